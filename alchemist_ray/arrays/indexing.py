"""``A[...]`` and ``A[...] = B``: NumPy's indices reduced to selections that the ranks carry out.

An index becomes one selection for each stored axis, or a mask of all elements, or lists of
positions; see `ali/arrays/selecting.py`.
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.dtypes import check_range, check_unmasked
from alchemist_ray.errors import BadIndexError, MatrixError, ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef

WHOLE = slice(None)
AXES = ("rows", "columns")
Selection = range | NDArray[np.int64] | Any  # Any: a vector on the ranks


@dataclass(frozen=True, slots=True)
class _Parsed:
    """An index, by stored axis.

    Attributes
    ----------
    rows, cols : Selection
    drop : str
        Axes that an integer selects, and new axes, as `part` of the ranks' library takes them.
    shape : tuple of int, optional
        The shape of a result that `part` cannot give: elements that two lists pick.
    """

    rows: Selection
    cols: Selection
    drop: str
    shape: tuple[int, ...] | None = None

    def arguments(self) -> dict[str, Any]:
        """For `part` and `assign`."""
        found: dict[str, Any] = {"drop": self.drop}
        for name, selection in (("row", self.rows), ("col", self.cols)):
            found[f"{name}s"] = []
            if isinstance(selection, range):
                found[f"{name}s"] = [selection.start, selection.step, len(selection)]
            elif isinstance(selection, np.ndarray):
                found[f"{name}_list"] = rules.encode_index(selection)
            else:
                found[f"{name}_vector"] = selection
        return found


def get(engine: Engine, A: Any, key: Any) -> Any:
    """See `Handle.__getitem__`."""
    _check_unmasked(key)
    mask = _whole_mask(engine, A, key)
    if mask is not None:
        return engine.call("elements", A, mask)
    table = _table(key)
    if table is not None:
        return _picked_by_table(engine, A, key, table)
    parsed = _parsed(engine, A, key)
    if parsed.shape is not None:
        lists = [rules.encode_index(np.asarray(one)) for one in (parsed.rows, parsed.cols)]
        return engine.call("pick", A, *lists, list(parsed.shape))
    found = engine.call("part", A, columns=_columns(A, parsed), **parsed.arguments())
    if isinstance(parsed.rows, range) and isinstance(parsed.cols, range):
        found.mark_part_of(A)  # a view in NumPy
    return found


def _columns(A: Any, parsed: _Parsed) -> list[str]:
    """Names of the columns of a matrix that is a part of A.

    A selection that is on the ranks counts if this process knows its elements.
    """
    if not A.columns or parsed.drop:
        return []
    chosen = parsed.cols
    if isinstance(chosen, MatrixRef):
        known = chosen.known_elements()
        if known is None:
            return []
        chosen = np.flatnonzero(known) if known.dtype.kind == "b" else known
    return [A.columns[i] for i in chosen]


def put(engine: Engine, A: Any, key: Any, value: Any) -> None:
    """See `Handle.__setitem__`."""
    _check_unmasked(key)
    mask = _whole_mask(engine, A, key)
    if isinstance(value, int | np.integer):  # as NumPy: an error if it is out of range
        value = bool(value) if A.dtype.kind == "b" else int(value)
    elif getattr(value, "dtype", None) == np.uint64:
        check_range(value, A.dtype, "the value of an assignment")
        value = value.astype(A.dtype)  # float64, its common dtype with int64, would lose digits
    if A.dtype.kind in "if" and np.iscomplexobj(value):
        if type(value) is complex:  # as NumPy, which warns of arrays and of its own numbers
            raise TypeError(f"{value} cannot be an element of an array of {A.dtype}")
        text = "an assignment discards the imaginary parts"
        warnings.warn(text, np.exceptions.ComplexWarning, stacklevel=3)
    if type(value) in (float, complex):  # others are checked on the ranks
        check_range(np.asarray(value), A.dtype, "the value of an assignment")
    filling = engine.matrix(value, A)
    A.forget_elements()
    if mask is not None:
        engine.call("assign_elements", A, mask, filling)
        return
    table = _table(key)
    if table is None:
        parsed = _parsed(engine, A, key)
    else:
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) != A.ndim or not all(_is_list(one) or _is_integer(one) for one in keys):
            raise ShapeError("the index gives 3 dimensions: arrays on ranks have up to two")
        parsed = _paired(A, [np.asarray(one) for one in (*keys, 0)[:2]], [])
    if parsed.shape is not None:
        lists = [rules.encode_index(np.asarray(one)) for one in (parsed.rows, parsed.cols)]
        engine.call("put_elements", A, *lists, list(parsed.shape), filling)
        return
    if parsed.drop in ("row", "column", "vector"):
        raise rules.unsupported(
            "None in the index of an assignment",
            "leave it out, and give the value the shape of A[...] without None",
        )
    engine.call("assign", A, filling, **parsed.arguments())


def _check_unmasked(key: Any) -> None:
    for one in key if isinstance(key, tuple) else (key,):
        check_unmasked(one, "the index")


def _table(key: Any) -> int | None:
    """Where in an index the only array of integers with two dimensions is; None if nowhere."""
    keys = key if isinstance(key, tuple) else (key,)
    found = [i for i, one in enumerate(keys) if _is_list(one) and len(np.shape(one)) == 2]
    if len(found) != 1 or sum(map(_is_list, keys)) != 1:
        return None
    kind = keys[found[0]].dtype if hasattr(keys[found[0]], "dtype") else np.asarray(
        keys[found[0]]).dtype  # fmt: skip
    return None if kind.kind == "b" else found[0]


def _picked_by_table(engine: Engine, A: Any, key: Any, place: int) -> Any:
    """As NumPy: the elements at each index of a matrix of indices, in its shape."""
    keys = key if isinstance(key, tuple) else (key,)
    table = keys[place] if isinstance(keys[place], MatrixRef) else np.asarray(keys[place])
    flat = engine.reshape(table, -1) if isinstance(table, MatrixRef) else table.reshape(-1)
    found = get(engine, A, (*keys[:place], flat, *keys[place + 1 :]))
    if found.ndim != 1:
        raise ShapeError(
            f"the index gives {found.ndim + 1} dimensions: arrays on ranks have up to two"
        )
    return engine.reshape(found, table.shape)


def _whole_mask(engine: Engine, A: Any, key: Any) -> Any:
    """The mask of all elements that an index is, as a handle; else None."""
    key = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(key, list):
        key = np.asarray(key) if not any(isinstance(x, MatrixRef) for x in key) else key
    given = key
    if not isinstance(given, MatrixRef | np.ndarray) or given.dtype.kind != "b":
        return None
    if len(given.shape) != A.ndim:
        return None
    if key.shape != A.shape:
        if A.ndim == 1:
            raise BadIndexError(
                f"a mask of {key.shape[0]} elements does not fit {A.shape[0]} rows: give one "
                "element for each"
            )
        raise BadIndexError(f"a mask of shape {key.shape} does not fit an array of shape {A.shape}")
    return engine.matrix(key)


def _parsed(engine: Engine, A: Any, key: Any) -> _Parsed:
    keys, new = _expanded(A, key)
    if _outer(keys):
        keys = [np.asarray(keys[0])[:, 0], np.asarray(keys[1])[0]]
        paired = False
    else:
        paired = sum(_is_list(one) for one in keys) == 2
    if paired:
        return _paired(A, keys, new)
    found = [_selection(engine, one, A, axis) for axis, one in enumerate(keys)]
    integers = [isinstance(one, int) for one in found]
    rows, cols = (
        [range(one, one + 1) if isinstance(one, int) else one for one in (*found, range(1))[:2]]
        if found
        else (range(1), range(1))
    )
    drop = "".join(name for name, is_int in zip("rc", integers, strict=False) if is_int)
    if A.ndim == 1 and drop == "r":
        drop = "rc"
    if not new:
        return _Parsed(rows, cols, drop)
    left = len(found) - sum(integers)
    if left + len(new) > 2:
        raise ShapeError(
            f"the index gives {left + len(new)} dimensions: arrays on ranks have up to two"
        )
    if left + len(new) == 1:
        return _Parsed(rows, cols, "vector")
    return _Parsed(rows, cols, "row" if left and new[0] == 0 else "column")


def _expanded(A: Any, key: Any) -> tuple[list[Any], list[int]]:
    """One index for each axis of A, and the positions of new axes in the result."""
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1:
        raise BadIndexError("an index can have only one ellipsis (...)")
    given = sum(one is not None and one is not Ellipsis for one in keys)
    if given > A.ndim:
        raise BadIndexError(f"{given} indices for an array of shape {A.shape}")
    fill = [WHOLE] * (A.ndim - given)
    if dots:
        keys[dots[0] : dots[0] + 1] = fill
    else:
        keys += fill
    new, position = [], 0
    for one in keys:
        if one is None:
            new.append(position)
        position += one is None or not _is_integer(one)
    if len(keys) == 3 and _is_integer(keys[0]) and keys[1] is None and _is_list(keys[2]):
        new = [1]  # as NumPy: an axis between two indices moves what they select to the front
    return [one for one in keys if one is not None], new


def _is_integer(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _is_list(given: Any) -> bool:
    if isinstance(given, MatrixRef):
        return len(given.shape) > 0
    return isinstance(given, list | tuple | np.ndarray) and np.ndim(given) > 0


def _outer(keys: list[Any]) -> bool:
    """Whether they come from `numpy.ix_`: a column of rows and a row of columns."""
    return (
        len(keys) == 2
        and all(isinstance(one, np.ndarray) and one.ndim == 2 for one in keys)
        and keys[0].shape[1] == keys[1].shape[0] == 1
    )


def _paired(A: Any, keys: list[Any], new: list[int]) -> _Parsed:
    """Two lists: NumPy picks single elements, at their indices in pairs."""
    if new:
        raise rules.unsupported(
            "an index of two lists with None",
            "index first, and then add the axis: A[i, j][:, None]",
        )
    for one in keys:
        _check_length(int(np.prod(one.shape)) if isinstance(one, MatrixRef) else 0)
    keys = [np.asarray(one) if isinstance(one, MatrixRef) else one for one in keys]
    lists = [_list(one, A.stored_shape[axis], AXES[axis]) for axis, one in enumerate(keys)]
    try:
        rows, cols = np.broadcast_arrays(*lists)
    except ValueError:
        raise BadIndexError(
            f"lists of {lists[0].shape} rows and {lists[1].shape} columns do not broadcast: "
            "write A[np.ix_(rows, cols)] for whole rows and columns"
        ) from None
    if rows.ndim > 2:
        raise ShapeError(f"the index gives {rows.ndim} dimensions: arrays on ranks have up to two")
    _check_length(rows.size)
    return _Parsed(rows.reshape(-1), cols.reshape(-1), "", rows.shape)


def _selection(engine: Engine, given: Any, A: Any, axis: int) -> Selection | int:
    """One index, checked; raises `BadIndexError`."""
    what, length = AXES[axis], A.shape[axis]
    if isinstance(given, slice):
        try:
            return range(length)[given]
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{what}: {error}") from None
    if isinstance(given, MatrixRef) and given.shape:
        if len(given.shape) != 1 or given.dtype.kind not in "bi":
            raise BadIndexError(
                f"{what} cannot be selected by a {given.dtype} array of shape {given.shape}: give "
                "a vector of integers or of bool"
            )
        return given
    if _is_list(given):
        index = _list(given, length, what)
        if index.ndim != 1:
            raise BadIndexError(
                f"{what} cannot be selected by an array of shape {index.shape}: give a list or a "
                "1-D mask"
            )
        return index if index.nbytes <= rules.SMALL else engine.sent(index)
    if isinstance(given, bool | np.bool_):
        raise BadIndexError(
            f"{given} does not select {what}: give a comparison such as A[A > 0], or a mask of "
            f"{length} elements"
        )
    try:
        return range(length)[operator.index(given)]
    except TypeError:
        raise BadIndexError(
            f"{what} are selected by slices, integers, lists of integers and masks, not by a "
            f"{type(given).__name__}"
        ) from None
    except IndexError:
        raise BadIndexError(f"index {given} is out of range for {length} {what}") from None


def _list(listed: Any, length: int, what: str) -> NDArray[np.int64]:
    """Indices >= 0, from a list of indices or a 1-D mask."""
    given = np.asarray(listed)
    if given.dtype.kind == "b" and given.ndim == 1:
        if given.size != length:
            raise BadIndexError(
                f"a mask of {given.size} elements does not fit {length} {what}: give one element "
                "for each"
            )
        return np.flatnonzero(given).astype(np.int64)
    if not given.size and not isinstance(listed, np.ndarray):  # an empty list has no dtype
        return given.astype(np.int64)
    if given.dtype.kind not in "iu":
        raise BadIndexError(f"{what} are selected by integers, not by {given.dtype}")
    index = given.astype(np.int64)
    wrong = (index < -length) | (index >= length)
    if wrong.any():
        raise BadIndexError(f"index {index[wrong][0]} is out of range for {length} {what}")
    return np.where(index < 0, index + length, index)


def _check_length(count: int) -> None:
    if 8 * count > rules.SMALL:
        raise MatrixError(
            f"two lists of {count:,} indices are too long to be sent in a command: use a mask of "
            "A's shape, or fetch the rows"
        )
