"""Block-cyclic matrices: BLOCK_CYCLIC and MC_MR without a copy, larger blocks, triangles.

A matrix in BLOCK_CYCLIC is passed to ScaLAPACK as it is, and results have its layout. Elemental's
MC_MR on a column-major grid is ScaLAPACK's block-cyclic distribution with
blocks of one element, so a matrix in MC_MR is passed to ScaLAPACK without a copy.
Factorizations are slow on such blocks (a panel is one column); above a size
(`BLOCKED_FROM`) they run on a copy in blocks of `BLOCK_SIZE`, converted by
ScaLAPACK's ``p?gemr2d``. On one rank nothing is copied: any block size
describes the same memory.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.blocks import float_dtype, require, require_finite, shape_text
from ali.interface import Context
from ali.scalapack.native import INT_MAX, BlacsGrid, Native, grid_of, real
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Runs, as_array, form

Array = NDArray[Any]

NATURAL = "MC_MR"
BLOCK_SIZE = 64
BLOCKS = {"gesvd": 16}  # where another size is the faster by far
NEVER = 1 << 31
# The smallest dimension of a matrix for which a copy in blocks is faster, by routine:
# measured (docs/scalapack.md). PBLAS gathers its own blocks for a product; p?lange only reads.
BLOCKED_FROM = {
    "gemm": NEVER, "lange": NEVER, "getrf": 48, "potrf": 48, "geqrf": 48, "gebrd": 48, "gesvd": 48,
    "syevd": 1,
}  # fmt: skip
ROUNDED = 2 * float(np.finfo(np.float32).eps)  # relative error of a work size returned as float32
MOVED = 64 << 20  # 64 MiB: memory that p?gemr2d may allocate on a rank, which is not checked


def owned(length: int, block: int, proc: int, procs: int) -> int:
    """How many of `length` indices a process holds (ScaLAPACK's numroc)."""
    return Runs(proc, 1, procs).of_blocks(block).count(length)


def indices(length: int, block: int, proc: int, procs: int) -> NDArray[np.int64]:
    """Global indices of what a process holds, ascending."""
    return as_array(Runs(proc, 1, procs).of_blocks(block).members(0, length))


class Cyclic:
    """This rank's part of a block-cyclic matrix.

    Attributes
    ----------
    m, n, block : int
        Its shape, and the height and width of its blocks.
    data : ndarray
        The local elements in Fortran order, at least one.
    desc : ndarray of int32, shape (9,)
        The descriptor.
    matrix : DistMatrix or None
        The matrix whose memory this is, if the two are the same.
    """

    def __init__(
        self,
        grid: BlacsGrid,
        shape: tuple[int, int],
        block: int,
        data: Array,
        matrix: DistMatrix | None = None,
    ) -> None:
        self.m, self.n = shape
        self.block = block
        self.data = data if data.size else np.zeros(1, data.dtype)
        self.matrix = matrix
        self.rows = owned(self.m, block, grid.row, grid.height)
        self.cols = owned(self.n, block, grid.col, grid.width)
        self.desc = np.array(
            [1, grid.context, self.m, self.n, block, block, 0, 0, max(1, self.rows)], np.int32
        )

    @property
    def submatrix(self) -> tuple[Array, int, int, Array]:
        """All of it, as four arguments: A, IA, JA, DESCA."""
        return self.data, 1, 1, self.desc

    def pivots(self) -> NDArray[np.int32]:
        """Room for the row interchanges of an LU factorization."""
        return np.zeros(self.rows + self.block, np.int32)


class Call:
    """One call of a routine on this rank: its matrices, its memory, its native calls.

    Parameters
    ----------
    ctx : Context
    routine : str
        Its name, for messages.
    kind : str
        A key of `BLOCKED_FROM`.
    *operands : DistMatrix
        If one is in BLOCK_CYCLIC, the call works in its blocks, and the results have its layout.
    finite : bool
        Refuse NaN and infinity, on which ScaLAPACK's pivoting and iterations fail. Collective.

    Attributes
    ----------
    dtype : dtype
        Of all matrices in the computation: NumPy's common one, with integers and bool as float64.
    layout : str
        Of the matrices that ScaLAPACK takes without a copy, and of results.
    """

    def __init__(
        self, ctx: Context, routine: str, kind: str, *operands: DistMatrix, finite: bool = True
    ) -> None:
        for matrix in operands:
            require(
                min(matrix.shape) >= 1 and max(matrix.shape) <= INT_MAX,
                "ShapeError",
                f"{routine}: a matrix is {shape_text(matrix)}; ScaLAPACK takes 1 to {INT_MAX} rows "
                "and columns",
            )
        if finite:
            names = (chr(ord("A") + i) for i in range(len(operands)))
            require_finite(
                ctx, routine, **{n: A.local for n, A in zip(names, operands, strict=True)}
            )
        self.ctx = ctx
        self.dtype = float_dtype(*(A.dtype for A in operands))
        self.native: Native = ctx.state["native"]
        self.grid = grid_of(ctx)
        self.layout = next((A.layout for A in operands if _in_blocks(A)), NATURAL)
        block = BLOCKS.get(kind, BLOCK_SIZE)
        extent = min(operands[0].shape)
        self.block = block if ctx.size == 1 or extent >= BLOCKED_FROM[kind] else 1
        if self.layout != NATURAL:
            self.block = form(self.layout).block or BLOCK_SIZE

    # --- memory ---

    def vector(self, count: int, dtype: Any = None) -> Array:
        """Work space of this rank. Raises `Failure` (ResourceError) if memory is short."""
        _fits(self.ctx, count)
        kind = self.dtype if dtype is None else np.dtype(dtype)
        # A VC_STAR matrix with one row per rank: its memory is checked before it is taken.
        return self.ctx.empty((self.ctx.size, max(1, count)), kind, "VC_STAR").local.reshape(-1)

    def new(self, m: int, n: int) -> Cyclic:
        """An uninitialised matrix."""
        rows = owned(m, self.block, self.grid.row, self.grid.height)
        cols = owned(n, self.block, self.grid.col, self.grid.width)
        _fits(self.ctx, rows * cols)
        if self.block == 1 or self.ctx.size == 1 or self.layout != NATURAL:
            return self._without_copy(self.ctx.empty((m, n), self.dtype, self.layout))
        return Cyclic(self.grid, (m, n), self.block, self.vector(rows * cols))

    def largest_part(self, m: int, n: int) -> tuple[int, int]:
        """Rows and columns of the largest part that a rank has of such a matrix."""
        height, width = self.ctx.grid
        return owned(m, self.block, 0, height), owned(n, self.block, 0, width)

    def _without_copy(self, matrix: DistMatrix) -> Cyclic:
        _fits(self.ctx, matrix.local.size)
        block = self.block if self.ctx.size == 1 or matrix.layout != NATURAL else 1
        data = matrix.local.reshape(-1, order="F")
        return Cyclic(self.grid, matrix.shape, block, data, matrix)

    # --- from our matrices, and back ---

    def operand(self, matrix: DistMatrix) -> Cyclic:
        """A matrix to be read: in its own memory if possible, else a copy."""
        if matrix.dtype != self.dtype:
            other = self.ctx.empty(matrix.shape, self.dtype, matrix.layout)
            other.local[...] = matrix.local
            matrix = other
        there = self._without_copy(self.ctx.to_layout(matrix, self.layout))
        if there.block == self.block:
            return there
        copy = self.new(there.m, there.n)
        self._move(there, copy, there.m, there.n)
        return copy

    def copy(self, matrix: DistMatrix, rows: int | None = None) -> Cyclic:
        """A copy that may be overwritten; with `rows`, extended uninitialised or cut off."""
        there = self.operand(matrix)
        if there.matrix is not matrix and rows in (None, there.m):
            return there  # already a copy
        copy = self.new(there.m if rows is None else rows, there.n)
        if copy.m == there.m and there.matrix is not None:
            copy.data[...] = there.data
        else:
            self._move(there, copy, min(there.m, copy.m), there.n)
        return copy

    def result(self, source: Cyclic) -> DistMatrix:
        """The matrix in the call's layout: its own memory if it has that."""
        return source.matrix or self.leading(source, source.m, source.n)

    def leading(self, source: Cyclic, m: int, n: int) -> DistMatrix:
        """A copy in the call's layout of the first `m` rows and `n` columns."""
        matrix = self.ctx.empty((m, n), self.dtype, self.layout)
        if source.matrix is not None:
            rows, cols = matrix.local.shape
            matrix.local[...] = source.matrix.local[:rows, :cols]
        else:
            self._move(source, self._without_copy(matrix), m, n)
        return matrix

    def _move(self, source: Cyclic, target: Cyclic, m: int, n: int) -> None:
        """Copy the first `m` rows and `n` columns between block sizes, in panels of columns."""
        width = max(1, MOVED * self.ctx.size // (m * self.dtype.itemsize))
        for first in range(0, n, width):
            self.ctx.comm.Barrier()
            self._call(
                "p?gemr2d", m, min(width, n - first),
                source.data, 1, first + 1, source.desc,
                target.data, 1, first + 1, target.desc, self.grid.context,
            )  # fmt: skip

    # --- native calls ---

    def run(self, name: str, *arguments: Any, info: bool = True) -> int:
        """Call a subroutine; the value of INFO, which is 0 or positive, on all ranks.

        All ranks meet first in a wait that can be interrupted: if one of them has failed (its
        memory was short), the others leave instead of waiting in native code.

        Raises
        ------
        Failure
            RoutineError, if ScaLAPACK refuses an argument, which is a bug in this library.
        """
        self.ctx.comm.Barrier()
        if not info:
            self._call(name, *arguments)
            return 0
        found = ctypes.c_int(0)
        self._call(name, *arguments, found)
        said = np.zeros(self.ctx.size, np.int64)
        self.ctx.comm.Allgather(np.array([found.value], np.int64), said)
        require(
            int(said.min()) >= 0,
            "RoutineError",
            f"scalapack: {name} refused argument {-int(said.min())} (as ScaLAPACK counts them). "
            "This is a bug of the library scalapack: report it, and use linalg instead",
        )
        return int(said.max())

    def norm(self, kind: str, matrix: Cyclic) -> float:
        """The norm ``p?lange`` of kind "F", "1", "I" or "M"."""
        work = self.vector(matrix.rows + matrix.cols + 2 * self.block, real(self.dtype))
        self.ctx.comm.Barrier()
        shape = matrix.m, matrix.n
        with self._in_native("p?lange"):
            return self.native.norm(self.dtype, kind, *shape, *matrix.submatrix, work)

    def _call(self, name: str, *arguments: Any) -> None:
        with self._in_native(name):
            self.native.call(name, self.dtype, *arguments)

    def _in_native(self, name: str) -> AbstractContextManager[None]:
        return self.grid.in_native(f"scalapack: {name}")

    def run_with_work(
        self,
        name: str,
        *arguments: Any,
        work: tuple[Any, ...] = (None,),
        after: tuple[Any, ...] = (),
        least: int = 1,
    ) -> int:
        """Call a subroutine after a query of its work space.

        `work` has the dtypes of its work arrays (None: the matrix's own). Each is passed with
        its length after it, then `after`, then INFO, which is returned as by `run`. Each array
        has at least `least` elements.
        """
        kinds = [self.dtype if kind is None else np.dtype(kind) for kind in work]
        asked: list[Any] = []
        for kind in kinds:
            asked += [np.zeros(3, kind), -1]
        self.run(name, *arguments, *asked, *after)
        # The answer on one rank can be too small for a later step: use the largest.
        wanted = np.array([float(array[0].real) for array in asked[::2]])
        most = np.empty_like(wanted)
        self.ctx.comm.Allreduce(wanted, most, MPI.MAX)
        given: list[Any] = []
        for kind, enough in zip(kinds, most.tolist(), strict=True):
            count = max(least, math.ceil(enough * (1 + ROUNDED)))
            given += [self.vector(count, kind), count]
        return self.run(name, *arguments, *given, *after)


def _in_blocks(matrix: DistMatrix) -> bool:
    rows, cols, block = form(matrix.layout)
    return (rows, cols) == ("MC", "MR") and block is not None and block > 1


def _fits(ctx: Context, count: int) -> None:
    if count > INT_MAX:
        raise Failure(
            "ResourceError",
            f"scalapack: rank {ctx.rank} would hold {count} elements, but ScaLAPACK's 32-bit "
            f"integers allow {INT_MAX}: request more workers",
        )


def diagonal(ctx: Context, matrix: Cyclic, offset: int = 0) -> NDArray[Any]:
    """The diagonal `offset` columns above the main one, on every rank. Collective: its length."""
    grid = grid_of(ctx)
    rows = indices(matrix.m, matrix.block, grid.row, grid.height)
    cols = indices(matrix.n, matrix.block, grid.col, grid.width) - offset
    at, i, j = np.intersect1d(rows, cols, assume_unique=True, return_indices=True)
    mine = np.zeros(max(0, min(matrix.m, matrix.n - offset)), matrix.data.dtype)
    mine[at] = matrix.data[i + j * matrix.rows]
    everything = np.empty_like(mine)
    ctx.comm.Allreduce(mine, everything, MPI.SUM)
    return everything
