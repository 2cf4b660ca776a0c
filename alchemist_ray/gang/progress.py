"""Progress bars, and the table of transfer times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi_workers.data.description import NodeTimes
from mpi_workers.data.transfers import Progress

try:
    from tqdm.auto import tqdm
except ImportError:  # no bars
    tqdm = None

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
    with tqdm(
        total=nbytes,
        desc=what,
        unit="B",
        unit_scale=True,
        delay=0.0 if wanted else QUIET_S,
        disable=None if wanted is None else not wanted,
        leave=bool(wanted),
    ) as bar:
        yield lambda nbytes: _advance(bar, nbytes)


def _advance(bar: tqdm, nbytes: int) -> None:
    bar.update(nbytes)


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
            self._bar = tqdm(
                total=100,
                desc=self._what,
                unit="%",
                delay=0.0 if self._wanted else QUIET_S,
                disable=None if self._wanted is None else not self._wanted,
                leave=bool(self._wanted),
                bar_format="{l_bar}{bar}| {elapsed} {postfix}",
            )
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
