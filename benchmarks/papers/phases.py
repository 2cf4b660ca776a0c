"""Send, compute, receive: the three phases of a job on a gang, and the share of transfers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.harness import phases
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
    """Run a job (see `phases`) several times, after a run that is not counted."""
    found = [phases(send, compute, receive) for _ in range(runs + 1)]
    return Phases(*(Sample(times) for times in zip(*found[1:], strict=True)))


def stored(times: Sequence[Sequence[float]]) -> Phases:
    """Phases that were kept as JSON."""
    return Phases(*map(Sample, times))
