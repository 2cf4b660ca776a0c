"""``A[rows, cols]`` of a handle selects the elements that NumPy selects."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.arrays import rules
from alchemist_ray.errors import BadIndexError, MatrixError, ShapeError
from tests.alchemist_ray.arrays.checks import dtypes, few, layouts, lengths, same, values

bounds = st.none() | st.integers(-11, 11)
steps = st.none() | st.integers(-3, 3).filter(bool)
slices = st.builds(slice, bounds, bounds, steps)
integers = st.integers(-9, 8)
lists = st.lists(integers, max_size=5)
masks = st.lists(st.booleans(), min_size=1, max_size=9)
numbers = integers.map(np.array)  # arrays of shape (): they select like integers
indices = slices | integers | numbers | lists | lists.map(np.array) | masks.map(np.array)


@given(
    m=lengths, n=lengths, layout=layouts, dtype=dtypes, rows=indices, cols=indices,
    one=st.booleans(), vector=st.booleans(),
)  # fmt: skip
@few
def test_any_index(
    session: AlchemistSession, m: int, n: int, layout: str, dtype: str, rows: Any, cols: Any,
    one: bool, vector: bool,
) -> None:  # fmt: skip
    a = values((m,) if vector else (m, n), dtype)
    A = session.send_matrix(a, layout=layout)
    key = rows if one or vector else (rows, cols)
    try:
        expected = a[key]
    except (IndexError, ValueError):
        with pytest.raises(ShapeError):
            A[key]
        return
    same(A[key], expected)


@given(
    m=lengths, n=lengths, layout=layouts, dtype=dtypes, rows=indices, cols=indices,
    one=st.booleans(), shape=st.sampled_from(["number", "same", "row", "column", "vector"]),
)  # fmt: skip
@few
def test_any_assignment(
    session: AlchemistSession, m: int, n: int, layout: str, dtype: str, rows: Any, cols: Any,
    one: bool, shape: str,
) -> None:  # fmt: skip
    a = values((m, n), dtype)
    A = session.send_matrix(a, layout=layout)
    key = rows if one else (rows, cols)
    try:
        target = a[key].shape
    except (IndexError, ValueError):
        with pytest.raises(ShapeError):
            A[key] = 1
        return
    lengths_of = {
        "number": (), "same": target, "row": (1, *target[-1:]), "column": (*target[:1], 1),
        "vector": target[-1:],
    }  # fmt: skip
    value = values(lengths_of[shape], "int32", 5)
    value = abs(value) if dtype.startswith("u") else value  # -1 is refused, where NumPy wraps
    for filling in (value, session.xp.asarray(value)):
        b = a.copy()
        B = session.send_matrix(b, layout=layout)
        try:
            b[key] = value
        except (ValueError, TypeError):
            with pytest.raises(ShapeError, match="does not broadcast"):
                B[key] = filling
            continue
        B[key] = filling
        same(B, b)


def test_masks_that_live_on_the_gang(session: AlchemistSession) -> None:
    a = values((9, 6), "float64")
    A = session.send_matrix(a, layout="MC_MR")
    rows, cols = a[:, 0] > 0, a[0] > 0
    same(A[A[:, 0] > 0], a[rows])
    same(A[:, A[0] > 0], a[:, cols])
    same(A[A[:, 0] > 0, 1:3], a[rows, 1:3])
    same(A[A[:, 0] > 0, 2], a[rows, 2])
    same(A[A > 0], a[a > 0])
    same(A[a > 0], a[a > 0])
    same(A[A > 100], a[a > 100])
    same(A[np.where(A[:, 0] > 0)[0]], a[rows])
    A[A < 0] = 0
    a[a < 0] = 0
    same(A, a)
    A[A > 2] = np.arange((a > 2).sum())
    a[a > 2] = np.arange((a > 2).sum())
    same(A, a)
    A[A[:, 0] > 0, 1] = A[A[:, 0] > 0, 2] + 1
    a[a[:, 0] > 0, 1] = a[a[:, 0] > 0, 2] + 1
    same(A, a)


def test_further_indices(session: AlchemistSession) -> None:
    a = values((5, 4), "float32")
    A, v = session.send_matrix(a), session.send_matrix(a[:, 0])
    table = np.array([[0, 3], [-1, 2]])
    for found, expected in [
        (A[...], a), (A[..., 1], a[..., 1]), (A[1, ...], a[1]), (A[:], a), (A[2, 3], a[2, 3]),
        (v[:, None], a[:, :1]), (v[None], a[None, :, 0]), (v[None, 1:3], a[None, 1:3, 0]),
        (v[..., None], a[:, :1]), (A[[0, 2], [1, 3]], a[[0, 2], [1, 3]]),
        (A[[4, -1], 2], a[[4, -1], 2]),
        (A[[[0], [2]], [1, 3]], a[[[0], [2]], [1, 3]]), (A[[]], a[[]]), (A[3:1], a[3:1]),
        (A[a[:, 0] > 1][:, [1, 0]], a[a[:, 0] > 1][:, [1, 0]]),
        (A[:, 0, None], a[:, 0, None]), (A[None, 2], a[None, 2]), (A[2, :, None], a[2, :, None]),
        (A[None, 1:3, 0], a[None, 1:3, 0]), (A[1, 2, None], a[1, 2, None]),
        (v[None, 0], a[None, 0, 0]),
        (A[1, None, 2, None], a[1, None, 2, None]), (A[0, 0][None], a[0, 0][None]),
        (v[table], a[table, 0]), (A[table, 1], a[table, 1]), (A[2, table], a[2, table]),
        (v[session.xp.asarray(table)], a[table, 0]),
    ]:  # fmt: skip
        same(found, expected)


def test_assignment_to_elements_that_indices_pick(session: AlchemistSession) -> None:
    a = values((5, 4), "float64")
    table = np.array([[0, 3], [-1, 2]])
    for key, value in [
        (([0, 4, 0], [1, 1, 1]), [7.0, 8, 9]), (([[0], [2]], [3, 1]), [5, 6]), ((table, 1), 4),
        ((1, table), [[1, 2]]),
    ]:  # fmt: skip
        for layout in ("VC_STAR", "STAR_VR", "MC_MR", "STAR_STAR", "CIRC_CIRC"):
            b, B = a.copy(), session.send_matrix(a, layout=layout)
            b[key] = value
            B[key] = value
            same(B, b)
    v, w = session.send_matrix(a[:, 0]), a[:, 0].copy()
    v[table] = session.xp.asarray([[1.0], [2.0]])
    w[table] = [[1], [2]]
    same(v, w)
    B, b = session.send_matrix(a), a.copy()
    B[table] = b[table] = 1
    same(B, b)
    v[:, None] = w[:, None] = np.arange(5.0)[:, None]
    same(v, w)
    with pytest.raises(TypeError, match="element of an array of float64"):
        v[0] = 1j
    with pytest.warns(np.exceptions.ComplexWarning):
        v[:2] = np.array([1j, 2])


def test_parts_are_copies_and_say_so_where_an_assignment_would_be_lost(
    session: AlchemistSession,
) -> None:
    a = np.ones((5, 4))
    A = session.send_matrix(a)
    part = A[1:3]
    with pytest.raises(MatrixError, match=r"a copy of elements of matrix\d+.*\.copy\(\)"):
        part[0] = 7
    mine = part.copy()
    mine[0] = 7
    same(A, a)
    chosen = A[[0, 1]]  # a copy in NumPy as well
    chosen[0] = 7
    same(A, a)
    views: list[Any] = [
        lambda A: A.T, lambda A: A.reshape(-1), lambda A: A.ravel(), lambda A: A[:, None, 0],
        lambda A: np.swapaxes(A, 0, 1), lambda A: A[1:][:, ::2], lambda A: np.flip(A.T, 0),
        lambda A: np.expand_dims(A[:, 1], 0), lambda A: (A + 0j).real if A.size else A,
    ]  # fmt: skip
    for work in views[:-1]:
        with pytest.raises(MatrixError, match=r"a copy of elements of matrix\d+"):
            work(A)[...] = 7
    for work in (lambda A: A.flatten(), lambda A: np.reshape(A, -1, copy=True), *views):
        work(A + 0)[...] = 7  # no handle refers to the array that NumPy would change
    Z = A + 1j
    with pytest.raises(MatrixError, match="a copy of elements of"):
        Z.real[0] = 7
    rest = A[1:].copy()
    rest = rest[1:]
    rest[0] = 7
    assert rest.fetch()[0, 0] == 7
    same(A, a)
    A[1:3] = A[:2] + 1
    A[::-1] = A
    a[1:3] = a[:2] + 1
    a[::-1] = a.copy()
    same(A, a)


WRONG: list[tuple[Any, str]] = [
    (9, "index 9 is out of range for 5 rows"),
    ((slice(None), -5), "index -5 is out of range for 4 columns"),
    ((0, -7), "index -7 is out of range for 4 columns"),
    ([0, 5], "index 5 is out of range for 5 rows"),
    (([0, 1], [0, 4]), "index 4 is out of range for 4 columns"),
    ([True] * 4, "mask of 4 elements does not fit 5 rows"),
    (np.ones((4, 5), bool), r"mask of shape \(4, 5\) does not fit an array of shape \(5, 4\)"),
    ((0, 0, 0), "3 indices"),
    (1.5, "not by a float"),
    ("a", "not by a str"),
    ([0.5], "not by float64"),
    ((..., ...), "one ellipsis"),
    (([0, 1], [0, 1, 2]), r"np\.ix_"),
]


@pytest.mark.parametrize(("key", "words"), WRONG)
def test_a_wrong_index_is_an_index_error_that_names_the_fault(
    session: AlchemistSession, key: Any, words: str
) -> None:
    a = values((5, 4), "float32")
    A = session.send_matrix(a)
    for work in (operator.getitem, lambda x, key: operator.setitem(x, key, 1)):
        with pytest.raises(IndexError):
            work(a, key)
        with pytest.raises(BadIndexError, match=words):
            work(A, key)


@pytest.mark.parametrize(
    ("key", "words"), [(slice(None, None, 0), "zero"), (True, "a mask of 5 elements")]
)
def test_other_wrong_indices(session: AlchemistSession, key: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        session.send_matrix(values((5, 4), "float32"))[key]


def test_an_array_of_shape_nothing_is_an_integer_whose_part_is_a_copy(
    session: AlchemistSession,
) -> None:
    a = values((5, 4), "float64")
    A, i = session.send_matrix(a), np.array(2)
    for one in (i, session.send_matrix(i), A[:, 0].argmax(), np.array(2, "uint8")):
        j = int(one)
        for mine, numpys in (
            (A[one], a[j]), (A[:, one], a[:, j]), (A[one, one], a[j, j]), (A[..., one], a[..., j]),
            (A[one, [0, 2]], a[j, [0, 2]]), (A[one, None], a[j, None]), (A[one, 1:], a[j, 1:]),
            (np.take(A, one, axis=1), a[:, j]), (np.take(A, one), a.ravel()[j]),
        ):  # fmt: skip
            same(mine, numpys)
    part = A[i]
    part[0] = 7  # as in NumPy: it is no view
    same(A, a)
    A[i] = a[2] = 9
    A[:, i] += 1
    a[:, 2] += 1
    np.add.at(A, i, 1)
    np.add.at(a, i, 1)
    same(A, a)
    with pytest.raises(BadIndexError):
        A[np.array(2.0)]
    with pytest.raises(BadIndexError):
        A[np.array(5)]


@pytest.mark.parametrize("on_ranks", [False, True])
def test_a_mask_of_several_axes_beside_others(session: AlchemistSession, on_ranks: bool) -> None:
    image = np.random.default_rng(0).random((8, 6, 3))
    chosen, planes = image[..., 1] > 0.5, image[0] > 0.5
    count = int(chosen.sum())
    for key, value in (
        ((chosen, 0), 0), ((chosen, 1), np.arange(count)), ((chosen, slice(1, 3)), [1, 2]),
        ((chosen, slice(None, None, -1)), [[7, 8, 9]]), ((2, planes), -1), ((chosen, None, 0), 3),
        ((chosen, np.array(2)), 4), ((slice(2, 4), planes), 5),
    ):  # fmt: skip
        for layout in ("VC_STAR", "MC_MR"):
            b, B = image.copy(), session.send_matrix(image, layout=layout)
            mine = tuple(
                session.send_matrix(one) if on_ranks and np.ndim(one) == 2 else one for one in key
            )
            same(B[mine], b[key])
            b[key] = value
            B[mine] = value
            same(B, b)


def test_long_lists_go_to_the_gang(session: AlchemistSession) -> None:
    m = rules.INLINE_NBYTES // 8 + 5
    A = session.xp.from_function(lambda i, j: i + j, (m, 2))
    column = A[:, 1]
    assert column.shape == (m,)
    assert column[-1] == m
    same(A[np.arange(m)[::-1]][:3, 0], np.arange(m - 1.0, m - 4, -1))
    assert A[column % 2 == 0].shape == (m // 2, 2)
    same(A[2:5, 0], np.array([2.0, 3.0, 4.0]))
