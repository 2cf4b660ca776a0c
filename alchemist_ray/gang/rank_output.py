"""Shows what ranks print on this process's stdout and stderr."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from typing import TextIO

from mpi_workers.node.output_lines import STDERR, Line

try:
    from tqdm import tqdm
except ImportError:  # no bars to write above
    tqdm = None


def as_text(lines: Iterable[Line]) -> str:
    """Lines with the rank that printed each."""
    return "".join(
        f"[rank {rank}] {text}\n" if rank >= 0 else f"{text}\n" for rank, _, text in lines
    )


def show(lines: Iterable[Line]) -> None:
    """Write lines to this process's stdout and stderr, above a progress bar if one is shown."""
    together: list[Line] = []
    for line in lines:
        if together and together[-1][1] != line[1]:
            _show(together)
            together = []
        together.append(line)
    if together:
        _show(together)


def _show(lines: list[Line]) -> None:
    stream: TextIO = sys.stderr if lines[0][1] == STDERR else sys.stdout
    # A reader that is gone (`| head`) or a closed stream must not cost the call its result.
    above = contextlib.nullcontext() if tqdm is None else tqdm.external_write_mode(file=stream)
    with contextlib.suppress(BrokenPipeError, ValueError), above:
        stream.write(as_text(lines))
        stream.flush()
