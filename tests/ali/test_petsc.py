"""The libraries `petsc` and `slepc`, where they are installed (``make test-petsc``)."""

from __future__ import annotations

import importlib
import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sl

from ali import scaffold
from ali.testing import Case, LibraryTests
from mpi_workers.local import local_gang
from tests.support.build import needs_compiler, run
from tests.support.suite import scaled

ROOT = Path(__file__).parents[2]

SIZES = scaled((1, 2, 5), (1, 2, 3, 4, 5, 6))
LOOSE = 1e-5
STENCIL = str(Path(__file__).with_name("ranks_stencil.py"))


def poisson(n: int) -> Any:
    """The five-point matrix of order n^2."""
    line = sp.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(n, n))
    both = sp.kron(sp.eye_array(n), line) + sp.kron(line, sp.eye_array(n))
    return sp.csr_array(both)


R = np.random.default_rng(3)
P = poisson(5)
B = R.standard_normal((25, 2))
X = sl.spsolve(P.tocsc(), B)
T = sp.random_array((12, 5), density=0.6, rng=R, format="csr")
Y = R.standard_normal(12)
LEAST = np.linalg.lstsq(T.toarray(), Y)[0]
SMALL = sp.csr_array(np.diag([4.0, -3.0, 2.0, 1.0]))  # fewer rows than ranks
FEW = sp.csr_array((3, 3))
NAN = sp.csr_array(np.diag([1.0, np.nan, 1.0]))
SINGULAR = sp.csr_array(np.diag([1.0, 0.0, 1.0]))
TWICE = sp.csr_array(  # each element of P in two, from the last column on
    (np.concatenate([P.data[a:b][::-1] * f for a, b in pairwise(P.indptr) for f in (0.25, 0.75)]),
     np.concatenate([P.indices[a:b][::-1] for a, b in pairwise(P.indptr) for _ in "12"]),
     2 * P.indptr),
    shape=P.shape,
)  # fmt: skip
WIDE = sp.csr_array((np.ones(1), (np.array([2]), np.array([2**31 + 3]))), shape=(3, 2**31 + 8))
NOTHING = sp.csr_array((0, 0))
# Pivots of 1e-13: without pivoting a factorization loses the digits.
TINY = sp.block_diag(
    [sp.csr_array([[1e-13 * k, k], [k, 1.0]]) for k in (1.0, 2.0, 3.0, 4.0, 5.0)], format="csr"
)
RANK_1 = sp.csr_array(np.outer(np.arange(1.0, 9), np.ones(5)))
MASS = sp.diags_array(np.arange(1.0, 26), format="csr")
W = np.linalg.eigvalsh(P.toarray())
GENERAL = np.sort(np.linalg.eigvals(np.diag(1 / np.arange(1.0, 26)) @ P.toarray()).real)
ROUND = sp.block_diag([sp.csr_array([[0.0, k], [-k, 0.0]]) for k in (1.0, 2.0, 3.0)], format="csr")

needs_petsc = pytest.mark.skipif(
    importlib.util.find_spec("petsc4py") is None, reason="PETSc is not installed: make petsc"
)
needs_slepc = pytest.mark.skipif(
    importlib.util.find_spec("slepc4py") is None, reason="SLEPc is not installed: make petsc"
)


@needs_petsc
class TestPetsc(LibraryTests):
    library = "petsc"
    sizes = SIZES
    cases = (
        Case("solve", {"A": P, "B": B, "method": "cg", "preconditioner": "gamg"},
             [X, None, None, "rtol"], rtol=LOOSE),
        Case("solve", {"A": P, "B": B[:, 0]}, [X[:, 0], None, None, None], rtol=LOOSE),
        Case("solve", {"A": SMALL, "B": np.ones(4), "method": "minres", "preconditioner": "none"},
             [1 / SMALL.diagonal(), None, None, None], rtol=LOOSE),
        Case("solve", {"A": P, "B": B, "method": "preonly", "preconditioner": "redundant"},
             [X, 1, None, None], rtol=LOOSE),
        Case("solve", {"A": TINY, "B": B[:10, 0], "method": "preonly",
                       "preconditioner": "redundant"}, raises="has not converged: its"),
        Case("solve", {"A": P, "B": B, "max_iterations": 2**40}, raises="between 0 and 2147483647"),
        Case("solve", {"A": P, "B": B, "options": {"ksp_gmres_restart": 7}},
             [X, None, None, None], rtol=LOOSE),
        Case("solve", {"A": P, "B": B, "options": {"ksp_gmres_restrat": 7}},
             raises="PETSc has not used the option ksp_gmres_restrat"),
        Case("solve", {"A": P, "B": B, "method": "nothing"}, raises="nothing"),
        Case("solve", {"A": P, "B": B, "preconditioner": "nothing"}, raises="nothing"),
        Case("solve", {"A": P, "B": B, "max_iterations": 1, "preconditioner": "none"},
             raises="has not converged: max it, after 1 iterations"),
        Case("solve", {"A": SMALL, "B": np.ones(4), "method": "cg", "preconditioner": "none"},
             raises="indefinite mat"),
        Case("solve", {"A": NAN, "B": np.ones(3), "preconditioner": "none"},
             raises="LinAlgError: the matrix contains NaN"),
        Case("solve", {"A": TWICE, "B": B, "method": "cg", "preconditioner": "gamg"},
             [X, None, None, None], rtol=LOOSE),
        Case("solve", {"A": NOTHING, "B": np.zeros(0)}, [np.zeros(0), 0, 0.0, None]),
        Case("solve", {"A": P, "B": np.zeros((25, 0))}, [np.zeros((25, 0)), 0, 0.0, None]),
        Case("solve", {"A": P, "B": B, "options": {"ksp_gmres_restart": "many"}},
             raises="BadArgumentError"),
        Case("solve", {"A": P, "B": B, "options": {"": "3"}}, raises="has not used the option"),
        Case("solve", {"A": P, "B": B, "preconditioner": "hypre"},
             raises="requested PC type hypre"),
        Case("solve", {"A": P, "B": B, "tol": 2.0}, raises="between 0 and 1"),
        Case("lstsq", {"A": WIDE, "B": np.ones(3)}, raises="needs a PETSc with 64-bit indices"),
        Case("lstsq", {"A": sp.csr_array((6, 3)), "B": np.ones(6)}, raises="LinAlgError"),
        Case("solve", {"A": P, "B": np.full(25, np.nan)}, raises="B contains NaN"),
        Case("solve", {"A": SINGULAR, "B": np.ones(3), "preconditioner": "none"},
             raises="LinAlgError"),
        Case("solve", {"A": FEW, "B": np.ones(3), "preconditioner": "none"}, raises="LinAlgError"),
        Case("solve", {"A": T, "B": Y}, raises="ShapeError: solve: A is 12 x 5"),
        Case("solve", {"A": P, "B": Y}, raises="ShapeError"),
        Case("solve", {"A": P.astype("float32"), "B": B}, raises="scalars of float64"),
        Case("lstsq", {"A": T, "B": Y}, [LEAST, None, None], rtol=LOOSE),
        Case("solve_dense", {"A": P.toarray(), "B": B, "method": "cg"},
             [X, None, None, "rtol"], rtol=LOOSE),
        Case("solve_dense", {"A": np.diag([4.0, -3.0, 2.0, 1.0]), "B": np.ones(4)},
             [1 / SMALL.diagonal(), None, None, None], rtol=LOOSE),
        Case("solve_dense", {"A": np.ones((3, 2)), "B": np.ones(3)}, raises="ShapeError"),
        Case("solve_dense", {"A": np.full((3, 3), np.inf), "B": np.ones(3)}, raises="infinity"),
        Case("solve_operator", {"B": B, "library": "stencil", "routine": "times",
                                "path": STENCIL, "method": "cg"},
             [X, None, None, "rtol"], rtol=LOOSE),
        Case("solve_operator", {"B": B, "library": "stencil", "routine": "other", "path": STENCIL},
             raises="NoSuchRoutineError"),
        Case("solve_operator", {"B": B, "library": "stencil", "routine": "breaks",
                                "path": STENCIL}, raises="it breaks"),
        Case("prepare", {"A": P, "method": "cg"}),
        Case("solve_prepared", {"solver": np.zeros(1, np.int8), "B": B}, raises="no solver of"),
        Case("about"),
    )  # fmt: skip


@needs_slepc
class TestSlepc(LibraryTests):
    library = "slepc"
    sizes = SIZES
    cases = (
        Case("eigsh", {"A": P, "k": 3}, [W[-3:], None, None], rtol=1e-7),
        Case("eigsh", {"A": P, "k": 3, "which": "SA"}, [W[:3], None, None], rtol=1e-7),
        Case("eigsh", {"A": P, "k": 2, "sigma": 0.0}, [W[:2], None, None], rtol=1e-7),
        Case("eigsh", {"A": P, "k": 2, "M": MASS}, [GENERAL[-2:], None, None], rtol=1e-7),
        Case("eigsh", {"A": SMALL, "k": 2}, [np.array([-3.0, 4.0]), None, None], rtol=1e-7),
        Case("eigsh", {"A": TWICE, "k": 3}, [W[-3:], None, None], rtol=1e-7),
        Case("eigsh", {"A": NAN, "k": 1}, raises="contains NaN"),
        Case("eigsh", {"A": P, "k": 1, "which": "LI"}, raises="which"),
        Case("eigsh", {"A": FEW, "k": 1}, raises="0 of 1 have converged"),
        Case("eigsh", {"A": NOTHING, "k": 1}, raises="k=1 of a matrix of order 0"),
        Case("eigsh", {"A": P, "k": 1, "options": {"eps_typo": 3}},
             raises="has not used the option eps_typo"),
        Case("eigsh", {"A": TINY, "k": 2, "sigma": 0.0}, raises="without pivoting, which lost"),
        Case("eigsh", {"A": sp.csr_array(P + sp.eye_array(25, k=1)), "k": 3},
             raises="A is not Hermitian"),
        Case("eigsh", {"A": SINGULAR, "k": 1, "sigma": 0.0}, raises="sigma=0.0: another one may"),
        Case("eigsh", {"A": P, "k": 1, "sigma": np.nan}, raises="BadArgumentError: eigsh: sigma"),
        Case("eigsh", {"A": P, "k": 1, "tol": np.nan}, raises="tol=nan: it must be between"),
        Case("eigsh", {"A": P, "k": 1, "max_iterations": -1}, raises="max_iterations=-1"),
        Case("eigsh", {"A": P, "k": 1, "M": -MASS}, raises="eigsh: M is not positive"),
        Case("eigsh", {"A": P, "k": 26}, raises="k=26 of a matrix of order 25"),
        Case("eigsh", {"A": T, "k": 2}, raises="ShapeError"),
        Case("eigs", {"A": P, "k": 1, "which": "LR"}, [W[-1:] + 0j, None, None], rtol=1e-7),
        Case("svds", {"A": T, "k": 2},
             [np.linalg.svd(T.toarray(), compute_uv=False)[:2], None, None, None], rtol=1e-7),
        Case("svds", {"A": RANK_1, "k": 2}, raises="fewer singular values that are not 0"),
        Case("svds", {"A": RANK_1, "k": 2, "options": {"svd_type": "trlanczos"}},
             [np.array([np.linalg.norm(RANK_1.data), 0]), None, None, None], rtol=1e-7),
        Case("svds", {"A": T, "k": 6}, raises="k=6 of a 12 x 5 matrix"),
    )  # fmt: skip


@needs_petsc
@pytest.mark.parametrize("ranks", SIZES)
def test_a_prepared_solver_and_calls_that_fail(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:prepared", ranks) == []


@needs_petsc
@pytest.mark.parametrize("ranks", [1, 3])
def test_many_errors_inside_petsc_leave_the_gang_and_its_matrices(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:errors_inside", ranks, timeout=300) == []


@needs_petsc
@pytest.mark.parametrize("ranks", [1, 3])
def test_files_are_those_of_petsc(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:files", ranks) == []


@needs_petsc
@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_leave_no_memory(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:grown", ranks) < 8 << 20


@needs_slepc
@pytest.mark.parametrize("ranks", SIZES)
def test_pairs_are_those_of_the_matrix(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:pairs", ranks) == []


@needs_petsc
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_examples_in_the_documentation_run(ranks: int) -> None:
    assert local_gang.run("tests.ali.ranks_petsc:documented", ranks) < 5e-3


@needs_petsc
@needs_compiler
@pytest.mark.skipif(importlib.util.find_spec("petsc") is None, reason="it is of a site, not of pip")
def test_the_example_in_c_runs(tmp_path: Path) -> None:
    (text,) = re.findall(
        r"```c\n(/\* ksp\.c.*?)```", (ROOT / "docs/own-library.md").read_text(), re.DOTALL
    )
    petsc = Path(importlib.import_module("petsc").get_petsc_dir())
    (tmp_path / "ksp.c").write_text(text)
    run(
        scaffold.mpi_compiler("mpicc"), "-Wall", "-Werror", "-shared", "-fPIC", "ksp.c",
        f"-I{scaffold.include_directory()}", f"-I{petsc}/include", f"-L{petsc}/lib",
        f"-Wl,-rpath,{petsc}/lib", "-o", "libksp.so", "-lpetsc", cwd=tmp_path,
    )  # fmt: skip
    for ranks in (1, 3):
        path = str(tmp_path / "libksp.so")
        assert local_gang.run("tests.ali.ranks_petsc:in_c", ranks, path) == []


def test_a_petsc_that_is_not_there_is_explained() -> None:
    if importlib.util.find_spec("petsc4py") is not None:
        pytest.skip("PETSc is installed")
    told = local_gang.run("tests.ali.ranks_petsc:missing", 2)
    assert all("LibraryNotFoundError" in words and "PETSC_DIR" in words for words in told)
