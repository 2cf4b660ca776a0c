"""QR of tall, well-conditioned matrices by Cholesky factors of their Gram matrices.

Source: Fukaya, Kannan, Nakatsukasa, Yamamoto, Yanagisawa, "Shifted Cholesky QR for computing the
QR factorization of ill-conditioned matrices", SIAM J. Sci. Comput. 42(1), 2020 (CholeskyQR2, and
its condition for orthogonality to rounding).
"""

from __future__ import annotations

import numpy as np
import scipy.linalg

from ali.blocks import Array, block, panel_width, panels
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from mpi_workers.matrix.dist_matrix import DistMatrix

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
    first = _factor(ctx, _gram(ctx, local), n, orthonormal=False)
    if first is None:
        return None
    Q = ctx.empty((m, n), local.dtype)
    q = block(Q)
    _divide(ctx, local, first, q)
    second = _factor(ctx, _gram(ctx, q), n, orthonormal=True)
    if second is None:
        return None
    _divide(ctx, q, second, q)
    r = second @ first
    ctx.comm.Bcast(r)  # products may be rounded differently on each rank
    return Q, ctx.new_replicated(r, "VC_STAR")


def _gram(ctx: Context, local: Array) -> Array:
    n = local.shape[1]
    gram = np.zeros((n, n), local.dtype)
    with np.errstate(all="ignore"):
        for some in panels(len(local), panel_width(n, local.itemsize)):
            ctx.check()
            part = local[some]
            gram += part.T @ part if local.dtype.kind == "f" else part.conj().T @ part
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
