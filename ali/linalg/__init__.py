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

from ali.interface import collect_routines
from ali.linalg.native_libraries import close as close

PURE = True  # no routine has other effects than its results and the matrices in `writes`

__all__ = collect_routines(__name__)
