"""Eigenvalues and eigenvectors of Hermitian matrices, which stay distributed if they are large.

Reduction to a real tridiagonal matrix in VC_STAR, divide and conquer with deflation and the
secular equation, then the back-transformation.

The matrix is cut in two halves and a rank-one matrix. Every rank has its rows of both halves'
eigenvectors and multiplies them by the eigenvectors of the rank-one problem, which it computes a
panel at a time: only vectors are communicated.

Source: Gu, Eisenstat, "A divide-and-conquer algorithm for the symmetric tridiagonal eigenproblem",
SIAM J. Matrix Anal. Appl. 16(1), 1995; LAPACK's laed2, laed3 and laed4.

A panel of columns at a time: each column takes a product of the trailing matrix, as it was before
the panel, with a vector; the panel's rank-2b update follows in products of matrices. Source: Golub,
Van Loan, "Matrix Computations", 4th ed., 8.3; LAPACK's latrd and hetrd.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import scipy.linalg

from ali.blocks import (
    CHUNK,
    Array,
    block,
    finite_norm,
    float_dtype,
    lapack,
    panel_width,
    panels,
    require,
    require_square,
)
from ali.interface import Context, routine
from ali.linalg import qr_factorization
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.local_products import subtract_product
from ali.linalg.native_libraries import call
from ali.linalg.qr_factorization import Panel
from ali.linalg.rows import adjoint_in_rows, copy_to_rows, gather_rows, owned_rows, rows_before
from mpi_workers.matrix.dist_matrix import DistMatrix

EPS = float(np.finfo(np.float64).eps)


class Deflated(NamedTuple):
    """Which eigenvectors of ``diag(d) + rho z z^T`` are known, and the problem that is left.

    Attributes
    ----------
    d : ndarray, shape (n,)
        After the rotations.
    kept, known : ndarray of int64
        Positions in d of the remaining problem, ascending by value, and of eigenvalues.
    z : ndarray, shape (len(kept),)
    rho : float
    rotations : list of (int, int, float, float)
        p, q, c, s: columns p and q became ``c p + s q`` and ``c q - s p``.
    """

    d: Array
    kept: Array
    known: Array
    z: Array
    rho: float
    rotations: list[tuple[int, int, float, float]]


def deflate(d: Array, z: Array, rho: float) -> Deflated:
    """Find eigenvalues of ``diag(d) + rho z z^T``, rho > 0, that are elements of d to rounding."""
    length = float(np.linalg.norm(z))
    d, z, rho = d.copy(), z / length, rho * length * length
    tol = 8 * EPS * max(float(np.abs(d).max()), float(np.abs(z).max()))
    kept: list[int] = []
    known: list[int] = []
    rotations: list[tuple[int, int, float, float]] = []
    if rho * float(np.abs(z).max()) <= tol:
        return Deflated(d, np.empty(0, np.int64), np.arange(len(d)), z[:0], rho, [])
    for q in np.argsort(d, kind="stable").tolist():
        if rho * abs(z[q]) <= tol:
            known.append(q)
            continue
        if kept:
            p = kept[-1]
            both = float(np.hypot(z[p], z[q]))
            c, s = float(z[q] / both), float(-z[p] / both)
            if abs((d[q] - d[p]) * c * s) <= tol:
                z[q], z[p] = both, 0.0
                rotations.append((p, q, c, s))
                d[p], d[q] = d[p] * c * c + d[q] * s * s, d[p] * s * s + d[q] * c * c
                known.append(kept.pop())
        kept.append(q)
    index = np.array(kept, np.int64)
    return Deflated(d, index, np.array(known, np.int64), z[index], rho, rotations)


class RankOne:
    """The eigenpairs of ``diag(d) + rho z z^T``, d ascending and distinct, no zero in z.

    Attributes
    ----------
    values : ndarray, shape (k,)
        Ascending, the same on every rank.

    Notes
    -----
    Each rank solves for its share of the values: ``O(k^2 / ranks)`` flops; ``4 k`` words.
    """

    def __init__(self, ctx: Context, d: Array, z: Array, rho: float) -> None:
        k = len(d)
        self._d = d
        self._explicit = None
        if k <= 2:  # where laed4 returns something else
            self.values, self._explicit = np.linalg.eigh(np.diag(d) + rho * np.outer(z, z))
            return
        # Of each value: itself, its nearest pole, and its distance from it, which is accurate.
        mine = np.zeros((3, len(range(ctx.rank, k, ctx.size))))
        failure = 0
        delta = np.empty(k)
        for at, i in enumerate(range(ctx.rank, k, ctx.size)):
            value, info = _laed4(i, d, z, delta, rho)
            nearest = int(np.abs(delta).argmin())
            mine[:, at] = value, nearest, delta[nearest]
            failure = failure or info
        require(not any(ctx.comm.allgather(failure)), "LinAlgError", "eigh: a root was not found")
        both = gather_rows(ctx, mine.T, 0, k).T
        self.values, self._poles, self._off = both[0], d[both[1].astype(np.int64)], both[2]
        own = range(ctx.rank, k, ctx.size)
        squares = np.empty(len(own))
        for some in panels(len(own), max(1, CHUNK // (8 * k))):
            rows = np.asarray(own[some])
            ratios = self._differences(d[rows])
            gaps = d[rows, None] - d
            gaps[range(len(rows)), rows] = -1
            squares[some] = np.prod(ratios / gaps, axis=1)
        self._z = np.copysign(np.sqrt(gather_rows(ctx, squares[:, None], 0, k)[:, 0]), z)

    def _differences(self, d: Array, some: slice = slice(None)) -> Array:
        """``d_i - values_j`` to full relative accuracy."""
        found: Array = (d[:, None] - self._poles[some]) + self._off[some]
        return found

    def vectors(self, some: slice) -> Array:
        """Eigenvectors of a slice of the values, as columns."""
        if self._explicit is not None:
            return self._explicit[:, some]
        found: Array = self._z[:, None] / self._differences(self._d, some)
        found /= np.linalg.norm(found, axis=0)
        return found


_dlaed4 = lapack("dlaed4", 8)


def _laed4(i: int, d: Array, z: Array, delta: Array, rho: float) -> tuple[float, int]:
    """Value i, from 0; delta is overwritten by ``d - value``. Also LAPACK's INFO."""
    info, value = ctypes.c_int(0), ctypes.c_double(0)
    _dlaed4(len(d), i + 1, d, z, delta, rho, value, info)
    return value.value, info.value


LEAF = 256  # order of a matrix that LAPACK solves on rank 0
MERGE_WIDTH = 512  # columns of a panel, at most


def tridiagonal_eigh(ctx: Context, d: Array, e: Array) -> tuple[Array, DistMatrix]:
    """Eigenvalues, unordered, and eigenvectors of a tridiagonal matrix. Collective.

    Parameters
    ----------
    d, e : ndarray of float64, shapes (n,) and (n - 1,)
        Diagonal and subdiagonal, the same on every rank.

    Returns
    -------
    values : ndarray, shape (n,)
        The same on every rank.
    Z : DistMatrix, shape (n, n), VC_STAR
        Column i belongs to value i.

    Notes
    -----
    At most ``4/3 n^3 / ranks`` flops in products of matrices, and ``O(n^2)`` on every rank. Memory:
    1.5 matrices, and panels of ``512 n`` words.
    """
    n = len(d)
    half = n // 2 // ctx.size * ctx.size  # so that the second half begins on rank 0
    if n <= LEAF or half == 0:
        values, vectors = np.empty(n), np.empty((n, n))
        if ctx.rank == 0:
            values[...], vectors[...] = scipy.linalg.eigh_tridiagonal(d, e, lapack_driver="stevd")
        ctx.comm.Bcast(values)
        ctx.comm.Bcast(vectors)
        return values, ctx.new_replicated(vectors, "VC_STAR")
    ctx.check()
    rho = abs(float(e[half - 1]))
    cut = d.copy()
    cut[half - 1 : half + 1] -= rho
    upper, Z1 = tridiagonal_eigh(ctx, cut[:half], e[: half - 1])
    lower, Z2 = tridiagonal_eigh(ctx, cut[half:], e[half:])
    z = np.concatenate([_row(ctx, Z1, half - 1), _row(ctx, Z2, 0) * np.sign(e[half - 1])])
    left: Deflated | None = None
    if ctx.rank == 0:  # alone: other ranks may round differently
        left = deflate(np.concatenate([upper, lower]), z, rho)
    left = ctx.comm.bcast(left)
    assert left is not None
    return _merged(ctx, left, Z1, Z2)


def _row(ctx: Context, Z: DistMatrix, i: int) -> Array:
    """Row i of Z, on every rank."""
    mine = i % ctx.size == ctx.rank
    row = block(Z)[i // ctx.size].copy() if mine else np.empty(Z.shape[1])
    ctx.comm.Bcast(row, i % ctx.size)
    return row


def _merged(
    ctx: Context, left: Deflated, Z1: DistMatrix, Z2: DistMatrix
) -> tuple[Array, DistMatrix]:
    n, half, kept = len(left.d), Z1.shape[0], left.kept
    rank_one = RankOne(ctx, left.d[kept], left.z, left.rho) if kept.size else None
    values = np.concatenate([rank_one.values if rank_one else left.d[:0], left.d[left.known]])
    Z = ctx.empty((n, n), np.float64)
    out = block(Z)
    top = rows_before(half, ctx.rank, ctx.size)
    for some in panels(n, min(MERGE_WIDTH, panel_width(n, 8))):
        ctx.check()
        U = np.zeros((n, some.stop - some.start))
        solved = slice(some.start, min(some.stop, len(kept)))
        if rank_one is not None and solved.start < solved.stop:
            U[kept, : solved.stop - solved.start] = rank_one.vectors(solved)
        for j in range(max(some.start, len(kept)), some.stop):
            U[left.known[j - len(kept)], j - some.start] = 1
        for p, q, c, s in reversed(left.rotations):
            U[p], U[q] = c * U[p] - s * U[q], s * U[p] + c * U[q]
        np.matmul(block(Z1), U[:half], out=out[:top, some])
        np.matmul(block(Z2), U[half:], out=out[top:, some])
    return values, Z


WIDTH = 48  # columns of a panel: 48 was quickest in one trial, n = 2000 on 2 ranks


def reduce(ctx: Context, A: DistMatrix) -> tuple[Array, Array, list[Panel]]:
    """``A = Q T Q^H``: A is overwritten by the reflections whose product is Q. Collective.

    Parameters
    ----------
    A : DistMatrix, shape (n, n), VC_STAR, floating point
        Hermitian; both triangles are read. Squares of its elements must neither over- nor
        underflow.

    Returns
    -------
    diagonal, beside : ndarray, shapes (n,) and (n - 1,), real
        Of T, the same on every rank.
    panels : list of Panel
        Of Q, for `reflectors.apply`.

    Notes
    -----
    ``2 n^3 / ranks`` flops, a third of them at the speed of memory. For each column one message of
    at most n words to all ranks, and one from all to all.
    """
    n, local, me, size = A.shape[0], block(A), ctx.rank, ctx.size
    kind = np.zeros(0, A.dtype).real.dtype
    diagonal, beside, taus = np.zeros(n, kind), np.zeros(max(0, n - 1), kind), np.zeros(n, A.dtype)
    reflections = []
    for cols in panels(n - 1, WIDTH):
        start, stop = cols.start, cols.stop
        V = np.zeros((n, stop - start), A.dtype, order="F")
        W = np.zeros_like(V)
        for j in range(start, stop):
            i = j - start
            message = np.empty(n - j + 1, A.dtype)  # d, e, tau, the rest of v
            if j % size == me:
                row = local[j // size, j:].copy()
                row -= V[j, :i] @ W[j:, :i].conj().T
                row -= W[j, :i] @ V[j:, :i].conj().T
                message[0] = row[0].real
                message[1:3], message[3:] = _reflection(row[1:].conj())
            ctx.comm.Bcast(message, j % size)
            diagonal[j], beside[j], taus[j] = message[0].real, message[1].real, message[2]
            V[j + 1, i], V[j + 2 :, i] = 1, message[3:]
            v = V[j + 1 :, i]
            at = rows_before(j + 1, me, size)
            own = owned_rows(j + 1, me, size)
            w = local[at:, j + 1 :] @ v
            w -= V[j + 1 :, :i][own] @ (W[j + 1 :, :i].conj().T @ v)
            w -= W[j + 1 :, :i][own] @ (V[j + 1 :, :i].conj().T @ v)
            whole = taus[j] * gather_rows(ctx, w[:, None], j + 1, n)[:, 0]
            W[j + 1 :, i] = whole - (0.5 * taus[j] * np.vdot(whole, v)) * v
            local[at:, j] = v[own]
        at, own = rows_before(stop, me, size), owned_rows(stop, me, size)
        left = np.concatenate([V[stop:][own], W[stop:][own]], axis=1)
        right = np.concatenate([W[stop:], V[stop:]], axis=1).conj().T
        subtract_product(local[at:, stop:n], left, right)
        panel = Panel(cols, start + 1, n, np.empty(0, A.dtype))
        _, y = qr_factorization.vectors(ctx, local, panel)
        gram = sum_over_ranks(ctx.comm, y.conj().T @ y)
        reflections.append(panel._replace(t=qr_factorization.triangle_of(gram, taus[cols])))
        ctx.progress(0.5 * (1 - (1 - stop / n) ** 3), f"tridiagonal form: column {stop} of {n}")
    last = local[(n - 1) // size, -1:].real if (n - 1) % size == me else np.empty(1, kind)
    last = np.ascontiguousarray(last)
    ctx.comm.Bcast(last, (n - 1) % size)
    diagonal[-1] = last[0]
    return diagonal, beside, reflections


def _reflection(x: Array) -> tuple[tuple[complex, complex], Array]:
    """beta, tau and the rest of v, where ``(I - tau v v^H)^H x = beta e_1`` (LAPACK's larfg)."""
    alpha, rest = x[0], x[1:]
    length = float(np.linalg.norm(rest))
    if length == 0.0 and alpha.imag == 0.0:
        return (alpha, 0.0), np.zeros_like(rest)
    beta = -np.copysign(np.hypot(abs(alpha), length), alpha.real)
    return (beta, (beta - alpha) / beta), rest / (alpha - beta)


def eigenpairs(ctx: Context, A: DistMatrix, scale: float) -> tuple[Array, DistMatrix]:
    """Eigenvalues, ascending, and eigenvectors. Collective.

    Parameters
    ----------
    A : DistMatrix, shape (n, n), VC_STAR, floating point
        Hermitian; overwritten.
    scale : float
        Its Frobenius norm.

    Returns
    -------
    values : ndarray, shape (n,), real
        The same on every rank.
    V : DistMatrix, shape (n, n), VC_STAR

    Notes
    -----
    Tridiagonal form, divide and conquer in float64, and the vectors times the reflections: ``2 +
    4/3 + 2`` times ``n^3 / ranks`` flops; ``3 n^2`` words received. Memory per rank: its share of 4
    matrices.
    """
    n, local = A.shape[0], block(A)
    kind = np.zeros(0, A.dtype).real.dtype
    if scale:
        local /= kind.type(scale)
    diagonal, beside, found = reduce(ctx, A)
    values, Z = tridiagonal_eigh(ctx, diagonal.astype(np.float64), beside.astype(np.float64))
    ctx.progress(0.8, "eigenvectors")
    order = np.argsort(values, kind="stable")
    V = ctx.empty((n, n), A.dtype)
    v = block(V)
    for some in panels(n, panel_width(n, 8)):
        v[:, some] = block(Z)[:, order[some]]
    del Z
    for panel in reversed(found):
        ctx.check()
        rows, y = qr_factorization.vectors(ctx, local, panel)
        qr_factorization.apply(ctx, y, panel.t, v[rows])
    return (values[order] * scale).astype(kind), V


ON_ONE_RANK = 400  # order up to which rank 0 computes: below, messages take longer than LAPACK
LAPACK_LIMIT = 30_000  # the order at which LAPACK's 32-bit integers end


@routine("W", "V", vectors=("W",))
def eigh(ctx: Context, A: DistMatrix, method: str = "auto") -> tuple[DistMatrix, DistMatrix]:
    """Eigenvalues and eigenvectors of a Hermitian matrix: A V = V diag(W).

    Parameters
    ----------
    A : matrix, shape (n, n)
        Hermitian; only its lower triangle is read. Integers are promoted to float64.
    method : str
        "auto": the algorithm below. "scalapack" or "elemental": the routine of that library, which
        must be installed on the nodes; see the results of `load_library`.

    Returns
    -------
    W : vector, shape (n,), real, STAR_STAR
        Ascending.
    V : matrix, shape (n, n), VC_STAR
        Orthonormal columns.

    Raises
    ------
    ShapeError
        If A is not square.
    BadArgumentError
        If `method` is unknown.
    LibraryNotFoundError, LibraryLoadError
        If the native library is not there.
    LinAlgError
        If A contains NaN or infinity, or LAPACK does not converge.

    Notes
    -----
    Reduction to a tridiagonal matrix, divide and conquer, and the vectors times the reflections:
    at most ``16/3 n^3 / ranks`` flops, an eighth of them at the speed of memory; ``3 n^2`` words
    and ``2 n log2(ranks)`` messages. Each rank holds its share of 4 matrices. For n up to 400, or
    on one rank, LAPACK's evd on rank 0. For a few eigenvalues of a large positive semidefinite
    matrix use `truncated_svd`. Sources: Golub, Van Loan, 4th ed., 8.3; Gu, Eisenstat 1995.

    Error: 40 eps, |A - V W V^H| / |A| and |V^H V - I|. Peak memory: 2.7 times arguments and
    results.
    """
    n = require_square("eigh", A)
    if method != "auto":
        return call(ctx, method, eigh, A)
    dtype = float_dtype(A.dtype)
    rows = copy_to_rows(ctx, A, dtype)
    lower = block(rows)
    for i, row in enumerate(rows.rows):
        lower[i, row + 1 :] = 0  # the upper triangle may hold NaN
    scale = finite_norm(ctx, "eigh", rows)
    if n <= (ON_ONE_RANK if ctx.size > 1 else LAPACK_LIMIT):
        return _on_one_rank(ctx, rows)
    index = range(len(rows.rows)), rows.rows
    lower[index] = lower[index].real / 2
    lower += block(adjoint_in_rows(ctx, rows))
    values, V = eigenpairs(ctx, rows, scale)
    return ctx.new_replicated(values), V


def _on_one_rank(ctx: Context, rows: DistMatrix) -> tuple[DistMatrix, DistMatrix]:
    n, dtype = rows.shape[0], rows.dtype
    V = ctx.empty((n, n), dtype, "CIRC_CIRC")  # fails here if memory is short
    spare = ctx.empty((2 * n, n), dtype, "CIRC_CIRC")  # the memory that LAPACK will use
    del spare
    whole = ctx.to_layout(rows, "CIRC_CIRC")
    W: Array = np.empty(n, np.zeros(0, dtype).real.dtype)
    failure = ""
    if ctx.rank == 0:
        try:
            W[...], V.local[...] = scipy.linalg.eigh(
                whole.local, overwrite_a=True, check_finite=False, driver="evd"
            )
        except scipy.linalg.LinAlgError as error:
            failure = str(error)
    failure = ctx.comm.bcast(failure)
    require(not failure, "LinAlgError", f"eigh: {failure}")
    ctx.comm.Bcast(W)
    return ctx.new_replicated(W), ctx.to_layout(V, "VC_STAR")
