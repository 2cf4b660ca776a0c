"""Shared by the tests of this folder: test arrays, and the comparison with NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from alchemist_ray import Handle
from alchemist_ray.errors import MatrixError
from mpi_workers.matrix.dtypes import DTYPES
from tests.support.layouts import SOME_LAYOUTS
from tests.support.suite import scaled

few = settings(
    max_examples=scaled(30, 500),
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(SOME_LAYOUTS)
lengths = st.integers(0, 9)
REFUSALS = (TypeError, ValueError, IndexError, ArithmeticError, MatrixError)


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    """Small numbers, some of them alike, none of them 0; those of signed dtypes of both signs."""
    random = np.random.default_rng([seed, *shape])
    found = random.integers(1, 6, shape) * np.where(random.random(shape) < 0.3, -1, 1)
    if dtype.startswith("complex"):
        found = found + 1j * random.integers(-3, 4, shape)
    return (abs(found) if dtype.startswith("u") else found).astype(dtype)


def whole(found: Any) -> Any:
    return found.fetch() if isinstance(found, Handle) else found


def same(found: Any, expected: Any) -> None:
    """A handle with the same shape, dtype and, but for rounding, elements."""
    expected = np.asarray(expected)
    assert isinstance(found, Handle), type(found)
    wide = np.finfo(expected.dtype).eps * 64 if expected.dtype.kind in "fc" else 0
    got = np.asarray(whole(found))
    assert (found.shape, found.dtype) == (got.shape, got.dtype)
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(got, expected, rtol=wide, atol=wide)


def both(work: Callable[[Any, Any], Any], ours: Any, theirs: Any, *args: Any) -> None:
    """The same from handles as from arrays; an error where NumPy has one."""
    with np.errstate(all="ignore"):
        try:
            expected = work(*theirs, *args)
        except (TypeError, ValueError, OverflowError):
            try:
                work(*ours, *args)
            except Exception:
                return
            raise AssertionError("NumPy refuses that") from None
        same(work(*ours, *args), expected)


def elements(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Any:
    random = np.random.default_rng([seed, *shape])
    found = random.integers(0 if dtype.startswith("u") else -3, 6, shape).astype(dtype)
    if dtype.startswith("complex"):
        found = found + 1j * random.integers(-2, 3, shape).astype(dtype)
    if dtype.startswith("float"):
        found[random.random(shape) < 0.1] = np.nan
    return found


def as_in_numpy(work: Callable[[Any], Any], a: Any, A: Any) -> None:
    """One result or several; a refusal where NumPy refuses."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns of empty slices and of constant columns
        try:
            expected = work(a)
        except REFUSALS:
            with pytest.raises(REFUSALS):
                work(A)
            return
        found = work(A)
    several = isinstance(expected, tuple | list)
    pairs = zip(found, expected, strict=True) if several else [(found, expected)]
    for mine, numpys in pairs:
        same(mine, numpys)
