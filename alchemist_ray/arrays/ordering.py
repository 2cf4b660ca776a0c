"""NumPy's functions that order and look up elements: sort, argmax, unique, searchsorted, ..."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules, statistics
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import Implementation, implements
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import BadArgumentError, ShapeError

_ONE = np.zeros(1)
UNIQUE_ALL: Any = type(np.unique_all(_ONE))
UNIQUE_COUNTS: Any = type(np.unique_counts(_ONE))
UNIQUE_INVERSE: Any = type(np.unique_inverse(_ONE))


@implements(np.sort)
def _sort(engine: Engine, a: Any, axis: Any = -1, kind: Any = None, *, stable: Any = None) -> Any:
    along = rules.along(axis, a.ndim)
    columns = a.columns if along == 0 else ()
    return engine.along(a, along, lambda M, i: engine.call("sort", M, axis=i, columns=columns))


@implements(np.partition)
def _partition(engine: Engine, a: Any, kth: Any, axis: Any = -1) -> Any:
    return _sort(engine, a, axis)  # sorted arrays are partitioned


@implements(np.argpartition)
def _argpartition(engine: Engine, a: Any, kth: Any, axis: Any = -1) -> Any:
    return _argsort(engine, a, axis)


@implements(np.lexsort)
def _lexsort(engine: Engine, keys: Any, axis: int = -1) -> Any:
    keys = [engine.matrix(key) for key in keys]
    if len({key.shape for key in keys}) != 1:
        raise ShapeError("np.lexsort: give one key or more, all of the same shape")
    if not keys[0].ndim:
        return engine.matrix(np.int64(0))
    order = _argsort(engine, keys[0], axis)
    for key in keys[1:]:
        ordered = _take_along_axis(engine, key, order, axis)
        order = _take_along_axis(engine, order, _argsort(engine, ordered, axis), axis)
    return order


@implements(np.argsort)
def _argsort(
    engine: Engine, a: Any, axis: Any = -1, kind: Any = None, *, stable: Any = None
) -> Any:
    along = rules.along_or_number(axis, a.ndim)
    return engine.along(a, along, lambda M, i: engine.call("argsort", M, axis=i))


def _place(op: str) -> Implementation:
    def place(engine: Engine, a: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
        return engine.reduce(op, a, axis, keepdims=bool(keepdims))

    return place


implements(np.argmax)(_place("argmax"))
implements(np.argmin)(_place("argmin"))


def _nan_place(op: str, worst: float) -> Implementation:
    def place(engine: Engine, a: Any, axis: Any = None, *, keepdims: Any = False) -> Any:
        if a.dtype.kind not in "fc":
            return engine.reduce(op, a, axis, keepdims=bool(keepdims))
        missing = engine.unary("isnan", a)
        if bool(engine.reduce("any", engine.reduce("all", missing, axis), None)):
            raise BadArgumentError(f"np.nan{op}: a slice along axis {axis} contains only NaN")
        kept = engine.where(missing, np.asarray(worst, a.dtype), a)
        return engine.reduce(op, kept, axis, keepdims=bool(keepdims))

    return place


implements(np.nanargmax)(_nan_place("argmax", -np.inf))
implements(np.nanargmin)(_nan_place("argmin", np.inf))


# --- sets -------------------------------------------------------------------------------


@implements(np.unique)
def _unique(
    engine: Engine,
    ar: Any,
    return_index: bool = False,
    return_inverse: bool = False,
    return_counts: bool = False,
    axis: Any = None,
    *,
    equal_nan: bool = True,
    sorted: bool = True,
) -> Any:
    """Distinct elements; along an axis, the distinct rows or columns: see `_unique_lines`."""
    asked = (return_index, return_inverse, return_counts)
    if axis is not None and ar.ndim != 1:
        values, *found = _unique_lines(engine, ar, rules.axis_index(axis, ar.ndim))
        if not any(asked):
            return values
    elif not any(asked):
        return engine.call("unique", rules.flat(ar), equal_nan=equal_nan)
    else:
        values, *found = _unique_elements(engine, ar, equal_nan=equal_nan)
    return (values, *(x for x, is_asked in zip(found, asked, strict=True) if is_asked))


def _unique_elements(engine: Engine, x: Any, *, equal_nan: bool) -> tuple[Any, ...]:
    """Distinct elements, the index of each, the place of each element, and counts."""
    values, first, inverse, counts = engine.call("unique_all", rules.flat(x), equal_nan=equal_nan)
    if inverse.shape != x.shape:
        inverse = engine.reshape(inverse, x.shape)
    return values, first, inverse, counts


def _unique_lines(engine: Engine, a: Any, axis: int) -> tuple[Any, ...]:
    """Distinct rows (axis 0) or columns (1) in the order of their elements, and where they are.

    Rows are numbered in the order of their first elements, then of their first two, and so on,
    until all rows have different numbers: two distributed sorts for each column up to there.
    """
    given = np.moveaxis(a, axis, 0)
    length, *others = given.shape
    lines = engine.reshape(given, (length, math.prod(others))) if a.ndim > 2 else given
    m, n = lines.shape
    order = engine.call("filled", [m], 0, "int64")
    for j in range(n):
        values, _, inverse, _ = engine.call("unique_all", lines[:, j], equal_nan=False)
        order = engine.binary("add", engine.binary("multiply", order, values.size), inverse)
        values, _, order, _ = engine.call("unique_all", order)
        if values.size == m:
            break
    _, first, inverse, counts = engine.call("unique_all", order)
    return np.moveaxis(given[first], 0, axis), first, inverse, counts


@implements(np.unique_values)
def _unique_values(engine: Engine, x: Any) -> Any:
    return _unique(engine, x, equal_nan=False)


@implements(np.unique_all)
def _unique_all(engine: Engine, x: Any) -> Any:
    return UNIQUE_ALL(*_unique_elements(engine, x, equal_nan=False))


@implements(np.unique_counts)
def _unique_counts(engine: Engine, x: Any) -> Any:
    values, _, _, counts = _unique_elements(engine, x, equal_nan=False)
    return UNIQUE_COUNTS(values, counts)


@implements(np.unique_inverse)
def _unique_inverse(engine: Engine, x: Any) -> Any:
    values, _, inverse, _ = _unique_elements(engine, x, equal_nan=False)
    return UNIQUE_INVERSE(values, inverse)


@implements(np.isin)
def _isin(
    engine: Engine,
    element: Any,
    test_elements: Any,
    assume_unique: bool = False,
    invert: bool = False,
    *,
    kind: Any = None,
) -> Any:
    given, table = engine.both(element, test_elements)
    table = rules.flat(table)
    return engine.each(given, lambda M: engine.call("isin", M, table, invert=bool(invert)))


@implements(np.union1d)
def _union1d(engine: Engine, ar1: Any, ar2: Any) -> Any:
    return engine.call("unique", engine.concatenate([ar1, ar2], None))


@implements(np.intersect1d)
def _intersect1d(
    engine: Engine, ar1: Any, ar2: Any, assume_unique: bool = False, return_indices: bool = False
) -> Any:
    left, right = engine.both(ar1, ar2)
    if return_indices:
        common = np.result_type(left.dtype, right.dtype)
        (ours, first, *_), (theirs, second, *_) = (
            engine.call("unique_all", rules.flat(engine.cast(x, common))) for x in (left, right)
        )
        there = np.isin(ours, theirs)
        return ours[there], first[there], second[np.isin(theirs, ours)]
    common = np.result_type(left.dtype, right.dtype)
    return _members(engine, engine.cast(left, common), right, invert=False)


@implements(np.setdiff1d)
def _setdiff1d(engine: Engine, ar1: Any, ar2: Any) -> Any:
    return _members(engine, ar1, ar2, invert=True)


def _members(engine: Engine, ar1: Any, ar2: Any, *, invert: bool) -> Any:
    left, right = engine.both(ar1, ar2)
    distinct = engine.call("unique", rules.flat(left))
    return distinct[engine.call("isin", distinct, rules.flat(right), invert=invert)]


# --- look-ups ---------------------------------------------------------------------------


@implements(np.searchsorted)
def _searchsorted(engine: Engine, a: Any, v: Any, side: str = "left", sorter: Any = None) -> Any:
    table, values = engine.both(a, v)
    if table.ndim != 1:
        raise ShapeError(f"np.searchsorted in an array of shape {table.shape}: give a vector")
    table = table if sorter is None else table[sorter]
    return engine.each(values, lambda M: engine.call("searchsorted", table, M, side))


@implements(np.digitize)
def _digitize(engine: Engine, x: Any, bins: Any, right: bool = False) -> Any:
    edges = np.asarray(bins)
    if x.dtype.kind == "c":
        raise BadArgumentError("np.digitize of complex numbers, which have no order")
    if edges.ndim != 1 or not edges.size:
        raise ShapeError(f"np.digitize: bins of shape {edges.shape}: give a vector")
    steps = np.diff(edges)
    if (steps >= 0).all():
        return _searchsorted(engine, edges, x, "left" if right else "right")
    if (steps <= 0).all():
        found = _searchsorted(engine, edges[::-1], x, "left" if right else "right")
        return edges.size - found
    raise BadArgumentError("np.digitize: bins must be monotonic")


@implements(np.take_along_axis)
def _take_along_axis(engine: Engine, arr: Any, indices: Any, axis: Any = -1) -> Any:
    table, index = engine.matrix(arr), engine.matrix(indices)
    if axis is None:
        table, along = engine.reshape(table, -1), 0
    else:
        along = rules.axis_index(axis, table.ndim)
    if index.dtype.kind != "i":
        raise BadArgumentError(f"np.take_along_axis: indices are {index.dtype}, not integers")
    if index.ndim != table.ndim:
        raise ShapeError(
            f"np.take_along_axis of shape {arr.shape} by indices of {index.shape}: they must have "
            "as many axes"
        )
    if table.ndim < 3:
        return engine.call("take_along_axis", table, index, axis=along)
    order = [*(i for i in range(table.ndim) if i != along), along]
    table, index = engine.permute(table, order), engine.permute(index, order)
    others = np.broadcast_shapes(table.shape[:-1], index.shape[:-1])
    lines = [
        engine.reshape(np.broadcast_to(x, (*others, x.shape[-1])), (math.prod(others), x.shape[-1]))
        for x in (table, index)
    ]
    found = engine.call("take_along_axis", *lines, axis=1)
    found = engine.reshape(found, (*others, index.shape[-1]))
    return engine.permute(found, np.argsort(order).tolist())


@implements(np.argwhere)
def _argwhere(engine: Engine, a: Any) -> Any:
    columns = [engine.call("nonzero", a, axis) for axis in range(a.ndim)]
    if len(columns) < 2:
        return engine.reshape(columns[0], (-1, 1)) if columns else engine.call(
            "filled", [int(bool(a)), 0], 0, "int64")  # fmt: skip
    return np.stack(columns, axis=1)


@implements(np.bincount)
def _bincount(engine: Engine, x: Any, /, weights: Any = None, minlength: int = 0) -> Any:
    beside = weights if isinstance(weights, MatrixRef) else None
    weight = None if weights is None else engine.matrix(weights)
    return engine.call("bincount", engine.matrix(x, beside), weight, int(minlength))


@implements(np.histogram)
def _histogram(
    engine: Engine, a: Any, bins: Any = 10, range: Any = None, density: Any = None,
    weights: Any = None,
) -> Any:  # fmt: skip
    shape = np.shape(a)
    a = rules.flat(a)
    whole = engine.astype(a, np.int32) if a.dtype.kind == "b" else a
    if isinstance(bins, str):
        if weights is not None:
            raise BadArgumentError(f"np.histogram with bins={bins!r} and weights: give a number")
        bins = statistics.number_of_bins(bins, whole, range)
    regular = np.ndim(bins) == 0
    if regular and range is None and a.size:
        ends = [whole.min().item(), whole.max().item()]
        edges = np.histogram_bin_edges(np.array(ends, whole.dtype), bins)
    else:
        edges = np.histogram_bin_edges(np.zeros(0, whole.dtype), bins, range)
    if weights is not None and np.shape(weights) != shape:
        raise ShapeError(f"np.histogram: weights of {np.shape(weights)} for an array of {shape}")
    weight = None if weights is None else engine.matrix(rules.flat(weights))
    made = engine.matrix(edges)
    counts = engine.call("histogram", whole, made, int(bins) if regular else 0, weight)
    if density:
        counts = counts / np.diff(edges) / counts.sum()
    return counts, made
