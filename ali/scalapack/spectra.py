"""Eigenvalues and singular values; singular vectors of bidiagonal matrices.

LAPACK's dlasda computes, on rank 0, the values and a compact form of the vectors: a tree of
products of small orthogonal matrices, of rotations, and of vectors of secular equations, which need
``O(n)`` numbers in each level. The ranks multiply these factors, each for its own rows, so that
nothing else is communicated. ScaLAPACK has only QR iteration (p?gesvd).

Source: Gu, Eisenstat, "A divide-and-conquer algorithm for the bidiagonal SVD", SIAM J. Matrix Anal.
Appl. 16(1), 1995; LAPACK's dlasda, and dlals0 for the compact form.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from ali.blocks import (
    Array,
    block,
    count_owned,
    lapack,
    panel_width,
    panels,
    require,
    require_square,
    transposed,
)
from ali.interface import Context, routine
from ali.scalapack import cyclic
from ali.scalapack.cyclic import Call
from ali.scalapack.native import real
from ali.scalapack.systems import lq, matmul, qr, triangle
from mpi_workers.matrix.dist_matrix import DistMatrix

LEAF = 48  # order of the matrices whose vectors LAPACK's QR iteration finds
WIDTH = 256  # columns of a panel, at most
EPS = float(np.finfo(np.float64).eps)

_dlasda = lapack("dlasda", 24)


class _Node(NamedTuple):
    """A submatrix of the tree: n rows from `first` on; one more column unless it is the last one.

    Rows before its row `half` are one part of it, those behind it the other.
    """

    level: int
    number: int  # counted as dlasda counts
    first: int
    n: int
    last: bool

    @property
    def half(self) -> int:
        return self.n // 2

    @property
    def columns(self) -> int:
        return self.n + (not self.last)


class Compact(NamedTuple):
    """The compact form, of a matrix whose largest element is 1; see LAPACK's dlasda."""

    values: Array
    u: Array
    vt: Array
    k: Array
    difl: Array
    difr: Array
    z: Array
    poles: Array
    givptr: Array
    givcol: Array
    perm: Array
    givnum: Array
    c: Array
    s: Array


def bidiagonal_svd(ctx: Context, d: Array, e: Array) -> tuple[Array, DistMatrix, DistMatrix]:
    """Singular values, unordered, and vectors of an upper bidiagonal matrix. Collective.

    Parameters
    ----------
    d, e : ndarray of float64, shapes (n,) and (n - 1,)
        Diagonal and superdiagonal, the same on every rank.

    Returns
    -------
    values : ndarray, shape (n,)
        The same on every rank.
    U, V : DistMatrix, shape (n, n), VC_STAR, float64
        Column i belongs to value i.

    Notes
    -----
    At most ``8/3 n^3 / ranks`` flops in products of matrices, ``O(n^2)`` on every rank, and
    ``O(n log n)`` words to every rank. Memory: 4 matrices, and some panels of ``256 n`` words.
    """
    n = len(d)
    scale = max(float(np.abs(d).max(initial=0)), float(np.abs(e).max(initial=0)))
    U, V = ctx.zeros((n, n), np.float64), ctx.zeros((n, n), np.float64)
    if n <= LEAF or scale == 0:
        u, values, vh = np.eye(n), np.zeros(n), np.eye(n)
        if ctx.rank == 0 and scale:
            u, values, vh = np.linalg.svd(np.diag(d / scale) + np.diag(e / scale, 1))
        for array in (u, values, vh):
            ctx.comm.Bcast(array)
        block(U)[...], block(V)[...] = u[U.rows], vh.T[V.rows]
        return values * scale, U, V
    levels = _levels(n)
    form = _empty(n, levels)
    failure = ctypes.c_int(0)
    if ctx.rank == 0:
        diagonal, above = d / scale, e / scale
        # dlasda divides by norms of parts, which must not be 0.
        form.values[...] = np.where(np.abs(diagonal) < EPS, np.copysign(EPS, diagonal), diagonal)
        work, places = np.empty(6 * n + (LEAF + 1) ** 2), np.empty(7 * n, np.int32)
        _dlasda(
            1, LEAF, n, 0, form.values, above, form.u, n, form.vt, form.k, form.difl, form.difr,
            form.z, form.poles, form.givptr, form.givcol, n, form.perm, form.givnum, form.c,
            form.s, work, places, failure,
        )  # fmt: skip
    require(not ctx.comm.bcast(failure.value), "LinAlgError", "svd: dlasda does not converge")
    for array in form:
        ctx.comm.Bcast(array.T)
    _leaves(ctx, form, levels, U, V)
    new_u, new_v = ctx.empty((n, n), np.float64), ctx.empty((n, n), np.float64)
    for level in range(levels, 0, -1):
        for node in _nodes(n, level):
            ctx.check()
            _merge(ctx, form, node, (block(U), block(V)), (block(new_u), block(new_v)))
        U, V, new_u, new_v = new_u, new_v, U, V
    return form.values * scale, U, V


def _levels(n: int) -> int:
    return int(np.log2(n / (LEAF + 1))) + 1


def _empty(n: int, levels: int) -> Compact:
    def real(columns: int) -> Array:
        return np.zeros((n, columns), order="F")

    def whole(columns: int) -> Array:
        return np.zeros((n, columns), np.int32, order="F")

    return Compact(
        np.zeros(n), real(LEAF), real(LEAF + 1), whole(1), real(levels), real(2 * levels),
        real(levels), real(2 * levels), whole(1), whole(2 * levels), whole(levels),
        real(2 * levels), real(1), real(1),
    )  # fmt: skip


def _nodes(n: int, level: int) -> Iterator[_Node]:
    """The submatrices of a level, 1 being the whole matrix."""
    parts = [(0, n)]
    for _ in range(level - 1):
        parts = [
            part
            for first, m in parts
            for part in ((first, m // 2), (first + m // 2 + 1, m - m // 2 - 1))
        ]
    for at, (first, m) in enumerate(parts):
        yield _Node(level, 2 * len(parts) - 2 - at, first, m, at == len(parts) - 1)


def _mine(ctx: Context, start: int, stop: int) -> tuple[slice, slice]:
    """Which of this rank's rows lie in a range of the matrix, and where in the range."""
    before = [count_owned(row, ctx.rank, ctx.size) for row in (start, stop)]
    return slice(*before), slice((ctx.rank - start) % ctx.size, None, ctx.size)


def _leaves(ctx: Context, form: Compact, levels: int, U: DistMatrix, V: DistMatrix) -> None:
    for node in _nodes(U.shape[0], levels):
        middle, end = node.first + node.half, node.first + node.n
        for start, stop, width in (
            (node.first, middle, middle + 1 - node.first),
            (middle + 1, end, node.first + node.columns - middle - 1),
        ):
            rows, places = _mine(ctx, start, stop)
            block(U)[rows, start:stop] = form.u[start:stop, : stop - start][places]
            rows, places = _mine(ctx, start, start + width)
            right = form.vt[start : start + width, :width].T
            block(V)[rows, start : start + width] = right[places]


def _merge(
    ctx: Context, form: Compact, node: _Node, old: tuple[Array, Array], new: tuple[Array, Array]
) -> None:
    """This rank's rows of U and V, from those of the node's two parts."""
    first, half = node.first, node.half
    middle, _ = _mine(ctx, first + half, first + half + 1)  # in U a row between the parts
    for some in panels(node.columns, min(WIDTH, panel_width(node.n, 16))):
        for factor, before, after, edge, end in zip(
            _vectors(form, node, some), old, new, (half, half + 1), (node.n, node.columns),
            strict=True,
        ):  # fmt: skip
            cols = slice(first + some.start, first + some.start + factor.shape[1])
            for start, stop in ((0, edge), (half + 1, end)):
                rows, _ = _mine(ctx, first + start, first + stop)
                part = before[rows, first + start : first + stop]
                after[rows, cols] = part @ factor[start:stop]
            if edge == half:
                after[middle, cols] = factor[half]


def _vectors(form: Compact, node: _Node, some: slice) -> tuple[Array, Array]:
    """Columns of the factors of U and of V, whose rows are the columns of the parts."""
    first, n, level, j = node.first, node.n, node.level - 1, node.number
    rows = slice(first, first + n)
    k = int(form.k[j, 0])
    width = some.stop - some.start
    left, right = np.zeros((n, min(some.stop, n) - some.start)), np.zeros((node.columns, width))
    order = form.perm[rows, level].astype(np.int64) - 1
    order[0] = node.half  # the row between the parts comes first
    solved = slice(some.start, min(some.stop, k))
    count = max(0, solved.stop - solved.start)
    if count:
        left[order[:k], :count], right[order[:k], :count] = _secular(form, node, k, solved)
    for i in range(max(some.start, k), min(some.stop, n)):
        left[order[i], i - some.start] = right[order[i], i - some.start] = 1
    if not node.last:  # the vector of the null space, which the last column holds
        c, s = float(form.c[j, 0]), float(form.s[j, 0])
        if some.stop == node.columns:
            right[n, -1] = 1
        top, null = right[order[0]].copy(), right[n].copy()
        right[order[0]], right[n] = c * top + s * null, c * null - s * top
    for i in reversed(range(int(form.givptr[j, 0]))):
        q, p = (int(form.givcol[first + i, 2 * level + b]) - 1 for b in (0, 1))
        s, c = (float(form.givnum[first + i, 2 * level + b]) for b in (0, 1))
        for x in (left, right):
            x[p], x[q] = c * x[p] - s * x[q], s * x[p] + c * x[q]
    return left, right


def _secular(form: Compact, node: _Node, k: int, some: slice) -> tuple[Array, Array]:
    """Left and right vectors of a diagonal matrix whose first row is full, as columns."""
    rows = slice(node.first, node.first + k)
    level = node.level - 1
    z, poles = form.z[rows, level], form.poles[rows, 2 * level + 1]
    if k == 1:
        return np.full((1, 1), -1.0 if z[0] < 0 else 1.0), np.ones((1, 1))
    values = form.poles[rows, 2 * level][some]
    cols = np.arange(some.start, some.stop)
    # Old minus new values, from the nearer pole: accurate however close they are.
    below, after = form.difl[rows, level][some], form.difr[rows, 2 * level][some]
    upper = np.arange(k)[:, None] <= cols
    following = poles[np.minimum(cols + 1, k - 1)]
    gaps = np.where(
        upper, (poles[:, None] - poles[some]) - below, (poles[:, None] - following) - after
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        right = z[:, None] / gaps
    right /= poles[:, None] + values
    right[z == 0] = 0
    left = poles[:, None] * right
    left[0] = -1
    for vectors in (left, right):
        vectors /= np.linalg.norm(vectors, axis=0)
    return left, right


TALL = 1.5  # times as many rows as columns, from which on QR first is the quicker


@routine("W", "V", vectors=("W",))
def eigh(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    """Eigenvalues and eigenvectors of a Hermitian matrix: A V = V diag(W).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Only its lower triangle counts: that the upper one is its mirror image is not checked.
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    W : vector, shape (n,), real, STAR_STAR
        Ascending.
    V : matrix, shape (n, n), MC_MR
        Orthonormal columns.

    Raises
    ------
    ShapeError
        If A is not square.
    LinAlgError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    Tridiagonal form and divide and conquer: 4/3 to 16/3 ``n^3 / ranks`` flops, less where
    eigenvalues lie close; half of those of the tridiagonal form are matrix-vector products, at
    the speed of memory. Memory per rank: some ``5 n^2 / ranks + 10 n`` elements. Cannot be
    interrupted while it computes. Source: ScaLAPACK Users' Guide, ``p?syevd`` (``p?heevd``).

    Error: 40 eps, |A - V W V^H| / |A| and |V^H V - I|. Peak memory: 3.7 times arguments and
    results.
    """
    n = require_square("eigh", A)
    call = Call(ctx, "eigh", "syevd", A)
    dtype = call.dtype
    a, v = call.copy(A), call.new(n, n)
    w = np.zeros(n, real(dtype))
    kinds: tuple[Any, ...] = (
        (None, real(dtype), np.int32) if dtype.kind == "c" else (None, np.int32)
    )
    # p?syevd omits the work space of p?ormtr, which it calls, and ignores its error.
    rows, cols = call.largest_part(n, n)
    least = 4 * n + (rows + cols + 2 * call.block) * call.block
    info = call.run_with_work(
        "p?syevd", "V", "L", n, *a.submatrix, w, *v.submatrix, work=kinds, least=least
    )
    require(
        info == 0,
        "LinAlgError",
        f"eigh: no convergence (p?syevd returned {info}); try linalg.eigh",
    )
    ctx.comm.Bcast(w)  # for a matrix within one block, ranks without elements get no values
    return ctx.new_replicated(w), call.result(v)


@routine("S", "U", "V", vectors=("S",))
def svd(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """Thin singular value decomposition A = U diag(S) V^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.
    U : matrix, shape (m, min(m, n)), MC_MR
    V : matrix, shape (n, min(m, n)), MC_MR
        Orthonormal columns.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    With s = min(m, n), l = max(m, n): bidiagonal form, ``8/3 s^3 / ranks`` flops, half of them at
    the speed of memory; its vectors by divide and conquer, at most ``8/3 s^3 / ranks`` and
    ``O(s^2)`` on every rank; and the reflections, ``4 s^3 / ranks``. A matrix with l > 1.5 s is
    first reduced to a triangle by `qr` or `lq`: ``6 l s^2 / ranks`` flops. For a few leading
    vectors `linalg.truncated_svd` is quicker. Memory: some 7 copies of A. Cannot be interrupted
    while ScaLAPACK computes. Sources: ScaLAPACK Users' Guide, ``p?gebrd``, ``p?ormqr``,
    ``p?ormlq``; Gu, Eisenstat 1995 (see ali/scalapack/spectra.py).

    Error: 100 eps, |A - U S V^H| / |A|, |U^H U - I| and |V^H V - I|. Peak memory: 2.9 times
    arguments and results.
    """
    (m, n), k = A.shape, min(A.shape)
    call = Call(ctx, "svd", "gebrd", A)
    dtype = call.dtype
    if m > TALL * n:
        Q, R = qr(ctx, A)
        S, left, V = svd(ctx, R)
        return S, matmul(ctx, Q, left), V
    if n > TALL * m:
        L, Q = lq(ctx, A)
        S, U, right = svd(ctx, L)
        return S, U, matmul(ctx, Q, right, "C")
    if m < n:
        S, V, U = svd(ctx, ctx.to_layout(transposed(ctx, A, conjugate=True), A.layout))
        return S, U, V
    a = call.copy(A)
    length = k + call.block
    kind = real(dtype)
    unused = call.vector(length, kind), call.vector(length, kind)  # the same diagonals are in a
    tau_q, tau_p = call.vector(length), call.vector(length)
    call.run_with_work("p?gebrd", m, n, *a.submatrix, *unused, tau_q, tau_p)
    diagonal, above = (cyclic.diagonal(ctx, a, offset).real for offset in (0, 1))
    values, U, V = bidiagonal_svd(ctx, diagonal.astype(np.float64), above.astype(np.float64))
    order = np.argsort(-values, kind="stable")
    # Not p?ormbr, which refuses P on the left: it shifts the rows of A instead of the columns.
    u = call.copy(_columns(ctx, U, order, m, dtype))
    call.run_with_work("p?ormqr", "L", "N", m, k, n, *a.submatrix, tau_q, *u.submatrix)
    U = call.result(u)
    v = call.copy(_columns(ctx, V, order, n, dtype))
    turned = "C" if dtype.kind == "c" else "T"
    if n > 1:
        call.run_with_work(
            "p?ormlq", "L", turned, n - 1, k, n - 1, a.data, 1, 2, a.desc, tau_p, v.data, 2, 1,
            v.desc,
        )  # fmt: skip
    return ctx.new_replicated(values[order].astype(real(dtype))), U, call.result(v)


def _columns(
    ctx: Context, matrix: DistMatrix, order: Array, rows: int, dtype: np.dtype[Any]
) -> DistMatrix:
    """Columns of a matrix in VC_STAR in another order, extended by rows of zeros."""
    taken = ctx.zeros((rows, len(order)), dtype)
    block(taken)[: len(matrix.rows)] = block(matrix)[:, order]
    return taken


@routine("S", vectors=("S",))
def svdvals(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Singular values.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.

    Returns
    -------
    S : vector, shape (min(m, n),), real, STAR_STAR
        Descending.

    Raises
    ------
    LinAlgError
        If A contains NaN or infinity, or the iteration does not converge.

    Notes
    -----
    The bidiagonal form of `svd`, and ``O(s^2)`` flops on every rank. Cannot be interrupted while
    it computes. Source: ScaLAPACK Users' Guide, ``p?gesvd``.

    Error: 15 eps, relative to the largest singular value. Peak memory: 4.9 times arguments and
    results.
    """
    call = Call(ctx, "svdvals", "gesvd", A)
    if A.shape[0] > TALL * A.shape[1]:
        A = triangle(ctx, A)
    a = call.copy(A)
    unused = call.new(1, 1).submatrix
    S = np.zeros(min(A.shape), real(call.dtype))
    # The query of the work space omits an array for complex matrices.
    own = (call.vector(1 + 4 * max(A.shape), S.dtype),) if call.dtype.kind == "c" else ()
    given = ("N", "N", *A.shape, *a.submatrix, S, *unused, *unused)
    info = call.run_with_work("p?gesvd", *given, after=own)
    mine = S.copy()
    ctx.comm.Bcast(S)  # the same on all ranks to the last bit
    if info == len(S) + 1:
        # "Ranks found different values": those without a part of the vectors run another
        # iteration, whose values are as good.
        apart = np.abs(mine - S).max(keepdims=True)
        most = np.empty(1, S.dtype)
        ctx.comm.Allreduce(apart, most, MPI.MAX)
        info = 0 if most[0] <= 10 * len(S) * np.finfo(S.dtype).eps * S[0] else info
    require(
        info == 0,
        "LinAlgError",
        f"svdvals: no convergence (p?gesvd returned {info}); try linalg.svdvals",
    )
    return ctx.new_replicated(S)
