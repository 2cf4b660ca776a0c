"""Operators on handles give the results of NumPy."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import DtypeError, MatrixNotFoundError, ResourceError, ShapeError
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.arrays.checks import both, dtypes, few, layouts, lengths, same, values
from tests.support.layouts import SOME_LAYOUTS
from tests.support.suite import scaled

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.pow, operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne,
]  # fmt: skip
SMALLER = [(9, 7), (1, 7), (9, 1), (1, 1)]


NUMBERS = [
    2, -3, 0.5, 1.5 - 2j, True, np.float32(0.5), np.float64(2), np.int32(3), np.int64(-2),
    np.complex64(1j), np.bool_(True), np.int8(2), np.float16(0.5),
]  # fmt: skip
OTHER_SHAPES = [(7,), (1, 7), (9, 1), (9, 7), (1,), (), (5,), (2, 9, 7), (0, 7), (9, 0)]


@given(
    work=st.sampled_from(OPERATORS), dtype=dtypes, layout=layouts, turned=st.booleans(),
    shape=st.sampled_from([(9, 7), (9, 7), (0, 7), (9, 0), (1, 1)]),
    other=st.sampled_from(NUMBERS)
    | st.tuples(st.sampled_from(OTHER_SHAPES), dtypes, st.none() | layouts),
)  # fmt: skip
@settings(few, max_examples=scaled(90, 1500))
def test_a_handle_and_another_operand(
    session: AlchemistSession, work: Any, dtype: str, layout: str, turned: bool,
    shape: tuple[int, int], other: Any,
) -> None:  # fmt: skip
    """A number, an array here (its layout is None), or another handle."""
    a, b = values(shape, dtype), other
    if isinstance(other, tuple):
        b = np.asarray(values(other[0], other[1], 1))
    if work is operator.pow and a.dtype.kind in "biu":  # NumPy refuses negative powers
        a, b = abs(a), abs(b) if np.isrealobj(b) else b
    A, B = session.send_matrix(a, layout=layout), b
    if isinstance(other, tuple) and other[2] is not None:
        B = session.send_matrix(b, layout=other[2]) if b.shape else session.xp.asarray(b)
    both(work, (B, A) if turned else (A, B), (b, a) if turned else (a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_handle(session: AlchemistSession, dtype: str) -> None:
    a = values((7, 5), dtype)
    A = session.send_matrix(a, layout="MC_MR")
    for found, expected in [
        (abs(A), abs(a)), (A**3, a**3), (+A, a), (A.copy(), a), (A.ravel(), a.ravel()),
        (A.reshape(5, -1), a.reshape(5, -1)), (A[:1].squeeze(), a[0]), (~(A > 1), ~(a > 1)),
        (A.T, a.T), (A.conj(), a.conj()),
        (A.real, a.real), (A.imag, a.imag), (A.H, a.conj().T), (A.clip(0, 2), a.clip(0, 2)),
        (A.mT, a.T), (A.transpose(), a.T), (A.astype("complex128"), a.astype("complex128")),
        (A.astype(bool), a.astype(bool)), (A.round(), a.round()), (A.diagonal(), a.diagonal()),
        (A.trace(), a.trace()),
    ]:  # fmt: skip
        same(found, expected)
    assert (A.size, A.ndim, len(A), A.shape) == (35, 2, 7, (7, 5))
    if dtype == "bool":
        with pytest.raises(DtypeError, match="negative is not defined for bool"):
            operator.neg(A)
    else:
        same(-A, -a)


@given(m=lengths, k=lengths, n=lengths, one=dtypes, other=dtypes, left=layouts, right=layouts)
@few
def test_products(
    session: AlchemistSession, m: int, k: int, n: int, one: str, other: str, left: str, right: str
) -> None:
    a, b = values((m, k), one), values((k, n), other, 1)
    A, B = session.send_matrix(a, layout=left), session.send_matrix(b, layout=right)
    for found in (A @ B, A @ b, a @ B):
        same(found, a @ b)
    if n:
        v, V = b[:, 0], B[:, 0]
        for found, expected in [
            (A @ v, a @ v), (A @ V, a @ v), (V @ A.T, v @ a.T), (v @ A.T, v @ a.T), (V @ V, v @ v),
        ]:  # fmt: skip
            same(found, expected)
    with pytest.raises(ShapeError):
        A @ session.xp.ones((k + 1, 2))


def test_masks_are_bool(session: AlchemistSession) -> None:
    a = values((9, 4), "float64")
    A = session.send_matrix(a)
    mask = (A > 0) & (A < 4) | (A == -1)
    same(mask, (a > 0) & (a < 4) | (a == -1))
    same((A > 0) ^ (a < 3), (a > 0) ^ (a < 3))
    same(np.where(mask, A, 0), np.where(mask.fetch(), a, 0))
    same(A * (A > 0), a * (a > 0))
    same(~mask, ~mask.fetch())
    assert mask.dtype == bool
    same(np.sum(mask), np.sum(mask.fetch()))
    np.testing.assert_array_equal(a[np.asarray(mask)], a[mask.fetch()])


def test_results_are_handles_of_numpys_shape_whatever_their_size(session: AlchemistSession) -> None:
    m = 200_000
    a, v = values((m, 2), "float64"), np.array([1.0, -1.0])
    A, y = session.send_matrix(a), session.send_matrix(a @ v)
    assert y.shape == (m,)
    same(y - A @ v, np.zeros(m))
    same((a @ v) - A @ v, np.zeros(m))
    same(((y - A @ v) ** 2).mean(), np.float64(0))
    np.testing.assert_allclose(float(np.linalg.norm(y)), np.linalg.norm(a @ v))
    same(a[:, 0] * A[:, 1], a[:, 0] * a[:, 1])  # an operand of more than 1 MiB is sent
    same(~(A[:, 0] > 0), ~(a[:, 0] > 0))
    same(A[:, 0][3], a[3, 0])


def test_numbers_leave_the_gang_when_python_asks_for_them(session: AlchemistSession) -> None:
    a = values((4, 3), "float64")
    A = session.send_matrix(a)
    total = A.sum()
    assert total.shape == ()
    assert (float(total), int(total), complex(total)) == (a.sum(), int(a.sum()), complex(a.sum()))
    assert total.item() == a.sum()
    assert f"{total:.3f}" == f"{a.sum():.3f}"
    assert str(total) == str(a.sum())
    assert "float64" in repr(total)
    assert bool(total == a.sum())
    assert [1, 2, 3][np.argmax(a[0]) * 0 + session.xp.asarray(1)] == 2
    assert A[1].tolist() == a[1].tolist()
    assert list(A[1]) == list(a[1])
    np.testing.assert_array_equal(list(A), a)
    assert a[0, 0] in A
    assert 1000 not in A
    with pytest.raises(TypeError, match="not an index"):
        [1, 2][total]
    with pytest.raises(TypeError, match="len"):
        len(total)


def test_small_results_are_not_fetched(session: AlchemistSession) -> None:
    A = session.send_matrix(values((40, 3), "float64"), layout="MC_MR")
    for found in (
        A.sum(), A.mean(axis=0), A.max(axis=1), A[3], A[3, 2], A[:5], np.linalg.svdvals(A),
    ):  # fmt: skip
        assert found.known_elements() is not None
        np.testing.assert_array_equal(
            found.known_elements(), np.asarray(found.to_layout("VC_STAR"))
        )


def test_known_elements_are_forgotten_when_code_may_change_them(session: AlchemistSession) -> None:
    def double(comm: object, matrix: Any) -> None:
        matrix.local[...] *= 2

    total = session.send_matrix(np.ones((4, 3))).sum(axis=0)
    session.run(double, total)
    np.testing.assert_array_equal(np.asarray(total), [8, 8, 8])
    total[1] = 5
    np.testing.assert_array_equal(np.asarray(total), [8, 5, 8])


def test_integers_beyond_the_floats_stay_exact(session: AlchemistSession) -> None:
    A = session.send_matrix(np.array([[1, 2], [3, 4]]))
    big = 2**60 + 1
    same(A + big, np.array([[1, 2], [3, 4]]) + big)
    same(session.xp.full((2, 2), big), np.full((2, 2), big))


def test_a_handle_is_itself_in_sets_and_lists(session: AlchemistSession) -> None:
    A, B = session.xp.ones((2, 2)), session.xp.ones((2, 2))
    assert len({A, B, A}) == 2
    assert A in [A, B]
    assert bool((A == B).all())


def test_errors_for_invalid_operands_give_advice(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((600, 4)))
    with pytest.raises(ShapeError, match="600 x 4 and 3 x 1"):
        A + np.ones((3, 1))
    with pytest.raises(DtypeError, match="not numbers"):
        A + np.array(["x"])
    with pytest.raises(TypeError, match="unsupported operand"):
        A + "x"
    with pytest.raises(TypeError, match="unsupported operand"):
        A - [A, A]  # which NumPy would make an array of
    with pytest.raises(TypeError):
        A @ None
    with pytest.raises(DtypeError, match="bitwise_and is not defined"):
        A & A
    for number in (bool, float, int, complex):
        with pytest.raises(ValueError, match=r"\.any\(\)"):
            number(A)
        assert number(A[:1, :1]) == 1
    with (
        AlchemistSession(1) as other,
        pytest.raises(MatrixNotFoundError, match=r"send_matrix\(.*copies it there"),
    ):
        A + other.xp.ones((600, 4))


def test_results_have_the_planned_layout(session: AlchemistSession) -> None:
    for left in SOME_LAYOUTS:
        for right, shape in zip(("VC_STAR", "MC_MR", "STAR_VC"), SMALLER, strict=False):
            A = session.send_matrix(np.ones((9, 7)), layout=left)
            B = session.send_matrix(np.ones(shape), layout=right)
            plan = A.plan("add", B)
            assert (A + B).layout == plan.layout
            assert plan.moved_nbytes[0] == 0 or plan.operands[0] != left
        C = session.send_matrix(np.ones((7, 2)))
        assert (A @ C).layout == A.plan("matmul", C).layout
    with pytest.raises(ShapeError, match="do not broadcast"):
        A.plan("add", C)


def test_a_result_that_does_not_fit_names_the_operands(session: AlchemistSession) -> None:
    v = session.xp.zeros(2_000_000)
    with pytest.raises(
        ResourceError, match=r"elementwise of \(2000000, 1\) and \(2000000,\): .*GB"
    ):
        v[:, None] + v


def test_numpy_on_the_left_asks_the_handle(session: AlchemistSession) -> None:
    A = session.xp.ones((3, 2))
    for found in (
        np.float64(2) * A, np.ones((3, 2)) + A, np.ones(2) - A, np.int32(1) / A, [1, 2] * A,
        np.ones((1, 3)) @ A, np.float32(1) < A,
    ):  # fmt: skip
        assert isinstance(found, Handle)


def test_comparisons_with_none_and_text_are_element_by_element(session: AlchemistSession) -> None:
    a = np.ones((2, 3))
    A = session.send_matrix(a)
    for other in (None, "a"):
        same(other == A, a == other)
        same(other != A, a != other)
        same(other == A, other == a)
    assert not (A == None).any()  # noqa: E711
    assert (object() == A) is False
