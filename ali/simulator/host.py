"""The instances of a simulator on this rank, and their distribution over the gang.

Copies are distributed over the ranks in blocks. With at least as many copies as ranks, one rank
computes each copy; with fewer, the ranks are distributed over the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ali.simulator.instance import Instance
from ali.simulator.spec import Record, Spec
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix

if TYPE_CHECKING:
    from ali.interface import Context
    from ali.native import NativeLibrary
    from ali.python_library import PythonLibrary


class Simulations:
    """Copies of one simulation, distributed over the gang.

    Parameters
    ----------
    ctx : Context
        Context of the routine that creates them. Collective.
    load : callable
        Loads the library once more.
    name, config : str
        As for `Instance`.
    copies : int
        How many simulations.

    Raises
    ------
    Failure
        As `Instance` does.
    """

    def __init__(
        self,
        ctx: Context,
        load: Callable[[], PythonLibrary | NativeLibrary],
        name: str,
        config: str,
        copies: int,
    ) -> None:
        self.copies = copies
        self._comm = ctx.comm
        self._whole = copies == 1
        self._first, self._last, roots = _distributed(copies, ctx.size, ctx.rank)
        gang = ctx.gang if self._whole else ctx.gang.part(self._first)
        self._leads = gang.rank == 0
        self._answers = ctx.rank == 0
        self._counts = [last - first for first, last in roots]
        self._instances: list[Instance] = []
        try:
            for _ in range(self._first, self._last):
                self._instances.append(Instance(gang, load(), name, config))
                if len(self._instances) == 1:  # before many others are set up
                    np.empty(copies, self._instances[0].spec.layout)
            self.spec: Spec = self._instances[0].spec
            self._check_specs(ctx, name)
            self.share(None)
        except MemoryError as error:
            self._abandon()
            raise Failure(
                "ResourceError", f"{copies} copies of simulator {name!r} do not fit: {error}"
            ) from None
        except BaseException:
            self._abandon()
            raise

    def _check_specs(self, ctx: Context, name: str) -> None:
        """Refuse copies with different records, of this rank or of others."""
        told = {instance.spec.text for instance in self._instances}
        everyone = told if self._whole else set().union(*ctx.comm.allgather(told))
        if len(everyone) > 1:
            raise Failure("LibraryLoadError", f"simulator {name!r}: its copies' specs differ")

    def share(self, memory: np.ndarray[Any, Any] | None) -> None:
        """Leave records in bytes that rank 0 shares with the client; None: return them."""
        layout = self.spec.layout
        self._table = np.zeros(len(self._instances), layout)
        self._all = np.zeros(self.copies, layout)
        self._shared = memory is not None
        if memory is not None:
            self._all = memory.view(layout)
            if len(self._table) == self.copies:
                self._table = self._all
        self._records = [Record(self._table, row) for row in range(len(self._table))]

    def run(self, ctx: Context, fresh: dict[int, int], actions: np.ndarray[Any, Any]) -> bytes:
        """Begin an episode in the copies of `fresh` (number to seed), advance all others.

        Without actions the others do not change. Returns the records of all copies on rank 0, or
        nothing if they are in shared memory; the value on other ranks is unspecified. Collective.
        """
        self._enter(ctx)
        with np.errstate(over="ignore", invalid="ignore"):  # numbers become infinite: checked later
            for number, instance in enumerate(self._instances, self._first):
                record = self._records[number - self._first]
                seed = fresh.get(number)
                if seed is not None:
                    instance.begin(seed, record)
                elif len(actions):
                    instance.advance(actions[number], record)
        table = self._table
        if not self._whole and ctx.size > 1:
            mine, table = table if self._leads else table[:0], self._all
            counts = [self.spec.layout.itemsize * count for count in self._counts]
            everything = [table.view(np.uint8), counts] if ctx.rank == 0 else None
            ctx.comm.Gatherv(mine.view(np.uint8), everything, 0)
        return b"" if self._shared or not self._answers else table.tobytes()

    def picture(self, ctx: Context, copy: int) -> tuple[int, int, bytes]:
        """Height, width and float32 elements of a copy's field, on rank 0. Collective."""
        self._enter(ctx)
        field = self._at_rank_0(ctx, copy, lambda instance: instance.picture())
        if field is None:
            return 0, 0, b""
        return field.shape[0], field.shape[1], field.astype(np.float32).tobytes()

    def has(self, routine: str) -> bool:
        """Whether the simulator has a routine."""
        return self._instances[0].has(routine)

    def save(self, ctx: Context) -> DistMatrix:
        """The state of the only simulation. Collective. Raises `Failure`."""
        self._enter(ctx)
        state: DistMatrix = self._only("save_state").call("save_state")[0]
        return state

    def load(self, ctx: Context, state: DistMatrix) -> None:
        """Go back to a state. Collective. Raises `Failure`."""
        self._enter(ctx)
        self._only("load_state").call("load_state", state)

    def save_copy(self, ctx: Context, copy: int) -> tuple[list[int], str, bytes]:
        """Shape, dtype and elements of a copy's state, on rank 0. Collective."""
        self._enter(ctx)
        state = self._at_rank_0(ctx, copy, lambda instance: instance.saved_state())
        if state is None:
            return [], "", b""
        return list(state.shape), state.dtype.str, state.tobytes()

    def load_copy(self, ctx: Context, copy: int, state: np.ndarray[Any, Any]) -> None:
        """Set the state of a copy, given on all ranks. Collective."""
        self._enter(ctx)
        if self._first <= copy < self._last:
            self._instances[copy - self._first].restore_state(state)

    def _at_rank_0(
        self, ctx: Context, copy: int, work: Callable[[Instance], np.ndarray[Any, Any]]
    ) -> np.ndarray[Any, Any] | None:
        """An array that the first rank of a copy computes, on rank 0; None on other ranks."""
        found: np.ndarray[Any, Any] | None = None
        if self._first <= copy < self._last:
            whole = work(self._instances[copy - self._first])
            if self._leads:
                found = np.asarray(whole, order="C")  # a number stays one
        root = next(r for r, n in enumerate(np.cumsum(self._counts)) if copy < n)
        if root != 0:  # rank 0 answers, but does not compute this copy
            if ctx.rank == root:
                ctx.comm.send(found, 0)
            found = ctx.comm.recv(source=root) if ctx.rank == 0 else None
        return found if ctx.rank == 0 else None

    def _only(self, routine: str) -> Instance:
        if not self._whole:
            raise Failure(
                "BadArgumentError",
                f"{routine} needs one simulation on all ranks; there are {self.copies} copies",
            )
        return self._instances[0]

    def _enter(self, ctx: Context) -> None:
        """Follow the gang's communicator, which a failed call has replaced."""
        if ctx.comm is not self._comm:
            self._comm = ctx.comm
            if not self._whole:
                self._instances[0].renew()  # all instances of this rank share it

    def _abandon(self) -> None:
        with contextlib.suppress(Exception):  # the first error is reported
            self.close()

    def close(self) -> None:
        """Close all instances, also after one has raised."""
        with contextlib.ExitStack() as closing:
            for instance in self._instances:
                closing.callback(instance.close)


def _distributed(copies: int, size: int, rank: int) -> tuple[int, int, Sequence[tuple[int, int]]]:
    """This rank's copies as a range; and for each rank the copies that it leads."""
    if copies >= size:
        ranges = [(r * copies // size, (r + 1) * copies // size) for r in range(size)]
        return *ranges[rank], ranges
    mine = [r * copies // size for r in range(size)]
    leads = [(copy, copy + (r == 0 or mine[r - 1] != copy)) for r, copy in enumerate(mine)]
    return mine[rank], mine[rank] + 1, leads
