"""The BLACS grid of a gang: its communicator as ScaLAPACK needs it."""

from __future__ import annotations

import ctypes
from typing import Any

from mpi4py import MPI

from ali.interface import Context
from ali.native.ignored_mpi_errors import ignored_errors_raised
from ali.scalapack.native import Native


class BlacsGrid:
    """A BLACS context on the gang's communicator, of the gang's own (column-major) grid.

    Created by all ranks together. BLACS duplicates the gang's communicator, so that its messages
    do not mix with ours.

    Attributes
    ----------
    context : int
        The context number in descriptors.
    height, width, row, col : int
        The grid, and this rank's place on it.
    """

    def __init__(self, ctx: Context, native: Native) -> None:
        self._native = native
        self.comm = ctx.comm
        self.height, self.width = ctx.grid
        self.row, self.col = ctx.rank % self.height, ctx.rank // self.height
        as_c = ctypes.c_int if MPI._sizeof(MPI.Comm) == 4 else ctypes.c_void_p
        self._handle = native.blacs("Csys2blacs_handle", as_c(self.comm.handle))
        context = ctypes.c_int(self._handle)
        native.blacs("Cblacs_gridinit", ctypes.byref(context), b"C", self.height, self.width)
        self.context = context.value
        found = [ctypes.c_int(-1) for _ in range(4)]
        native.blacs("Cblacs_gridinfo", self.context, *map(ctypes.byref, found))
        if [value.value for value in found] != [self.height, self.width, self.row, self.col]:
            raise RuntimeError(
                f"BLACS placed rank {ctx.rank} of a {self.height} x {self.width} grid elsewhere: "
                f"{[value.value for value in found]}; {native.path} uses another MPI than mpi4py"
            )

    def close(self) -> None:
        self._native.blacs("Cblacs_gridexit", self.context)
        self._native.blacs("Cfree_blacs_system_handle", self._handle)


def grid_of(ctx: Context) -> BlacsGrid:
    """The grid on the gang's present communicator. Collective when it is new.

    A failed call replaces the gang's communicator. The grid on the old one is abandoned with it,
    because messages on both may never arrive.
    """
    grid: BlacsGrid | None = ctx.state.get("grid")
    if grid is None or grid.comm is not ctx.comm:
        ctx.comm.Barrier()  # no rank enters BLACS, which cannot be interrupted, alone
        with ignored_errors_raised(ctx.gang, "scalapack: BLACS"):
            grid = ctx.state["grid"] = BlacsGrid(ctx, ctx.state["native"])
    return grid


def close(state: dict[str, Any]) -> None:
    """Release the grid, if there is one."""
    grid: BlacsGrid | None = state.pop("grid", None)
    if grid is not None:
        grid.close()
