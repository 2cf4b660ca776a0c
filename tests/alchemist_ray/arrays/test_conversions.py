"""No conversion on the ranks makes another number of nan, inf or what is out of range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, DtypeError, RoutineError
from tests.support.suite import part

WRONG = [
    (np.nan, "int64"), (np.inf, "int32"), (-np.inf, "int64"), (1e30, "int64"), (2.0**31, "int32"),
    (np.float32(2.0**63), "int64"), (np.int64(2**31), "int32"), (np.uint64(2**63), "int64"),
    (1e300, "float32"), (np.complex128(1e300j), "complex64"), (np.int64(100_000), "float16"),
    (-1, "uint8"), (np.int16(300), "uint8"),
]  # fmt: skip
WAYS = {
    "slice": lambda A, x: A.__setitem__(slice(1, 3), x),
    "element": lambda A, x: A.__setitem__((3, 1), x),
    "row of an array": lambda A, x: A.__setitem__(1, np.array([0, x, 0], np.asarray(x).dtype)),
    "mask": lambda A, x: A.__setitem__(A == 0, x),
    "elements of a mask": lambda A, x: A.__setitem__(A == 0, np.full(12, x)),
    "lists": lambda A, x: A.__setitem__(([0, 1], [1, 2]), x),
    "handle": lambda A, x: A.__setitem__(..., like(A, x)),
    "astype": lambda A, x: like(A, x).astype(A.dtype),
    "asarray": lambda A, x: A.__array_namespace__().asarray(np.asarray(x), dtype=A.dtype),
}


def like(A: Any, x: Any) -> Any:
    """The number in one element of a matrix, which one rank has."""
    found = np.zeros(A.shape, np.asarray(x).dtype)
    found[2, 1] = x
    return A.__array_namespace__().asarray(found)


def test_it_is_refused_and_nothing_changes(
    session: AlchemistSession, subtests: pytest.Subtests
) -> None:
    refusal = r"cannot hold|int too large|bounds"
    for turn, (number, dtype) in enumerate(WRONG):
        for way in part([*WAYS], turn, 2):
            with subtests.test(number=number, dtype=dtype, way=way):
                A = session.xp.zeros((4, 3), dtype=dtype)
                with pytest.raises((DtypeError, OverflowError), match=refusal):
                    WAYS[way](A, number)
                np.testing.assert_array_equal(A.fetch(), np.zeros((4, 3)))


def test_fractions_are_cut_off_and_what_fits_is_taken(session: AlchemistSession) -> None:
    a = np.array([1.9, -1.9, 2.0**31 - 0.5, -(2.0**31) - 0.5])
    A = session.send_matrix(a)
    np.testing.assert_array_equal(A.astype("int32").fetch(), a.astype("int32"))
    assert A.astype(bool).fetch().all()
    wide = session.send_matrix(np.array([np.nan, np.inf, -np.inf, 3e38]))
    np.testing.assert_array_equal(wide.astype("float32").fetch(), wide.fetch().astype("float32"))
    assert wide.astype(bool).fetch().all()


def test_the_advice_names_what_to_do(session: AlchemistSession) -> None:
    A = session.xp.asarray([1.0, np.nan])
    with pytest.raises(DtypeError, match="element nan, which int64 cannot hold: replace it first"):
        A.astype(int)
    with pytest.raises(DtypeError, match="choose int64"):
        session.xp.asarray([1 << 40]).astype("int32")


def test_a_function_on_the_ranks_cannot_do_it_either(session: AlchemistSession) -> None:
    with pytest.raises((DtypeError, RoutineError), match="cannot hold") as caught:
        session.xp.from_function(lambda i, j: i / j, (3, 3), dtype=int)
    assert isinstance(caught.value, AlchemistError)
