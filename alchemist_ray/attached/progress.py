"""The output of a session: bars, the table of times, lines of ranks, and steps (`verbose`)."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from alchemist_ray.attached.matrix_ref import MatrixRef, ref_of
from mpi_workers.data.description import NodeTimes
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix.sizes import readable
from mpi_workers.protocol.proxy_messages import STDERR, Line

try:
    from tqdm.auto import tqdm
except ImportError:  # no bars
    tqdm = None

VALUE_LENGTH = 40  # of an argument that is shown
QUIET_S = 1.0  # shorter calls show no bar
QUIET_NBYTES = 256 << 20  # 256 MiB: nor do smaller transfers


@contextmanager
def transfer_bar(what: str, nbytes: int, wanted: bool | None) -> Iterator[Progress | None]:
    """A bar in bytes, as the callback that moves it. `wanted` None: on a terminal, after a second.

    None where the transfer ends before a bar could be shown: panels cost a little.
    """
    if tqdm is None or (not wanted and nbytes <= QUIET_NBYTES):
        yield None
        return
    with _opened(what, wanted, total=nbytes, unit="B", unit_scale=True) as bar:
        yield bar.update


def _opened(what: str, wanted: bool | None, **more: Any) -> tqdm:
    return tqdm(
        desc=what,
        delay=0.0 if wanted else QUIET_S,
        disable=None if wanted is None else not wanted,
        leave=bool(wanted),
        **more,
    )


class RoutineBar:
    """A bar in percent for a routine's `ctx.progress`; made at its first call."""

    def __init__(self, what: str, wanted: bool | None) -> None:
        self._what = what
        self._wanted = wanted
        self._bar: tqdm | None = None

    def __call__(self, fraction: float, text: str) -> None:
        if tqdm is None:
            return
        if self._bar is None:
            shown = "{l_bar}{bar}| {elapsed} {postfix}"
            self._bar = _opened(self._what, self._wanted, total=100, unit="%", bar_format=shown)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(100 * min(1.0, max(0.0, fraction)) - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def times_table(times: dict[int, NodeTimes], *, sending: bool) -> str:
    """The paper's "Data transfer times breakdown", a line per node and their totals.

    Seconds. Through shared memory there is one copy, shown as send (or receive);
    the streams between nodes show all four.
    """
    title = f"Data transfer times breakdown ({'send' if sending else 'fetch'}, seconds)"
    head = (
        f"{'node':>7} {'route':<14} {'MB':>9} {'serialize':>10} {'send':>10} {'receive':>10} "
        f"{'deserialize':>12}"
    )
    lines = [title, head, "-" * len(head)]
    total = NodeTimes(-1, "")
    for node in sorted(times):
        total.add(times[node])
        lines.append(_line(str(node), times[node]))
    lines += ["-" * len(head), _line("all", total)]
    return "\n".join(lines)


def _line(name: str, t: NodeTimes) -> str:
    return (
        f"{name:>7} {t.route:<14} {t.nbytes / 1e6:>9.2f} {t.serialize_s:>10.4f} {t.send_s:>10.4f} "
        f"{t.receive_s:>10.4f} {t.deserialize_s:>12.4f}"
    )


def as_text(lines: Iterable[Line]) -> str:
    """Lines with the rank that printed each."""
    return "".join(
        f"[rank {rank}] {text}\n" if rank >= 0 else f"{text}\n" for rank, _, text in lines
    )


SHOWN = Path()  # on this process's streams
_folder: ContextVar[Path | None] = ContextVar("alchemist_output", default=SHOWN)  # None: dropped


@contextmanager
def output_to(folder: Path | None) -> Iterator[None]:
    """See `AlchemistSession.output`."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    before = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(before)


def show(lines: Iterable[Line]) -> None:
    """Write lines to this process's stdout and stderr, above a progress bar if one is shown.

    Or where `output_to` says. Notices, which are no rank's, are always shown.
    """
    folder = _folder.get()
    if folder is not SHOWN:
        for rank, printed in itertools.groupby(lines, lambda line: line[0]):
            text = "".join(f"{text}\n" for _, _, text in printed)
            if rank < 0:
                _write(sys.stderr, text)
            elif folder is not None:
                with contextlib.suppress(OSError), open(folder / f"rank{rank}.txt", "a") as file:
                    file.write(text)
        return
    for name, together in itertools.groupby(lines, lambda line: line[1]):
        _write(sys.stderr if name == STDERR else sys.stdout, as_text(together))


def _write(stream: TextIO | None, text: str) -> None:
    """Write and flush, as far as there is a stream: a service has none, and one may be closed.

    A reader that is gone (`| head`) or a full disk must not cost the call its result.
    """
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError), _above_bars(stream):
        stream.write(text)
        stream.flush()


def _above_bars(stream: TextIO) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if tqdm is None else tqdm.external_write_mode(file=stream)


# --- steps of a verbose session ---


@contextmanager
def narrated(verbose: bool, what: str) -> Iterator[None]:
    """Print that something begins, and that it has ended and how long it took, if `verbose`."""
    if not verbose:
        yield
        return
    say(f"{what} ...")
    begun = time.perf_counter()
    try:
        yield
    except BaseException as error:
        say(f"{what}: {type(error).__name__} after {time.perf_counter() - begun:.3f} s")
        raise
    say(f"{what}: done in {time.perf_counter() - begun:.3f} s")


def say(text: str) -> None:
    """Print a line at once."""
    _write(sys.stdout, f"{text}\n")


def call_text(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call as a user would write it, with the facts of its matrices."""
    given = [_value(value) for value in args]
    given += [f"{key}={_value(value)}" for key, value in kwargs.items()]
    return f"Task {name}({', '.join(given)})"


def matrix_text(ref: MatrixRef) -> str:
    """A matrix: name, shape, dtype, layout, size. Or a sparse one, which has these too."""
    shape = " x ".join(map(str, ref.shape)) or "number"
    return f"{ref.name} ({shape}, {ref.dtype}, {ref.layout}, {readable(ref.nbytes)})"


def _value(value: Any) -> str:
    if ref_of(value) is not None:
        return matrix_text(value)
    if isinstance(value, bytes):
        return f"<{readable(len(value))}>"
    text = repr(value)
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 3]}..."
