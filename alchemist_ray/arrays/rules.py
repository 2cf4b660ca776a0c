"""What goes together with a handle, and as what: numbers, small arrays, dtypes, axes, names."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.dtypes import DTYPES
from alchemist_ray.errors import BadArgumentError, DtypeError, MatrixError, ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef

SMALL = 1 << 20  # 1 MiB: NumPy arrays up to here travel in a command, or come in its reply
EXACT = 1 << 53  # integers up to here travel as they are

# The functions of linalg's `elementwise` and `apply`; a test compares them with its own tables.
BINARY = frozenset({
    "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "power", "minimum",
    "maximum", "arctan2", "hypot", "equal", "not_equal", "less", "less_equal", "greater",
    "greater_equal", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or",
    "bitwise_xor", "left_shift", "right_shift", "logaddexp", "copysign", "nextafter",
})  # fmt: skip
UNARY = frozenset({
    "negative", "abs", "sign", "conj", "real", "imag", "square", "sqrt", "reciprocal", "exp",
    "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan", "arcsin", "arccos", "arctan",
    "sinh", "cosh", "tanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "trunc", "rint",
    "isnan", "isinf", "isfinite", "signbit", "logical_not",
})  # fmt: skip
Number = int | float | complex


def number(value: Any) -> Number | None:
    """A Python number as it takes part in NumPy's promotion; None if it is not a number.

    NumPy's own scalars are not Python numbers: their dtype counts.
    """
    if isinstance(value, np.generic) or not isinstance(value, int | float | complex):
        return None
    return int(value) if isinstance(value, bool) else value


def is_array(value: Any) -> bool:
    """Whether `value` is an array of NumPy's, or becomes one with nothing fetched."""
    if isinstance(value, list | tuple):
        return not any(isinstance(item, MatrixRef) for item in value)
    return isinstance(value, np.ndarray | np.generic)


def operand(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A NumPy operand as a small matrix beside one of `dtype`: 1-D is a row, as NumPy has it.

    Raises
    ------
    DtypeError
        If its elements are not numbers.
    ShapeError
        If it has three dimensions or more, or no elements.
    MatrixError
        If it is too large to travel with an expression.
    """
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise DtypeError(f"elements of dtype {array.dtype} are not numbers")
    if array.ndim > 2 or not array.size:
        raise ShapeError(
            f"an array of shape {array.shape} does not go with a matrix: it must have one or two "
            "dimensions, and elements"
        )
    if array.nbytes > SMALL:
        raise MatrixError(
            f"an array of shape {array.shape} has {array.nbytes:,} bytes, and up to {SMALL:,} "
            "travel with an expression: send it first, with send_matrix, and use the handle"
        )
    return np.atleast_2d(array).astype(matrix_dtype(array.dtype, dtype), copy=False)


def matrix_dtype(have: np.dtype[Any], beside: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """The dtype of a matrix for elements of `have`, with NumPy's promotion beside another."""
    if have.kind != "b" and have.name in DTYPES:
        return have.newbyteorder("=")
    if beside is None:
        common = np.promote_types(have, np.int32) if have.kind in "biu" else have
    else:
        common = np.promote_types(have, beside)
    common = np.dtype(np.float32) if common == np.float16 else common
    if common.name not in DTYPES:
        raise DtypeError(f"elements of dtype {have} are none of {', '.join(DTYPES)}: convert them")
    return common


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """One of the six, bool as int32. Raises `DtypeError`."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise DtypeError(f"{dtype!r} is not a dtype") from None
    if found.kind == "b":
        return np.dtype(np.int32)
    if found.name not in DTYPES:
        raise DtypeError(f"dtype {found}: a matrix is one of {', '.join(DTYPES)}")
    return found


def encode_operand(array: NDArray[Any]) -> tuple[bytes, int, int, str]:
    """A small matrix as arguments of the ranks' routines: elements, rows, columns, dtype.

    Elements are little-endian, row by row.
    """
    m, n = array.shape
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes(), m, n, array.dtype.name


def decode_result(values: bytes, dtype: str) -> NDArray[Any]:
    """The elements of a reply, as a new 1-D array."""
    kind = np.dtype(dtype)
    return np.frombuffer(values, kind.newbyteorder("<")).astype(kind)


def axis_of(axis: Any) -> int | None:
    """0, 1 or None (both) for an axis as NumPy takes it. Raises `ShapeError`."""
    if axis is None:
        return None
    given = axis if isinstance(axis, tuple) else (axis,)
    try:
        found = [range(2)[one] for one in given]
    except (IndexError, TypeError):
        raise ShapeError(f"axis={axis!r}: a matrix has the axes 0 and 1") from None
    if len(set(found)) < len(found):
        raise ShapeError(f"axis={axis!r} names an axis twice")
    if len(found) == 2:
        return None
    if not found:
        raise ShapeError("axis=() reduces nothing")
    return found[0]


def shape_of(shape: Any) -> tuple[int, int]:
    """A shape of a matrix. Raises `ShapeError`."""
    try:
        m, n = (int(length) for length in shape)
    except (TypeError, ValueError):
        raise ShapeError(f"shape {shape!r}: a matrix has two dimensions") from None
    if m < 1 or n < 1:
        raise ShapeError(f"shape {shape!r}: a matrix has at least one row and one column")
    return m, n


def unsupported(what: str, instead: str = "") -> BadArgumentError:
    """The error for what handles cannot do: it says what can be done."""
    hint = instead or "take what you need with .fetch(), or run your own code with als.run"
    return BadArgumentError(f"{what} is not supported for matrices on ranks: {hint}")
