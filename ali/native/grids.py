"""Grids that MPI libraries make of communicators of their own, kept when calls of the gang fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ali.interface import Context
from ali.native.host import ignored_errors_raised

# Spare ones for a grid and its subroutines: ScaLAPACK 2.2 takes 14 to 16, Elemental ten.
COMMUNICATORS = 32


class Grid:
    """A library's grid. It outlives the gang's communicator, which ends with a failed call.

    Attributes
    ----------
    gang_comm : MPI.Intracomm
        The gang's communicator when no message was under way on the grid.
    begun, ended : int
        Native calls that this rank has begun, and those that have succeeded.
    """

    def __init__(self, ctx: Context) -> None:
        self._gang = ctx.gang
        self.gang_comm = ctx.comm
        self.begun = self.ended = 0

    @contextmanager
    def in_native(self, what: str) -> Iterator[None]:
        """Make a native call in the block; an error of MPI that it ignores is raised."""
        self.begun += 1
        with ignored_errors_raised(self._gang, what):
            yield
        self.ended += 1  # not if it has failed


G = TypeVar("G", bound=Grid)


def kept(ctx: Context, make: Callable[[], G], what: str) -> G:
    """The library's grid of the gang. Collective in the first call, and after a failed one.

    If a native call has failed on some ranks and not on others, messages on the grid may never
    arrive, so it is abandoned for another one, whose messages cannot be taken for them.

    Raises
    ------
    Failure
        ResourceError, if MPI has too few communicators left: libraries would end the gang.
    """
    grid: G | None = ctx.state.get("grid")
    if grid is not None and grid.gang_comm is ctx.comm:
        return grid
    calls = ctx.comm.allgather((grid.begun, grid.ended) if grid is not None else None)
    ctx.gang.require_communicators(COMMUNICATORS)
    if grid is not None and len(set(calls)) == 1:
        grid.gang_comm = ctx.comm
        return grid
    with ignored_errors_raised(ctx.gang, what):
        grid = ctx.state["grid"] = make()
    return grid
