"""Reduction of a Hermitian matrix in VC_STAR to a real tridiagonal one.

A panel of columns at a time: each column takes a product of the trailing matrix, as it was before
the panel, with a vector; the panel's rank-2b update follows in products of matrices. Source: Golub,
Van Loan, "Matrix Computations", 4th ed., 8.3; LAPACK's latrd and hetrd.
"""

from __future__ import annotations

import numpy as np

from ali.blocks import CHUNK, Array, block, panels
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.cyclic_rows import gather_rows, owned_rows, rows_before
from ali.linalg.reflectors import Panel, triangle_of, vectors
from mpi_workers.matrix.dist_matrix import DistMatrix

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
    found = []
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
            mine = owned_rows(j + 1, me, size)
            w = local[at:, j + 1 :] @ v
            w -= V[j + 1 :, :i][mine] @ (W[j + 1 :, :i].conj().T @ v)
            w -= W[j + 1 :, :i][mine] @ (V[j + 1 :, :i].conj().T @ v)
            whole = taus[j] * gather_rows(ctx, w[:, None], j + 1, n)[:, 0]
            W[j + 1 :, i] = whole - (0.5 * taus[j] * np.vdot(whole, v)) * v
            local[at:, j] = v[mine]
        at, mine = rows_before(stop, me, size), owned_rows(stop, me, size)
        left = np.concatenate([V[stop:][mine], W[stop:][mine]], axis=1)
        right = np.concatenate([W[stop:], V[stop:]], axis=1).conj().T
        strip = max(32, 4 * CHUNK // max(1, len(left) * left.itemsize))
        for some in panels(n - stop, strip):
            local[at:, stop + some.start : stop + some.stop] -= left @ right[:, some]
        panel = Panel(cols, start + 1, n, np.empty(0, A.dtype))
        _, y = vectors(ctx, local, panel)
        gram = sum_over_ranks(ctx.comm, y.conj().T @ y)
        found.append(panel._replace(t=triangle_of(gram, taus[cols])))
        ctx.progress(0.5 * (1 - (1 - stop / n) ** 3), f"tridiagonal form: column {stop} of {n}")
    last = local[(n - 1) // size, -1:].real if (n - 1) % size == me else np.empty(1, kind)
    last = np.ascontiguousarray(last)
    ctx.comm.Bcast(last, (n - 1) % size)
    diagonal[-1] = last[0]
    return diagonal, beside, found


def _reflection(x: Array) -> tuple[tuple[complex, complex], Array]:
    """beta, tau and the rest of v, where ``(I - tau v v^H)^H x = beta e_1`` (LAPACK's larfg)."""
    alpha, rest = x[0], x[1:]
    length = float(np.linalg.norm(rest))
    if length == 0.0 and alpha.imag == 0.0:
        return (alpha, 0.0), np.zeros_like(rest)
    beta = -np.copysign(np.hypot(abs(alpha), length), alpha.real)
    return (beta, (beta - alpha) / beta), rest / (alpha - beta)
