"""Small plain values in a frame's map: typed, never pickled.

Scalars, strings and bytes are stored directly; lists, tuples, dicts, NumPy scalars and arrays
under a tag; a matrix as its number. Large values and values of other types are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LIMIT = 64 << 10  # 64 KiB per value, approximately
MAX_DEPTH = 16  # of nested containers
ALIGNMENT = 64
_NUMBERS = "biufc"  # kinds of dtype

Number = Callable[[Any], int | None]  # of a matrix; None for other values


class NotPlain(Exception):
    """The value is not plain: it must be pickled."""


def encode(value: Any, matrix: Number) -> Any:
    """The representation of a value in a frame's map. Raises `NotPlain`."""
    return _Encoder(matrix).encode(value, 0)


class _Encoder:
    def __init__(self, matrix: Number) -> None:
        self._matrix = matrix
        self._left = LIMIT

    def _take(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise NotPlain

    def encode(self, value: Any, depth: int) -> Any:
        self._take(16)
        kind = type(value)
        if value is None or kind in (bool, float, complex):
            return value
        if kind is int:
            if -(2**63) <= value < 2**63:
                return value
            raise NotPlain
        if kind in (str, bytes):
            self._take(len(value))
            if kind is str and not _is_text(value):
                raise NotPlain
            return value
        if kind in (list, tuple, dict):
            return self._container(value, kind, depth + 1)
        if isinstance(value, np.generic) or kind is np.ndarray:
            return self._numbers(value, kind)
        number = self._matrix(value)
        if number is None:
            raise NotPlain
        return {"matrix": number}

    def _container(self, value: Any, kind: type, depth: int) -> dict[str, Any]:
        if depth > MAX_DEPTH or len(value) > self._left:
            raise NotPlain
        if kind is dict:
            pairs = [[self.encode(k, depth), self.encode(v, depth)] for k, v in value.items()]
            return {"dict": pairs}
        return {kind.__name__: [self.encode(item, depth) for item in value]}

    def _numbers(self, value: Any, kind: type) -> dict[str, Any]:
        self._take(value.nbytes)
        if value.dtype.kind not in _NUMBERS or (value.flags.fnc and kind is np.ndarray):
            raise NotPlain
        if kind is np.ndarray:
            return {"array": [value.dtype.str, list(value.shape), value.tobytes()]}
        return {"number": [value.dtype.str, value.tobytes()]}


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates
        return False
    return True


def decode(encoded: Any, matrix: Callable[[int], Any]) -> Any:
    """The value of a representation; `matrix` returns the matrix of a number.

    Raises
    ------
    ValueError
        If `encode` cannot have produced it.
    """
    if not isinstance(encoded, dict):
        return encoded
    ((tag, content),) = encoded.items()
    match tag:
        case "matrix":
            return matrix(content)
        case "list":
            return [decode(item, matrix) for item in content]
        case "tuple":
            return tuple(decode(item, matrix) for item in content)
        case "dict":
            return {decode(key, matrix): decode(item, matrix) for key, item in content}
        case "array":
            dtype, shape, raw = content
            return np.frombuffer(raw, _dtype(dtype)).reshape(shape).copy()
        case "number":
            dtype, raw = content
            return np.frombuffer(raw, _dtype(dtype))[0]
    raise ValueError(f"unknown value {tag!r}")


def _dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS:
        raise ValueError(f"dtype {name!r}")
    return dtype


def places(sizes: Sequence[int]) -> list[slice]:
    """Where parts of these bytes begin and end in one vector: each array in them is aligned."""
    found, at = [], 0
    for nbytes in sizes:
        found.append(slice(at, at + nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found
