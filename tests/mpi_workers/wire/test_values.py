"""Plain values in a frame's map."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as npst

from mpi_workers.wire.frames import Kind, decode_body
from mpi_workers.wire.frames import encode as frame
from mpi_workers.wire.values import LIMIT, NotPlain, decode, encode

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=20),
    st.binary(max_size=20),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text("abc", max_size=3), inner, max_size=4),
    ),
    max_leaves=12,
)


def through(value: Any) -> Any:
    body = decode_body(frame(Kind.COMMAND, {"value": encode(value, lambda _: None)})[20:])
    return decode(body["value"], lambda number: number)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b)


@given(VALUES)
def test_a_value_is_decoded_unchanged(value: Any) -> None:
    assert same(through(value), value)


@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, min_side=0, max_side=4)))
def test_arrays_of_numbers_are_decoded_unchanged_and_writable(array: np.ndarray[Any, Any]) -> None:
    try:
        twin = through(array)
    except NotPlain:
        assert array.dtype.kind not in "biufc"
        return
    assert twin.dtype == array.dtype
    assert twin.shape == array.shape
    assert twin.tobytes() == array.tobytes()
    assert twin.flags.writeable


def test_numpy_scalars_stay_numpy_scalars() -> None:
    for value in (np.float32(1.5), np.int8(-3), np.bool_(True), np.complex64(1j)):
        assert type(through(value)) is type(value)
        assert through(value) == value


class Str(str): ...


@pytest.mark.parametrize(
    "value",
    [2**63, "\ud800", Str("x"), {1, 2}, object(), np.array(["a"]), b"x" * LIMIT, [0] * LIMIT,
     np.zeros(LIMIT // 8), np.asfortranarray(np.ones((2, 3))), np.datetime64("2020-01-01")],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_large_values_and_other_types_are_not_plain(value: Any) -> None:
    for wrapped in (value, [value], {"x": (value,)}):
        with pytest.raises(NotPlain):
            encode(wrapped, lambda _: None)


def test_a_recursive_list_is_not_plain() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlain):
        encode(endless, lambda _: None)


def test_matrices_are_encoded_as_numbers() -> None:
    marks = {"A": 5}
    encoded = encode([1, ("A?",)], lambda v: None)
    assert decode(encoded, lambda n: n) == [1, ("A?",)]

    class Matrix: ...

    mine = Matrix()
    encoded = encode({"m": [mine]}, lambda v: marks["A"] if v is mine else None)
    assert decode(encoded, lambda number: f"matrix {number}") == {"m": ["matrix 5"]}


@pytest.mark.parametrize(
    "encoded",
    [{"evil": 1}, {}, {"list": [1], "tuple": [2]}, {"array": ["|O", [1], b"12345678"]},
     {"array": ["<f8", [3], b"12345678"]}, {"number": ["|O", b"12345678"]}],
)  # fmt: skip
def test_an_invalid_representation_is_refused(encoded: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(msgpack.unpackb(msgpack.packb(encoded)), lambda number: number)
