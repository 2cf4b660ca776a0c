"""Elemental is a library like any other: the conformance suite, where there is a libEl."""

from __future__ import annotations

import numpy as np
import pytest

from ali.testing import Case, LibraryTests
from tests.ali.test_elemental import missing

RNG = np.random.default_rng(9)
A = RNG.standard_normal((7, 4))
B = RNG.standard_normal((7, 2))
C = RNG.standard_normal((5, 5)) + 1j * RNG.standard_normal((5, 5))
H = C @ C.conj().T + np.eye(5)
ROW = np.array([[3.0, 4.0]])


@pytest.fixture(autouse=True)
def _libel() -> None:
    if missing():
        pytest.skip(missing())


LINEAR = (
    Case("matmul", {"A": A, "B": B, "transpose_a": "T"}, [A.T @ B]),
    Case("matmul", {"A": A, "B": A}, raises="ShapeError: matmul: A is 7 x 4"),
    Case("cholesky", {"A": H}, [np.linalg.cholesky(H)]),
    Case("cholesky", {"A": -H}, raises="not numerically HPD"),
    Case("svdvals", {"A": ROW}, [np.array([5.0])]),
    Case("svdvals", {"A": A}, [np.linalg.svd(A, compute_uv=False)]),
    Case("eigh", {"A": H}, [np.linalg.eigvalsh(H), None]),
    Case("solve", {"A": H, "B": C}, [np.linalg.solve(H, C)]),
    Case("lstsq", {"A": A, "B": B}, [np.linalg.lstsq(A, B)[0]]),
    Case("pinv", {"A": A}, [np.linalg.pinv(A)]),
    Case("norm", {"A": ROW}, [5.0]),
    Case("lu", {"A": A}),
    Case("qr", {"A": A}),
    Case("qr_pivoted", {"A": A}),
    Case("interpolative", {"A": A, "rank": 2}),
    Case("svd", {"A": A}),
    Case("singular_values", {"A": ROW}, [np.array([5.0])]),
    Case("polar", {"A": np.diag([2.0, 3.0])}, [np.eye(2), np.diag([2.0, 3.0])]),
    Case("ridge", {"A": np.eye(2), "B": ROW.T, "lam": 1.0}, [ROW.T / 2]),
    Case("cond", {"A": np.diag([2.0, 3.0])}, [1.5]),
)
MODELS = (
    Case("lasso", {"A": np.eye(2), "b": ROW.T, "lam": 1.0}, [ROW.T - 1], rtol=1e-4),
    Case("elastic_net", {"A": np.eye(2), "b": ROW.T, "lam1": 1.0, "lam2": 0.5},
         [(ROW.T - 1) / 2], rtol=1e-4),
    Case("basis_pursuit", {"A": ROW, "b": np.array([[8.0]])}, [np.array([[0.0], [2.0]])],
         rtol=1e-4),
    Case("least_absolute", {"A": np.ones((3, 1)), "b": B[:3, :1]}, None),
    Case("nnls", {"A": np.eye(2), "B": np.array([[3.0], [-1.0]])}, [np.array([[3.0], [0.0]])],
         rtol=1e-4),
    Case("svm", {"A": np.array([[2.0], [-2.0]]), "d": np.array([[1.0], [-1.0]]), "lam": 5.0},
         [np.array([[0.5]]), None], rtol=1e-4),
    Case("nmf", {"A": np.array([[1.0, 2.0], [2.0, 4.0]]), "rank": 1, "iterations": 1}),
    Case("rpca", {"A": np.ones((3, 3)), "tol": 1e-2}),
)  # fmt: skip


class TestElementalOnOneRank(LibraryTests):
    library = "elemental"
    sizes = (1,)
    interruptible = False
    cases = (*LINEAR, *MODELS)
    test_ranks_without_elements_take_part = None


class TestElementalOnMore(LibraryTests):
    """Without the models, which would wait for each other for minutes in 14 layouts."""

    library = "elemental"
    sizes = (2,)
    interruptible = False
    cases = LINEAR
    test_its_signatures_are_whole = None  # it wants a case for every routine
