"""``A[...]`` and ``A[...] = B``: NumPy's indices reduced to selections that the ranks carry out.

An index becomes one selection for each axis, or a mask of all elements, or the positions of single
elements; see `ali/arrays/selecting.py`.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.dtypes import check_range, check_unmasked
from alchemist_ray.errors import BadIndexError, MatrixError, ShapeError

WHOLE = slice(None)
NEW = -1  # in place of an axis of A: an axis of length 1
UNKNOWN = -1  # how many elements a mask on the ranks selects
Selection = range | NDArray[np.int64] | Any  # Any: a vector on the ranks


class _Part:
    """One selection for each axis of an array, and the axes of the result.

    Attributes
    ----------
    selections : list of Selection
    axes : list of int
        For each axis of the result, that of A, or `NEW`: an integer selects the others.
    """

    def __init__(self, engine: Engine, A: Any, keys: Sequence[Any]) -> None:
        self.selections: list[Selection] = []
        self.axes: list[int] = []
        for one in keys:
            if one is None:
                self.axes.append(NEW)
                continue
            axis = len(self.selections)
            found = _selection(engine, one, A, axis)
            if isinstance(found, int):
                found = range(found, found + 1)
            else:
                self.axes.append(axis)
            self.selections.append(found)

    @property
    def is_view(self) -> bool:
        """Whether NumPy would make a view of it."""
        return all(isinstance(one, range) for one in self.selections)

    def is_everything(self, A: Any) -> bool:
        """Whether it is a copy of A: with all elements and axes, in order."""
        ordered = self.is_view and self.axes == list(range(A.ndim))
        return ordered and self.selections == [range(n) for n in A.shape]

    @property
    def shape(self) -> list[int]:
        """Of the result."""
        return [1 if axis == NEW else _count(self.selections[axis]) for axis in self.axes]

    def arguments(self) -> dict[str, Any]:
        """For `part` and `assign` of the ranks."""
        steps: list[int] = []
        found: dict[str, Any] = {"steps": steps, "lists": []}
        for axis, one in enumerate(self.selections):
            if isinstance(one, range):
                steps += [one.start, one.step, len(one)]
                continue
            steps += [0, 0, -1]
            if isinstance(one, np.ndarray):
                found["lists"].append(rules.encode_index(one))
            else:
                found["lists"].append(b"")
                found |= {"vector": one, "axis": axis}
        return found


def _count(selection: Selection) -> int:
    if isinstance(selection, MatrixRef) and selection.dtype.kind == "b":
        return UNKNOWN
    return int(selection.shape[0]) if isinstance(selection, MatrixRef) else len(selection)


def get(engine: Engine, A: Any, key: Any) -> Any:
    """See `Handle.__getitem__`."""
    copied = any(isinstance(one, np.ndarray) for one in (key if isinstance(key, tuple) else (key,)))
    key = _plain(key)
    mask = _whole_mask(engine, A, key)
    if mask is not None:
        return engine.selected(A, mask)
    whole, keys = _without_tables(engine, A, expanded(A, key))
    lists = [one for one in keys if _is_list(one)]
    if lists and not _outer(lists) and (len(lists) > 1 or not _together(keys)):
        if all(_is_list(one) or _is_integer(one) for one in keys):
            rows, cols, shape = _positions(whole, keys)
            return engine.call("pick", whole, rows, cols, shape)
        whole, keys = _one_list(engine, whole, keys)
    if any(len(np.shape(one)) > 1 for one in keys if _is_list(one)) and not _outer(lists):
        return _table(engine, whole, keys)
    keys = [np.ravel(one) if isinstance(one, np.ndarray) else one for one in keys]
    part = _Part(engine, whole, keys)
    whole = engine.recorder.original(whole)
    if part.is_everything(whole) and not whole.recording:
        return engine.recorder.view(engine.astype(whole, whole.dtype), whole)
    found = engine.call("part", whole, shape=part.shape, columns=_columns(whole, part),
                        **part.arguments())  # fmt: skip
    return found.mark_part_of(A) if part.is_view and not copied else found


def put(engine: Engine, A: Any, key: Any, value: Any) -> None:
    """See `Handle.__setitem__`."""
    key = _plain(key)
    mask = _whole_mask(engine, A, key)
    if isinstance(value, int | np.integer):  # as NumPy: an error if it is out of range
        value = {"b": bool, "f": float, "c": float}.get(A.dtype.kind, int)(value)
    elif getattr(value, "dtype", None) == np.uint64:
        check_range(value, A.dtype, "the value of an assignment", cut=True)
        value = value.astype(A.dtype)  # float64, its common dtype with int64, would lose digits
    if A.dtype.kind in "if" and np.iscomplexobj(value):
        if type(value) is complex:  # as NumPy, which warns of arrays and of its own numbers
            raise TypeError(f"{value} cannot be an element of an array of {A.dtype}")
        text = "an assignment discards the imaginary parts"
        warnings.warn(text, np.exceptions.ComplexWarning, stacklevel=3)
    if type(value) in (float, complex):  # others are checked on the ranks
        check_range(np.asarray(value), A.dtype, "the value of an assignment", cut=True)
    filling = engine.matrix(value, A)
    rules.require_same_categories("an assignment", A, filling)
    if mask is not None:
        engine.call("assign_elements", A, mask, filling)
        return
    keys = expanded(A, key)
    dots = any(index is Ellipsis for index in (key if isinstance(key, tuple) else (key,)))
    if keys and filling.ndim and all(map(_is_integer, keys)) and not dots:
        raise ShapeError(f"a value of shape {filling.shape} does not broadcast to one element")
    first: Any = keys[0] if keys else None
    rest = keys[1:]
    if _mask_axes(first) > 1 and filling.ndim <= len(rest) and all(map(_is_whole, rest)):
        chosen = engine.reshape(engine.matrix(first), (*first.shape, *(1,) * len(rest)))
        put(engine, A, ..., engine.where(chosen, filling, A))
        return
    if any(_mask_axes(index) > 1 for index in keys):
        whole, keys = _without_tables(engine, A, keys)
        put(engine, whole.mark_copy(), tuple(keys), filling)
        put(engine, A, ..., engine.reshape(whole, A.shape))
        return
    lists = [index for index in keys if _is_list(index)]
    single = len(lists) == 1 and len(np.shape(lists[0])) == 1 and _together(keys)
    if lists and not (single or _outer(lists)):
        rows, cols, shape = _positions(A, keys)
        engine.call("put_elements", A, rows, cols, shape, filling)
        return
    part = _Part(
        engine, A, [np.ravel(index) if isinstance(index, np.ndarray) else index for index in keys]
    )
    engine.call("assign", A, filling, shape=part.shape, axes=part.axes, **part.arguments())


def accumulate(engine: Engine, in_place: Any, A: Any, key: Any, value: Any) -> None:
    """``np.add.at(A, key, value)``: ``A[key] += value`` in which repeated indices all count.

    `in_place` is `operator.iadd` or `operator.isub`.
    """
    keys = expanded(A, _plain(key))
    if not any(_is_list(one) and not _mask_axes(one) for one in keys):  # nothing is repeated
        part = get(engine, A, key)
        own = part.copy() if part.shape else part.flatten()  # numbers have no operators in place
        put(engine, A, key, engine.reshape(in_place(own, value), part.shape))
        return
    first = keys[0]
    if _is_list(first) and len(np.shape(first)) == 1 and all(map(_is_whole, keys[1:])):
        chosen: Any = _selection(engine, first, A, 0)
        length = A.shape[0]
        if isinstance(first, MatrixRef):
            chosen = engine.where(chosen < 0, chosen + length, chosen)
        shape = (*chosen.shape, *A.shape[1:])
    else:
        rows, cols = _places(A, keys)
        chosen = rows * math.prod(A.shape[1:]) + cols
        length = A.size
        shape = rows.shape
    given = engine.matrix(value, A)
    if given.shape != shape:
        given = engine.broadcast(given, shape)
    if length == A.size:
        given = engine.reshape(given, -1)
    sums = engine.call("segment_sum", given, engine.matrix(np.ravel(chosen)), length)
    in_place(A, engine.reshape(sums, A.shape))


def expanded(A: Any, key: Any) -> list[Any]:
    """One index for each axis of A, and None for each new one: without an ellipsis.

    Raises
    ------
    BadIndexError
        If there are too many.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    dots = [i for i, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1:
        raise BadIndexError("an index can have only one ellipsis (...)")
    given = sum(_mask_axes(one) or 1 for one in keys if one is not None and one is not Ellipsis)
    if given > A.ndim:
        raise BadIndexError(f"{given} indices for an array of shape {A.shape}")
    place = dots[0] if dots else len(keys)
    keys[place : place + 1] = [WHOLE] * (A.ndim - given)
    return keys


def _mask_axes(one: Any) -> int:
    """How many axes a mask selects from; 0 for an index that is not a mask."""
    return len(one.shape) if getattr(one, "dtype", None) == np.bool_ else 0


def _plain(key: Any) -> Any:
    """A key with arrays of other libraries, such as pandas, as NumPy's; masked ones are refused.

    An integer array of shape () selects like its number.
    """
    several = key if isinstance(key, tuple) else (key,)
    found = []
    for one in several:
        check_unmasked(one, "the index")
        one = np.asarray(one) if rules.is_foreign(one) else one
        number = isinstance(one, MatrixRef | np.ndarray) and not one.shape
        found.append(operator.index(one) if number and one.dtype.kind in "iu" else one)
    return tuple(found) if isinstance(key, tuple) else found[0]


def _columns(A: Any, part: _Part) -> list[str]:
    """Names of the columns of a matrix that is a part of A.

    A selection that is on the ranks counts if this process knows its elements.
    """
    if not A.columns or part.axes != [0, 1]:
        return []
    chosen = part.selections[1]
    if isinstance(chosen, MatrixRef):
        known = chosen.known_elements()
        if known is None:
            return []
        chosen = np.flatnonzero(known) if known.dtype.kind == "b" else known
    return [A.columns[i] for i in chosen]


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


# --- several lists, masks and tables -----------------------------------------------------


def _is_integer(given: Any) -> bool:
    return isinstance(given, int | np.integer) and not isinstance(given, bool)


def _is_list(given: Any) -> bool:
    if isinstance(given, MatrixRef):
        return len(given.shape) > 0
    return isinstance(given, list | tuple | np.ndarray) and np.ndim(given) > 0


def _is_whole(one: Any) -> bool:
    return isinstance(one, slice) and one == WHOLE


def _outer(lists: Sequence[Any]) -> bool:
    """Whether they come from `numpy.ix_`: each selects along an axis of its own."""
    n = len(lists)
    return n > 1 and all(
        isinstance(one, np.ndarray) and one.ndim == n and one.size == one.shape[i]
        for i, one in enumerate(lists)
    )


def _together(keys: Sequence[Any]) -> bool:
    """Whether lists and integers follow one another: else NumPy moves their axis to the front."""
    places = [i for i, one in enumerate(keys) if _is_list(one) or _is_integer(one)]
    return not places or places[-1] - places[0] == len(places) - 1


def _without_tables(engine: Engine, A: Any, keys: list[Any]) -> tuple[Any, list[Any]]:
    """Masks of several axes as lists: their axes become one."""
    found: list[Any] = []
    axis = 0
    for one in keys:
        n = _mask_axes(one)
        if n > 1:
            there = A.shape[axis : axis + n]
            if tuple(one.shape) != there:
                raise BadIndexError(
                    f"a mask of shape {tuple(one.shape)} does not fit the axes from {axis} on of "
                    f"an array of shape {A.shape}"
                )
            shape = (*A.shape[:axis], math.prod(there), *A.shape[axis + n :])
            A = engine.reshape(A, shape)
            one = engine.reshape(one, -1) if isinstance(one, MatrixRef) else np.ravel(one)
        found.append(one)
        axis += one is not None
    return A, found


def _indices(A: Any, keys: Sequence[Any]) -> list[Any]:
    """The lists and integers of an index, checked, with None for slices; broadcast."""
    items = [one for one in keys if one is not None]
    found = [
        None if isinstance(one, slice)
        else _list(np.asarray(one) if isinstance(one, MatrixRef) else one, A.shape[axis],
                   _name(A, axis))
        for axis, one in enumerate(items)
    ]  # fmt: skip
    shapes = [one.shape for one in found if one is not None]
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        told = " and ".join(map(str, shapes))
        raise BadIndexError(
            f"lists of shapes {told} do not broadcast: write A[np.ix_(rows, cols)] for whole rows "
            "and columns"
        ) from None
    return [None if one is None else np.broadcast_to(one, shape) for one in found]


def _one_list(engine: Engine, A: Any, keys: list[Any]) -> tuple[Any, list[Any]]:
    """The axes that lists and integers select become one, with one list.

    As in NumPy, it takes the place of the first if they follow one another, else the front.
    """
    index = _indices(A, keys)
    listed = [axis for axis, one in enumerate(index) if one is not None]
    others = [axis for axis in range(A.ndim) if axis not in listed]
    together = _together(keys)
    first = listed[0] if together else 0
    A = engine.permute(A, [*others[:first], *listed, *others[first:]])
    lengths, rest = A.shape[first : first + len(listed)], A.shape[first + len(listed) :]
    A = engine.reshape(A, (*A.shape[:first], math.prod(lengths), *rest))
    shape = index[listed[0]].shape
    chosen = [np.ravel(index[axis]) for axis in listed]
    flat = np.ravel_multi_index(chosen, lengths).reshape(shape)
    places = [i for i, one in enumerate(keys) if _is_list(one) or _is_integer(one)]
    left = [one for i, one in enumerate(keys) if i not in places]
    at = places[0] if together else 0
    return A, [*left[:at], flat, *left[at:]]


def _table(engine: Engine, A: Any, keys: list[Any]) -> Any:
    """A list with several axes: they take the place of one."""
    place = next(i for i, one in enumerate(keys) if _is_list(one))
    table = keys[place] if isinstance(keys[place], MatrixRef) else np.asarray(keys[place])
    flat = engine.reshape(table, -1) if isinstance(table, MatrixRef) else np.ravel(table)
    found = get(engine, A, (*keys[:place], flat, *keys[place + 1 :]))
    before = sum(not _is_integer(one) for one in keys[:place]) if _together(keys) else 0
    return engine.reshape(found, (*found.shape[:before], *table.shape, *found.shape[before + 1 :]))


def _positions(A: Any, keys: Sequence[Any]) -> tuple[bytes, bytes, list[int]]:
    """`_places` for a command."""
    rows, cols = _places(A, keys)
    if 8 * rows.size > rules.INLINE_NBYTES:
        raise MatrixError(
            f"lists of {rows.size:,} indices are too long to be sent in a command: use a mask of "
            "A's shape, or fetch the rows"
        )
    return rules.encode_index(np.ravel(rows)), rules.encode_index(np.ravel(cols)), list(rows.shape)


def _places(A: Any, keys: Sequence[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The row and column in the stored matrix of each single element that an index selects."""
    key = tuple(np.asarray(one) if isinstance(one, MatrixRef) else one for one in keys)
    if all(_is_list(one) or _is_integer(one) for one in key):
        rows, *others = _indices(A, key)
    else:
        try:
            rows, *others = (
                np.broadcast_to(
                    np.arange(n).reshape([-1 if i == axis else 1 for i in range(A.ndim)]), A.shape
                )[key]
                for axis, n in enumerate(A.shape)
            )
        except IndexError as error:
            raise BadIndexError(f"an array of shape {A.shape}: {error}") from None
    cols = np.zeros(rows.shape, np.int64)
    for one, length in zip(others, A.shape[1:], strict=True):
        cols = cols * length + one
    return rows, cols


# --- one axis ----------------------------------------------------------------------------


def _name(A: Any, axis: int) -> str:
    """The selection of an index along an axis, for messages."""
    return ("rows", "columns")[axis] if A.ndim < 3 else f"elements of axis {axis}"


def _selection(engine: Engine, given: Any, A: Any, axis: int) -> Selection | int:
    """One index, checked; raises `BadIndexError`."""
    what = _name(A, axis)
    length = A.shape[axis]
    if isinstance(given, slice):
        try:
            return range(length)[given]
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{what}: {error}") from None
    if isinstance(given, MatrixRef) and given.shape:
        if len(given.shape) != 1 or given.dtype.kind not in "biu":
            raise BadIndexError(
                f"{what} cannot be selected by a {given.dtype} array of shape {given.shape}: give "
                "a vector of integers or of bool"
            )
        return given
    if _is_list(given):
        index = _list(given, length, what)
        return index if index.nbytes <= rules.INLINE_NBYTES else engine.sent(index)
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
    """Indices >= 0, from indices or a 1-D mask."""
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
