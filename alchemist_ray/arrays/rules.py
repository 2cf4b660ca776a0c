"""Rules for operands of handles: numbers, small arrays, dtypes, axes, names; the functions."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.dtypes import DTYPES, check_unmasked
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from mpi_workers.matrix.dtypes import check_dtype
from mpi_workers.matrix.layout import MAX_AXES

INLINE_NBYTES = 1 << 20  # 1 MiB: larger NumPy operands are sent, smaller ones travel in the command
COMPARISONS: dict[str, Any] = {
    "equal": operator.eq, "not_equal": operator.ne, "less": operator.lt, "less_equal": operator.le,
    "greater": operator.gt, "greater_equal": operator.ge,
}  # fmt: skip
EXACT = 1 << 53  # integers up to here travel as they are

Number = int | float | complex
Implementation = Callable[..., Any]
FUNCTIONS: dict[Any, Implementation] = {}  # NumPy's functions that handles implement

INSTEAD = {  # of functions that are missing: code that runs as it is here, and when it is the same
    "save": "A.save('matrix.npy')",
    "eig": "np.linalg.eigh(A) for Hermitian A, else np.linalg.eig(A.fetch())",
    "eigvals": "np.linalg.eigvalsh(A) for Hermitian A, else np.linalg.eigvals(A.fetch())",
    "sort_complex": "np.sort(A)",
    "delete": "A[np.arange(len(A)) != 2], a mask of the rows that stay",
    "insert": "np.concatenate([A[:2], A[:1], A[2:]])",
    "compress": "A[A[:, 0] > 0], a mask of rows", "extract": "A[A > 0], a mask of elements",
    "place": "A[A > 0] = 1", "putmask": "A[A > 0] = 1", "copyto": "A[...] = 1",
    "rot90": "A.T[::-1]",
    "ediff1d": "np.diff(A.ravel())",
    "piecewise": "np.where(A > 0, A, -A)",
    "setxor1d": "np.setdiff1d(np.union1d(A, A), np.intersect1d(A, A))",
    "block": "np.vstack([np.hstack([A, A]), np.hstack([A, A])])",
    "dstack": "np.stack([A, A], axis=2) for matrices",
    "atleast_3d": "A[:, :, None] for a matrix", "dsplit": "np.split(A[None], 2, axis=2)",
    "rollaxis": "np.moveaxis(A, 1, 0)", "vander": "A[:, :1] ** np.arange(3)",
    "heaviside": "np.where(A > 0, 1.0, np.where(A < 0, 0.0, 0.5))",
    "choose": "np.where(A > 0, A, -A) for two choices",
    "histogram_bin_edges": "np.histogram(A)[1]", "isposinf": "A == np.inf",
    "isneginf": "A == -np.inf", "fix": "np.trunc(A)", "resize": "np.tile(A, 2)",
    "put": "A[[0, 1], [1, 0]] = 1", "array2string": "str(A)", "array_str": "str(A)",
    "array_repr": "repr(A)", "savetxt": "A.save('matrix.csv')",
}  # fmt: skip


def implements(*functions: Any) -> Callable[[Implementation], Implementation]:
    """Register an implementation of NumPy functions; its first parameter is the engine."""

    def register(implementation: Implementation) -> Implementation:
        FUNCTIONS.update(dict.fromkeys(functions, implementation))
        return implementation

    return register


def number(value: Any) -> Number | None:
    """A Python number as it takes part in NumPy's promotion; None if it is not a number.

    NumPy's own scalars are not Python numbers: their dtype counts.
    """
    if isinstance(value, np.generic) or not isinstance(value, int | float | complex):
        return None
    return value


def is_beyond(value: int, dtype: np.dtype[Any]) -> bool:
    """Whether integers of a dtype, or beside bool those of int64, cannot hold an integer."""
    limits = np.iinfo(np.int64 if dtype.kind == "b" else dtype)
    return not limits.min <= value <= limits.max


def taken_as(op: str, beside: np.dtype[Any], *, reflected: bool) -> np.dtype[Any]:
    """The dtype as which a binary function takes a Python integer beside integers."""
    types = (int, beside, None) if reflected else (beside, int, None)
    found: np.dtype[Any] = getattr(np, op).resolve_dtypes(types)[0 if reflected else 1]
    return found


def is_array(value: Any) -> bool:
    """Whether `value` is an array of NumPy's, or becomes one with nothing fetched."""
    if isinstance(value, list | tuple):
        return not any(isinstance(item, MatrixRef) for item in value)
    return isinstance(value, np.ndarray | np.generic)


def is_foreign(value: Any) -> bool:
    """Whether `value` is an array of another library in this process, as a Series of pandas is."""
    return hasattr(value, "__array__") and not isinstance(
        value, MatrixRef | np.ndarray | np.generic
    )


def operand(value: Any, beside: np.dtype[Any] | None = None) -> NDArray[Any]:
    """A NumPy operand in a dtype that a matrix can have, beside one of another dtype.

    Raises
    ------
    DtypeError
        If its elements are not numbers, or some are masked.
    ShapeError
        If it has more axes than arrays on ranks.
    """
    check_unmasked(value, "the operand")
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise DtypeError(
            f"elements of dtype {array.dtype} are not numbers: if all of them are, x.astype(float) "
            "makes floats"
        )
    if array.ndim > MAX_AXES:
        raise ShapeError(
            f"an array of shape {array.shape} cannot be an operand: arrays on ranks have up to "
            f"{MAX_AXES} axes"
        )
    return array.astype(matrix_dtype(array.dtype, beside), copy=False)


def matrix_dtype(have: np.dtype[Any], beside: np.dtype[Any] | None = None) -> np.dtype[Any]:
    """The dtype of a matrix for elements of `have`, with NumPy's promotion beside another."""
    common = have if beside is None or have.name in DTYPES else np.promote_types(have, beside)
    if common.name not in DTYPES:
        raise DtypeError(
            f"a matrix cannot have dtype {have}: convert to one of {', '.join(DTYPES)}"
        )
    return common.newbyteorder("=")


def checked_dtype(dtype: Any) -> np.dtype[Any]:
    """One of `DTYPES`. Raises `DtypeError`."""
    try:
        return check_dtype(dtype)
    except ValueError as error:
        raise DtypeError(str(error)) from None


def plain_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype that something names. Raises `DtypeError`."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise DtypeError(f"{dtype!r} is not a dtype") from None
    return found


def require_same_categories(what: str, A: Any, B: Any) -> None:
    """Refuse two handles whose codes count other texts. Raises `DtypeError`."""
    if not (getattr(A, "columns", ()) and getattr(B, "columns", ())):
        return
    for a, b in zip(A.columns, B.columns, strict=False):
        its = getattr(a, "categories", ()), getattr(b, "categories", ())
        if all(its) and its[0] != its[1]:
            raise DtypeError(
                f"{what}: the codes of column {str(a)!r} count other categories in both: send them "
                "together (pandas.concat, pyarrow.concat_tables), or with the same categories"
            )


def encode_operand(array: NDArray[Any]) -> tuple[bytes, list[int], str]:
    """A small array as arguments of the ranks' routines: elements, shape, dtype.

    Elements are little-endian and C-ordered.
    """
    values = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return values.tobytes(), list(array.shape), array.dtype.name


def encode_index(index: NDArray[np.int64]) -> bytes:
    """Indices as arguments of the ranks' routines: little-endian int64."""
    return index.astype("<i8", copy=False).tobytes()


def axis_index(axis: Any, ndim: int) -> int:
    """An axis as 0 to `ndim` - 1. Raises `ShapeError`."""
    try:
        return range(ndim)[operator.index(axis)]
    except (IndexError, TypeError):
        raise ShapeError(f"axis={axis!r} is not an axis of a {ndim}-D array") from None


def along(axis: Any, ndim: int) -> int | None:
    """An axis as 0 to `ndim` - 1; None stands for all elements."""
    return None if axis is None else axis_index(axis, ndim)


def along_or_number(axis: Any, ndim: int) -> int | None:
    """As NumPy's older functions take a number: as a vector with one element."""
    return None if ndim == 0 and axis in (0, -1) else along(axis, ndim)


def at(axis: int, part: Any) -> tuple[Any, ...]:
    """The index of a part along an axis."""
    return (*(slice(None),) * axis, part)


def flat(a: Any) -> Any:
    """An array of three axes or more as a vector: for what does not depend on the shape."""
    return np.ravel(a) if np.ndim(a) > 2 else a


def axes_of(axis: Any, ndim: int) -> list[int]:
    """The axes that NumPy's `axis` stands for, None for all of them. Raises `ShapeError`."""
    if axis is None or (ndim == 0 and axis in (0, -1)):  # as NumPy has it
        return list(range(ndim))
    found = [axis_index(one, ndim) for one in (axis if isinstance(axis, tuple) else (axis,))]
    if len(set(found)) < len(found):
        raise ShapeError(f"axis={axis!r} names an axis twice")
    return sorted(found)


def shape_of(shape: Any) -> tuple[int, ...]:
    """A shape of an array. Raises `ShapeError`."""
    try:
        found = tuple(
            operator.index(length) for length in (shape if np.iterable(shape) else (shape,))
        )
    except TypeError:
        raise ShapeError(f"shape {shape!r}: it must be integers") from None
    if len(found) > MAX_AXES or min(found, default=0) < 0:
        raise ShapeError(
            f"shape {shape!r}: arrays on ranks have up to {MAX_AXES} axes, and lengths must be >= 0"
        )
    return found


def reshaped(have: tuple[int, ...], shape: Any) -> tuple[int, ...]:
    """A shape for the elements of another, with -1 replaced. Raises `ShapeError`."""
    try:
        wanted = [operator.index(n) for n in (shape if np.iterable(shape) else (shape,))]
    except TypeError:
        raise ShapeError(f"shape {shape!r}: it must be integers") from None
    size, known = math.prod(have), math.prod(n for n in wanted if n != -1)
    if wanted.count(-1) == 1 and known and size % known == 0:
        wanted[wanted.index(-1)] = size // known
    if min(wanted, default=0) < 0 or math.prod(wanted) != size:
        raise ShapeError(f"an array of shape {have} cannot become one of shape {shape!r}")
    return shape_of(wanted)


def unsupported(what: str, instead: str = "") -> BadArgumentError:
    """The error for what handles cannot do: it says what can be done."""
    hint = instead or "take what you need with .fetch(), or run your own code with als.run"
    return BadArgumentError(f"{what} is not supported for matrices on ranks: {hint}")


def fetching(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call as code that fetches the handles in it, which are named A, B, ..."""
    letters: dict[int, str] = {}

    def told(value: Any) -> str:
        if isinstance(value, MatrixRef):
            return letters.setdefault(value.id, chr(ord("A") + len(letters))) + ".fetch()"
        if isinstance(value, tuple | list):
            inner = ", ".join(map(told, value))
            left, right = "()" if isinstance(value, tuple) else "[]"
            return f"{left}{inner}{',' if left == '(' and len(value) == 1 else ''}{right}"
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        return getattr(value, "__name__", "...")

    given = [told(x) for x in args]
    given += [f"{key}={told(x)}" for key, x in kwargs.items() if x is not np._NoValue]
    return f"{name}({', '.join(given)})"
