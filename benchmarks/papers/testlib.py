"""TestLib: the library of the 2019 paper's session, whose only routine is a truncated SVD."""

from ali import Context, DistMatrix, routine
from ali.linalg import truncated_svd as linalg_svd


@routine("S", "U", "V")
def truncated_svd(
    ctx: Context, A: DistMatrix, rank: int
) -> tuple[DistMatrix, DistMatrix, DistMatrix]:
    """The `rank` leading singular values and vectors of A, by ARPACK."""
    found: tuple[DistMatrix, DistMatrix, DistMatrix] = linalg_svd(ctx, A, rank)
    return found
