"""Products and norms."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from ali.blocks import require, require_choice, shape_text
from ali.interface import Context, routine
from ali.scalapack.checks import computed_in
from ali.scalapack.cyclic import Call
from ali.scalapack.native import scalar
from mpi_workers.matrix.dist_matrix import DistMatrix

NORMS = {"fro": "F", "1": "1", "inf": "I", "max": "M"}


@routine("C")
def matmul(
    ctx: Context, A: DistMatrix, B: DistMatrix, transpose_a: str = "N", transpose_b: str = "N"
) -> DistMatrix:
    """Matrix product C = op(A) op(B).

    Parameters
    ----------
    A, B : matrix
        Any layouts (best MC_MR: others are copied) and dtypes; op(A) is (m, k), op(B) is
        (k, n). Integers are promoted to float64.
    transpose_a, transpose_b : str
        op: "N" as it is, "T" transposed, "C" conjugated and transposed.

    Returns
    -------
    C : matrix, shape (m, n), MC_MR

    Raises
    ------
    ShapeError
        If op(A)'s columns and op(B)'s rows differ in number.
    BadArgumentError
        For any other transpose.

    Notes
    -----
    ``2 m n k / ranks`` flops; ``m k / height + k n / width`` words received per rank on a
    height x width grid; memory for C, and one copy of A and of B where they are not in
    MC_MR, are of another dtype, or all dimensions are at least the threshold (docs/scalapack.md).
    Cannot be interrupted while it computes. Source: ScaLAPACK Users' Guide, PBLAS ``p?gemm``.

    Error: 5 eps, relative to |C|. Peak memory: 2.3 times arguments and results.
    """
    dtype = computed_in("matmul", A, B)
    for name, value in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        require_choice("matmul", name, value, ("N", "T", "C"))
    m, k = A.shape if transpose_a == "N" else A.shape[::-1]
    other, n = B.shape if transpose_b == "N" else B.shape[::-1]
    require(
        k == other,
        "ShapeError",
        f"matmul: A is {shape_text(A)} ({transpose_a}) and B is {shape_text(B)} ({transpose_b}); "
        "op(A) must have as many columns as op(B) has rows",
    )
    call = Call(ctx, dtype, "gemm", min(m, n, k), A, B)
    a = call.operand(A)
    b = a if B is A else call.operand(B)
    c = call.new(m, n)
    call.run(
        "p?gemm", transpose_a, transpose_b, m, n, k, scalar(1, dtype), *a.submatrix,
        *b.submatrix, scalar(0, dtype), *c.submatrix, info=False,
    )  # fmt: skip
    return call.result(c)


@routine("norm")
def norm(ctx: Context, A: DistMatrix, ord: str = "fro") -> float:
    """Norm of a matrix.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best in MC_MR. Integers are promoted to float64.
    ord : str
        "fro" (Frobenius), "1" (largest sum of a column's absolute values), "inf" (of a
        row's) or "max" (largest absolute value, which is no matrix norm).

    Returns
    -------
    norm : float
        nan if A contains NaN. Computed in A's precision.

    Raises
    ------
    BadArgumentError
        For any other ord.

    Notes
    -----
    Two passes over A; ``n / width`` ("1") or ``m / height`` ("inf") words, else one, from
    each rank; a copy of A if it is not in MC_MR. Source: ScaLAPACK Users' Guide, ``p?lange``.

    Error: 2 eps, relative to the norm. Peak memory: 3.2 times arguments and results.
    """
    dtype = computed_in("norm", A)
    require_choice("norm", "ord", ord, tuple(NORMS))
    call = Call(ctx, dtype, "lange", 0, A)
    a = call.operand(A)
    mine = np.array([a.rows > 0 and a.cols > 0 and bool(np.isnan(a.data).any())], np.int32)
    nans = np.zeros(1, np.int32)
    ctx.comm.Allreduce(mine, nans, MPI.MAX)
    if nans[0]:
        return float("nan")
    return call.norm(NORMS[ord], a)
