"""NumPy's own functions on handles; a page of NumPy code runs on them as it is."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.transfer import fetching
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.protocol.libraries import SPECIAL_BINARY, SPECIAL_UNARY
from tests.alchemist_ray.arrays.cases import ASKING, BINARY_UFUNCS, LINEAR, PAIRS, UFUNCS
from tests.alchemist_ray.arrays.checks import both, dtypes, few, layouts, same, values
from tests.support.suite import part


def pca(X: Any, k: int) -> tuple[Any, Any, Any]:
    """Principal components, their variances and the scores, by hand."""
    centred = X - np.mean(X, axis=0)
    covariance = centred.T @ centred / (X.shape[0] - 1)
    variances, vectors = np.linalg.eigh(covariance)
    order = np.argsort(variances)[::-1][:k]
    components = vectors[:, order]
    scores = centred @ components
    share = variances[order] / np.trace(covariance)
    assert np.allclose(scores.mean(axis=0), 0)
    return abs(components), share, np.abs(scores) / np.std(scores, axis=0)


def test_pca_by_hand_runs_on_handles_unchanged(session: AlchemistSession) -> None:
    x = np.random.default_rng(0).standard_normal((400, 12)) @ np.diag(np.arange(1.0, 13))
    theirs = pca(x, 3)
    ours = pca(session.send_matrix(x), 3)
    assert all(isinstance(r, Handle) for r in ours)
    for mine, numpys in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine), numpys, rtol=1e-9)


SPECIAL = [getattr(special, name) for name in sorted(SPECIAL_UNARY)]


@given(ufunc=st.sampled_from([*sorted(UFUNCS, key=str), *SPECIAL]), dtype=dtypes, layout=layouts)
@few
def test_ufuncs(session: AlchemistSession, ufunc: Any, dtype: str, layout: str) -> None:
    a = values((6, 5), dtype)
    both(ufunc, (session.send_matrix(a, layout=layout),), (a,))


def test_ufuncs_of_two(session: AlchemistSession) -> None:
    a, b = values((6, 5), "float64"), values((1, 5), "float64", 1)
    A, B = session.send_matrix(a), session.send_matrix(b)
    of_two = [getattr(np, name) for name in BINARY_UFUNCS]
    for ufunc in (*of_two, *(getattr(special, name) for name in SPECIAL_BINARY)):
        for found in (ufunc(A, B), ufunc(A, b)):
            same(found, ufunc(a, b))
    for found, expected in zip(np.divmod(A, 2), np.divmod(a, 2), strict=True):
        same(found, expected)
    same(np.vecdot(A, A), np.vecdot(a, a))
    same(np.positive(A), a)


@pytest.mark.parametrize("turn", range(len(DTYPES)))
def test_functions(session: AlchemistSession, turn: int) -> None:
    a, b = values((6, 6), DTYPES[turn]), values((3, 6), "float64", 1)
    A, B = session.send_matrix(a, layout="MC_MR"), session.send_matrix(b)
    for work in part(PAIRS, turn, 4):
        both(work, (A, B), (a, b))
    assert np.shape(A) == (6, 6)
    assert (np.ndim(A), np.size(A), np.size(A, 0)) == (2, 36, 6)
    assert np.allclose(A, A + 1e-12)
    assert not np.allclose(A, A + 1)
    assert np.array_equal(A, A)
    assert not np.array_equal(A, B)
    assert np.result_type(A, B) == np.result_type(a, b)
    assert np.iscomplexobj(A) == np.iscomplexobj(a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_that_tell_about_arrays(session: AlchemistSession, dtype: str) -> None:
    a = values((6, 5), dtype)
    A = session.send_matrix(a)
    for work in ASKING:
        assert work(A) == work(a)


def test_linear_functions(session: AlchemistSession, subtests: pytest.Subtests) -> None:
    a = np.random.default_rng(3).standard_normal((5, 5))
    g = a.T @ a + np.eye(5)
    for row, work in enumerate(LINEAR):
        for dtype in part(("float64", "complex128"), row, 2):
            with subtests.test(row=row, dtype=dtype):
                found = np.asarray(work(session.send_matrix(g.astype(dtype))))
                expected = np.asarray(work(g.astype(dtype)))
                assert found.shape == expected.shape
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_linear_algebra(session: AlchemistSession, dtype: str) -> None:
    random = np.random.default_rng(3)
    a = random.standard_normal((20, 6)).astype(dtype)
    if dtype == "complex128":
        a = a + 1j * random.standard_normal((20, 6))
    g, b = a.conj().T @ a + np.eye(6), random.standard_normal((6, 2))
    A, G, B = session.send_matrix(a), session.send_matrix(g), session.send_matrix(b)

    def close(found: Any, expected: Any) -> None:
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-9, atol=1e-9)

    Q, R = np.linalg.qr(A)
    close(Q @ R, a)
    close(np.linalg.qr(A, mode="r"), np.asarray(R))
    U, s, Vh = np.linalg.svd(A, full_matrices=False)
    assert s.shape == (6,)
    close(U * s @ Vh, a)
    close(np.linalg.svdvals(A), np.linalg.svdvals(a))
    found = np.linalg.eigh(G)
    close(found.eigenvalues, np.linalg.eigvalsh(g))
    close(G @ found.eigenvectors, np.asarray(found.eigenvectors * found.eigenvalues))
    for right in (B, b, b[:, 0]):
        close(np.linalg.solve(G, right), np.linalg.solve(g, np.asarray(right)))
    close(np.linalg.solve(g, B), np.linalg.solve(g, b))
    close(np.linalg.pinv(A), np.linalg.pinv(a))
    close(np.linalg.pinv(A, rtol=0.5), np.linalg.pinv(a, rtol=0.5))
    np.testing.assert_allclose(np.linalg.slogdet(G), np.linalg.slogdet(g), atol=1e-12)
    x, residuals, rank, values_of_a = np.linalg.lstsq(A, a @ b + 1)
    for found, expected in zip((x, residuals, values_of_a), np.array(
        np.linalg.lstsq(a, a @ b + 1), dtype=object)[[0, 1, 3]], strict=True):  # fmt: skip
        close(found, expected)
    assert rank == 6
    close(np.linalg.lstsq(A, a @ b[:, 0])[0], b[:, 0])
    assert type(np.linalg.det(G)) is type(np.linalg.det(g))


def test_no_operation_fetches_a_whole_matrix_implicitly(session: AlchemistSession) -> None:
    gc.collect()
    fetching._pool.trim()  # memory of earlier results is not used, and does not go meanwhile
    nbytes = 64 << 20
    A = session.xp.random.uniform((nbytes // 8 // 1000, 1000), seed=1)

    def peak() -> int:
        with open("/proc/self/status") as status:
            return next(int(x.split()[1]) << 10 for x in status if x.startswith("VmHWM"))

    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # resets the peak of resident memory
    before = peak()
    B = np.float64(2) * A - np.mean(A, axis=0)
    C = np.where(B > 0, np.exp(B), 0)[::2, :500]
    C.T @ C
    np.std(C, axis=0), np.linalg.norm(C), C[3], C[:, 4], C.sum(), np.concatenate([C, C])
    for work in (np.linalg.eig, np.unwrap):
        with pytest.raises(Exception, match="fetch"):
            work(A)
    assert peak() - before < nbytes // 2  # a row was read from C, a quarter, where it is mapped
    A.fetch()
    assert peak() - before > nbytes // 2


def test_a_copy_is_a_matrix_of_its_own(session: AlchemistSession) -> None:
    def write(comm: object, matrix: object) -> None:
        matrix.local[...] = 0

    a = np.arange(6.0).reshape(3, 2)
    A = session.send_matrix(a)
    for B in (np.copy(A), session.xp.asarray(A, copy=True), A.copy(), copy.deepcopy(A)):
        assert B.id != A.id
        session.run(write, B)
        assert not B.fetch().any()
        np.testing.assert_array_equal(A.fetch(), a)
    assert session.xp.asarray(A) is A
    assert A.astype("float64").id != A.id
    assert A.astype("float64", copy=False) is A
