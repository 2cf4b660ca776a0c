"""Where the ranks were when a call was ended, and those that do not return from it."""

from __future__ import annotations

from alchemist_ray.errors import NEXT_GANG, GroupFailedError
from mpi_workers.wire.frames import Body

CONTINUES = "; the gang continues"  # at the end of messages, while it is true
PLACES = 4  # that a message names
STACKS = 2


class StuckRanks:
    """Ranks that have not returned from a call, as their proxies report them."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._stacks: dict[int, list[str]] = {}

    def add(self, body: Body) -> None:
        """Take a report."""
        self._ranks.update(body["ranks"])
        self._stacks.update({int(rank): stack for rank, stack in body["stacks"].items()})

    def where(self) -> str:
        """``rank 1 is in MPI_Recv (libmpi.so) < solve (lib.c:12)``, a line for each."""
        shown = sorted(self._stacks)[:STACKS]
        return "".join(f"\nrank {rank} is in {' < '.join(self._stacks[rank])}" for rank in shown)

    def still_running(self, message: str, doing: str, limit_s: float) -> str:
        """Add to the message of a cancelled call that they have not returned from it."""
        return (
            f"{message.removesuffix(CONTINUES)}; {self._named()} still in {doing or 'it'}, and the "
            f"gang is ended if that lasts {limit_s:.0f} s{self.where()}"
        )

    def error(self, what: str, error: Body, limit_s: float) -> GroupFailedError:
        """The end of the gang: they did not return from a call that failed or was cancelled."""
        ranks = sorted(self._ranks)
        return GroupFailedError(
            f"a call {what} and {named(ranks) if ranks else 'ranks'} did not return within "
            f"{limit_s:.0f} s: they are in native code, or in a blocking MPI call (a library in C "
            "can use alchemist_wait, alchemist_allreduce and alchemist_check). The gang was ended; "
            f"{NEXT_GANG}{self.where()}",
            rank=ranks[0] if ranks else error.get("facts", {}).get("rank"),
            cause="ranks stuck in MPI",
        )

    def _named(self) -> str:
        ranks = sorted(self._ranks)
        verb = "is" if len(ranks) == 1 else "are"
        return f"{named(ranks) if ranks else 'ranks'} {verb}"


def named(ranks: list[int], most: int = 8) -> str:
    """Ranks for a message: ``ranks 0, 2, 5`` or the first ones and how many more."""
    shown = ", ".join(map(str, ranks[:most]))
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"


def waited(places: dict[str, list[int]]) -> str:
    """Where ranks were when their call was ended: ``. At that time rank 1 was in ...``."""
    known = [(sorted(ranks), place) for place, ranks in places.items() if place]
    lines = [
        f"{named(ranks)} {'was' if len(ranks) == 1 else 'were'} in {place}"
        for ranks, place in sorted(known)[:PLACES]
    ]
    return f". At that time {'; '.join(lines)}" if lines else ""
