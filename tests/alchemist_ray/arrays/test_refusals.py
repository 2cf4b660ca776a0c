"""Programs that handle NumPy's errors handle ours as well."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.special

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    BadIndexError,
    DtypeError,
    LinAlgError,
    MatrixError,
    ShapeError,
)

A = np.arange(12.0).reshape(4, 3)
SINGULAR, NAN = np.zeros((3, 3)), np.array([[np.nan, 1.0], [1.0, 2.0]])

MASKED = np.ma.masked_less(A, 5)
PLACES = np.ma.masked_equal([0, 2, 3], 2)
WITH_MASKS: list[Callable[[Any], Any]] = [
    lambda a: a + MASKED, lambda a: a * MASKED[0], lambda a: a @ MASKED.T, lambda a: a < MASKED,
    lambda a: np.add(MASKED, 1, out=a), lambda a: np.add(a, MASKED), lambda a: a[MASKED > 6],
    lambda a: a[PLACES], lambda a: a[:, np.ma.masked_equal([True, False, True], True)],
    lambda a: a[PLACES, [0, 1, 2]], lambda a: a.__setitem__(PLACES, 1),
    lambda a: a.__setitem__(..., MASKED), lambda a: a.__setitem__((0, 0), np.ma.masked),
    lambda a: a.__iadd__(MASKED), lambda a: a.__array_namespace__().asarray(MASKED),
    lambda a: np.where(MASKED > 6, a, 0), lambda a: np.isclose(a, MASKED),
    lambda a: np.isin(a, PLACES), lambda a: np.concatenate([a, MASKED]),
    lambda a: a.sum(where=MASKED > 6), lambda a: np.linalg.solve(a.T @ a, MASKED[0]),
    lambda a: np.average(a, axis=0, weights=np.ma.masked_less(np.arange(4.0), 2)),
]  # fmt: skip


@pytest.mark.parametrize("of", WITH_MASKS)
def test_masked_elements_are_refused_as_send_matrix_refuses_them(
    als: AlchemistSession, of: Any
) -> None:
    a = als.send_matrix(A)
    with pytest.raises(DtypeError, match=r"masked, and has elements without a value .*: fill"):
        of(a)
    np.testing.assert_array_equal(a.fetch(), A)
    np.testing.assert_array_equal((a + np.ma.masked_less(A, 0)).fetch(), 2 * A)  # none is masked


def test_subscripts_on_the_ranks_are_checked_there(als: AlchemistSession) -> None:
    a = als.send_matrix(A)
    for wrong in (als.send_matrix(np.array([0, 4])), als.send_matrix(np.ones(3, bool))):
        with pytest.raises(BadIndexError):
            a[wrong]


@pytest.mark.parametrize(
    ("function", "matrix"),
    [
        (np.linalg.inv, SINGULAR), (lambda a: np.linalg.solve(a, a), SINGULAR),
        (np.linalg.cholesky, -np.eye(3)), (np.linalg.svd, NAN), (np.linalg.eigh, NAN),
    ],
    ids=["inv", "solve", "cholesky", "svd of nan", "eigh of nan"],
)  # fmt: skip
def test_a_matrix_without_the_result_is_a_linalg_error(
    als: AlchemistSession, function: Callable[[Any], Any], matrix: np.ndarray
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if function is not np.linalg.eigh:  # LAPACK's result is nan
            with pytest.raises(np.linalg.LinAlgError):
                function(matrix)
    with pytest.raises(LinAlgError) as caught:
        function(als.send_matrix(matrix))
    assert isinstance(caught.value, np.linalg.LinAlgError)


def test_the_advice_can_be_followed(als: AlchemistSession) -> None:
    a, cube = als.send_matrix(A), als.send_matrix(np.ones((4, 3, 2)))
    with pytest.raises(ShapeError, match=r"A\.reshape\(len\(A\), -1\)"):
        als.load_library("linalg").svd(cube)
    assert cube.reshape(len(cube), -1).shape == (4, 6)
    squares = als.send_matrix(np.stack([np.eye(2), 2 * np.eye(2)]))
    for work in (np.linalg.inv, lambda x: np.linalg.solve(x, np.ones((2, 2, 1)))):
        with pytest.raises(ShapeError, match=r"is a stack.* of A\[i\] .* of A\.fetch\(\)"):
            work(squares)
    np.testing.assert_array_equal(np.linalg.inv(squares[1]).fetch(), np.eye(2) / 2)
    with pytest.raises(BadArgumentError, match=r"np\.ldexp\(A\.fetch\(\), 2\)"):
        np.ldexp(a, 2)
    objects = A.astype(object)
    for wrong in (lambda: als.send_matrix(objects), lambda: a + objects):
        with pytest.raises(DtypeError, match=r"x\.astype\(float\)"):
            wrong()
    with pytest.raises(BadArgumentError, match=r"^ellipk is not .*: ellipk\(A\.fetch\(\)\)"):
        scipy.special.ellipk(a)
    with pytest.raises(BadArgumentError, match=r"dense, 80\.0 GB of float64"):
        als.send_matrix(scipy.sparse.csr_array((100_000, 100_000))) + 1


def test_an_error_of_all_ranks_is_told_once(als: AlchemistSession) -> None:
    for wrong in (lambda: als.send_matrix(A) @ A, lambda: als.send_matrix(A) + np.ones((2, 2))):
        with pytest.raises(ShapeError) as caught:
            wrong()
        assert "more rank" not in str(caught.value)


def test_methods_with_the_names_of_numpy(als: AlchemistSession) -> None:
    a = als.send_matrix(A / 3)
    np.testing.assert_array_equal(round(a, 1).fetch(), (A / 3).round(1))
    assert round(a[3, 2]) == 4
    assert list(a.flat) == list((A / 3).flat)
    assert float(a.flat[5]) == 5 / 3
    with pytest.raises(MatrixError, match=r"assign to A\[\.\.\.\]"):
        a.flat[5] = 1
    np.testing.assert_allclose(np.rad2deg(a).fetch(), np.rad2deg(A / 3))
    np.testing.assert_allclose(np.deg2rad(a).fetch(), np.deg2rad(A / 3))
    for name, advice in (("tobytes", r": A\.fetch\(\)\.tobytes"), ("put", ": write A"), ("x", "$")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'{advice}"):
            getattr(a, name)
    assert not hasattr(a, "__array_interface__")
    a.fill(7)
    np.testing.assert_array_equal(a.fetch(), np.full((4, 3), 7.0))
