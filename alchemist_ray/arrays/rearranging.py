"""NumPy's functions that repeat, move or cut elements: roll, tile, broadcast_to, split, ..."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import implements
from alchemist_ray.errors import ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef


@implements(np.roll)
def _roll(engine: Engine, a: Any, shift: Any, axis: Any = None) -> Any:
    if axis is None:
        flat = engine.reshape(a, -1)
        found = engine.call("roll", flat, [int(np.sum(shift))])
        return found if a.ndim == 1 else engine.reshape(found, a.shape)
    shifts = [0] * a.ndim
    for by, along in zip(*map(np.ravel, np.broadcast_arrays(shift, axis)), strict=True):
        shifts[rules.axis_index(along, a.ndim)] += int(by)
    return engine.call("roll", a, shifts)


@implements(np.repeat)
def _repeat(engine: Engine, a: Any, repeats: Any, axis: Any = None) -> Any:
    along = None if axis is None else rules.axis_index(axis, a.ndim)
    times = engine.matrix(repeats)
    if times.dtype.kind != "i":
        raise ShapeError(f"np.repeat: repeats are {times.dtype}, not integers")
    return engine.call("repeat", engine.matrix(a), times, axis=along)


@implements(np.tile)
def _tile(engine: Engine, A: Any, reps: Any) -> Any:
    times = [int(k) for k in np.atleast_1d(reps)]
    ndim = max(A.ndim, len(times))
    if ndim > 2:
        raise ShapeError(f"np.tile with reps={reps}: arrays on ranks have up to two dimensions")
    times = [1] * (ndim - len(times)) + times + [1] * (2 - ndim)
    return engine.call("tile", A, times, ndim)


@implements(np.broadcast_to)
def _broadcast_to(engine: Engine, array: Any, shape: Any, subok: bool = False) -> Any:
    return engine.call("broadcast", array, list(rules.shape_of(shape)))


@implements(np.broadcast_arrays)
def _broadcast_arrays(engine: Engine, *args: Any, subok: bool = False) -> tuple[Any, ...]:
    try:
        shape = np.broadcast_shapes(*(np.shape(x) for x in args))
    except ValueError as error:
        raise ShapeError(f"np.broadcast_arrays: {error}") from None
    return tuple(_broadcast_to(engine, engine.matrix(x), shape) for x in args)


@implements(np.outer, np.linalg.outer)
def _outer(engine: Engine, a: Any, b: Any, /) -> Any:
    left = engine.matrix(a, b if isinstance(b, MatrixRef) else None)
    return engine.call("outer", "multiply", left, engine.matrix(b, left))


@implements(np.unstack)
def _unstack(engine: Engine, x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    if not x.ndim:
        raise ShapeError("np.unstack is not defined for an array of shape ()")
    along = rules.axis_index(axis, x.ndim)
    return tuple(x[:, i] if along else x[i] for i in range(x.shape[along]))


@implements(np.array_split)
def _array_split(engine: Engine, ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    along = rules.axis_index(axis, ary.ndim)
    length = ary.shape[along]
    if np.ndim(indices_or_sections) == 0:
        each, longer = divmod(length, int(indices_or_sections))
        count = int(indices_or_sections)
        cuts = [i * each + min(i, longer) for i in range(1, count)]
    else:
        cuts = [int(i) for i in indices_or_sections]
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, length], strict=True)]
    return [ary[:, part] if along else ary[part] for part in parts]


@implements(np.split)
def _split(engine: Engine, ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
    if np.ndim(indices_or_sections) == 0:
        length = ary.shape[rules.axis_index(axis, ary.ndim)]
        if length % indices_or_sections:
            raise ShapeError(
                f"np.split of {length} into {indices_or_sections} equal parts: use np.array_split"
            )
    return _array_split(engine, ary, indices_or_sections, axis)


@implements(np.vsplit)
def _vsplit(engine: Engine, ary: Any, indices_or_sections: Any) -> Any:
    if ary.ndim < 2:
        raise ShapeError(f"np.vsplit of an array of shape {ary.shape}: it must have two dimensions")
    return _split(engine, ary, indices_or_sections, 0)


@implements(np.hsplit)
def _hsplit(engine: Engine, ary: Any, indices_or_sections: Any) -> Any:
    return _split(engine, ary, indices_or_sections, 1 if ary.ndim > 1 else 0)


@implements(np.append)
def _append(engine: Engine, arr: Any, values: Any, axis: Any = None) -> Any:
    return engine.concatenate([arr, values], axis)


@implements(np.atleast_1d)
def _atleast_1d(engine: Engine, *arys: Any) -> Any:
    found = [x if np.ndim(x) else engine.reshape(engine.matrix(x), (1,)) for x in arys]
    return found[0] if len(found) == 1 else tuple(found)


@implements(np.atleast_2d)
def _atleast_2d(engine: Engine, *arys: Any) -> Any:
    found = [x if np.ndim(x) > 1 else engine.reshape(engine.matrix(x), (1, -1)) for x in arys]
    return found[0] if len(found) == 1 else tuple(found)


@implements(np.fliplr)
def _fliplr(engine: Engine, m: Any) -> Any:
    return m[:, ::-1]


@implements(np.flipud)
def _flipud(engine: Engine, m: Any) -> Any:
    return m[::-1]


@implements(np.swapaxes)
def _swapaxes(engine: Engine, a: Any, axis1: int, axis2: int) -> Any:
    swapped = rules.axis_index(axis1, a.ndim) != rules.axis_index(axis2, a.ndim)
    return engine.transpose(a) if swapped else a


@implements(np.moveaxis)
def _moveaxis(engine: Engine, a: Any, source: Any, destination: Any) -> Any:
    order = np.moveaxis(np.empty((2, 3)[: a.ndim]), source, destination).shape
    return engine.transpose(a) if order == (3, 2) else a


@implements(np.meshgrid)
def _meshgrid(
    engine: Engine, *xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy"
) -> tuple[Any, ...]:
    if len(xi) > 2:
        raise ShapeError(
            f"np.meshgrid of {len(xi)} vectors has {len(xi)} dimensions, and arrays on ranks have "
            "at most two: fetch the vectors"
        )
    flat = [engine.reshape(engine.matrix(x), -1) for x in xi]
    if len(flat) == 1:
        return (engine.copy(flat[0]),)
    across = 0 if indexing == "ij" else 1
    shapes = [(1, -1), (-1, 1)] if across else [(-1, 1), (1, -1)]
    lines = [engine.reshape(x, shape) for x, shape in zip(flat, shapes, strict=True)]
    return tuple(lines) if sparse else _broadcast_arrays(engine, *lines)
