"""Many replies to one command, combined into one.

A proxy combines those of its ranks, and the GroupManager those of the nodes.
"""

from __future__ import annotations

from typing import Any

from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

ERRORS_SENT = 4  # failing ranks whose tracebacks are sent
PLACES_SENT = 4  # places at which a call was interrupted


class Replies:
    """The replies to one command so far: of a node's ranks, or of the nodes.

    Attributes
    ----------
    errors, failed
        Failures that travelled, and how many there were.
    places : dict of str to list of int
        Ranks that left a call because others failed, by the place at which they were.
    value, matrices
        What rank 0 returned, and the matrices that every rank made.
    floating : int
        NumPy's flags of floating-point errors on any rank.
    gone : set of int
        Matrices that a rank which was started again does not have any more.
    renew : str
        Why a rank asks that all ranks are started again after the command, or empty.
    settle : bool
        Whether messages to ranks that had left the call may be under way: the next one drops them.
    sequences : set of int
        Of the ranks' collectives on communicators which outlive the call (two of them, if there are
        more). They are the same on all ranks, unless some have left one out.
    """

    def __init__(self) -> None:
        self.errors: list[Body] = []
        self.failed = 0
        self.places: dict[str, list[int]] = {}
        self.value: Any = None
        self.matrices: list[Any] | None = None
        self.floating = 0
        self.gone: set[int] = set()
        self.renew = ""
        self.settle = False
        self.sequences: set[int] = set()

    def add(self, reply: Body, sender: str) -> None:
        """Add a reply; `sender`: for messages."""
        errors: list[Body] = reply.get("errors", [])
        self.errors += errors
        self.failed += reply.get("failed", len(errors))
        for place, ranks in reply.get("places", {}).items():
            self.places.setdefault(place, []).extend(ranks)
        self.floating |= reply.get("floating", 0)
        self.gone.update(reply.get("gone", ()))
        self.renew = self.renew or reply.get("renew", "")
        self.settle = self.settle or reply.get("settle", False)
        self.sequences.update(reply.get("sequences", (0,)))
        if "value" in reply:
            self.value = reply["value"]
        if errors or "places" in reply:
            return
        made = reply.get("matrices", [])
        if self.matrices is None:
            self.matrices = made
        elif self.matrices != made:
            words = (
                f"{sender} returned matrices of other shapes or layouts than the others: every "
                "rank must return the same matrices"
            )
            self.errors.append(Failure("RoutineError", words).to_map())
            self.failed += 1

    def combined(self) -> Body:
        """The fields of one reply for all."""
        places = dict(list(self.places.items())[:PLACES_SENT])
        found = {
            "errors": self.errors[:ERRORS_SENT], "failed": self.failed, "places": places,
            "floating": self.floating, "matrices": self.matrices,
            "gone": sorted(self.gone), "renew": self.renew, "settle": self.settle,
            "sequences": sorted(self.sequences)[-2:] if any(self.sequences) else None,
        }  # fmt: skip
        reply = {name: value for name, value in found.items() if value}
        return reply if self.value is None else {**reply, "value": self.value}
