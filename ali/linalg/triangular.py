"""Kernels of Cholesky and LU factors, and of systems with triangular matrices, in VC_STAR.

Cholesky is blocked and right-looking: rank 0 factors the square corner of a panel and sends it to
all ranks, each rank solves for its rows of the panel, all ranks gather the panel, and each rank
updates its remaining rows. Source: Golub, Van Loan, "Matrix Computations", 4th ed., 3.1 and 4.2;
LAPACK's potrf.

LU does not exchange rows: pivots are bookkeeping. A pivot row is sent to all ranks and leaves the
active rows; the rank that owns row i of U keeps it. The pivots of a panel are chosen by a
tournament among the ranks. Sources: Grigori, Demmel, Xiang, "CALU: a communication optimal LU
factorization algorithm", SIAM J. Matrix Anal. Appl. 32(4), 2011; Golub, Van Loan, 3.4.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import scipy.linalg
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from ali.blocks import CHUNK, Array, block, panels
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.local_products import strip_width, subtract_product
from ali.linalg.rows import gather_rows, owned_rows, rows_before
from mpi_workers.matrix import copy_kernels, tags
from mpi_workers.matrix.dist_matrix import DistMatrix

PANEL_COLUMNS = 128  # enough for BLAS's full speed, and little memory compared with the matrix
NOT_FINITE = -1


def cholesky_in_place(ctx: Context, L: DistMatrix) -> int:
    """Overwrite a Hermitian matrix in VC_STAR by its Cholesky factor; reads the lower triangle.

    Returns
    -------
    int
        0, or the order of the leading minor that is not positive definite; the same on all
        ranks.
    """
    n, local = L.shape[0], block(L)
    me, size = ctx.rank, ctx.size
    for cols in panels(n, PANEL_COLUMNS):
        ctx.check()
        start, stop = cols.start, cols.stop
        width, begin, end = stop - start, rows_before(start, me, size), rows_before(stop, me, size)
        corner = gather_rows(ctx, local[begin:end, cols], start, stop)
        message = np.empty(width * width + 1, local.dtype)  # the factor, and the failing minor
        if ctx.rank == 0:
            message[-1] = _factor(corner)
            message[:-1] = corner.reshape(-1)
        ctx.comm.Bcast(message)
        if minor := int(message[-1].real):
            return int(start + minor)
        corner = message[:-1].reshape(width, width)
        local[begin:end, cols] = corner[owned_rows(start, me, size)]
        # X corner^H = panel, solved as conj(corner) X^T = panel^T.
        below = local[end:, cols].T
        below = scipy.linalg.solve_triangular(
            corner.conj(), below, lower=True, check_finite=False
        ).T
        local[end:, cols] = below
        whole = gather_rows(ctx, below, stop, n)
        strip = strip_width(len(local) - end, local.itemsize)
        for some in panels(n - stop, strip):  # little more than the lower triangle
            at = rows_before(stop + some.start, me, size)
            rest = local[at:, stop + some.start : stop + some.stop]
            subtract_product(rest, below[at - end :], whole[some].conj().T)
        ctx.progress(1 - (1 - stop / n) ** 3, f"column {stop} of {n}")
    for j, col in enumerate(L.cols):
        local[: rows_before(col, me, size), j] = 0
    return 0


def _factor(corner: Array) -> int:
    """Overwrite a block by its Cholesky factor; the order of the minor that fails, or 0."""
    (potrf,) = scipy.linalg.get_lapack_funcs(("potrf",), (corner,))
    factor, info = potrf(corner, lower=True, clean=True)
    diagonal = np.diagonal(factor)
    if info == 0 and not np.isfinite(diagonal).all():  # some LAPACKs do not detect NaN
        info = int(np.flatnonzero(~np.isfinite(diagonal))[0]) + 1
    corner[...] = factor
    return int(info)


def triangular_solve(
    ctx: Context, T: DistMatrix, X: DistMatrix, *, lower: bool, adjoint: bool = False
) -> int:
    """Overwrite X by the solution of ``T X = X`` or ``T^H X = X``; both in VC_STAR. Collective.

    Only the triangle chosen by `lower` is read.

    Returns
    -------
    int
        0, or the first position on the diagonal, from 1, that is zero; the same on all ranks.
        X is then undefined.

    Notes
    -----
    ``n^2 r / ranks`` flops; for each block of 128 rows two messages to all ranks, of the
    block's square and of r words for each of its rows.
    """
    n, t, x = T.shape[0], block(T), block(X)
    me, size = ctx.rank, ctx.size
    forward = lower != adjoint
    blocks = list(panels(n, PANEL_COLUMNS))
    for part in blocks if forward else reversed(blocks):
        ctx.check()
        start, stop = part.start, part.stop
        mine = slice(rows_before(start, me, size), rows_before(stop, me, size))
        corner = gather_rows(ctx, t[mine, part], start, stop)
        zeros = np.flatnonzero(np.diagonal(corner) == 0)
        if zeros.size:
            return int(start + zeros[0] + 1)
        side = gather_rows(ctx, x[mine], start, stop)
        done = slice(0, mine.start) if forward else slice(mine.stop, None)
        ahead = slice(mine.stop, None) if forward else slice(0, mine.start)
        if adjoint:
            side = side - sum_over_ranks(ctx.comm, t[done, part].conj().T @ x[done])
        side = scipy.linalg.solve_triangular(
            corner, side, lower=lower, trans="C" if adjoint else "N", check_finite=False
        )
        x[mine] = side[owned_rows(start, me, size)]
        if not adjoint:
            subtract_product(x[ahead], t[ahead, part], side)
    return 0


class Step(NamedTuple):
    """The part of L that comes from one panel.

    Attributes
    ----------
    columns : slice
    corner : ndarray
        The square top of the panel, L below its diagonal; the same on every rank.
    keep : ndarray of bool
        Which of this rank's active rows stay active.
    lower : ndarray
        Their rows of L.
    """

    columns: slice
    corner: Array
    keep: Array
    lower: Array


class Elimination(NamedTuple):
    """``L^-1 P [A B] = [U Y]``.

    Attributes
    ----------
    U : DistMatrix, shape (n, n), VC_STAR
    Y : DistMatrix, shape (n, r), VC_STAR, or None without B
    order : ndarray of int64, shape (n,)
        Row of A that became row i of U.
    failure : int
        0; k if pivot k (from 1) is exactly zero; NOT_FINITE. The same on all ranks.
    steps : list of Step
        L, if it was asked for.
    """

    U: DistMatrix
    Y: DistMatrix | None
    order: Array
    failure: int
    steps: list[Step]


def eliminate(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix | None,
    into: DistMatrix | None = None,
    keep_lower: bool = False,
) -> Elimination:
    """Gaussian elimination of a square A and of right-hand sides B. Collective.

    Parameters
    ----------
    A : DistMatrix, shape (n, n), VC_STAR, floating point
    B : DistMatrix, shape (n, r), VC_STAR, of A's dtype; or None
    into : DistMatrix, optional
        Where to put Y; may be B.
    keep_lower : bool
        Whether to keep L, for `solved` and `solved_adjoint`; half the memory of U.

    Notes
    -----
    ``2/3 n^3 / ranks`` flops, and ``2 n^2 PANEL_COLUMNS / ranks`` for the panels; a rank receives
    ``n^2 / 2`` words. Memory: a copy of A and B, U and Y.
    """
    n, me, size = A.shape[0], ctx.rank, ctx.size
    parts = [block(A)] if B is None else [block(A), block(B)]
    active = np.empty((len(parts[0]), n + (0 if B is None else B.shape[1])), A.dtype)
    for part, columns in zip(parts, (slice(n), slice(n, None)), strict=False):
        copy_kernels.copy(active[:, columns], part)
    ids = np.arange(me, n, size)
    remaining = np.ones(n, bool)
    order = np.empty(n, np.int64)
    U = ctx.zeros((n, n), A.dtype)
    Y = None if B is None else into or ctx.empty(B.shape, B.dtype)
    u, y = block(U), None if Y is None else block(Y)
    steps: list[Step] = []
    for cols in panels(n, PANEL_COLUMNS):
        ctx.check()
        start, stop = cols.start, cols.stop
        width = stop - start
        corner, lower, pivots, failure = _panel(ctx, active[:, :width], ids, width)
        order[cols] = pivots
        if failure:
            return Elimination(U, Y, order, failure if failure < 0 else start + failure, steps)
        remaining[pivots] = False
        chosen = _chosen(ctx, active[:, width:], ids, pivots)
        upper = scipy.linalg.solve_triangular(
            corner, chosen, lower=True, unit_diagonal=True, check_finite=False
        )
        mine = owned_rows(start, me, size)
        place = slice(rows_before(start, me, size), rows_before(stop, me, size))
        u[place, cols] = np.triu(corner)[mine]
        u[place, stop:] = upper[mine, : n - stop]
        if y is not None:
            y[place] = upper[mine, n - stop :]
        keep = remaining[ids]
        ids, lower = ids[keep], lower[keep]
        if keep_lower:
            steps.append(Step(cols, corner, keep, lower))
        active = _kept(active[:, width:], keep)
        subtract_product(active, lower, upper)
        ctx.progress(1 - (1 - stop / n) ** 3, f"column {stop} of {n}")
    return Elimination(U, Y, order, 0, steps)


def solved(ctx: Context, factors: Elimination, B: Array) -> Array:
    """``A^-1 B`` for a few vectors, shape (n, r), the same on every rank. Collective."""
    n, me, size = len(B), ctx.rank, ctx.size
    ids = np.arange(me, n, size)
    active = B[ids]
    Y = ctx.empty(B.shape, B.dtype)
    for columns, corner, keep, lower in factors.steps:
        ctx.check()
        chosen = _chosen(ctx, active, ids, factors.order[columns])
        upper = scipy.linalg.solve_triangular(
            corner, chosen, lower=True, unit_diagonal=True, check_finite=False
        )
        place = slice(rows_before(columns.start, me, size), rows_before(columns.stop, me, size))
        block(Y)[place] = upper[owned_rows(columns.start, me, size)]
        ids, active = ids[keep], active[keep] - lower @ upper
    triangular_solve(ctx, factors.U, Y, lower=False)
    return gather_rows(ctx, block(Y), 0, n)


def solved_adjoint(ctx: Context, factors: Elimination, B: Array) -> Array:
    """``A^-H B`` for a few vectors, shape (n, r), the same on every rank. Collective."""
    n = len(B)
    Z = ctx.new_replicated(B, "VC_STAR")
    triangular_solve(ctx, factors.U, Z, lower=False, adjoint=True)
    z, found = gather_rows(ctx, block(Z), 0, n), np.empty_like(B)
    ids = np.empty(0, np.int64)  # this rank's rows that are active after a step
    eliminated = [factors.order[columns] for columns, *_ in factors.steps]
    for (columns, corner, _, lower), pivots in zip(
        reversed(factors.steps), reversed(eliminated), strict=True
    ):
        ctx.check()
        side = z[columns] - sum_over_ranks(ctx.comm, lower.conj().T @ found[ids])
        found[pivots] = scipy.linalg.solve_triangular(
            corner, side, lower=True, unit_diagonal=True, trans="C", check_finite=False
        )
        ids = np.union1d(ids, pivots[pivots % ctx.size == ctx.rank])
    return found


def _kept(rows: Array, keep: Array) -> Array:
    """The rows marked in `keep`, moved to the front in their order, in place."""
    index = np.flatnonzero(keep)
    for some in panels(index.size, max(1, CHUNK // max(1, rows.shape[1] * rows.itemsize))):
        if index[some.start] != some.start or index[some.stop - 1] != some.stop - 1:
            rows[some] = rows[index[some]]  # no row moves back: those still to be read are intact
    return rows[: index.size]


def _panel(ctx: Context, mine: Array, ids: Array, width: int) -> tuple[Array, Array, Array, int]:
    """Factor a panel: its square corner, own rows of L (undefined for pivot rows), pivots.

    A tournament: each rank factors its own rows, whose pivot rows meet those of other ranks in a
    tree. The rows that are left on rank 0 are the pivots of all.
    """
    comm, me, size, step = ctx.comm, ctx.rank, ctx.size, 1
    finite = bool(np.isfinite(mine).all())
    rows, names = _pivot_rows(mine, ids, width) if finite else (mine[:0], ids[:0])
    while step < size and me % (2 * step) == 0:
        if me + step < size:
            others, more, theirs_finite = comm.recv(source=me + step, tag=tags.PIVOTS)
            finite = finite and theirs_finite
            rows, names = np.concatenate([rows, others]), np.concatenate([names, more])
            if finite:
                rows, names = _pivot_rows(rows, names, width)
        step *= 2
    if me:
        comm.send((rows, names, finite), me - (me & -me), tags.PIVOTS)
    header = np.zeros(width + 1, np.int64)
    corner = np.empty((width, width), mine.dtype)
    if me == 0:
        header[-1] = NOT_FINITE
        if finite:
            corner[...], order, header[-1] = _factored(rows)
            header[:-1] = names[order]
    comm.Bcast(header)
    comm.Bcast(corner)
    lower = mine
    if len(mine) and not header[-1]:
        (trsm,) = scipy.linalg.get_blas_funcs(("trsm",), (corner,))
        lower = trsm(1.0, np.asfortranarray(corner), mine, side=1)
    return corner, lower, header[:-1], int(header[-1])


def _pivot_rows(rows: Array, names: Array, width: int) -> tuple[Array, Array]:
    """The rows that partial pivoting chooses, at most as many as columns, and their names."""
    if len(rows) <= width:
        return rows, names
    _, order, _ = _factored(rows)
    return rows[order[:width]], names[order[:width]]


def _factored(rows: Array) -> tuple[Array, Array, int]:
    """LU factors, the order of the rows, and LAPACK's INFO."""
    (getrf,) = scipy.linalg.get_lapack_funcs(("getrf",), (rows,))
    factors, swaps, info = getrf(rows)
    order = np.arange(len(rows))
    for i, other in enumerate(swaps):
        order[[i, other]] = order[[other, i]]
    return factors, order, int(info)


def _chosen(ctx: Context, rest: Array, ids: Array, pivots: Array) -> Array:
    """The remaining columns of the pivot rows, in their order, on every rank."""
    width, owners = rest.shape[1], pivots % ctx.size
    mine: Array = rest[np.searchsorted(ids, pivots[owners == ctx.rank])]
    if ctx.size == 1:
        return mine
    counts = [int((owners == q).sum()) * width for q in range(ctx.size)]
    packed = np.empty(pivots.size * width, rest.dtype)
    ctx.comm.Allgatherv(np.ascontiguousarray(mine).reshape(-1), [packed, counts])
    found = np.empty((pivots.size, width), rest.dtype)
    found[np.argsort(owners, kind="stable")] = packed.reshape(pivots.size, width)
    return found


def parity(order: Array) -> int:
    """1 for an even permutation, -1 for an odd one."""
    n = order.size
    moves = csr_array((np.ones(n), order, np.arange(n + 1)), shape=(n, n))
    cycles, _ = connected_components(moves)
    return int(1 - 2 * ((n - cycles) % 2))
