"""Reports of a gang for operators: its events (`measures.events`) and gauges."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.errors import AlchemistError
from alchemist_ray.measures import events, exporter, metrics
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import default_grid, owners
from mpi_workers.wire.frames import Body

if TYPE_CHECKING:
    from collections.abc import Iterable

    from alchemist_ray.runtime.commands.jobs import Job
    from alchemist_ray.runtime.commands.matrix_records import Record

log = logging.getLogger(__name__)

# Outcomes of calls by their errors; others are `failed`.
OUTCOMES = {
    "CancelledError": "cancelled",
    "CallTimeoutError": "cancelled",
    "ResourceError": "refused",
    "AuthError": "refused",
}


class GangMeasures:
    """Counts of one gang, over all its incarnations.

    Parameters
    ----------
    gang : str
        Its name; empty for a private one.
    user : str
        Its owner, as `attached.address.this_process` names it.
    folder : str
        Of its log; see `measures.logs.write_to`.
    """

    def __init__(self, gang: str = "", user: str = "", folder: str = "", gpus: float = 0) -> None:
        self._log = logging.LoggerAdapter(log, {"gang": folder})
        self._gang = metrics.bounded(gang) if gang else metrics.PRIVATE
        self._user = metrics.bounded(user.partition("@")[0])  # host and process are without number
        self._gpus = gpus  # of each rank
        self._shown: dict[tuple[str, metrics.Labels], float] = {}

    # --- events ---

    def note(self, event: events.Event, **facts: object) -> None:
        """Note an event of the gang with these facts."""
        events.note(event, self._log, gang=self._gang, **facts)

    def lost(self, error: AlchemistError) -> None:
        """Ranks were lost."""
        cause = metrics.bounded(str(error.facts.get("cause", metrics.OTHER)))
        first = str(error).partition("\n")[0]  # the rest is in its own file
        self.note(events.LOST, cause=cause, error=first)

    def ended(self, job: Job, begun: float, result: Body | Failure | None) -> None:
        """A command ended that ran since `begun` (`time.monotonic`)."""
        if job.own:
            return
        library, routine = _labels(job)
        outcome = "ok"
        if job.cancelled is not None or isinstance(result, Failure):
            failure = job.cancelled or result
            kind = failure.kind if isinstance(failure, Failure) else ""
            outcome = OUTCOMES.get(kind, "failed")
        self.note(
            events.CALLED, name=job.name, library=library, routine=routine, outcome=outcome,
            seconds=time.monotonic() - begun, queued_s=begun - job.since,
        )  # fmt: skip

    # --- the present state ---

    def show(
        self, state: str, status: Body, address: GangAddress | None, records: Iterable[Record]
    ) -> None:
        """Set the gauges; those that no longer apply become 0."""
        now: dict[tuple[str, metrics.Labels], float] = {
            ("alchemist_gangs", (self._gang, state, self._user)): 1,
            ("alchemist_processes", (self._gang,)): len(status["processes"]),
            ("alchemist_queued_calls", (self._gang,)): sum(
                call["state"] == "queued" for call in status["calls"]
            ),
        }
        if address is not None:
            hosts = address.hosts_of_ranks()
            for host in set(hosts):
                now["alchemist_ranks", (self._gang, host)] = hosts.count(host)
                if self._gpus:
                    now["alchemist_gpus", (self._gang, host)] = hosts.count(host) * self._gpus
            for host, nbytes in held_bytes(hosts, records).items():
                now["alchemist_held_bytes", (self._gang, host)] = nbytes
        self._set(now)

    def hide(self) -> None:
        """The gang has ended."""
        self._set({})
        self.note(events.ENDED)

    def _set(self, now: dict[tuple[str, metrics.Labels], float]) -> None:
        for key in self._shown | now:
            name, labels = key
            metrics.shift(name, now.get(key, 0.0) - self._shown.get(key, 0.0), labels)
        if now.keys() != self._shown.keys():  # another state, or the end
            exporter.soon()
        self._shown = now


def held_bytes(hosts: list[str], records: Iterable[Record]) -> dict[str, float]:
    """Memory of matrices by host, copies included; `hosts` are those of the ranks in order."""
    grid = default_grid(len(hosts))
    totals: dict[str, int] = {}
    for record in records:
        totals[record.layout] = totals.get(record.layout, 0) + record.nbytes
    found = dict.fromkeys(hosts, 0.0)
    for layout, nbytes in totals.items():
        parts = owners(layout, grid)
        for ranks in parts:
            for rank in ranks:
                found[hosts[rank]] += nbytes / len(parts)
    return {host: math.ceil(nbytes) for host, nbytes in found.items()}


def _labels(job: Job) -> tuple[str, str]:
    match job.body:
        case {"op": "call", "library": library, "routine": routine}:
            return metrics.bounded(str(library)), metrics.bounded(str(routine))
        case {"op": "run"}:  # names of functions are without number
            return "run", ""
    return "gang", metrics.bounded(str(job.body.get("op")))
