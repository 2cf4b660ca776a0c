"""Integers beyond 2**53, nan, empty operands and unusual forms of calls give NumPy's results."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, Handle
from tests.alchemist_ray.arrays.checks import REFUSALS, same

CASES = [  # X makes an array, on the ranks or here
    # Python integers that a float64, or the array's dtype, does not hold
    "X([True, False]) + (2**53 + 1)", "(2**60 + 1) * X([True, False])",
    "np.maximum(X([True, False]), 2**53 + 1)", "np.logical_and(X([True, False]), 2**63 - 1)",
    "X([1, 2], 'int32') / 2**40", "np.arctan2(X([1, 2], 'int32'), 2**40)",
    "np.arctan2(X([1, 2], 'uint8'), -2)", "np.hypot(300, X([1, 2], 'uint8'))",
    "np.logical_xor(X([0, 2], 'uint8'), -2)", "np.logical_and(300, X([0, 2], 'int8'))",
    "np.take(X(3), [0, 0], axis=-1)", "10**30 / X([1, 2])",
    "X([1, 2]) / 2**63", "np.hypot(2**60, X([1, 2], 'int32'))",
    "np.max(X([[], [1]][0]).astype(int), initial=2**53 + 1)",
    # no elements
    "X(np.ones((2, 3, 0))) @ X(np.ones((0, 4)))", "X(np.ones((2, 3, 0))) @ X(np.ones((2, 0, 3)))",
    "X(np.ones((2, 0, 3))) @ X(np.ones((3, 1)))", "X(np.ones((0, 2, 3))) @ X(np.ones((1, 3, 2)))",
    "np.unique(X(np.ones((0, 0, 3))), axis=0)", "np.unique(X(np.ones((0, 2, 3))), axis=1)",
    "np.tensordot(X(np.ones((2, 0, 3))), X(np.ones((3, 0))), 1)",
    "np.einsum('ijk,kl->jl', X(np.ones((0, 2, 3))), X(np.ones((3, 2))))",
    "np.sum(X(np.ones((2, 0, 3))), axis=())", "np.nonzero(X(np.ones((2, 0, 3))))[2]",
    "X(np.ones((2, 0, 3)))[[1, 0], :, [2, 0]]", "np.quantile(X(np.ones((2, 0, 3))), 0.5, axis=2)",
    "np.fft.fft(X(np.ones((2, 0, 3))), axis=2)", "np.kron(X(np.ones((2, 0))), X(np.ones((3, 1))))",
    # assignments
    "set(X([1, 2]), np.array([2**60 + 1, 2**63 - 5], 'uint64'))",
    "set(X([1, 2], 'int32'), np.array([2**31 - 1, 3], 'uint64'))",
    "set(X([True, False]), np.array([0, 7], 'uint64'))", "set(X([True, False, False]), 1j)",
    "set(X([True, False]), 2**70)",
    "set(X([True, False]), X([1j, 0]))", "set(X([True, False]), np.array([1j, 2]), [1, 0])",
    "set(X([1.5, 2]), np.complex128(3))", "set(X([1.5, 2]), np.array([3, 4], 'float16'))",
    "set(X([1.5, 2]), np.array([]), X([False, False]))",
    "set(X([[1.5, 2]]), X([1.0])[:0], np.array([[False, False]]))",
    # indices that an integer begins
    "X([[1, 2, 3], [4, 5, 6]])[1, None, [0, 2, 1]]", "X([[1, 2], [4, 5]])[[0, 1], None, 1]",
    # reductions
    "np.nansum(X([1, np.nan]), dtype='int64')", "np.nanprod(X([3, np.nan]), dtype='int32')",
    "np.nansum(X([1, np.nan]), dtype='int64', where=X([True, True]))",
    "np.mean(X([1, 2, 2]), dtype='int64')", "np.mean(X([[1, 2], [2, 3]]), axis=0, dtype='int64')",
    "np.nanmax(X([1.0, 2.0]), initial=np.nan)", "np.nanmin(X([1.0, 2.0]), initial=np.nan)",
    "np.nanvar(X([1, 2]), ddof=5)", "np.nanstd(X([True, False]), ddof=2)",
    "np.nanstd(X([4, 5]), dtype='float32', ddof=5)",
    # functions
    "np.round(X([14, 15, 25, -2**60]), -1)", "np.round(X([1 + np.inf * 1j, 2.555 - 0.125j]), 2)",
    "np.fabs(X([-1, 2]))", "np.fabs(X([-1.5, 2]))", "np.vecdot(X([True, True]), X([True, True]))",
    "np.vecdot(X([1j, 2]), X([1, 1j]))", "np.dot(X([1, 2]), np.float64(2))", "X([1, 2]).dot(3)",
    "X([3, 1, 2]).argsort(kind='stable')", "sorted_in_place(X([3, 1, 2]))",
    # norms, and linear algebra of nothing
    "np.linalg.norm(X([1, -2]), -1)", "np.linalg.norm(X([[1, -2]]), 0, axis=0)",
    "np.linalg.norm(X([[1, -2]], 'float32'), 0, axis=0)", "np.linalg.norm(X([-2**63]), 1)",
    "np.linalg.norm(X([[3, -4]], 'int32'), -np.inf, axis=1)",
    *(f"np.linalg.norm(X(np.zeros({shape})), {ord})" for shape in ((3, 0), (0, 3))
      for ord in ("1", "2", "np.inf", "'nuc'")),
    "np.linalg.lstsq(X(np.eye(5)[:3]), X(np.zeros((3, 0))))[0]",
    "np.linalg.lstsq(X(np.eye(9)[:, :2]), X(np.zeros((9, 0))))[0]",
]  # fmt: skip
NUMBERS = [
    "X([[1, 2], [3, 4]]).item(2)", "X([[1, 2], [3, 4]]).item(-1)", "X([[1, 2]]).item(0, 1)",
    "X([5, 6]).item(1)", "np.linalg.cond(X(np.zeros((3, 2))))",
    "X(np.arange(6).reshape(3, 2)).item(3)",
]  # fmt: skip
REFUSED = [
    "np.max(X([1, 2]), initial=np.inf)", "np.sum(X([1, 2]), initial=np.nan)",
    "np.fabs(X([1j, 2]))", "np.stack([X(True), X([True])])", "X([[1, 2]]).item(2)",
    "np.interp([1, 2], X([[1, 2]]), X([[1, 2]]))", "np.linalg.cond(X(np.zeros((3, 0))))",
    "set(X([1, 2], 'int32'), np.int64(2**40))", "np.vecdot(X([1, 2]), np.int64(3))",
]  # fmt: skip


def assigned(A: Any, value: Any, key: Any = ...) -> Any:
    A[key] = value
    return A


def sorted_in_place(A: Any) -> Any:
    A.sort(kind="stable")
    return A


def evaluated(code: str, make: Any) -> Any:
    names = {"np": np, "X": make, "set": assigned, "sorted_in_place": sorted_in_place}
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return eval(code, names)


@pytest.fixture
def make(session: AlchemistSession) -> Any:
    return lambda values, dtype=None: session.xp.asarray(np.asarray(values, dtype))


@pytest.mark.parametrize("code", CASES)
def test_results_are_numpys(make: Any, code: str) -> None:
    same(evaluated(code, make), evaluated(code, np.array))


@pytest.mark.parametrize("code", NUMBERS)
def test_numbers_are_numpys(make: Any, code: str) -> None:
    found = evaluated(code, make)
    assert found == evaluated(code, np.array)
    assert not isinstance(found, Handle)


@pytest.mark.parametrize("code", REFUSED)
def test_what_numpy_refuses_is_refused(make: Any, code: str) -> None:
    for one in (np.array, make):
        with pytest.raises((*REFUSALS, OverflowError)):
            evaluated(code, one)


def test_results_that_numpy_copies_can_be_assigned_to(make: Any) -> None:
    A = make([[1, 2], [3, 4]])
    for found in (np.clip(A, None, None), np.take(A, 0, axis=1), np.take(A, 1)):
        same(assigned(found, 9), np.full(found.shape, 9))
    same(A, [[1, 2], [3, 4]])


@pytest.mark.parametrize("skip", [False, True])
def test_quantiles_of_many_columns_with_different_counts_of_nan(make: Any, skip: bool) -> None:
    a = np.random.default_rng(0).normal(size=(7, 400))
    a[np.arange(7)[:, None] < np.arange(400) % 9 - 1] = np.nan
    for method in ("linear", "lower", "inverted_cdf", "midpoint"):
        work = f"np.{'nan' * skip}quantile(X, [0.1, 0.5, 0.9], axis=0, method='{method}')"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            same(eval(work, {"np": np, "X": make(a)}), eval(work, {"np": np, "X": a}))
