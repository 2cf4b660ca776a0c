"""Operators in place write into the matrix; what NumPy would make a view refuses to be written."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    BadIndexError,
    DtypeError,
    MatrixError,
    ShapeError,
)
from tests.alchemist_ray.arrays.checks import REFUSALS, dtypes, few, layouts, same, values

OPERATORS = [
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv,
    operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift, operator.imatmul,
]  # fmt: skip
OPERANDS: list[Any] = [
    2, True, 1.5, 1j, np.float32(2), 1 << 40, 1 << 70, np.int64(3), np.array([1, 2, 3]),
    np.array([[1.0], [2], [3]]), np.full((3, 3), 2, np.int32), np.ones((3, 3), bool),
    np.ones((2, 3, 3)), np.ones((1, 4)), np.full((3, 3), 1 + 1j),
]  # fmt: skip
VIEWS = [
    lambda a: a[:2], lambda a: a[1], lambda a: a[:, None, 0], lambda a: a.T, lambda a: a.T[:2],
    lambda a: a.reshape(2, 6), np.ravel, np.squeeze, lambda a: np.diagonal(a), lambda a: np.flip(a),
    lambda a: np.broadcast_to(a, (4, 3)), lambda a: np.broadcast_arrays(a, np.ones(3))[0],
    lambda a: np.broadcast_arrays(a, np.ones((4, 3)))[0], lambda a: np.split(a, 2)[0],
    lambda a: np.swapaxes(a, 0, 1), lambda a: np.moveaxis(a, 0, 1), lambda a: np.diag(a),
    lambda a: np.expand_dims(a[0], 0), lambda a: np.unstack(a)[0], lambda a: np.matrix_transpose(a),
]  # fmt: skip


@given(
    change=st.sampled_from(OPERATORS), dtype=dtypes, layout=layouts,
    operand=st.sampled_from(OPERANDS), on_ranks=st.booleans(),
)  # fmt: skip
@few
def test_all_handles_of_the_matrix_see_it_and_its_dtype_stays(
    session: AlchemistSession, change: Any, dtype: str, layout: str, operand: Any, on_ranks: bool
) -> None:
    a = values((3, 3), dtype)
    A = session.send_matrix(a, layout=layout)
    other = A
    if on_ranks and isinstance(operand, np.ndarray):
        given_one = session.xp.asarray(operand)
    else:
        given_one = operand
    before = a.copy()
    with np.errstate(all="ignore"):
        try:
            change(a, operand)
        except (*REFUSALS, OverflowError):
            with pytest.raises((*REFUSALS, OverflowError)):
                change(A, given_one)
            same(A, before)
            return
        A = change(A, given_one)
    assert A is other
    same(other, a)


KEYS: list[Any] = [
    [0, 2, 0, -1], np.array([3, 3, 3]), [[1, 1], [2, 1]], ([0, 0, 1], [2, 2, -1]),
    (slice(None), [1, 1, 2]), (..., [[0, 0]]), (1, [2, 2]), (2, 1), slice(2), ([0, 0, 1], None),
    np.arange(12).reshape(4, 3) % 5 == 0, np.array([True, False, True, True]), ([2, 0], slice(2)),
]  # fmt: skip


@given(
    key=st.sampled_from(KEYS), ufunc=st.sampled_from([np.add, np.subtract]), layout=layouts,
    dtype=st.sampled_from(["float64", "float32", "int64", "complex64", "int8"]),
    number=st.sampled_from([2, 1.5, None]), on_ranks=st.booleans(),
)  # fmt: skip
@few
def test_repeated_indices_all_count(
    session: AlchemistSession, key: Any, ufunc: Any, layout: str, dtype: str, number: Any,
    on_ranks: bool,
) -> None:  # fmt: skip
    a = values((4, 3), dtype)
    A = session.send_matrix(a, layout=layout)
    value = number or np.arange(a[key].size).reshape(a[key].shape).astype(dtype)
    there = session.xp.asarray(key) if on_ranks and isinstance(key, np.ndarray) else key
    given_one = session.xp.asarray(value) if on_ranks and not number else value
    if a.dtype.kind == "i" and number == 1.5:  # NumPy cuts fractions off without a word
        with pytest.raises(DtypeError):
            ufunc.at(A, there, given_one)
    else:
        ufunc.at(a, key, value)
        ufunc.at(A, there, given_one)
    same(A, a)


def test_other_repeated_changes_are_refused(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((4, 3)))
    with pytest.raises(BadIndexError, match="7 is out of range"):
        np.add.at(A, [0, 7], 1.0)
    with pytest.raises(ShapeError):
        np.add.at(A, [0, 1], np.ones(5))
    with pytest.raises(MatrixError, match="copy"):
        np.add.at(A.T, [0], 1.0)
    with pytest.raises(BadArgumentError, match=r"np\.multiply\.at"):
        np.multiply.at(A, [0], 2.0)
    assert A.sum() == 12
    counts = session.send_matrix(np.ones((4, 3), int))
    for key in ((2, 1), (2, slice(2)), [2, 2], ([2], [1])):
        with pytest.raises(DtypeError):
            np.add.at(counts, key, 1.5)
    np.add.at(counts, (2, 1), 2)
    assert int(counts[2, 1]) == 3
    assert counts.sum() == 14


def test_a_function_changes_its_argument(session: AlchemistSession) -> None:
    def center(v: Any) -> None:
        v -= v.mean(axis=0)
        v /= v.std(axis=0)

    a = np.random.default_rng(0).normal(size=(20, 3))
    A, small = session.send_matrix(a), session.xp.asarray([1.0, 2.0, 6.0])
    assert float(small.sum()) == 9  # its elements are known here now
    center(A)
    center(small)
    center(a)
    same(A, a)
    np.testing.assert_allclose(small.fetch(), np.array([-2, -1, 3]) / np.sqrt(14 / 3))


def test_the_dtype_and_the_shape_cannot_change(session: AlchemistSession) -> None:
    counts = session.xp.asarray([1, 2, 3])
    with pytest.raises(DtypeError, match=r"result is float64, which cannot be cast to int64.*A = "):
        counts += 1.5
    with pytest.raises(DtypeError):
        counts /= session.xp.asarray([1, 2, 3])
    with pytest.raises(ShapeError):
        counts += np.ones((2, 3), int)
    with pytest.raises(ShapeError):
        counts @= session.xp.ones((3, 2), dtype=int)
    same(counts, np.array([1, 2, 3]))


@pytest.mark.parametrize("view", VIEWS)
def test_what_would_be_a_view_is_not_written(session: AlchemistSession, view: Any) -> None:
    a = np.arange(12.0).reshape(4, 3)
    A = session.send_matrix(a)
    part = view(A)
    with pytest.raises(MatrixError, match=r"assign to A\[\.\.\.\] directly, or call \.copy"):
        part += 100
    with pytest.raises(MatrixError, match="is a copy of elements"):
        part[...] = 100
    with pytest.raises(MatrixError, match="is a copy of elements"):
        np.add(part, 1, out=part)
    same(A, a)
    same(part, np.array(view(a)))
    own = part.copy()
    own += 1
    same(own, np.array(view(a)) + 1)


def test_parts_are_changed_where_the_operator_names_them(session: AlchemistSession) -> None:
    def work(a: Any, two: Any) -> Any:
        a[:2] += 100
        a[1] -= a[0]
        a[:, 2] *= two
        a[[0, 2]] /= 4
        a[a > 10] **= 2
        a[3, 0] += 5
        return a

    a = np.arange(12.0).reshape(4, 3)
    same(work(session.send_matrix(a), session.xp.asarray(2.0)), work(a.copy(), 2.0))


def test_parts_in_a_container_are_not_written(session: AlchemistSession) -> None:
    A = session.send_matrix(np.zeros((4, 3)))
    parts = {"top": A[:2]}
    with pytest.raises(MatrixError):
        parts["top"] += 1


def test_numbers_are_immutable_as_those_of_numpy(session: AlchemistSession) -> None:
    total = first = session.xp.asarray([1, 2, 3]).sum()
    total += 1.5
    assert (float(first), float(total)) == (6, 7.5)


def test_rows_of_an_iteration_are_read_only(session: AlchemistSession) -> None:
    for row in session.xp.ones((3, 2)):
        with pytest.raises(ValueError, match="read-only"):
            row += 1
