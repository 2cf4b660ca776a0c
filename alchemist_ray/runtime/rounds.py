"""A round: one message to all nodes of a gang, and their combined replies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.stuck_ranks import waited
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body


@dataclass(slots=True, eq=False)
class Round:
    """One message to all nodes, and the replies so far.

    Attributes
    ----------
    missing : int
        Nodes that have not replied.
    doing : str
        What the ranks run, for messages.
    collective : bool
        Whether the ranks may meet in MPI.
    over : Future
        Done when all nodes have replied, or when one has failed (or the round was cancelled) and
        the others take their time; fails with what ended the gang.
    cancelled : Failure or None
        Why the caller no longer waits.
    errors, failed, interrupted
        Failures that travelled, ranks that failed, ranks that left because others failed.
    places
        Where those ranks were.
    value, matrices
        What rank 0 returned, and the matrices that every rank made.
    begun : float
        When it was sent, by `time.monotonic`.
    """

    missing: int
    doing: str = ""
    collective: bool = False
    over: asyncio.Future[None] = field(default_factory=lambda: _future())
    cancelled: Failure | None = None
    interrupted: int = 0
    errors: list[Body] = field(default_factory=list)
    failed: int = 0
    places: dict[str, list[int]] = field(default_factory=dict)
    value: Any = None
    matrices: list[Any] | None = None
    begun: float = field(default_factory=time.monotonic)

    def described(self) -> Body:
        """A round that is over for its caller, and that ranks are still in, for the catalogue."""
        age_s = time.monotonic() - self.begun
        state = "cancelled, but ranks are still in it"
        if self.cancelled is None:
            state = "failed on a rank, and others are still in it"
        return {"name": self.doing or "a call", "state": state, "caller": "", "age_s": age_s}

    def take(self, reply: Body) -> None:
        """Add a node's reply."""
        self.missing -= 1
        self.errors += reply.get("errors", [])
        self.failed += reply.get("failed", 0)
        self.interrupted += reply.get("interrupted", 0)
        for place, ranks in reply.get("places", {}).items():
            self.places.setdefault(place, []).extend(ranks)
        if "value" in reply:
            self.value = reply["value"]
        if reply.get("errors") or reply.get("interrupted"):
            return
        made = reply.get("matrices", [])
        if self.matrices is not None and self.matrices != made:
            words = "nodes returned different matrices: every rank must return the same"
            self.errors.append(Failure("RoutineError", words).to_map())
        self.matrices = made

    def finish(self, error: AlchemistError | None = None) -> None:
        """The caller need not wait any longer. Only the first call counts."""
        if self.over.done():
            return
        if self.interrupted and not self.errors and self.cancelled is None:
            self.cancelled = Failure("CancelledError", "the call was interrupted on every rank")
        if self.cancelled is not None:  # whatever the ranks made of it
            self.cancelled.message += waited(self.places)
            self.errors, self.failed = [self.cancelled.to_map()], 1
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
            self.over.exception()  # seen: the caller may have been cancelled

    def failure(self) -> Failure | None:
        """The error to show: that of the lowest rank, and how many more failed.

        An error on which the ranks have agreed (a fact) is one error, of the rank that it names.
        """
        if not self.errors:
            return None
        errors = sorted(self.errors, key=lambda e: e.get("facts", {}).get("rank", 0))
        failure = Failure.from_map(errors[0])
        others = max(self.failed, len(errors)) - 1
        if not failure.facts.pop("agreed", False) and others > 0:
            failure.message += f" (and on {others} more rank{'s' if others > 1 else ''})"
        return failure


def _future() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()
