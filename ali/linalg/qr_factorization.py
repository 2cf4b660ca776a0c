"""Thin QR of distributed matrices: TSQR and Cholesky QR for tall ones, else Householder panels.

Tall matrices need one pass over the rows, then a tree of small QRs over the ranks. Products of
reflections are in compact WY form; vectors are in VC_STAR. `thin_qr` chooses by shape and
condition.

Source: Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the
QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42(1), 2020 (CholeskyQR2, and
its condition for orthogonality to rounding).

Each panel of columns is factored by TSQR, whose Q is turned into Householder vectors, which are
then applied to the columns on the right. Source: Ballard, Demmel, Grigori, Jacquelin, Nguyen,
Solomonik, "Reconstructing Householder vectors from tall-skinny QR", IPDPS 2014.

A panel of reflections is ``I - Y T Y^H``. Y is unit lower trapezoidal; it lies below the diagonal
of a matrix in VC_STAR, in the place of the elements that it has eliminated. Source: Schreiber, Van
Loan, "A storage-efficient WY representation", SIAM J. Sci. Stat. Comput. 10(1), 1989; LAPACK's
larfb.

Source: Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and
sequential QR and LU factorizations", SIAM J. Sci. Comput. 34(1), 2012; LAPACK's
tpqrt for two triangles (measured: a fifth of the time of a QR of the stack, n = 2000).
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy.linalg

from ali.blocks import (
    Array,
    block,
    floating,
    norm_estimate,
    panel_width,
    panels,
    phases,
)
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.local_products import multiply, subtract_product
from ali.linalg.products import inner
from ali.linalg.rows import copy_to_rows, gather_rows, owned_rows, rows_before
from ali.linalg.triangular import PANEL_COLUMNS, triangular_solve
from mpi_workers.matrix import tags
from mpi_workers.matrix.dist_matrix import DistMatrix

if TYPE_CHECKING:
    from mpi4py import MPI


class Panel(NamedTuple):
    """One panel of reflections.

    Attributes
    ----------
    columns : slice
        Where Y lies in the matrix.
    first, last : int
        Y has the rows from `first`, that of its first diagonal element, to before `last`.
    t : ndarray
        T, upper triangular, the same on every rank.
    """

    columns: slice
    first: int
    last: int
    t: Array


def vectors(ctx: Context, local: Array, panel: Panel) -> tuple[slice, Array]:
    """Which of this rank's rows Y has, and a copy of them."""
    me, size = ctx.rank, ctx.size
    rows = slice(rows_before(panel.first, me, size), rows_before(panel.last, me, size))
    y = np.array(local[rows, panel.columns], order="F")
    width = y.shape[1]
    triangle = np.tri(width, k=-1, dtype=bool)[owned_rows(panel.first, me, size)]
    y[: len(triangle)][~triangle] = 0
    diagonal = range(width)[owned_rows(panel.first, me, size)]
    y[range(len(triangle)), diagonal] = 1
    return rows, y


def apply(ctx: Context, y: Array, t: Array, x: Array) -> None:
    """``X = (I - Y T Y^H) X``, in place; y, x: this rank's rows of them. Collective.

    Notes
    -----
    ``4 m b r / ranks`` flops; ``2 b r`` words are sent and received.
    """
    if not x.shape[1]:
        return
    subtract_product(x, y, t @ sum_over_ranks(ctx.comm, y.conj().T @ x))


def triangle_of(gram: Array, taus: Array) -> Array:
    """T of ``H_1 ... H_b`` with ``H_i = I - tau_i v_i v_i^H``, from the Gram matrix of the v_i."""
    t = np.diag(taus).astype(gram.dtype)
    for i in range(1, len(taus)):
        t[:i, i] = -taus[i] * (t[:i, :i] @ gram[:i, i])
    return t


SLACK = 0.1  # the estimate of the norm of the inverse may be several times too small


def least_singular(ctx: Context, R: DistMatrix) -> float:
    """A value that the smallest singular value hardly ever undercuts; 0 if it is noise. Collective.

    Parameters
    ----------
    R : DistMatrix, shape (m, n) with m >= n, VC_STAR
        Only the upper triangle of its first n rows is read. Its norm is about 1.
    """
    n, r = R.shape[1], block(R)
    count = len(range(ctx.rank, n, ctx.size))
    diagonal = r[range(count), R.rows[:count]]
    if min(ctx.comm.allgather(float(np.abs(diagonal).min(initial=1)))) <= np.finfo(R.dtype).eps:
        return 0.0

    def solved(B: Array, adjoint: bool) -> Array:
        X = ctx.new_replicated(B, "VC_STAR")
        triangular_solve(ctx, R, X, lower=False, adjoint=adjoint)
        return gather_rows(ctx, block(X), 0, n)

    with np.errstate(all="ignore"):
        size = norm_estimate(ctx, n, R.dtype, lambda B: solved(B, False), lambda B: solved(B, True))
    return SLACK / (size * n**0.5) if math.isfinite(size) and size > 0 else 0.0


TALL = 4  # times as many rows as columns on each rank: below, TSQR costs no more
DEPARTURE = 0.1  # of the first factor from orthonormal columns; the second then is orthonormal


def cholesky_qr(ctx: Context, local: Array, m: int) -> tuple[DistMatrix, DistMatrix] | None:
    """``X = Q R`` with orthonormal Q and a real diagonal > 0 of R, if X allows it. Collective.

    Parameters
    ----------
    local : ndarray, shape (local_m, n)
        This rank's rows of X in VC_STAR; float or complex.
    m : int
        Number of rows of X.

    Returns
    -------
    Q : DistMatrix, shape (m, n), VC_STAR
    R : DistMatrix, shape (n, n), VC_STAR
        None instead of both, on all ranks, if a rank has less than `TALL` n rows, if the condition
        number of X exceeds about the inverse root of the machine epsilon, or if X contains NaN
        or infinity.

    Notes
    -----
    ``4 local_m n^2`` flops in products of matrices, ``4 n^2`` words in ``4 log2(ranks)`` messages.
    Memory: Q, ``3 n^2`` words and a panel of 32 MiB.
    """
    n = local.shape[1]
    if m // ctx.size < TALL * n:
        return None
    first = _factor(ctx, gram_of_rows(ctx, local), n, orthonormal=False)
    if first is None:
        return None
    Q = ctx.empty((m, n), local.dtype)
    q = block(Q)
    _divide(ctx, local, first, q)
    second = _factor(ctx, gram_of_rows(ctx, q), n, orthonormal=True)
    if second is None:
        return None
    _divide(ctx, q, second, q)
    r = second @ first
    ctx.comm.Bcast(r)  # products may be rounded differently on each rank
    return Q, ctx.new_replicated(r, "VC_STAR")


def gram_of_rows(ctx: Context, local: Array, scale: float = 1.0) -> Array:
    """The Gram matrix of X over `scale`, of which this rank has some rows, on every rank."""
    n, dtype = local.shape[1], local.dtype
    gram = np.zeros((n, n), dtype)
    with np.errstate(all="ignore"):
        for some in panels(len(local), panel_width(n, local.itemsize)):
            ctx.check()
            part = local[some] if scale == 1.0 else local[some] / dtype.type(scale)
            gram += multiply(part.T if local.dtype.kind == "f" else part.conj().T, part)
        return sum_over_ranks(ctx.comm, gram)


def _factor(ctx: Context, gram: Array, n: int, *, orthonormal: bool) -> Array | None:
    """The upper Cholesky factor, decided and computed on rank 0; None if A has none."""
    limits = np.finfo(gram.dtype)
    message = np.zeros(n * n + 1, gram.dtype)  # the factor, and whether it is good
    if ctx.rank == 0:
        diagonal = np.diagonal(gram).real
        low, high = float(limits.tiny) / float(limits.eps) ** 2, float(limits.max) * 1e-3
        good = bool(np.isfinite(gram).all()) and bool(((diagonal > low) & (diagonal < high)).all())
        if good and orthonormal:
            good = float(np.linalg.norm(gram - np.eye(n, dtype=gram.dtype))) < DEPARTURE
        if good:
            try:
                factor = scipy.linalg.cholesky(gram, check_finite=False)
                message[:-1], message[-1] = factor.reshape(-1), 1
            except scipy.linalg.LinAlgError:
                pass
    ctx.comm.Bcast(message)
    return message[:-1].reshape(n, n) if message[-1] else None


def _divide(ctx: Context, x: Array, r: Array, out: Array) -> None:
    """``out = x @ inverse(r)``, a panel of rows at a time; x and out may be the same array."""
    (trsm,) = scipy.linalg.get_blas_funcs(("trsm",), (x,))
    upper = np.asfortranarray(r)
    for some in panels(len(x), panel_width(x.shape[1], x.itemsize)):
        ctx.check()
        out[some] = trsm(1.0, upper, x[some], side=1)


BLOCK_COLS = 32  # columns that tpqrt factors at a time


class _Joined(NamedTuple):
    """Q of a triangle that was stacked on the rows of another rank, as LAPACK's tpqrt leaves it."""

    below: Array  # the Householder vectors in place of the other rows
    blocks: Array
    triangular: bool

    def times(self, part: Array, count: int) -> Array:
        """``Q @ part``, and below it `count` rows."""
        (multiply,) = scipy.linalg.get_lapack_funcs(("tpmqrt",), (self.below,))
        if not part.size:  # SciPy's takes no array without columns
            return np.zeros((len(part) + count, part.shape[1]), part.dtype)
        rest = np.zeros((count, part.shape[1]), part.dtype, order="F")
        edge = self.below.shape[1] if self.triangular else 0
        top, low, _ = multiply(
            edge, self.below, self.blocks, np.asfortranarray(part), rest, overwrite_b=True
        )
        return np.concatenate([top, low])


class _Join(NamedTuple):
    """The QR of this rank's `rows` rows stacked on `others` rows of `partner`."""

    partner: int
    rows: int
    others: int
    q: Array | _Joined | None  # None: the stack was passed on unchanged

    def times(self, part: Array) -> Array:
        if self.q is None:
            return part
        return self.q.times(part, self.others) if isinstance(self.q, _Joined) else self.q @ part


class TallQR:
    """``X = Q R`` of a matrix whose rows are distributed over the ranks. Collective.

    Parameters
    ----------
    comm : MPI.Intracomm
        The gang's communicator.
    local : ndarray, shape (local_m, n)
        This rank's rows of X, any number of them. Floating point.
    vectors : bool
        Whether Q is needed. Without it `times` may not be called; half the flops and no memory
        for Q.
    overwrite : bool
        Whether `local`, if in Fortran order, may be overwritten instead of copied.
    triangle : bool
        Whether r must be triangular. Otherwise a matrix that is not tall enough for any rank to
        reduce its rows is gathered in r as it is.

    Attributes
    ----------
    r : ndarray, shape (min(m, n), n), or None
        Upper triangular (see `triangle`), on rank 0; None on the other ranks.

    Notes
    -----
    The columns of Q are orthonormal for X of any rank (Householder reflections throughout).
    Cost per rank: ``4 local_m n^2 + O(n^3 log ranks)`` flops, ``n^2`` words up the tree and
    ``n k`` down in ``log2(ranks)`` messages; memory ``2 local_m n + n^2 log ranks`` words (without
    Q: ``local_m n``, or nothing with `overwrite`, until the constructor returns). A rank with at
    most n rows passes them on unchanged, so that a square matrix is gathered on rank 0.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        local: Array,
        *,
        vectors: bool = True,
        overwrite: bool = False,
        triangle: bool = True,
    ) -> None:
        self._comm = comm
        self._n = local.shape[1]
        self._vectors = vectors
        self._joins: list[_Join] = []
        self._parent: int | None = None
        self._q, rows, triangular = self._shrink(local, overwrite)
        rank, size, step = comm.rank, comm.size, 1
        while step < size and self._parent is None:
            if rank % (2 * step):
                self._parent = rank - step
                self._send(rows, triangular, self._parent)
            elif rank + step < size:
                count = rows.shape[0]
                other, both = self._receive(rank + step, rows.dtype)
                q: Array | _Joined | None = None
                if triangular and other.size:
                    q, rows = self._join(rows, other, both)
                elif not triangular:
                    q, rows, triangular = self._shrink(np.concatenate([rows, other]), True)
                self._joins.append(_Join(rank + step, count, other.shape[0], q))
            step *= 2
        self._rows = rows.shape[0]
        self._top: Array | None = None
        self.r: Array | None = None
        if self._parent is None and (triangular or not triangle):
            self.r = rows if triangular or overwrite or self._joins else rows.copy()
        elif self._parent is None:
            self._top, self.r = self._thin(rows, overwrite or bool(self._joins))

    def times(self, factor: Array | None, columns: int, dtype: np.dtype[np.generic]) -> Array:
        """This rank's rows of ``Q @ factor``. Collective.

        Parameters
        ----------
        factor : ndarray, shape (min(m, n), columns), or None
            Read on rank 0 only.
        columns, dtype
            Of `factor`; every rank gives them.

        Returns
        -------
        ndarray, shape (local_m, columns)
        """
        if self._parent is None:
            assert factor is not None
            part = factor if self._top is None else self._top @ factor
        else:
            part = np.empty((self._rows, columns), dtype)
            self._comm.Recv(part, self._parent, tags.TALL_QR)
        for join in reversed(self._joins):
            part = join.times(part)
            self._comm.Send(np.ascontiguousarray(part[join.rows :]), join.partner, tags.TALL_QR)
            part = part[: join.rows]
        return part if self._q is None else self._q @ part

    def _shrink(self, rows: Array, overwrite: bool) -> tuple[Array | None, Array, bool]:
        """(Q, R, True) if that reduces the number of rows, else (None, rows, False)."""
        if rows.shape[0] <= rows.shape[1]:
            return None, rows, False
        return *self._thin(rows, overwrite), True

    def _join(self, top: Array, below: Array, triangular: bool) -> tuple[_Joined | None, Array]:
        (factor,) = scipy.linalg.get_lapack_funcs(("tpqrt",), (top,))
        r, vectors, blocks, _ = factor(
            self._n if triangular else 0,
            min(self._n, BLOCK_COLS),
            np.asfortranarray(top),
            np.asfortranarray(below),
            overwrite_a=True,
            overwrite_b=True,
        )
        return (_Joined(vectors, blocks, triangular) if self._vectors else None), r

    def _thin(self, rows: Array, overwrite: bool) -> tuple[Array | None, Array]:
        # SciPy's QR of an array in Fortran order is a third faster here than NumPy's. It keeps
        # two copies of an array that it may not overwrite, and of every array with mode "r".
        rows = np.asfortranarray(rows) if overwrite else np.array(rows, order="F")
        mode = "economic" if self._vectors else "raw"
        q, r = scipy.linalg.qr(rows, overwrite_a=True, mode=mode, check_finite=False)
        return (q if self._vectors else None), r

    def _send(self, rows: Array, triangular: bool, to: int) -> None:
        self._comm.Send(np.array([rows.shape[0], triangular]), to, tags.TALL_QR)
        self._comm.Send(np.ascontiguousarray(rows), to, tags.TALL_QR)

    def _receive(self, source: int, dtype: np.dtype[np.generic]) -> tuple[Array, bool]:
        header = np.empty(2, np.int64)
        self._comm.Recv(header, source, tags.TALL_QR)
        rows = np.empty((int(header[0]), self._n), dtype)
        self._comm.Recv(rows, source, tags.TALL_QR)
        return rows, bool(header[1])


def factor(
    ctx: Context, A: DistMatrix, extra: Array | None = None, identity_from: int | None = None
) -> list[Panel]:
    """Overwrite A by R and Householder vectors. Collective.

    Parameters
    ----------
    A : DistMatrix, shape (m, n), VC_STAR, floating point
    extra : ndarray, shape (local_m, r), optional
        This rank's rows of a matrix B of A's dtype, which is overwritten by ``Q^H B``.
    identity_from : int, optional
        The row where an identity begins, below a square that may be far larger. The rows of
        both are kept apart until two triangles are left, the large one above the small one:
        otherwise the errors of the large rows would spoil the small ones.

    Notes
    -----
    ``(2 m n s - (m + n) s^2 + 2/3 s^3) / ranks`` flops with s = min(m, n), and ``4 m s b / ranks``
    for the panels of b = `PANEL_COLUMNS`; ``s (n + r)`` words and ``3 log2(ranks) s / b`` messages.
    """
    m, k, local = A.shape[0], min(A.shape), block(A)
    found = []
    for cols in panels(k, PANEL_COLUMNS):
        ctx.check()
        edges = (m,) if identity_from is None else (identity_from, identity_from + cols.stop)
        panel = _panel(ctx, local, cols, edges)
        rows, y = vectors(ctx, local, panel)
        adjoint = panel.t.conj().T
        apply(ctx, y, adjoint, local[rows, cols.stop :])
        if extra is not None:
            apply(ctx, y, adjoint, extra[rows])
        found.append(panel)
    return found


def _panel(ctx: Context, local: Array, cols: slice, edges: tuple[int, ...]) -> Panel:
    """Overwrite the columns, from the diagonal on, by R and by Householder vectors."""
    me, size, start, stop = ctx.rank, ctx.size, cols.start, cols.stop
    width, begin, end = stop - start, rows_before(start, me, size), rows_before(stop, me, size)
    bounds = [begin, *(rows_before(edge, me, size) for edge in edges)]
    groups = [TallQR(ctx.comm, local[a:b, cols]) for a, b in itertools.pairwise(bounds)]
    tops: list[Array | None] = [None] * len(groups)
    r: Array | None = None
    if ctx.rank == 0:
        triangles = [group.r for group in groups if group.r is not None]
        top, r = np.linalg.qr(np.concatenate(triangles))
        tops = list(np.split(top, np.cumsum([len(one) for one in triangles])[:-1]))
    q = np.concatenate(
        [group.times(t, width, local.dtype) for group, t in zip(groups, tops, strict=True)]
    )
    corner = gather_rows(ctx, q[: end - begin], start, stop)
    # L below the diagonal of R; U; T. The same bits on every rank.
    message = np.empty((3, width, width), local.dtype)
    if r is not None:
        lower, upper, signs = _unpivoted(corner)
        message[0] = np.tril(lower, -1) + signs[:, None] * np.triu(r)
        message[1] = upper
        turned = (upper * signs.conj()).conj().T
        message[2] = -scipy.linalg.solve_triangular(
            lower, turned, lower=True, unit_diagonal=True, check_finite=False
        ).conj().T  # fmt: skip
    ctx.comm.Bcast(message)
    packed, upper, t = message
    local[begin:end, cols] = packed[owned_rows(start, me, size)]
    if bounds[-1] > end:
        (trsm,) = scipy.linalg.get_blas_funcs(("trsm",), (q,))
        below = trsm(1.0, np.asfortranarray(upper), q[end - begin :], side=1)
        local[end : bounds[-1], cols] = below
    return Panel(cols, start, edges[-1], np.triu(t))


def _unpivoted(corner: Array) -> tuple[Array, Array, Array]:
    """LU of ``corner - diag(signs)``, whose pivots are at least 1 by the choice of signs."""
    lu, n = corner.copy(), len(corner)
    signs = np.empty(n, lu.dtype)
    for i in range(n):
        size = abs(lu[i, i])
        signs[i] = -lu[i, i] / size if size else -1
        lu[i, i] -= signs[i]
        lu[i + 1 :, i] /= lu[i, i]
        lu[i + 1 :, i + 1 :] -= np.outer(lu[i + 1 :, i], lu[i, i + 1 :])
    return np.tril(lu, -1) + np.eye(n, dtype=lu.dtype), np.triu(lu), signs


def triangle(ctx: Context, A: DistMatrix) -> DistMatrix:
    """R, shape (min(m, n), n), of the factored A."""
    n, k, local = A.shape[1], min(A.shape), block(A)
    R = ctx.empty((k, n), A.dtype)
    r = block(R)
    r[...] = local[: len(r)]
    for i, row in enumerate(R.rows):
        r[i, :row] = 0
    return R


def form_q(ctx: Context, A: DistMatrix, found: list[Panel]) -> DistMatrix:
    """Overwrite the factored A by the thin Q, shape (m, min(m, n)). Collective.

    Notes
    -----
    As many flops as `factor`, and as many words. Memory: that of A; with n > m, of the result.
    """
    k, local = min(A.shape), block(A)
    for panel in reversed(found):
        ctx.check()
        rows, y = vectors(ctx, local, panel)
        cols = panel.columns
        width = y.shape[1]
        apply(ctx, y, panel.t, local[rows, cols.stop : k])
        mine = owned_rows(panel.first, ctx.rank, ctx.size)
        corner = gather_rows(ctx, y[: len(range(width)[mine])], panel.first, panel.first + width)
        local[:, cols] = 0
        local[rows, cols] = y @ (-panel.t @ corner.conj().T)
        eye = np.eye(width, dtype=local.dtype)[mine]
        local[rows.start : rows.start + len(eye), cols] += eye
    if k == A.shape[1]:
        return A
    Q = ctx.empty((A.shape[0], k), A.dtype)
    block(Q)[...] = local[:, :k]
    return Q


# Order up to which a matrix may be gathered on rank 0: 2 MiB of float64. CPU time of order 512 on 2
# ranks: QR 0.018 s on rank 0 and 0.033 by panels, SVD 0.06 and 0.26; QR is level at order 1024.
ON_ONE_RANK = 512


def stays_spread(ctx: Context, n: int) -> bool:
    """Whether matrices of order n are too large to be gathered on rank 0."""
    return ctx.size > 1 and n > ON_ONE_RANK


def exceeds_share(ctx: Context, rows: int, cols: int) -> bool:
    """Whether ``cols x cols`` elements exceed a rank's share of ``rows x cols``, and its limit."""
    return stays_spread(ctx, cols) and rows // ctx.size < cols


def thin_qr(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Q, R in VC_STAR with a real diagonal >= 0 of R; see the module. Collective."""
    (m, n), k = A.shape, min(A.shape)
    if exceeds_share(ctx, m, k):  # TSQR would gather a part
        return _by_panels(ctx, A)
    local = floating(block(ctx.to_layout(A, "VC_STAR")))
    found = cholesky_qr(ctx, local, m)
    if found is not None:
        return found
    factors = TallQR(ctx.comm, local[:, :k])
    signs: Array | None = None
    corner = ctx.empty((k, k), local.dtype, "CIRC_CIRC")  # whole on rank 0
    if factors.r is not None:
        turn, length = phases(np.diagonal(factors.r))
        signs = np.diag(turn)
        corner.local[...] = turn.conj()[:, None] * factors.r
        np.fill_diagonal(corner.local, length)
    own = factors.times(signs, k, local.dtype)
    Q = ctx.new_from_rows(own, m)
    R = ctx.to_layout(corner, "VC_STAR")
    if n > k:
        rest = inner(ctx, own.conj().T, local[:, k:])
        R, left = ctx.empty((k, n), local.dtype), R
        block(R)[:, :k] = block(left)
        block(R)[:, k:] = block(rest)
    return Q, R


def _by_panels(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    dtype = floating(np.empty(0, A.dtype)).dtype
    Q = copy_to_rows(ctx, A, dtype)
    found = factor(ctx, Q)
    R = triangle(ctx, Q)
    Q = form_q(ctx, Q, found)
    r = block(R)
    mine = range(len(R.rows))
    diagonal = gather_rows(ctx, r[mine, R.rows][:, None], 0, R.shape[0])[:, 0]
    turn, length = phases(diagonal)
    r *= turn[R.rows, None].conj()
    r[mine, R.rows] = length[R.rows]
    block(Q)[...] *= turn
    return Q, R
