"""Send, compute, receive: the three phases of a job on a gang, and the share of transfers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.papers.experiment import Sample


class Phases(NamedTuple):
    """Seconds of each phase."""

    send: Sample
    compute: Sample
    receive: Sample

    @property
    def total(self) -> float:
        return sum(phase.mean for phase in self)

    @property
    def share(self) -> float:
        """Transfers in percent of the whole."""
        return 100 * (self.send.mean + self.receive.mean) / self.total

    @property
    def values(self) -> list[tuple[float, ...]]:
        return [phase.values for phase in self]

    def __str__(self) -> str:
        return " / ".join(map(str, self))

    def cells(self) -> tuple[str, ...]:
        """Of a table: the phases, the whole, the share of transfers."""
        return (*map(str, self), f"{self.total:.3g}", f"{self.share:.1f}")


def measured(
    send: Callable[[], Sequence[Any]],
    compute: Callable[..., Any],
    receive: Callable[[Any], object],
    runs: int,
) -> Phases:
    """Run a job several times, after a run that is not counted.

    Parameters
    ----------
    send : callable() -> handles
    compute : callable(*handles) -> handle or tuple of handles
    receive : callable(handle)
        Called with each result.
    """
    found: list[list[float]] = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        sent = send()
        begun = time.perf_counter()
        results = compute(*sent)
        computed = time.perf_counter()
        results = results if isinstance(results, tuple) else (results,)
        for result in results:
            receive(result)
        found.append([begun - began, computed - begun, time.perf_counter() - computed])
        for handle in (*sent, *results):
            handle.free()
    return Phases(*(Sample(times) for times in zip(*found[1:], strict=True)))


def stored(phases: list[list[float]]) -> Phases:
    """The phases whose `values` were kept as JSON."""
    return Phases(*map(Sample, phases))
