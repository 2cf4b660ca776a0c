"""Runs many small MPI programs in one gang, with a watch on each.

A program is a function of `ranks_programs.Calls` in the dictionary ``PROGRAMS`` of a module
``ranks_*``. All programs of a run share one gang without Ray. The ranks end themselves when a
program takes too long; then, and after a crash, a further gang runs the rest.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from mpi_workers.local import local_gang

FUNCTION = "tests.mpi_workers.waits.ranks_programs:each"
LIMIT_S = 60.0  # of one program, which takes some 10 ms on a quiet machine
RESERVE_S = 60.0  # of a gang, beyond the limits of its programs
FRAMES = 4  # of each stack that are shown

Outcome = list[list[Any]] | str  # of each rank: how the program ended, and its value; or the end


def outcomes(
    module: str,
    names: Sequence[str],
    ranks: int,
    *arguments: Any,
    layer: bool = True,
    under: Sequence[str] | None = None,
    most_ended: int = 3,
) -> dict[str, Outcome]:
    """Run programs; what each gave on each rank, or the output of the gang that it ended.

    Parameters
    ----------
    module : str
        The name of a module of this folder.
    names : sequence of str
        Keys of its ``PROGRAMS``.
    ranks : int
        Number of ranks.
    *arguments
        For each program, after `Calls`; values that JSON can represent.
    layer : bool
        Whether the ranks have the layer under MPI; else MPI waits as always.
    under : sequence of str, optional
        A command that starts each rank.
    most_ended : int
        The programs after this many hangs and crashes are left out.
    """
    found: dict[str, Outcome] = {}
    left, ended = list(names), 0
    with mock.patch.dict(os.environ, {} if layer else {"ALCHEMIST_MPI_WAITS": "plain"}):
        while left and ended < most_ended:
            with tempfile.TemporaryDirectory(prefix="programs-") as folder:
                timeout = RESERVE_S + LIMIT_S * len(left)
                given = (f"tests.mpi_workers.waits.{module}", left, folder, LIMIT_S, arguments)
                try:
                    local_gang.run(FUNCTION, ranks, *given, timeout=timeout, under=under)
                    said = "the gang has ended"
                except AssertionError as error:
                    said = _told(str(error))
                done = _done(Path(folder), ranks)
            found |= done
            left = [name for name in left if name not in done]
            if left:
                found[left.pop(0)] = f"ended after {LIMIT_S:g} s, or before: {said}"
                ended += 1
    return found


def _told(output: str) -> str:
    """Of the output of a gang that has ended: the innermost frames, the signal."""
    lines, kept, frames = output.splitlines(), [], 0
    for line in lines:
        frames = 0 if line.startswith(("Thread ", "Current thread ")) else frames
        if line.startswith("  File ") and frames < FRAMES:
            kept.append(line.strip())
            frames += 1
        elif "EXIT STRING" in line or "rror: " in line:
            kept.append(line)
    return "\n".join(kept) or output


def _done(folder: Path, ranks: int) -> dict[str, list[list[Any]]]:
    """The programs that all ranks have finished."""
    each = []
    for rank in range(ranks):
        path = folder / str(rank)
        lines = path.read_text().splitlines() if path.exists() else []
        each.append(dict(json.loads(line) for line in lines))
    return {
        name: [its[name] for its in each] for name in each[0] if all(name in its for its in each)
    }


def differences(found: dict[str, Outcome], expected: dict[str, Outcome]) -> dict[str, Any]:
    """The programs that gave something else than the same ones under plain MPI."""
    return {
        name: (outcome, expected.get(name)) for name, outcome in found.items()
        if outcome != expected.get(name)
    }  # fmt: skip


def wrong(found: dict[str, Outcome], expected: Any) -> dict[str, Outcome]:
    """The programs that did not give a value on all ranks."""
    return {
        name: outcome for name, outcome in found.items()
        if isinstance(outcome, str) or any(its != ["value", expected] for its in outcome)
    }  # fmt: skip
