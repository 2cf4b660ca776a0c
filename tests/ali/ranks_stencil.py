"""The five-point operator on 5 x 5 points as a routine: an operator for PETSc in test_petsc.py."""

import numpy as np

from ali import Context, DistMatrix, routine


@routine("Y", like={"Y": "X"})
def times(ctx: Context, X: DistMatrix) -> DistMatrix:
    """Y = A X."""
    x = np.pad(ctx.to_layout(X, "STAR_STAR").local.reshape(5, 5), 1)
    y = 4 * x[1:-1, 1:-1] - x[2:, 1:-1] - x[:-2, 1:-1] - x[1:-1, 2:] - x[1:-1, :-2]
    return ctx.new_replicated(y.reshape(25), "MC_MR")


@routine("Y")
def breaks(ctx: Context, X: DistMatrix) -> DistMatrix:
    """Fails after some messages."""
    ctx.comm.barrier()
    raise ValueError("it breaks")
