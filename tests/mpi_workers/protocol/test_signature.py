"""Arguments are checked against the signature, which every message shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.protocol.signature import (
    MATRIX,
    REQUIRED,
    TYPES,
    Parameter,
    Result,
    Signature,
    coerce,
    from_json,
)

SVD = Signature(
    "svd",
    (Parameter("A", MATRIX), Parameter("rank", "int"), Parameter("tol", "float", 0.0),
     Parameter("names", "list[string]", None)),
    (Result("S", MATRIX), Result("error", "float")),
    "Decompose.",
)  # fmt: skip


def matrix(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(type(value).__name__)
    return f"<{value}>"


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (True, "bool", True), (np.bool_(False), "bool", False), (3, "int", 3),
        (np.uint8(3), "int", 3), (np.array(3), "int", 3), (-(1 << 63), "int", -(1 << 63)),
        (3, "float", 3.0), (np.float32(0.5), "float", 0.5), (np.int64(2), "float", 2.0),
        (2, "complex", 2 + 0j), (np.complex64(1j), "complex", 1j),
        (np.float64(2), "complex", 2 + 0j), ("text", "string", "text"),
        (np.str_("text"), "string", "text"), ([1, np.int8(2)], "list[int]", [1, 2]),
        ((1, 2.5), "list[float]", [1.0, 2.5]), (np.arange(3), "list[int]", [0, 1, 2]),
        (range(2), "list[complex]", [0j, 1 + 0j]), ([], "list[bool]", []),
        (["a"], "list[string]", ["a"]),
    ],
)  # fmt: skip
def test_exact_values_become_plain_python(value: Any, kind: str, expected: Any) -> None:
    found = coerce(value, kind)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(found, list):
        assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize(
    ("value", "kind", "named"),
    [
        (1, "bool", "int"), (True, "int", "bool"), (np.True_, "int", "bool"), (1.0, "int", "float"),
        ("1", "int", "str"), (1 << 63, "int", "over 64 bits"),
        (np.uint64(1 << 63), "int", "over 64 bits"), (10**400, "float", "over 64 bits"),
        (10**400, "complex", "over 64 bits"), (True, "float", "bool"), (1j, "float", "complex"),
        ("1", "float", "str"), (True, "complex", "bool"), (None, "complex", "NoneType"),
        (b"x", "string", "bytes"), (None, "string", "NoneType"), ("ab", "list[string]", "str"),
        (b"ab", "list[int]", "bytes"), (3, "list[int]", "int"), ({1}, "list[int]", "set"),
        ([1, 2.5], "list[int]", "float"), ([1.5], "list[int]", "float"),
        (np.ones(2), "list[int]", "float"), (np.zeros((2, 2)), "list[float]", "ndarray"),
        ([True], "list[int]", "bool"), (1, "no such type", "int"),
    ],
)  # fmt: skip
def test_a_conversion_that_loses_information_is_refused(value: Any, kind: str, named: str) -> None:
    with pytest.raises(TypeError, match=named) as error:
        coerce(value, kind)
    assert "interpreted" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [([1, -2], 1 - 2j), ("1-2j", 1 - 2j), (3, 3), ("x", "x"), (["x", 1], ["x", 1]), ([1], [1])],
)
def test_complex_numbers_of_json_are_pairs_or_words(value: Any, expected: Any) -> None:
    assert from_json(value, "complex") == expected
    assert from_json([value], "list[complex]") == [expected]
    assert from_json(value, "list[float]") is value


@given(
    st.sampled_from([kind for kind in TYPES if kind != MATRIX]),
    st.one_of(
        st.integers(),
        st.floats(),
        st.complex_numbers(),
        st.booleans(),
        st.text(),
        st.binary(),
        st.none(),
        st.lists(st.one_of(st.integers(), st.floats(), st.booleans(), st.text())),
    ),
)
def test_any_value_is_accepted_or_refused_with_a_type_error(kind: str, value: Any) -> None:
    try:
        once = coerce(value, kind)
    except TypeError:
        return
    assert repr(coerce(once, kind)) == repr(once)


def test_arguments_are_bound_by_position_and_name_with_defaults() -> None:
    bound = {"A": "<a>", "rank": 3, "tol": 0.0, "names": None}
    assert SVD.bind(("a", 3), {}, matrix) == SVD.bind(("a", 3, 0, None), {}, matrix) == bound
    assert SVD.bind((), {"names": ["x"], "rank": 3, "A": "a", "tol": 1}, matrix) == {
        "A": "<a>",
        "rank": 3,
        "tol": 1.0,
        "names": ["x"],
    }
    assert SVD.bind(("a", 3), {"names": None}, matrix)["names"] is None


@pytest.mark.parametrize(
    ("args", "kwargs", "what"),
    [
        ((), {}, "svd needs 'A'"),
        (("a",), {}, "svd needs 'rank'"),
        (("a", 1, 0.0, None, 5), {}, "svd takes 4 arguments, not 5"),
        (("a", 1), {"rnk": 2}, "svd has no parameter 'rnk'"),
        (("a", 1), {"A": "a"}, "svd got 'A' twice"),
        (("a", 1.5), {}, "svd requires 'rank' to be of type int, not float"),
        (("a", None), {}, "svd requires 'rank' to be of type int, not NoneType"),
        ((3, 1), {}, "svd requires 'A' to be of type matrix, not int"),
        (("a", 1, "x"), {}, "svd requires 'tol' to be of type float, not str"),
        (("a", 1), {"names": "x"}, r"svd requires 'names' to be of type list\[string\], not str"),
    ],
)
def test_wrong_arguments_are_refused_with_the_signature(
    args: tuple[Any, ...], kwargs: dict[str, Any], what: str
) -> None:
    with pytest.raises(Failure, match=what) as error:
        SVD.bind(args, kwargs, matrix)
    assert error.value.kind == "BadArgumentError"
    assert str(error.value).endswith(f"Its signature: {SVD}")


def test_arrays_of_more_than_two_axes_are_for_routines_that_take_them() -> None:
    flat, deep = np.zeros((2, 3)), np.zeros((2, 3, 4))
    f, every = (Signature("f", (Parameter("A", MATRIX),), (), "", axes) for axes in (False, True))
    assert [Signature.from_map(one.to_map()) for one in (f, every)] == [f, every]
    assert f.bind((flat,), {}, np.shape) == every.bind((flat,), {}, np.shape) == {"A": (2, 3)}
    assert every.bind((deep,), {}, np.shape) == {"A": (2, 3, 4)}
    with pytest.raises(Failure, match=r"f: A has the shape \(2, 3, 4\)") as error:
        f.bind((deep,), {}, np.shape)
    assert error.value.kind == "ShapeError"


def test_a_signature_is_printed_as_in_python() -> None:
    assert str(SVD) == (
        "svd(A: matrix, rank: int, tol: float = 0.0, names: list[string] = None)"
        " -> S: matrix, error: float"
    )
    assert str(Signature("f", (), ())) == "f() -> nothing"


def test_a_signature_survives_its_map() -> None:
    fields = SVD.to_map()
    again = Signature.from_map(fields)
    assert again == SVD
    assert [p.default is REQUIRED for p in again.parameters] == [True, True, False, False]
    assert fields["parameters"][0] == ["A", MATRIX]
