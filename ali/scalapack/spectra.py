"""Eigenvalues and singular values."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from ali.blocks import Array, block, require, require_square
from ali.interface import Context, routine
from ali.scalapack import triangles
from ali.scalapack.bidiagonal import bidiagonal_svd
from ali.scalapack.checks import computed_in, require_finite
from ali.scalapack.cyclic import Call, Cyclic
from ali.scalapack.native import real
from ali.scalapack.orthogonal import lq, qr, triangle
from ali.scalapack.products import matmul
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import mirrored

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
    dtype = computed_in("eigh", A)
    n = require_square("eigh", A)
    require_finite(ctx, "eigh", A)
    call = Call(ctx, dtype, "syevd", n, A)
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
    ``p?ormlq``; Gu, Eisenstat 1995 (see ali/scalapack/bidiagonal.py).

    Error: 100 eps, |A - U S V^H| / |A|, |U^H U - I| and |V^H V - I|. Peak memory: 2.9 times
    arguments and results.
    """
    dtype = computed_in("svd", A)
    (m, n), k = A.shape, min(A.shape)
    require_finite(ctx, "svd", A)
    if m > TALL * n:
        Q, R = qr(ctx, A)
        S, left, V = svd(ctx, R)
        return S, matmul(ctx, Q, left), V
    if n > TALL * m:
        L, Q = lq(ctx, A)
        S, U, right = svd(ctx, L)
        return S, U, matmul(ctx, Q, right, "C")
    if m < n:
        S, V, U = svd(ctx, _adjoint(ctx, A))
        return S, U, V
    call = Call(ctx, dtype, "gebrd", k, A)
    a = call.copy(A)
    length, kind = k + call.block, real(dtype)
    unused = call.vector(length, kind), call.vector(length, kind)  # the same diagonals are in a
    tau_q, tau_p = call.vector(length), call.vector(length)
    call.run_with_work("p?gebrd", m, n, *a.submatrix, *unused, tau_q, tau_p)
    diagonal, above = (triangles.diagonal(ctx, a, offset).real for offset in (0, 1))
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

    Error: 15 eps, relative to the largest singular value. Peak memory: 4.8 times arguments and
    results.
    """
    dtype = computed_in("svdvals", A)
    require_finite(ctx, "svdvals", A)
    if A.shape[0] > TALL * A.shape[1]:
        A = triangle(ctx, A)
    call = Call(ctx, dtype, "gesvd", min(A.shape), A)
    return ctx.new_replicated(_values(call, call.copy(A), call.new(1, 1)))


def _values(call: Call, a: Cyclic, unused: Cyclic) -> Array:
    """Run p?gesvd, whose work space query omits an array for complex matrices."""
    S = np.zeros(min(a.m, a.n), real(call.dtype))
    given: tuple[Any, ...] = ("N", "N", a.m, a.n, *a.submatrix, S)
    given += (*unused.submatrix, *unused.submatrix)
    own = (call.vector(1 + 4 * max(a.m, a.n), S.dtype),) if call.dtype.kind == "c" else ()
    info = call.run_with_work("p?gesvd", *given, after=own)
    mine = S.copy()
    call.ctx.comm.Bcast(S)  # the same on all ranks to the last bit
    if info == len(S) + 1:
        # "Ranks found different values": those without a part of the vectors run another
        # iteration, whose values are as good.
        apart, most = np.abs(mine - S).max(keepdims=True), np.empty(1, S.dtype)
        call.ctx.comm.Allreduce(apart, most, MPI.MAX)
        info = 0 if most[0] <= 10 * len(S) * np.finfo(S.dtype).eps * S[0] else info
    require(
        info == 0,
        "LinAlgError",
        f"svdvals: no convergence (p?gesvd returned {info}); try linalg.svdvals",
    )
    return S


def _adjoint(ctx: Context, matrix: DistMatrix) -> DistMatrix:
    """The conjugate transpose, in the same layout."""
    m, n = matrix.shape
    turned = ctx.empty((n, m), matrix.dtype, mirrored(matrix.layout))
    if matrix.local.size:
        copy_kernels.copy(turned.local, matrix.local.T)
        if turned.dtype.kind == "c":
            np.conjugate(turned.local, out=turned.local)
    return ctx.to_layout(turned, matrix.layout)
