"""Products and transposes."""

from __future__ import annotations

from ali.blocks import block, floating, require, shape_text
from ali.interface import Context, routine
from ali.linalg.gemm import inner, product
from ali.linalg.views import OPERATIONS, operand
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import mirrored


@routine("C")
def matmul(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix,
    transpose_a: str = "N",
    transpose_b: str = "N",
) -> DistMatrix:
    """Matrix product C = A B; each operand as it is, transposed, or conjugated and transposed.

    Parameters
    ----------
    A : matrix, shape (m, k); (k, m) if transposed; or vector (k,)
    B : matrix, shape (k, n); (n, k) if transposed; or vector (k,)
        Any dtypes. C has the dtype of NumPy's product: integers stay integers and wrap around
        as in NumPy (use `astype` before where they could overflow).
    transpose_a, transpose_b : str
        "N": as it is, "T": transposed, "C": conjugated and transposed.

    Returns
    -------
    C : matrix, shape (m, n); of a vector A (n,), of a vector B (m,), of two a number
        In VC_STAR, STAR_VC or MC_MR, whichever takes the least time to move words. For A and B in
        VC_STAR it is VC_STAR if A is tall and B small, or if both are square on up to 5 ranks.

    Raises
    ------
    ShapeError
        If A's columns and B's rows differ in number.
    BadArgumentError
        If transpose_a or transpose_b is unknown.

    Notes
    -----
    ``2 m n k / ranks`` flops (of complex numbers four times as many). A rank receives one
    of ``k n``, ``m k``, ``m n`` (one operand, or partial results, between all ranks) and
    ``m k / height + k n / width`` (SUMMA on the grid) words. A transposed operand counts as one
    in the mirrored layout: it is a view of its local block and costs no communication, so that
    A^H B of tall A and B in VC_STAR takes ``m n`` words for any k. Memory in addition to the
    matrices: three panels of 32 MiB, a copy of an operand whose layout does not fit, and for "C" of
    a complex operand its local conjugate. Sources: see ali/linalg/gemm.py.

    Error: 4 eps, relative to |C|. Peak memory: 1.1 times arguments and results.
    """
    for name, how in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        require(
            how in OPERATIONS,
            "BadArgumentError",
            f"matmul: {name} must be one of N, T (transposed), C (its conjugate); got {how!r}",
        )
    left = operand(A, transpose_a if A.ndim == 2 else "N")
    right = operand(B, transpose_b if B.ndim == 2 else "N")
    inner_sizes = left.shape[A.ndim - 1], right.shape[0]
    shapes = [
        f"{name} is {shape_text(one)}{'' if op == 'N' or given.ndim < 2 else ' after transposing'}"
        for name, given, one, op in (("A", A, left, transpose_a), ("B", B, right, transpose_b))
    ]
    require(
        inner_sizes[0] == inner_sizes[1] and A.ndim > 0 and B.ndim > 0,
        "ShapeError",
        f"matmul: {shapes[0]} and {shapes[1]}; A must have as many columns as B has rows",
    )
    if A.ndim == 1:  # C^T = B^T A^T, where the column A^T is as A is stored
        return product(ctx, operand(right, "T"), A).with_ndim(B.ndim - 1)
    return product(ctx, left, right).with_ndim(B.ndim)


@routine("G")
def gram(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Gram matrix G = A^H A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best with whole rows on a rank (VC_STAR, VR_STAR). Integers are promoted to float64,
        so that sums of squares do not wrap (unlike ``matmul(A, A, "C")``, which is NumPy's).

    Returns
    -------
    G : matrix, shape (n, n), VC_STAR
        Hermitian.

    Notes
    -----
    ``2 m n^2 / ranks`` flops (half of it for a real A with n up to 2048), ``n^2`` words received,
    and two panels of 32 MiB of memory; for a complex A also its local conjugate.

    Error: 4 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    if A.layout != "VR_STAR":  # whose rows are in another order: the sum is the same
        A = ctx.to_layout(A, "VC_STAR")
    local = floating(block(A))
    return inner(ctx, local.conj().T if local.dtype.kind == "c" else local.T, local)


@routine("B")
def transpose(ctx: Context, A: DistMatrix, conjugate: bool = False) -> DistMatrix:
    """Transpose B = A^T, or B = A^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
    conjugate : bool
        Whether to conjugate the elements.

    Returns
    -------
    B : matrix, shape (n, m), dtype of A
        In the mirrored layout (VC_STAR gives STAR_VC, MC_MR gives MR_MC): every rank transposes
        its local block.

    Notes
    -----
    No communication. One local copy in cache-sized tiles; ``m n / ranks`` words of memory.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    B = ctx.empty((A.shape[1], A.shape[0]), A.dtype, mirrored(A.layout))
    if A.local.size:
        copy_kernels.copy(B.local, A.local.T)
        if conjugate and A.dtype.kind == "c":
            B.local.imag *= -1
    return B
