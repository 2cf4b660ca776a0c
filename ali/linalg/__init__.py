"""Linear algebra on a gang, with NumPy, SciPy and MPI only.

Every routine takes matrices in any layout; its docstring states the layout of the results. Factors
with many rows are in VC_STAR (row i is on rank i mod ranks).

Create: full, zeros, eye, diag, random_normal, random_uniform. Combine: add, elementwise,
elementwise_scalar, scale, apply, astype, where. Reduce: sum, mean, var, std, min, max,
column_stats, norm. Select: slice, take_rows, take_cols, select_rows, select_cols, concatenate,
triu, tril, diagonal, trace. Multiply: matmul, gram, transpose. Solve: cholesky, solve,
solve_triangular, lstsq, least_squares, ridge, conjugate_gradient, inv, pinv, det, slogdet, condest.
Decompose: qr, svd, truncated_svd, svdvals, matrix_rank, eigh, polar. Functions: expm. Learn: pca,
kmeans, random_features, random_features_ridge, random_features_predict.

Docstrings end with the error and the peak memory. "Error" is in units of the machine epsilon (eps)
of the dtype, "tol" is the argument; norms are Frobenius norms, those of ``Q^H Q - I`` 2-norms. It
holds for matrices of order 200 and of 2000 x 20 standard normal numbers; sums of n terms may add a
factor of the root of n / 200. "Peak memory" is the most that any rank holds during the call, in
units of its share of arguments and results, which are included; panels of 32 MiB are not. It was
measured for float64 of order 2000 and 100000 x 40 on 2 ranks. tests/ali/test_stated.py
measures both, and fails if a docstring states less.
"""

from ali.linalg.arithmetic import add, apply, astype, elementwise, elementwise_scalar, scale, where
from ali.linalg.creation import diag, eye, full, random_normal, random_uniform, zeros
from ali.linalg.eigen import eigh
from ali.linalg.indexing import (
    concatenate,
    diagonal,
    select_cols,
    select_rows,
    slice,
    take_cols,
    take_rows,
    trace,
    tril,
    triu,
)
from ali.linalg.iterative import conjugate_gradient
from ali.linalg.learning import (
    kmeans,
    pca,
    random_features,
    random_features_predict,
    random_features_ridge,
)
from ali.linalg.native_libraries import close as close
from ali.linalg.orthogonal import least_squares, lstsq, qr, ridge
from ali.linalg.products import gram, matmul, transpose
from ali.linalg.reductions import column_stats, max, mean, min, norm, std, sum, var
from ali.linalg.singular import matrix_rank, pinv, polar, svd, svdvals, truncated_svd
from ali.linalg.systems import (
    cholesky,
    condest,
    det,
    expm,
    inv,
    slogdet,
    solve,
    solve_triangular,
)

PURE = True  # no routine has other effects than its results and the matrices in `writes`

__all__ = [
    "add", "apply", "astype", "cholesky", "column_stats", "concatenate", "condest",
    "conjugate_gradient", "det", "diag", "diagonal", "eigh", "elementwise",
    "elementwise_scalar", "expm", "eye", "full", "gram", "inv", "kmeans", "least_squares",
    "lstsq", "matmul", "matrix_rank", "max", "mean", "min", "norm", "pca", "pinv", "polar",
    "qr", "random_features", "random_features_predict", "random_features_ridge",
    "random_normal", "random_uniform", "ridge", "scale", "select_cols", "select_rows", "slice",
    "slogdet", "solve", "solve_triangular", "std", "sum", "svd", "svdvals", "take_cols",
    "take_rows", "trace", "transpose", "tril", "triu", "truncated_svd", "var", "where", "zeros",
]  # fmt: skip
