"""TestLib: the library of the 2019 paper's session, whose only routine is a truncated SVD.

As ARPACK, it gives the values in ascending order, in a column: the listing turns them around with
``np.flipud(S).transpose()``.
"""

from ali import Context, DistMatrix, routine
from ali.linalg import truncated_svd as linalg_svd


@routine("S", "U", "V")
def truncated_svd(
    ctx: Context, A: DistMatrix, rank: int
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """The `rank` leading singular values, ascending, shape (rank, 1), and their vectors."""
    S, U, V = linalg_svd(ctx, A, rank)
    for factor in (U, V):  # VC_STAR: a rank has whole rows
        factor.local[...] = factor.local[:, ::-1].copy()
    return ctx.new_replicated(S.local[::-1].reshape(rank, 1)), U, V
