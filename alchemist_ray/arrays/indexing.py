"""``A[rows, cols]``: what of a matrix is asked for, and how the ranks pick it."""

from __future__ import annotations

import operator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.errors import MatrixError, ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef

Index = slice | int | NDArray[np.int64] | Any
WHOLE = slice(None)
OUTER = (
    "two lists pick single elements in NumPy: for whole rows and columns write "
    "A[np.ix_(rows, cols)], for elements fetch A[...] of the rows and index that"
)


def part(engine: Engine, A: Any, key: Any) -> Any:
    """See `Handle.__getitem__`."""
    given = _pair(key)
    outer = _outer(given)
    rows = _index(given[0], A, 0, outer)
    cols = _index(given[1], A, 1, outer)
    if isinstance(rows, int) and isinstance(cols, int):
        return A.fetch(rows, cols)[0, 0]
    lists = [i for i in (rows, cols) if isinstance(i, np.ndarray | MatrixRef)]
    if len(lists) == 2 and not outer:
        raise ShapeError(OUTER)
    if isinstance(rows, int) or isinstance(cols, int):
        return _line(engine, A, rows, cols)
    return _picked(engine, A, rows, cols)


def _pair(key: Any) -> tuple[Any, Any]:
    """What is asked of the rows and of the columns."""
    keys: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
    if any(one is None for one in keys):
        raise ShapeError("A[..., None] adds a dimension; a matrix on ranks has two, always")
    dots = [i for i, one in enumerate(keys) if one is Ellipsis]
    if len(dots) > 1:
        raise ShapeError("an index has one ellipsis (...) at most")
    if dots:
        before, after = keys[: dots[0]], keys[dots[0] + 1 :]
        keys = before + (WHOLE,) * (2 - len(before) - len(after)) + after
    if len(keys) > 2:
        raise ShapeError(f"{len(keys)} indices for a matrix, which has rows and columns")
    both = tuple(keys) + (WHOLE,) * (2 - len(keys))
    return both[0], both[1]


def _outer(keys: tuple[Any, Any]) -> bool:
    """Whether they come from `numpy.ix_`: a column of rows and a row of columns."""
    rows, cols = keys
    return (
        isinstance(rows, np.ndarray) and isinstance(cols, np.ndarray)
        and rows.ndim == cols.ndim == 2 and rows.shape[1] == cols.shape[0] == 1
    )  # fmt: skip


def _index(given: Any, A: Any, axis: int, outer: bool) -> Index:
    """One index, checked; raises `ShapeError`."""
    what, length = ("rows", "columns")[axis], A.shape[axis]
    if isinstance(given, slice):
        return _slice(given, what, length)
    if isinstance(given, MatrixRef):
        return _mask(given, A, axis)
    if isinstance(given, list | tuple | np.ndarray) and np.ndim(given) > 0:
        return _list(np.asarray(given), A, axis, outer)
    if isinstance(given, bool | np.bool_):
        raise ShapeError(f"{given} does not pick {what}: a mask has an element for each")
    try:
        return range(length)[operator.index(given)]
    except TypeError:
        raise ShapeError(
            f"{what} are picked by slices, integers, lists of them and masks, not by a "
            f"{type(given).__name__}"
        ) from None
    except IndexError:
        raise ShapeError(f"index {given} is out of range for {length} {what}") from None


def _slice(given: slice, what: str, length: int) -> slice:
    try:
        chosen = range(length)[given]
    except (TypeError, ValueError) as error:
        raise ShapeError(f"{what}: {error}") from None
    if not chosen:
        raise ShapeError(
            f"{given} leaves none of {length} {what}; a matrix has at least one row and column"
        )
    return given


def _mask(mask: Any, A: Any, axis: int) -> Any:
    wanted = (A.shape[0], 1) if axis == 0 else (1, A.shape[1])
    if mask.shape == wanted:
        return mask
    what = ("rows", "columns")[axis]
    instead = "np.where(mask, A, 0) keeps its shape" if mask.shape == A.shape else "fetch() it"
    raise ShapeError(
        f"a mask of shape {mask.shape} does not pick {what} of a {A.shape} matrix: it must be "
        f"{wanted}; {instead}"
    )


def _list(given: NDArray[Any], A: Any, axis: int, outer: bool) -> NDArray[np.int64]:
    what, length = ("rows", "columns")[axis], A.shape[axis]
    if outer:
        given = given.reshape(-1)
    if given.ndim != 1:
        raise ShapeError(
            f"{what} are picked by a list or a 1-D mask, not by an array of shape {given.shape}; "
            "np.where(mask, A, 0) keeps the shape of A"
        )
    if given.dtype.kind == "b":
        if given.size != length:
            raise ShapeError(f"a mask of {given.size} for {length} {what}")
        given = np.flatnonzero(given)
    if not given.size:
        raise ShapeError(f"no {what} are asked for; a matrix has at least one row and column")
    if given.dtype.kind not in "iu":
        raise ShapeError(f"{what} are picked by integers, not by {given.dtype}")
    index = given.astype(np.int64)
    if index.nbytes > rules.SMALL:
        raise MatrixError(
            f"a list of {index.size:,} {what} is too long to travel with a command: send a mask "
            "with send_matrix, (m, 1) or (1, n) of int32, and index by its handle"
        )
    wrong = (index < -length) | (index >= length)
    if wrong.any():
        raise ShapeError(f"index {index[wrong][0]} is out of range for {length} {what}")
    return index


def _line(engine: Engine, A: Any, rows: Index, cols: Index) -> Any:
    """Part of a row or of a column: 1-D if it is small."""
    across = isinstance(rows, int)
    other = cols if across else rows
    if A.shape[across] * A.dtype.itemsize <= rules.SMALL and not isinstance(other, MatrixRef):
        whole = A.fetch(rows) if isinstance(rows, int) else A.fetch(None, cast("int", cols))
        return whole.reshape(-1)[other]
    return engine.flat(_picked(engine, A, _stretch(rows), _stretch(cols)))


def _stretch(index: Index) -> Index:
    return slice(index, index + 1) if isinstance(index, int) else index


def _picked(engine: Engine, A: Any, rows: Index, cols: Index) -> Any:
    """The part as a matrix: slices in one command, then each list or mask."""
    found = A
    cuts = [i if isinstance(i, slice) else WHOLE for i in (rows, cols)]
    if any(range(n)[cut] != range(n) for cut, n in zip(cuts, A.shape, strict=True)):
        bounds = [b for cut in cuts for b in (cut.start, cut.stop, cut.step)]
        found = engine.call("slice", A, *bounds)
    for index, name in ((rows, "rows"), (cols, "cols")):
        if isinstance(index, MatrixRef):
            found = engine.call(f"select_{name}", found, index)
        elif isinstance(index, np.ndarray):
            found = engine.call(f"take_{name}", found, index.tolist())
    return found
