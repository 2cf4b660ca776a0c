"""``A[rows, cols]`` of a handle selects the elements that NumPy selects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.arrays import rules
from alchemist_ray.errors import MatrixError, ShapeError
from tests.alchemist_ray.arrays.checks import few, layouts, lengths, same, values

bounds = st.none() | st.integers(-11, 11)
steps = st.none() | st.integers(-3, 3).filter(bool)
slices = st.builds(slice, bounds, bounds, steps)
integers = st.integers(-9, 8)
lists = st.lists(integers, min_size=1, max_size=5)
masks = st.lists(st.booleans(), min_size=1, max_size=9)
indices = slices | integers | lists | lists.map(np.array) | masks.map(np.array)


def fits(index: Any, length: int) -> bool:
    try:
        found = np.arange(length)[index]
    except IndexError:
        return False
    return bool(np.size(found))


@given(m=lengths, n=lengths, layout=layouts, rows=indices, cols=indices, one=st.booleans())
@few
def test_any_index(
    session: AlchemistSession, m: int, n: int, layout: str, rows: Any, cols: Any, one: bool
) -> None:
    a = values((m, n), "float64")
    A = session.send_matrix(a, layout=layout)
    if not fits(rows, m) or not (one or fits(cols, n)):
        with pytest.raises(ShapeError):
            A[rows if one else (rows, cols)]
        return
    if one:
        same(A[rows], a[rows])
        return
    if not isinstance(rows, slice | int) and not isinstance(cols, slice | int):
        with pytest.raises(ShapeError, match=r"np\.ix_"):
            A[rows, cols]
        outer = np.ix_(np.arange(m)[rows], np.arange(n)[cols])
        same(A[outer], a[outer])
        return
    same(A[rows, cols], a[rows, cols])


def test_masks_that_live_on_the_gang(session: AlchemistSession) -> None:
    a = values((9, 6), "float64")
    A = session.send_matrix(a, layout="MC_MR")
    same(A[A[:, :1] > 0], a[a[:, 0] > 0])
    same(A[:, A[:1] > 0], a[:, a[0] > 0])
    same(A[A[:, :1] > 0, 1:3], a[a[:, 0] > 0, 1:3])
    same(A[A[:, 0] > 0], a[a[:, 0] > 0])
    same(A[A[:, 0] > 0, 2], a[a[:, 0] > 0, 2])
    with pytest.raises(ShapeError, match=r"np\.where\(mask, A, 0\)"):
        A[A > 0]
    with pytest.raises(ShapeError, match="only zeros"):
        A[A[:, :1] > 100]


def test_types_of_indexed_results(session: AlchemistSession) -> None:
    a = values((5, 4), "float32")
    A = session.send_matrix(a)
    assert isinstance(A[:2], Handle)
    assert isinstance(A[[0, 1]], Handle)
    assert isinstance(A[2:3], Handle)
    assert isinstance(A[2], np.ndarray)
    assert type(A[2, 3]) is np.float32
    assert type(A[-1, -1]) is np.float32
    same(A[...], a)
    same(A[..., 1], a[..., 1])
    same(A[1, ...], a[1])
    same(A[:], a)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (9, "index 9 is out of range for 5 rows"),
        ((0, -7), "index -7 is out of range for 4 columns"),
        ([0, 5], "index 5 is out of range for 5 rows"),
        (slice(2, 2), "leaves none of 5 rows"),
        (slice(None, None, 0), "zero"),
        ([], "no rows are asked for"),
        ([True] * 4, "mask of 4 for 5 rows"),
        (None, "two, always"),
        ((0, 0, 0), "3 indices"),
        (1.5, "not by a float"),
        ("a", "not by a str"),
        (True, "a mask has an element for each"),
        (np.ones((2, 2), int), "1-D mask"),
        ([0.5], "not by float64"),
        ((..., ...), "one ellipsis"),
    ],
)
def test_errors_for_wrong_indices_name_the_fault(
    session: AlchemistSession, key: Any, words: str
) -> None:
    A = session.send_matrix(values((5, 4), "float32"))
    with pytest.raises(ShapeError, match=words):
        A[key]


def test_long_lists_and_lines_are_for_the_gang(session: AlchemistSession) -> None:
    m = rules.SMALL // 8 + 5
    A = session.xp.from_function(lambda i, j: i + j, (m, 2))
    column = A[:, 1]
    assert isinstance(column, Handle)
    assert column.shape == (m, 1)
    assert column[-1, 0] == m
    with pytest.raises(MatrixError, match="send a mask with send_matrix"):
        A[np.arange(m)]
    assert A[column % 2 == 0].shape == (m // 2, 2)
    same(A[2:5, 0], np.array([2.0, 3.0, 4.0]))
