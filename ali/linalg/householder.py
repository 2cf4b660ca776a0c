"""QR of matrices that are not tall, in VC_STAR: no rank holds more than its share.

Each panel of columns is factored by TSQR, whose Q is turned into Householder vectors, which are
then applied to the columns on the right. Source: Ballard, Demmel, Grigori, Jacquelin, Nguyen,
Solomonik, "Reconstructing Householder vectors from tall-skinny QR", IPDPS 2014.
"""

from __future__ import annotations

import itertools

import numpy as np
import scipy.linalg

from ali.blocks import Array, block, panels
from ali.interface import Context
from ali.linalg.cyclic_rows import PANEL_COLUMNS, gather_rows, owned_rows, rows_before
from ali.linalg.reflectors import Panel, apply, vectors
from ali.linalg.tsqr import TallQR
from mpi_workers.matrix.dist_matrix import DistMatrix


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
        cols, width = panel.columns, y.shape[1]
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
