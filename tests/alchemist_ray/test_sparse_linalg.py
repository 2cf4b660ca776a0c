"""`alchemist_ray.sparse.linalg` gives what `scipy.sparse.linalg` gives."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sl

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    CallTimeoutError,
    DtypeError,
    LibraryNotFoundError,
    LinAlgError,
    RoutineError,
    ShapeError,
)
from alchemist_ray.sparse import linalg
from tests.ali.test_petsc import needs_petsc, needs_slepc, poisson

P = poisson(8)
B = np.random.default_rng(0).standard_normal(64)
X = sl.spsolve(P.tocsc(), B)
TALL = sp.random_array((40, 25), density=0.3, rng=np.random.default_rng(1), format="csr")


def test_cg_and_svds_need_no_petsc(session: AlchemistSession) -> None:
    A = session.send_matrix(P)
    x, info = linalg.cg(A, B, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(x), X, atol=1e-6)
    assert info == 0
    u, s, vh = linalg.svds(session.send_matrix(TALL), 3)
    np.testing.assert_allclose(s, np.linalg.svd(TALL.toarray(), compute_uv=False)[:3])
    near = np.asarray(u) * s @ np.asarray(vh)
    v, t, wh = sl.svds(TALL, 3)
    np.testing.assert_allclose(near, v * t @ wh, atol=1e-6)
    assert linalg.norm(P) == pytest.approx(sl.norm(P))


@pytest.mark.parametrize("name", ["cg", *(pytest.param(one, marks=needs_petsc) for one in (
    "gmres", "bicgstab"))])  # fmt: skip
def test_residuals_are_as_small_as_scipy_promises(session: AlchemistSession, name: str) -> None:
    """Of rows of several sizes: a preconditioner makes their residuals equally large."""
    D = sp.diags_array(np.logspace(0, 4, 64))
    A, b = (D @ P @ D).tocsr(), np.linspace(1, 2, 64)
    for rtol in (1e-3, 1e-5, 1e-8):
        x, info = getattr(linalg, name)(A, b, rtol=rtol)
        assert np.linalg.norm(b - A @ np.asarray(x)) <= rtol * np.linalg.norm(b) * (1 + 1e-9)
        assert info == 0


def test_what_it_does_not_take(session: AlchemistSession) -> None:
    with pytest.raises(BadArgumentError, match="x0="):
        linalg.cg(P, B, x0=B)
    with pytest.raises(BadArgumentError, match="'gamg'"):
        linalg.gmres(P, B, M=sp.eye_array(64))
    with pytest.raises(BadArgumentError, match="ord="):
        linalg.norm(P, 1)
    if importlib.util.find_spec("petsc4py") is None:
        with pytest.raises(LibraryNotFoundError, match="PETSC_DIR"):
            linalg.gmres(P, B)


NEED_PETSC = ("gmres", "bicgstab", "minres", "lsqr")
SOLVERS = ["cg", "spsolve", *(pytest.param(name, marks=needs_petsc) for name in NEED_PETSC)]


@pytest.mark.parametrize("name", SOLVERS)
def test_right_hand_sides_are_those_of_scipy(session: AlchemistSession, name: str) -> None:
    def solved(A: Any, b: Any) -> Any:
        if name == "spsolve":
            return linalg.spsolve(A, b)
        limit = {"atol" if name == "lsqr" else "rtol": 1e-5}
        return getattr(linalg, name)(A, b, **limit)[0]

    column, whole = B[:, np.newaxis], np.arange(64)
    for b in (B, column, session.send_matrix(column), list(B)):
        found = solved(P, b)
        assert (found.shape, found.dtype) == ((64,), np.float64)
        np.testing.assert_allclose(np.asarray(found), X, atol=1e-3)
    for A, b in ((P.astype(int), whole), (P.astype("f4"), whole), (P, whole.astype("u1"))):
        found = solved(A, b)
        assert found.dtype == np.float64
        np.testing.assert_allclose(np.asarray(found), sl.spsolve(P, whole), rtol=1e-2)
    assert solved(P.astype("f4"), B.astype("f4")).dtype == np.float32
    for b in (sp.csr_array(column), session.send_matrix(sp.csr_array(column))):
        with pytest.raises(BadArgumentError, match=r"right-hand side is a sparse .*\.toarray\(\)"):
            solved(P, b)
    with pytest.raises(ShapeError, match=r": B is \(5,\); it must have 64 rows"):
        solved(P, B[:5])
    for A in (P.toarray(), session.send_matrix(P.toarray()), sl.aslinearoperator(P)):
        with pytest.raises(BadArgumentError, match=r"A is a .*scipy\.sparse\.csr_array\(x\)"):
            solved(A, B)


def test_spsolve_pivots(session: AlchemistSession) -> None:
    """It gives SciPy's solution where a factorization without pivoting fails, or loses digits."""
    edges = np.eye(6, 2) + np.outer(np.ones(6), [1, 2])
    saddle = np.block([[np.diag(np.arange(1.0, 7)), edges], [edges.T, np.zeros((2, 2))]])
    for dense in ([[0.0, 1], [1, 0]], [[1e-14, 1.0], [1, 1]], saddle, [[0, 1j], [1, 2]]):
        a = sp.csr_array(np.array(dense))
        b = np.arange(1.0, len(dense) + 1)
        found = linalg.spsolve(a, b)
        np.testing.assert_allclose(np.asarray(found), sl.spsolve(a.tocsc(), b), rtol=1e-10)
    with pytest.raises(LinAlgError, match="solve: A is singular"):
        linalg.spsolve(sp.csr_array(np.diag([1.0, 0.0])), np.ones(2))


def test_complex_numbers_need_no_petsc(session: AlchemistSession) -> None:
    turned = sp.diags_array([-0.3j, 0.3j], offsets=[-1, 1], shape=(64, 64))
    A = sp.csr_array(P + turned)
    x, _ = linalg.cg(A, B, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(x), sl.spsolve(A, B + 0j), atol=1e-6)
    _, s, _ = linalg.svds(A, 2)
    np.testing.assert_allclose(s, np.linalg.svd(A.toarray(), compute_uv=False)[:2])
    if importlib.util.find_spec("petsc4py") is not None:
        with pytest.raises(DtypeError, match="--with-scalar-type=complex"):
            linalg.gmres(A, B)


@needs_petsc
@pytest.mark.parametrize("name", ["cg", "gmres", "bicgstab", "minres"])
def test_solvers(session: AlchemistSession, name: str) -> None:
    A: Any = session.send_matrix(P) if name != "gmres" else P
    solve = getattr(linalg, name)
    found = solve(A, B, rtol=1e-10)[0]
    np.testing.assert_allclose(np.asarray(found), X, atol=1e-6)
    if name == "minres":  # for which a matrix may be indefinite
        Q = sp.csr_array(P - 5 * sp.eye_array(64))
        found, _ = linalg.minres(session.send_matrix(Q), B, rtol=1e-10)
        np.testing.assert_allclose(np.asarray(found), sl.spsolve(Q.tocsc(), B), atol=1e-6)
    if name == "cg":
        found, _ = linalg.cg(A, session.send_matrix(B), rtol=1e-10, M="gamg")
        np.testing.assert_allclose(np.asarray(found), X, atol=1e-6)
        with pytest.raises(LinAlgError, match="max it"):
            linalg.cg(A, B, maxiter=2, M="jacobi")


@needs_petsc
def test_lsqr(session: AlchemistSession) -> None:
    b = np.arange(40.0)
    x, istop, _, norm = linalg.lsqr(TALL, b, atol=1e-10)
    exact = np.linalg.lstsq(TALL.toarray(), b)
    np.testing.assert_allclose(np.asarray(x), exact[0], atol=1e-5)
    assert norm == pytest.approx(np.sqrt(exact[1][0]))
    assert istop == 2
    with pytest.raises(DtypeError, match="operand is masked"):
        linalg.lsqr(TALL, np.ma.masked_greater(b, 3))


@needs_petsc
def test_a_solver_stays_until_its_handle_is_gone(session: AlchemistSession) -> None:
    petsc = session.load_library("petsc")
    A = session.send_matrix(P)
    solver = petsc.prepare(A, "cg", "gamg", options={"pc_gamg_threshold": 0.02})
    for _ in range(2):
        found = petsc.solve_prepared(solver, session.send_matrix(B))
        np.testing.assert_allclose(np.asarray(found.X), X, atol=1e-5)
    before = len(session.list_matrices())
    del solver
    session.xp.ones(1)
    assert len(session.list_matrices()) == before - 1


@needs_slepc
def test_eigenvalues(session: AlchemistSession) -> None:
    D = P + sp.diags_array(np.linspace(0, 1, 64))  # without multiple eigenvalues
    w, v = linalg.eigsh(D, 4, which="SA")
    exact = np.linalg.eigvalsh(D.toarray())
    np.testing.assert_allclose(w, exact[:4], rtol=1e-7)
    np.testing.assert_allclose(D @ np.asarray(v), np.asarray(v) * w, atol=1e-6)
    w, _ = linalg.eigsh(D, 3, sigma=0.0)
    np.testing.assert_allclose(w, exact[:3], rtol=1e-7)
    w, v = linalg.eigs(session.send_matrix(D), 1, which="LR")
    assert w[0] == pytest.approx(exact[-1])
    assert np.asarray(v).dtype == np.complex128


@needs_petsc
@pytest.mark.parametrize("preconditioner", ["jacobi", "gamg"])
def test_the_end_of_a_call_ends_an_iteration_and_costs_no_matrix(
    session: AlchemistSession, preconditioner: str
) -> None:
    petsc, A = session.load_library("petsc"), session.send_matrix(poisson(100))
    b = session.send_matrix(np.ones(10_000), layout="VC_STAR:BLOCK")
    endless = (A, b, "richardson", preconditioner, 1e-30, 10**9)
    for _ in range(2):
        with pytest.raises(CallTimeoutError):
            petsc.solve.options(timeout_s=0.5)(*endless)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            petsc.solve(*endless)
        found = petsc.solve(A, b, "cg", preconditioner)  # in other processes
        assert found.residual < 1e-5


@needs_petsc
def test_an_error_inside_petsc_has_its_stack(session: AlchemistSession) -> None:
    petsc, A = session.load_library("petsc"), session.send_matrix(P)
    with pytest.raises(RoutineError, match=r"MatGetFactor\(\) at"):
        petsc.solve(A, session.send_matrix(B), "preonly", "lu")  # of one rank only
    np.testing.assert_allclose(np.asarray(petsc.solve(A, session.send_matrix(B)).X), X, atol=1e-5)


@needs_petsc
def test_sessions_of_one_fork_server_have_petsc(cluster: str) -> None:
    for workers in (2, 3, 2):
        with AlchemistSession(workers) as als:
            found = als.load_library("petsc").solve(als.send_matrix(P), als.send_matrix(B))
            np.testing.assert_allclose(np.asarray(found.X), X, atol=1e-5)
