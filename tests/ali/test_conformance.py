"""Every shipped library does what every library must do (`ali.testing`)."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse

from ali.testing import Case, LibraryTests
from tests.support import launches
from tests.support.suite import scaled

R = np.random.default_rng(7)
A = R.standard_normal((9, 4))
B = R.standard_normal((4, 5))
Q = R.standard_normal((4, 4)) + 4 * np.eye(4)  # well conditioned
H = Q @ Q.T
Y = R.standard_normal((9, 2))
S = np.linalg.svd(A, compute_uv=False)
EIGEN = np.linalg.eigvalsh(H)
QR_R = np.linalg.qr(A)[1]
QR_R = QR_R * np.sign(np.diagonal(QR_R))[:, None]
RIDGE = np.linalg.solve(A.T @ A + 0.5 * np.eye(4), A.T @ Y)
LOOSE = 1e-6

# The same name and order of results in every library.
SHARED = (
    Case("matmul", {"A": A, "B": B}, [A @ B]),
    Case("matmul", {"A": A, "B": A, "transpose_a": "T"}, [A.T @ A]),
    Case("matmul", {"A": A, "B": A}, raises="ShapeError: matmul: A is 9 x 4"),
    Case("svd", {"A": A}, [S, None, None]),
    Case("qr", {"A": A}, [None, QR_R]),
    Case("eigh", {"A": H}, [EIGEN, None]),
    Case("cholesky", {"A": H}, [np.linalg.cholesky(H)]),
    Case("cholesky", {"A": -H}, raises="LinAlgError"),
    Case("solve", {"A": Q, "B": B}, [np.linalg.solve(Q, B)]),
    Case("solve", {"A": Q, "B": A}, raises="ShapeError"),
    Case("solve", {"A": Q, "B": B[:, 0]}, [np.linalg.solve(Q, B[:, 0])]),
    Case("lstsq", {"A": A, "B": Y}, [np.linalg.lstsq(A, Y)[0]]),
    Case("norm", {"A": A}, [np.linalg.norm(A)]),
)


class TestEcho(LibraryTests):
    library = "echo"
    sizes = scaled((6,), (1, 2, 3, 6))
    cases = (
        Case("nothing", {}, []),
        Case("echo", {"A": A}, [A, *[None] * 9]),
        Case("echo", {"A": A, "texts": ["ä"]}, [A, *[None] * 8, ["ä"]]),
        Case("who"),
        Case("say", {"text": "hello"}, []),
        Case("sleep", {"seconds": 0.01}, []),
        Case("fail", {"message": "no luck"}, raises="no luck"),
    )


K = scipy.sparse.random_array((7, 5), density=0.4, rng=np.random.default_rng(1), format="csr")
E = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(7, 7), format="csr")

TURNED = scipy.sparse.csr_array(E[::-1])  # with zeros on its diagonal


class TestSparse(LibraryTests):
    library = "sparse"
    sizes = scaled((3,), (1, 2, 3, 6))
    cases = (
        Case("matmul", {"A": K, "X": B[:, :1].repeat(2, 1)[[0, 1, 2, 3, 3]]},
             [K @ B[:, :1].repeat(2, 1)[[0, 1, 2, 3, 3]]]),
        Case("matmul", {"A": K, "X": A[:4]}, raises="ShapeError: A @ X: X is 4 x 4"),
        Case("transposed_matmul", {"A": K, "X": A[:7]}, [K.T @ A[:7]]),
        Case("multiply", {"A": E, "B": K}, [E @ K]),
        Case("multiply", {"A": K, "B": K}, raises="ShapeError"),
        Case("elementwise", {"A": K, "B": K, "op": "subtract"}, [0 * K]),
        Case("scale", {"A": K, "value": 2j}, [2j * K]),
        Case("astype", {"A": K, "dtype": "complex64"}, [K.astype("complex64")], rtol=1e-6),
        Case("take_rows", {"A": K, "rows": np.array([6, 0, -1, 0])}, [K[[6, 0, -1, 0]]]),
        Case("take_rows", {"A": K, "rows": np.array([7])}, raises="BadIndexError: row [7]"),
        Case("transpose", {"A": K}, [K.T]),
        Case("diagonal", {"A": K, "k": -1}, [K.diagonal(-1)]),
        Case("sum", {"A": K, "axis": 0}, [K.sum(axis=0)]),
        Case("norm", {"A": K}, [np.linalg.norm(K.toarray())]),
        Case("truncated_svd", {"A": K, "rank": 2}, raises="ARPACK's basis"),
        Case("conjugate_gradient", {"A": E, "B": A[:7, 0]},
             [np.linalg.solve(E.toarray(), A[:7, 0]), None, None], rtol=LOOSE),
        Case("conjugate_gradient", {"A": -E, "B": A[:7]}, raises="not positive definite"),
        Case("solve", {"A": TURNED, "B": A[:7]}, [np.linalg.solve(TURNED.toarray(), A[:7])]),
        Case("solve", {"A": TURNED, "B": A[:7, 0]}, [np.linalg.solve(TURNED.toarray(), A[:7, 0])]),
        Case("solve", {"A": E, "B": A[:7, :0]}, [np.empty((7, 0))]),
        Case("solve", {"A": scipy.sparse.csr_array((0, 0)), "B": A[:0]}, [A[:0]]),
        Case("solve", {"A": 0 * E, "B": A[:7]}, raises="LinAlgError: solve: A is singular"),
        Case("solve", {"A": E * np.nan, "B": A[:7]}, raises="NaN or infinity"),
        Case("solve", {"A": E, "B": A[:5]}, raises="solve: B is 5 x 4; it must have 7 rows"),
        Case("solve", {"A": K, "B": A[:7]}, raises="A is 7 x 5; it must be square"),
    )  # fmt: skip


class TestLinalg(LibraryTests):
    library = "linalg"
    sizes = scaled((3,), (2, 3, 6))
    cases = (
        *SHARED,
        Case("least_squares", {"A": A, "B": Y}, [*np.linalg.lstsq(A, Y)]),
        Case("add", {"A": A, "B": A, "beta": -2.0}, [-A]),
        Case("apply", {"op": "abs", "A": A}, [np.abs(A)]),
        Case("astype", {"A": A, "dtype": "float32"}, [A.astype("float32")]),
        Case("elementwise", {"op": "multiply", "A": A, "B": A[:1]}, [A * A[:1]]),
        Case("elementwise", {"op": "add", "A": A, "B": B}, raises="ShapeError"),
        Case("elementwise_scalar", {"op": "divide", "A": A, "value": 2.0}, [A / 2]),
        Case("scale", {"A": A, "alpha": 3.0}, [3 * A]),
        Case("where", {"condition": (A > 0).astype("int32"), "A": A, "B": -A}, [np.abs(A)]),
        Case("kmeans", {"A": A, "k": 3}),
        Case("diag", {"A": A[:, :1]}, [np.diag(A[:, 0])]),
        Case("eye", {"m": 3, "n": 5}, [np.eye(3, 5)]),
        Case("full", {"m": 2, "n": 9, "value": 1.5}, [np.full((2, 9), 1.5)]),
        Case("random_normal", {"m": 7, "n": 2, "seed": 3}),
        Case("random_uniform", {"m": 7, "n": 2, "seed": 3}),
        Case("zeros", {"m": 2, "n": 2}, [np.zeros((2, 2))]),
        Case("random_features", {"X": A, "features": 5, "sigma": 1.0}),
        Case("random_features_ridge", {"X": A, "Y": Y, "features": 5, "sigma": 1.0, "lam": 0.1}),
        Case("random_features_predict", {"X": A, "W": R.standard_normal((5, 2)), "sigma": 1.0}),
        Case("concatenate", {"A": A, "B": -A}, [np.concatenate([A, -A])]),
        Case("diagonal", {"A": A}, [np.diagonal(A)]),
        Case("triu", {"A": A, "k": -1}, [np.triu(A, -1)]),
        Case("tril", {"A": A}, [np.tril(A)]),
        Case("select_cols", {"A": A, "mask": np.array([[1, 0, 1, 1]])}, [A[:, [0, 2, 3]]]),
        Case("select_rows", {"A": Q, "mask": np.array([[1], [0], [1], [1]])}, [Q[[0, 2, 3]]]),
        Case("slice", {"A": A, "row_start": 1, "row_step": 3, "col_stop": 2}, [A[1::3, :2]]),
        Case("take_cols", {"A": A, "cols": [3, 0, 0]}, [A[:, [3, 0, 0]]]),
        Case("take_rows", {"A": A, "rows": [-1, 4]}, [A[[-1, 4]]]),
        Case("trace", {"A": Q}, [np.trace(Q)]),
        Case("conjugate_gradient", {"A": H, "B": B}, [np.linalg.solve(H, B), None, None],
             rtol=LOOSE),
        Case("ridge", {"A": A, "B": Y, "lam": 0.5}, [RIDGE]),
        Case("gram", {"A": A}, [A.T @ A]),
        Case("transpose", {"A": A}, [A.T]),
        Case("column_stats", {"A": A}, [
            A.mean(0, keepdims=True), A.std(0, keepdims=True), A.min(0, keepdims=True),
            A.max(0, keepdims=True),
        ]),
        Case("max", {"A": A, "axis": 0}, [A.max(0, keepdims=True)]),
        Case("mean", {"A": A, "axis": 1}, [A.mean(1, keepdims=True)]),
        Case("min", {"A": A}, [[[A.min()]]]),
        Case("std", {"A": A, "axis": 0, "ddof": 1}, [A.std(0, ddof=1, keepdims=True)]),
        Case("sum", {"A": A, "axis": 0}, [A.sum(0, keepdims=True)]),
        Case("var", {"A": A, "axis": 0}, [A.var(0, keepdims=True)]),
        Case("matrix_rank", {"A": A}, [4]),
        Case("pinv", {"A": A}, [np.linalg.pinv(A)]),
        Case("svdvals", {"A": A}, [S]),
        Case("truncated_svd", {"A": A, "rank": 2}, [S[:2], None, None]),
        Case("truncated_svd", {"A": A, "rank": 5}, raises="rank=5; it must be 1 to 4"),
        Case("pca", {"A": A, "k": 2}),
        Case("condest", {"A": Q}, [np.linalg.cond(Q, 1)], rtol=LOOSE),
        Case("det", {"A": Q}, [np.linalg.det(Q)]),
        Case("expm", {"A": Q}, [scipy.linalg.expm(Q)]),
        Case("inv", {"A": Q}, [np.linalg.inv(Q)]),
        Case("polar", {"A": A}, [*scipy.linalg.polar(A)]),
        Case("eigh", {"A": H, "method": "lapack"}, raises="BadArgumentError: eigh: method must"),
        Case("slogdet", {"A": Q}, [*np.linalg.slogdet(Q)]),
        Case("solve_triangular", {"A": np.tril(Q), "B": B}, [np.linalg.solve(np.tril(Q), B)]),
    )  # fmt: skip


class TestScalapack(LibraryTests):
    library = "scalapack"
    sizes = scaled((2,), (2, 6))
    interruptible = False
    cases = (
        *SHARED,
        Case("lq", {"A": A}),
        Case("svdvals", {"A": A}, [S]),
        Case("lu", {"A": A}),
        Case("condest", {"A": Q}, [np.linalg.cond(Q, 1)], rtol=0.9),
        Case("about"),
    )

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _scalapack(cls) -> None:
        about = launches.run("tests.ali.ranks_native:described", 1, "scalapack")
        if about.get("kind") == "LibraryNotFoundError":
            pytest.skip(about["message"])
