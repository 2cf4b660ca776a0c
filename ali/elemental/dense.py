"""Products, norms and linear systems."""

from __future__ import annotations

import math

from ali.blocks import require, require_choice, require_same_rows, require_square, shape_text
from ali.elemental.checks import positive
from ali.elemental.views import ADJOINT, MAX_NORM, NORMAL, TRANSPOSE, Elemental, set_diagonal
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

ORIENTATIONS = {"N": NORMAL, "T": TRANSPOSE, "C": ADJOINT}
NORMS = {"1": 0, "inf": 1, "max": MAX_NORM, "nuc": 4, "fro": 5, "2": 6}  # ElNormType
BY_SVD = ("2", "nuc")


@routine("C")
def matmul(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix,
    transpose_a: str = "N",
    transpose_b: str = "N",
) -> DistMatrix:
    """Matrix product C = op(A) op(B).

    Parameters
    ----------
    A, B : matrix
        With op(A) of shape (m, k) and op(B) of shape (k, n). Best in MC_MR. Dtypes are
        promoted to a common floating one (integers and bool to float64).
    transpose_a, transpose_b : str
        op: "N" takes the matrix as it is, "T" its transpose, "C" its conjugate transpose.

    Returns
    -------
    C : matrix, shape (m, n), MC_MR
        Written by Elemental where it stays; no copy.

    Raises
    ------
    ShapeError
        If op(A)'s columns and op(B)'s rows differ in number.
    BadArgumentError
        For another letter.

    Notes
    -----
    SUMMA with the largest of the three matrices stationary: ``2 m n k / ranks`` flops; of the
    other two, ``m k / height + k n / width`` words (and likewise) per rank; panels of 128
    vectors of memory, and a copy of an operand that is not in MC_MR. Sources: van de Geijn and
    Watts 1997 (SUMMA); Schatz, van de Geijn, Poulson 2016; Poulson et al., TOMS 39(2), 2013.

    Error: 4 eps, relative to |C|. Peak memory: 2.5 times arguments and results.
    """
    for what, given in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        require_choice("matmul", what, given, tuple(ORIENTATIONS))
    m, k = A.shape if transpose_a == "N" else A.shape[::-1]
    rows, n = B.shape if transpose_b == "N" else B.shape[::-1]
    require(
        k == rows,
        "ShapeError",
        f"matmul: A is {shape_text(A)} ({transpose_a}) and B is {shape_text(B)} ({transpose_b}); "
        "op(A) must have as many columns as op(B) has rows",
    )
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        C = el.zeros((m, n), A.dtype)
        one, zero = el.number_of(1, C.dtype), el.number_of(0, C.dtype)
        ops = ORIENTATIONS[transpose_a], ORIENTATIONS[transpose_b]
        el("GemmDist", C.dtype, *ops, one, A, B, zero, C)
    return C


@routine("X", like={"X": "B"})
def solve(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Solution X of A X = B, by LU with partial pivoting.

    Parameters
    ----------
    A : matrix, shape (n, n)
    B : matrix, shape (n, k)
        Dtypes are promoted to a common floating one.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        Solved in place in a copy of B.

    Raises
    ------
    ShapeError
        If A is not square or B has not n rows.
    RoutineError
        If A is exactly singular, or A or B contains NaN or infinity.

    Notes
    -----
    ``(2/3 n^3 + 2 n^2 k) / ranks`` flops, ``O(n^2 (1/height + 1/width))`` words and ``O(n)``
    pivot searches; a copy of A and one of B. Source: Poulson et al., TOMS 39(2), 2013.

    Error: 2 eps, |A X - B| / (|A| |X| + |B|). Peak memory: 4.9 times arguments and results.
    """
    require_square("solve", A)
    require_same_rows("solve", A, B)
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        el.finite("solve", A, B)
        X = el.copy(B)
        el("LinearSolveDist", X.dtype, A, X)
    return X


@routine("X", like={"X": "B"})
def lstsq(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Least squares: the X that makes ||A X - B|| least; if A is wide, the shortest such X.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of full rank: for others use `pinv`.
    B : matrix, shape (m, k)
        Dtypes are promoted to a common floating one.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        One copy if A is tall: Elemental works in columns of m.

    Raises
    ------
    ShapeError
        If B has not m rows.
    RoutineError
        If R (or L) has an exact zero on its diagonal, or A or B contains NaN or infinity.

    Notes
    -----
    Householder QR (LQ if wide): ``2 m n min(m, n) / ranks`` flops to first order,
    ``O((m n + n^2) (1/height + 1/width))`` words, a copy of A. Source: Golub and Van Loan,
    "Matrix Computations", section 5.3; Poulson et al., TOMS 39(2), 2013.

    Error: 2 eps, |A^H (A X - B)| / (|A| (|A| |X| + |B|)). Peak memory: 4.3 times arguments and
    results.
    """
    require_same_rows("lstsq", A, B)
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        el.finite("lstsq", A, B)
        X = el.zeros((A.shape[1], B.shape[1]), A.dtype)
        el("LeastSquaresDist", X.dtype, NORMAL, A, B, X)
    return X


@routine("X", like={"X": "B"})
def ridge(ctx: Context, A: DistMatrix, B: DistMatrix, lam: float) -> DistMatrix:
    """Ridge regression: the X that makes ||A X - B||^2 + lam ||X||^2 least.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Of any rank, tall or wide.
    B : matrix, shape (m, k)
        Dtypes are promoted to a common floating one.
    lam : float
        Weight > 0, in the units of A's squared singular values.

    Returns
    -------
    X : matrix, shape (n, k), MC_MR
        One copy: Elemental works in columns of m + n.

    Raises
    ------
    ShapeError
        If B has not m rows.
    BadArgumentError
        If lam is not positive and finite.
    RoutineError
        If A or B contains NaN or infinity.

    Notes
    -----
    Least squares by QR with ``sqrt(lam) I`` below A and zeros below B, which does not square
    A's condition number (Elemental's own ridge does, and takes no wide A): about
    ``2 (m + n) n^2 / ranks`` flops and two copies of ``(m + n) (n + k) / ranks`` words. Source:
    Bjorck, "Numerical Methods for Least Squares Problems", 1996.

    Error: 2 eps, the gradient, relative to |A| (|A| |X| + |B|). Peak memory: 4.3 times arguments
    and results.
    """
    require_same_rows("ridge", A, B)
    positive("ridge", "lam", lam)
    (m, n), k = A.shape, B.shape[1]
    with Elemental(ctx) as el:
        A, B = el.floats(A, B)
        el.finite("ridge", A, B)
        stacked, below = el.zeros((m + n, n), A.dtype), el.zeros((m + n, k), A.dtype)
        for source, target in ((A, stacked), (B, below)):
            top = ctx.to_layout(source, "MC_MR").local
            if top.size:  # the first m rows of the longer matrix lie on the same ranks
                target.local[: len(top)] = top
        set_diagonal(stacked, math.sqrt(lam), below=m)
        X = el.zeros((n, k), A.dtype)
        el("LeastSquaresDist", X.dtype, NORMAL, stacked, below, X)
    return X


@routine("norm")
def norm(ctx: Context, A: DistMatrix, ord: str = "fro") -> float:
    """A norm of A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Integers are promoted to float64.
    ord : str
        "fro" (Frobenius), "1" (largest column sum), "inf" (largest row sum), "max" (largest
        element), "2" (largest singular value), "nuc" (sum of the singular values).

    Raises
    ------
    BadArgumentError
        For another ord.
    RoutineError
        For "2" and "nuc", if A contains NaN or infinity.

    Notes
    -----
    One pass and a reduction of at most m or n numbers, in the precision of A; for "2" and
    "nuc" the cost of `singular_values`. Source: Poulson et al., TOMS 39(2), 2013.

    Error: 40 eps, relative to the norm. Peak memory: 1.1 times arguments and results.
    """
    require_choice("norm", "ord", ord, tuple(NORMS))
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        if ord in BY_SVD:
            el.finite("norm", A)
        return el.number("NormDist", A.dtype, A, NORMS[ord])


@routine("cond")
def cond(ctx: Context, A: DistMatrix, ord: str = "2") -> float:
    """Condition number of A in a norm.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Square, but for ord "2". Integers are promoted to float64.
    ord : str
        "2" (the ratio of the extreme singular values), "1", "inf", "fro" or "max".

    Returns
    -------
    float
        inf where Elemental finds A exactly singular. In the precision of A: beyond about
        1e7 (single) or 1e16 (double) only the magnitude means anything.

    Raises
    ------
    BadArgumentError
        For another ord.
    ShapeError
        If A is not square and the ord is not "2".
    RoutineError
        If A contains NaN or infinity.

    Notes
    -----
    "2" costs `singular_values`, "fro" too; the others an explicit inverse, ``2 n^3 / ranks``
    flops. A copy of A. Source: Higham, "Accuracy and Stability of Numerical Algorithms", 2002.

    Error: 8 eps, relative, of a well-conditioned A. Peak memory: 5.2 times arguments and results.
    """
    require_choice("cond", "ord", ord, ("2", "1", "inf", "fro", "max"))
    if ord != "2":
        require_square("cond", A)
    with Elemental(ctx) as el:
        (A,) = el.floats(A)
        el.finite("cond", A)
        found = el.number("ConditionDist", A.dtype, A, NORMS[ord])
    return found if found == found else math.inf
