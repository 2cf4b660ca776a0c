"""Code that is written for the array API standard runs on matrices of a gang."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.arrays import rules
from alchemist_ray.errors import (
    BadArgumentError,
    DtypeError,
    RoutineError,
    SessionError,
    ShapeError,
)
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.arrays.checks import same


def pca(X: Any, k: int) -> tuple[Any, Any]:
    """As in the standard, with nothing from NumPy."""
    xp = X.__array_namespace__()
    centred = X - xp.mean(X, axis=0, keepdims=True)
    U, S, Vh = xp.linalg.svd(centred, full_matrices=False)
    scores = xp.matmul(centred, xp.matrix_transpose(Vh[:k, :]))
    assert xp.all(xp.abs(xp.mean(scores, axis=0)) < 1e-10)
    assert xp.linalg.matrix_norm(centred - U * S @ Vh) < 1e-9
    return xp.abs(scores), S[:k] ** 2 / (X.shape[0] - 1)


def test_pca_by_the_standard_runs_on_handles_unchanged(session: AlchemistSession) -> None:
    x = np.random.default_rng(0).standard_normal((300, 8)) @ np.diag(np.arange(1.0, 9))
    theirs, ours = pca(x, 3), pca(session.send_matrix(x), 3)
    assert isinstance(ours[0], Handle)
    for mine, numpys in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.asarray(mine), numpys, rtol=1e-8)


def test_the_namespace_is_one_for_all_handles_of_a_gang(session: AlchemistSession) -> None:
    A = session.send_matrix(np.eye(2))
    xp = A.__array_namespace__()
    assert xp is session.xp is (A + 1).__array_namespace__(api_version="2024.12")
    with pytest.raises(ValueError, match=r"2024\.12"):
        A.__array_namespace__(api_version="1999.12")
    assert A.device == "gang" == xp.__array_namespace_info__().default_device()
    assert A.to_device("gang") is A
    with pytest.raises(ValueError, match="'gang'"):
        A.to_device("cuda")
    assert {*DTYPES} == {*xp.__array_namespace_info__().dtypes(), "float16"}  # no standard dtype
    assert [10, 20][xp.asarray(1, dtype=xp.uint8)] == 20
    assert xp.__array_namespace_info__().dtypes(kind="unsigned integer").keys() == {
        "uint8", "uint16", "uint32", "uint64",
    }  # fmt: skip
    assert all(hasattr(xp, name) for name in dir(xp))
    assert all(hasattr(xp.linalg, name) for name in dir(xp.linalg))


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_creation(session: AlchemistSession, dtype: Any) -> None:
    xp = session.xp
    for shape in ((3, 5), (3,), 3, (), (0, 2), (2, 0)):
        same(xp.zeros(shape, dtype=dtype), np.zeros(shape, dtype or float))
        same(xp.full(shape, 1, dtype=dtype), np.full(shape, 1, dtype=dtype))
    same(xp.ones((3, 5), dtype=dtype, layout="MC_MR"), np.ones((3, 5), dtype or float))
    same(xp.eye(4, 3, dtype=dtype), np.eye(4, 3, dtype=dtype or float))
    same(xp.eye(4, k=-1, dtype=dtype), np.eye(4, k=-1, dtype=dtype or float))
    for data in ([[1, 2], [3, 4]], [1, 2], 1, [], [[], []]):
        same(xp.asarray(data, dtype=dtype), np.array(data, dtype))
    if dtype != "bool":
        same(xp.arange(7, dtype=dtype), np.arange(7, dtype=dtype))
        same(xp.arange(7, 1, -2, dtype=dtype), np.arange(7, 1, -2, dtype=dtype))
        same(xp.linspace(0, 1, 7, dtype=dtype), np.linspace(0, 1, 7, dtype=dtype))
    assert xp.ones((3, 5), layout="MC_MR").layout == "MC_MR"


def test_asarray(session: AlchemistSession) -> None:
    xp = session.xp
    A = xp.asarray(np.arange(6).reshape(2, 3))
    assert isinstance(A, Handle)
    assert xp.asarray(A) is A
    same(xp.asarray(A, dtype=xp.float32), np.arange(6, dtype="float32").reshape(2, 3))
    large = np.random.default_rng(0).random((rules.INLINE_NBYTES // 800, 200))
    same(xp.asarray(large), large)
    assert xp.asarray(large).temporary
    same(xp.asarray(np.eye(2, dtype=bool)), np.eye(2, dtype=bool))
    same(xp.asarray([1.0, 2.0]), np.array([1.0, 2.0]))
    same(xp.asarray(np.arange(3, dtype="int8")), np.arange(3, dtype="int8"))
    same(xp.asarray(np.ones((2, 2, 2))), np.ones((2, 2, 2)))
    with pytest.raises(ShapeError, match="8 axes"):
        xp.asarray(np.ones((1,) * 9))
    with pytest.raises(ShapeError):
        xp.ones((2, -1))
    same(xp.ones((2, 2, 2)), np.ones((2, 2, 2)))
    with pytest.raises(DtypeError):
        xp.ones((2, 2), dtype="longdouble")


def test_from_function_is_evaluated_on_the_ranks(session: AlchemistSession) -> None:
    n = 7
    for layout in ("VC_STAR", "MC_MR", "STAR_STAR", "CIRC_CIRC"):
        A = session.xp.from_function(lambda i, j: 1 / (i + j + 1), (5, n), layout=layout)
        same(A, np.fromfunction(lambda i, j: 1 / (i + j + 1), (5, n)))
    same(session.xp.from_function(lambda i: i + 1.0, 5), np.arange(1.0, 6))
    same(session.xp.from_function(lambda i, j: i, (5, 3), dtype="int64"),
         np.arange(5)[:, None] + np.zeros((1, 3), int))  # fmt: skip
    with pytest.raises(RoutineError, match="ZeroDivisionError"):
        session.xp.from_function(lambda i, j: 1 / 0, (5, 3))
    del A
    assert session.list_matrices() == []


def test_random_matrices_are_the_same_for_the_same_seed(session: AlchemistSession) -> None:
    for draw in (session.xp.random.normal, session.xp.random.uniform):
        A = draw((2000, 4), seed=5)
        assert np.array_equal(A, draw((2000, 4), seed=5))
        assert not np.array_equal(A, draw((2000, 4), seed=6))
        assert draw((3, 2), seed=1, dtype="float32").dtype == np.float32
        assert draw(5, seed=1).shape == (5,)
    np.testing.assert_allclose(float(A.mean()), 0.5, atol=0.02)


def test_the_rest_of_the_standard_works_on_handles(session: AlchemistSession) -> None:
    xp = session.xp
    a = np.arange(12.0).reshape(4, 3) + 1
    A = xp.asarray(a)
    same(xp.concat([A, A], axis=1), np.concat([a, a], axis=1))
    same(xp.permute_dims(A, (1, 0)), a.T)
    same(xp.astype(A, xp.float32), a.astype("float32"))
    same(xp.astype(A - 1, xp.bool), (a - 1).astype(bool))
    same(xp.pow(A, 2), a**2)
    same(xp.sum(A, axis=1), a.sum(axis=1))
    same(xp.var(A, axis=0, correction=1), a.var(axis=0, ddof=1))
    same(xp.take(A, xp.asarray([2, 0]), axis=0), a[[2, 0]])
    same(xp.linalg.trace(A), np.trace(a))
    same(xp.linalg.diagonal(A), np.diagonal(a))
    same(xp.linalg.vector_norm(A, axis=0), np.linalg.norm(a, axis=0))
    same(xp.linalg.vecdot(A, A), np.vecdot(a, a))
    same(xp.tensordot(A, xp.matrix_transpose(A), axes=1), a @ a.T)
    same(xp.exp(xp.zeros(3)), np.ones(3))
    assert xp.result_type(A, xp.float32) == np.float64
    assert xp.finfo(A).eps == np.finfo(float).eps
    assert xp.iinfo(xp.astype(A, xp.int32)).max == 2**31 - 1
    same(xp.clip(A, max=3), np.clip(a, None, 3))
    same(xp.astype(A, xp.int64) << 2, a.astype(int) << 2)
    same(xp.full_like(A, True), np.ones((4, 3)))


def test_scipys_functions_of_matrices(session: AlchemistSession) -> None:
    a = np.random.default_rng(0).standard_normal((6, 4)) + 1j
    A, linalg = session.send_matrix(a), session.xp.linalg
    for side in ("right", "left"):
        for mine, theirs in zip(linalg.polar(A, side), scipy.linalg.polar(a, side), strict=True):
            np.testing.assert_allclose(np.asarray(mine), theirs, atol=1e-12)
    with pytest.raises(BadArgumentError, match="side='up'; it is 'right' or 'left'"):
        linalg.polar(A, "up")
    np.testing.assert_allclose(np.asarray(linalg.expm(A[:4])), scipy.linalg.expm(a[:4]), rtol=1e-11)
    with pytest.raises(ShapeError, match="expm"):
        linalg.expm(A)
    assert {"expm", "polar"} <= set(dir(linalg))


def test_errors_for_missing_functions_name_an_alternative(session: AlchemistSession) -> None:
    with pytest.raises(AttributeError, match=r"numpy\.kaiser takes A\.fetch\(\)"):
        _ = session.xp.kaiser
    with pytest.raises(AttributeError, match="has no 'nonsense'"):
        _ = session.xp.nonsense
    with pytest.raises(AttributeError, match="eigh"):
        _ = session.xp.linalg.eig
    with pytest.raises(BadArgumentError, match=r"np\.var\(A\.fetch\(\), mean=3\)"):
        session.xp.var(session.xp.ones((2, 2)), mean=3)


def test_the_namespace_needs_a_gang(cluster: str) -> None:
    with AlchemistSession() as als, pytest.raises(SessionError, match="no workers"):
        _ = als.xp
