"""NumPy's functions on handles: shapes, repetition, comparisons of whole arrays, complex parts.

Each implementation has the parameters that it supports and no others; `function_dispatch`
refuses the rest by name. Reductions are in `reductions.py`, those of `numpy.linalg` in `linear.py`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from alchemist_ray.arrays import creation, rules
from alchemist_ray.arrays.engine import LAYOUT, Engine
from alchemist_ray.arrays.rules import implements
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import BadIndexError, DtypeError, ShapeError

# --- what it is -------------------------------------------------------------------------


@implements(np.shape)
def _shape(engine: Engine, a: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = a.shape
    return shape


@implements(np.ndim)
def _ndim(engine: Engine, a: Any) -> int:
    ndim: int = a.ndim
    return ndim


@implements(np.size)
def _size(engine: Engine, a: Any, axis: int | None = None) -> int:
    return math.prod(a.shape[i] for i in rules.axes_of(axis, a.ndim))


@implements(np.result_type)
def _result_type(engine: Engine, *arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x.dtype if isinstance(x, MatrixRef) else x for x in arrays_and_dtypes))


@implements(np.can_cast)
def _can_cast(engine: Engine, from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(from_.dtype if isinstance(from_, MatrixRef) else from_, to, casting)


@implements(np.may_share_memory, np.shares_memory)
def _may_share_memory(engine: Engine, a: Any, b: Any, max_work: Any = None) -> bool:
    both = isinstance(a, MatrixRef) and isinstance(b, MatrixRef)
    return both and (a.gang, a.epoch, a.id) == (b.gang, b.epoch, b.id)


# --- shapes and pieces ------------------------------------------------------------------


@implements(np.trace)
def _trace(
    engine: Engine, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None
) -> Any:
    found = _diagonal(engine, a if dtype is None else engine.astype(a, dtype), offset, axis1, axis2)
    return engine.reduce("sum", found, -1)


@implements(np.linalg.trace)
def _trace_of_each(engine: Engine, x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    return _trace(engine, x, offset, -2, -1, dtype)


@implements(np.transpose, np.permute_dims)
def _transpose(engine: Engine, a: Any, axes: Any = None) -> Any:
    order = [rules.axis_index(axis, a.ndim) for axis in (reversed(range(a.ndim)) if axes is None
                                                        else axes)]  # fmt: skip
    if sorted(order) != list(range(a.ndim)):
        raise ShapeError(f"axes={axes}: they must be the axes of an array of shape {a.shape}")
    return engine.permute(a, order)


@implements(np.matrix_transpose, np.linalg.matrix_transpose)
def _matrix_transpose(engine: Engine, x: Any, /) -> Any:
    if x.ndim < 2:
        raise ShapeError(f"np.matrix_transpose of an array of shape {x.shape}: it has no matrices")
    return _swapaxes(engine, x, -1, -2)


def _require_matrix(name: str, a: Any) -> None:
    if len(a.shape) != 2:
        raise ShapeError(f"{name} of an array of shape {a.shape}: it must have two dimensions")


@implements(np.reshape)
def _reshape(
    engine: Engine, a: Any, /, shape: Any, order: str = "C", *, copy: bool | None = None
) -> Any:
    if copy is False:
        raise ValueError("reshape: copy=False is not possible for arrays on ranks")
    if order == "C":
        found = engine.reshape(a, shape)
        return found.mark_copy() if copy else found
    if order != "F":
        raise rules.unsupported(f"np.reshape with order={order!r}", "it can be 'C' or 'F'")
    wanted = rules.reshaped(a.shape, shape)
    return engine.transpose(engine.reshape(engine.transpose(a), wanted[::-1])).mark_copy()


@implements(np.ravel)
def _ravel(engine: Engine, a: Any, order: str = "C") -> Any:
    return _reshape(engine, a, -1, order)


@implements(np.squeeze)
def _squeeze(engine: Engine, a: Any, axis: Any = None) -> Any:
    if axis is None:
        return engine.reshape(a, [n for n in a.shape if n != 1])
    gone = {rules.axis_index(one, a.ndim) for one in (axis if isinstance(axis, tuple) else (axis,))}
    if any(a.shape[one] != 1 for one in gone):
        raise ShapeError(
            f"squeeze: axis={axis!r} of shape {a.shape}; only axes of length 1 can be removed"
        )
    return engine.reshape(a, [n for i, n in enumerate(a.shape) if i not in gone])


@implements(np.expand_dims)
def _expand_dims(engine: Engine, a: Any, axis: Any) -> Any:
    new = axis if isinstance(axis, tuple) else (axis,)
    ndim = a.ndim + len(new)
    places = {rules.axis_index(one, ndim) for one in new}
    lengths = iter(a.shape)
    return engine.reshape(a, [1 if i in places else next(lengths) for i in range(ndim)])


@implements(np.concatenate)
def _concatenate(engine: Engine, arrays: Sequence[Any], axis: Any = 0) -> Any:
    return engine.concatenate(arrays, axis)


@implements(np.vstack)
def _vstack(engine: Engine, tup: Sequence[Any]) -> Any:
    return engine.concatenate([_with_axes(engine, x, 2, front=True) for x in tup], 0)


@implements(np.hstack)
def _hstack(engine: Engine, tup: Sequence[Any]) -> Any:
    parts = [_with_axes(engine, x, 1) for x in tup]
    return engine.concatenate(parts, 0 if len(parts[0].shape) == 1 else 1)


@implements(np.column_stack)
def _column_stack(engine: Engine, tup: Sequence[Any]) -> Any:
    return engine.concatenate([_with_axes(engine, x, 2) for x in tup], 1)


@implements(np.stack)
def _stack(engine: Engine, arrays: Sequence[Any], axis: int = 0) -> Any:
    if len({np.shape(x) for x in arrays}) > 1:
        raise ShapeError("np.stack: all arrays must have the same shape")
    along = rules.axis_index(axis, np.ndim(arrays[0]) + 1)
    return engine.concatenate([np.expand_dims(x, along) for x in arrays], along)


def _with_axes(engine: Engine, x: Any, ndim: int, *, front: bool = False) -> Any:
    """An array with at least `ndim` dimensions: new axes follow its own, or precede them."""
    shape = np.shape(x)
    if len(shape) >= ndim:
        return x
    new = (1,) * (ndim - len(shape))
    wanted = new + shape if front else shape + new
    return engine.reshape(x, wanted) if isinstance(x, MatrixRef) else np.reshape(x, wanted)


@implements(np.diagonal)
def _diagonal(engine: Engine, a: Any, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
    if a.ndim < 2:
        raise ShapeError(f"np.diagonal of an array of shape {a.shape}: it must have two axes")
    first, second = (rules.axis_index(axis, a.ndim) for axis in (axis1, axis2))
    if first == second:
        raise ShapeError(f"np.diagonal: axis1={axis1} and axis2={axis2} are the same axis")
    if a.ndim > 2:
        whole = np.moveaxis(a, (first, second), (0, 1))
        index = np.arange(len(np.diagonal(np.empty(whole.shape[:2], np.bool_), offset)))
        found = whole[index - min(offset, 0), index + max(offset, 0)]
        return np.moveaxis(found, 0, -1)
    offset = offset if first < second else -offset
    if offset:  # the main diagonal of a part
        a = a[:, offset:] if offset > 0 else a[-offset:]
    return engine.call("diagonal", a).mark_part_of(a)


@implements(np.linalg.diagonal)
def _diagonal_of_each(engine: Engine, x: Any, /, *, offset: int = 0) -> Any:
    return _diagonal(engine, x, offset, -2, -1)


@implements(np.diag)
def _diag(engine: Engine, v: Any, k: int = 0) -> Any:
    if v.ndim != 1:
        _require_matrix("np.diag", v)
        return _diagonal(engine, v, k)
    found = engine.call("diag", v)
    if not k:
        return found
    length = v.size + abs(k)
    whole = engine.call("filled", [length, length], 0, v.dtype.name)
    rows, cols = (slice(None, v.size), slice(k, None)), (slice(-k, None), slice(None, v.size))
    whole[rows if k > 0 else cols] = found
    return whole


@implements(np.triu)
def _triu(engine: Engine, m: Any, k: int = 0) -> Any:
    return _triangle(engine, "triu", m, k)


@implements(np.tril)
def _tril(engine: Engine, m: Any, k: int = 0) -> Any:
    return _triangle(engine, "tril", m, k)


def _triangle(engine: Engine, name: str, m: Any, k: int) -> Any:
    """Of each matrix; of a vector, as NumPy has it, of a square one whose rows are all of it."""
    if m.ndim == 1:
        m = engine.broadcast(m, [m.size, m.size])
    if m.ndim > 2:
        ones = creation.filled(engine, m.shape[-2:], 1, np.dtype(bool), LAYOUT)
        return engine.where(engine.call(name, ones, int(k)), m, np.zeros((), m.dtype))
    _require_matrix(f"np.{name}", m)
    return engine.call(name, m, int(k))


@implements(np.take)
def _take(engine: Engine, a: Any, indices: Any, axis: Any = None, mode: str = "raise") -> Any:
    if mode != "raise":
        n = a.size if axis is None else a.shape[rules.axis_index(axis, a.ndim)]
        if mode not in ("wrap", "clip") or not n:
            raise BadIndexError(f"np.take with mode={mode!r} of {n} elements")
        indices = np.remainder(indices, n) if mode == "wrap" else np.clip(indices, 0, n - 1)
    if axis is None or not rules.axes_of(axis, a.ndim):
        return (a if a.ndim == 1 else engine.reshape(a, -1))[indices].mark_copy()
    return a[rules.at(rules.axis_index(axis, a.ndim), indices)].mark_copy()


@implements(np.flip)
def _flip(engine: Engine, m: Any, axis: Any = None) -> Any:
    back = rules.axes_of(axis, m.ndim)
    return m[tuple(slice(None, None, -1 if i in back else 1) for i in range(m.ndim))] if back else m


@implements(np.copy)
def _copy(engine: Engine, a: Any) -> Any:
    return engine.copy(a)


@implements(np.astype)
def _astype(engine: Engine, x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    return engine.astype(x, dtype, copy=copy)


# --- element by element, but no ufuncs --------------------------------------------------


@implements(np.where)
def _where(engine: Engine, condition: Any, x: Any = None, y: Any = None, /) -> Any:
    if x is None and y is None:
        return _nonzero(engine, condition)
    return engine.where(condition, x, y)


@implements(np.select)
def _select(engine: Engine, condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    if len(condlist) != len(choicelist) or not condlist:
        raise ValueError(
            f"np.select of {len(condlist)} conditions and {len(choicelist)} choices: give one "
            "choice for each condition"
        )
    given = [default, *reversed(choicelist)]
    kind = np.result_type(*(x.dtype if hasattr(x, "dtype") else x for x in given))
    found, *choices = [x if isinstance(x, MatrixRef) else np.asarray(x, kind) for x in given]
    for condition, choice in zip(reversed(condlist), choices, strict=True):
        found = engine.where(condition, choice, found)
    return found


@implements(np.fill_diagonal)
def _fill_diagonal(engine: Engine, a: Any, val: Any) -> None:
    _require_matrix("np.fill_diagonal", a)
    index = np.arange(min(a.shape))
    flat = np.ravel(val)
    a[index, index] = flat[index % flat.size] if np.ndim(val) else val


@implements(np.unravel_index)
def _unravel_index(engine: Engine, indices: Any, shape: Any) -> tuple[Any, ...]:
    if indices.dtype.kind not in "biu":
        raise DtypeError(f"np.unravel_index: indices are {indices.dtype}; they must be integers")
    if indices.size and not 0 <= indices.min() <= indices.max() < math.prod(shape):
        raise BadIndexError(f"np.unravel_index: an index is out of range for shape {tuple(shape)}")
    indices = engine.cast(indices, np.int64)
    found = []
    for length in reversed(shape):
        found.append(indices % length)
        indices = indices // length
    return tuple(reversed(found))


@implements(np.nonzero)
def _nonzero(engine: Engine, a: Any) -> tuple[Any, ...]:
    if not a.ndim:
        raise ShapeError("np.nonzero is not defined for an array of shape ()")
    return tuple(engine.call("nonzero", a, axis) for axis in range(a.ndim))


@implements(np.flatnonzero)
def _flatnonzero(engine: Engine, a: Any) -> Any:
    return engine.call("nonzero", a if a.ndim == 1 else engine.reshape(a, -1), 0)


@implements(np.clip)
def _clip(engine: Engine, a: Any, a_min: Any = None, a_max: Any = None, *,
          min: Any = None, max: Any = None) -> Any:  # fmt: skip
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    if a.dtype.kind in "iu":  # as NumPy: bounds that its elements cannot pass
        low = None if type(low) is int and low <= np.iinfo(a.dtype).min else low
        high = None if type(high) is int and high >= np.iinfo(a.dtype).max else high
    found = a if low is None else np.maximum(a, low)
    if high is not None:
        return np.minimum(found, high)
    return engine.copy(a) if low is None else found


@implements(np.round, np.around)
def _round(engine: Engine, a: Any, decimals: int = 0) -> Any:
    if a.dtype.kind == "b":  # as NumPy
        a = engine.astype(a, np.float16)
    return engine.call("round", a, operator.index(decimals))


# --- like another -----------------------------------------------------------------------


@implements(np.zeros_like, np.empty_like)
def _zeros_like(engine: Engine, a: Any, /, dtype: Any = None, *, device: Any = None) -> Any:
    return _full_like(engine, a, 0, dtype)


@implements(np.ones_like)
def _ones_like(engine: Engine, a: Any, /, dtype: Any = None, *, device: Any = None) -> Any:
    return _full_like(engine, a, 1, dtype)


@implements(np.full_like)
def _full_like(
    engine: Engine, a: Any, /, fill_value: Any, dtype: Any = None, *, device: Any = None
) -> Any:
    kind = a.dtype if dtype is None else rules.checked_dtype(dtype)
    return creation.filled(engine, a.shape, fill_value, kind, a.layout)


@implements(np.isclose)
def _isclose(
    engine: Engine, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False
) -> Any:
    if not isinstance(b, MatrixRef):
        b = np.asarray(b)
    if b.dtype.kind in "biu":
        b = b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf
        near = abs(a - b) <= atol + rtol * abs(b)
    finite = np.isfinite(b)
    if isinstance(finite, MatrixRef) or not finite.all():
        near = engine.where(finite, near, engine.binary("equal", a, b))
    return near | (np.isnan(a) & np.isnan(b)) if equal_nan else near


@implements(np.allclose)
def _allclose(
    engine: Engine, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(engine.reduce("all", _isclose(engine, a, b, rtol, atol, equal_nan), None))


@implements(np.array_equal)
def _array_equal(engine: Engine, a1: Any, a2: Any, equal_nan: bool = False) -> bool:
    if np.shape(a1) != np.shape(a2):
        return False
    same = engine.binary("equal", a1, a2)
    if equal_nan:
        same = same | (np.isnan(a1) & np.isnan(a2))
    return bool(engine.reduce("all", same, None))


@implements(np.array_equiv)
def _array_equiv(engine: Engine, a1: Any, a2: Any) -> bool:
    try:
        np.broadcast_shapes(np.shape(a1), np.shape(a2))
    except ValueError:
        return False
    return bool(engine.reduce("all", engine.binary("equal", a1, a2), None))


@implements(np.iscomplexobj)
def _iscomplexobj(engine: Engine, x: Any) -> bool:
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj)
def _isrealobj(engine: Engine, x: Any) -> bool:
    return bool(x.dtype.kind != "c")


@implements(np.real)
def _real(engine: Engine, val: Any) -> Any:
    return val.real


@implements(np.imag)
def _imag(engine: Engine, val: Any) -> Any:
    return val.imag


@implements(np.angle)
def _angle(engine: Engine, z: Any, deg: bool = False) -> Any:
    """One pass for each part, and one for the angle."""
    parts = (engine.unary("imag", z), z.real) if z.dtype.kind == "c" else (0, z)
    found = engine.binary("arctan2", *parts)
    return found * (180 / math.pi) if deg else found


@implements(np.iscomplex)
def _iscomplex(engine: Engine, x: Any) -> Any:
    return engine.binary("not_equal", engine.unary("imag", x), 0)


@implements(np.isreal)
def _isreal(engine: Engine, x: Any) -> Any:
    return engine.binary("equal", engine.unary("imag", x), 0)


@implements(np.roll)
def _roll(engine: Engine, a: Any, shift: Any, axis: Any = None) -> Any:
    if axis is None:
        flat = engine.reshape(a, -1)
        found = engine.call("roll", flat, [int(np.sum(shift))])
        return found if a.ndim == 1 else engine.reshape(found, a.shape)
    shifts = [0] * a.ndim
    for by, along in zip(*map(np.ravel, np.broadcast_arrays(shift, axis)), strict=True):
        shifts[rules.axis_index(along, a.ndim)] += int(by)
    if a.ndim < 3:
        return engine.call("roll", a, shifts)
    for along, by in enumerate(shifts):
        pairs = [by, 0], [0, by]
        a = engine.along(a, along, partial(_rolled, engine, pairs)) if by else a
    return a


def _rolled(engine: Engine, shifts: Sequence[list[int]], M: Any, axis: int) -> Any:
    return engine.call("roll", M, shifts[axis])


@implements(np.repeat)
def _repeat(engine: Engine, a: Any, repeats: Any, axis: Any = None) -> Any:
    along = rules.along(axis, a.ndim)
    times = engine.matrix(repeats)
    if times.dtype.kind != "i":
        raise ShapeError(f"np.repeat: repeats are {times.dtype}, not integers")
    whole = engine.matrix(a)
    return engine.along(whole, along, lambda M, i: engine.call("repeat", M, times, axis=i))


@implements(np.tile)
def _tile(engine: Engine, A: Any, reps: Any) -> Any:
    times = [int(k) for k in np.atleast_1d(reps)]
    ndim = max(A.ndim, len(times))
    if ndim > 2:
        found = engine.reshape(A, (1,) * (ndim - A.ndim) + A.shape)
        for along, k in enumerate([1] * (ndim - len(times)) + times):
            parts = [found] * k if k else [found[rules.at(along, slice(0, 0))]]
            found = engine.concatenate(parts, along) if k != 1 else found
        return found
    times = [1] * (ndim - len(times)) + times + [1] * (2 - ndim)
    return engine.call("tile", A, times, ndim)


@implements(np.lib.stride_tricks.sliding_window_view)
def _sliding_window_view(engine: Engine, x: Any, window_shape: Any, axis: Any = None) -> Any:
    """Copies: a matrix of each place in the window."""
    lengths = np.atleast_1d(window_shape).tolist()
    given = range(x.ndim) if axis is None else np.atleast_1d(axis)
    axes = [rules.axis_index(one, x.ndim) for one in given]
    if len(lengths) != len(axes):
        raise ShapeError(f"sliding_window_view: {len(lengths)} lengths for {len(axes)} axes")
    for along, length in zip(axes, lengths, strict=True):
        count = x.shape[along] - length + 1
        if length < 1 or count < 1:
            raise ShapeError(
                f"sliding_window_view: a window of {length} does not fit axis {along} of an array "
                f"of shape {x.shape}"
            )
        places = [rules.at(along, slice(i, i + count)) for i in range(length)]
        x = np.stack([x[place] for place in places], axis=-1)
    return x


@implements(np.broadcast_to)
def _broadcast_to(engine: Engine, array: Any, shape: Any, subok: bool = False) -> Any:
    return engine.broadcast(array, rules.shape_of(shape)).mark_part_of(array)


@implements(np.broadcast_arrays)
def _broadcast_arrays(engine: Engine, *args: Any, subok: bool = False) -> tuple[Any, ...]:
    try:
        shape = np.broadcast_shapes(*(np.shape(x) for x in args))
    except ValueError as error:
        raise ShapeError(f"np.broadcast_arrays: {error}") from None
    return tuple(_broadcast_to(engine, engine.matrix(x), shape) for x in args)


@implements(np.outer)
def _outer(engine: Engine, a: Any, b: Any, /) -> Any:
    return engine.call("outer", "multiply", *map(rules.flat, engine.both(a, b)))


@implements(np.linalg.outer)
def _outer_of_vectors(engine: Engine, x1: Any, x2: Any, /) -> Any:
    if np.ndim(x1) != 1 or np.ndim(x2) != 1:
        shapes = f"{np.shape(x1)} and {np.shape(x2)}"
        raise ShapeError(f"np.linalg.outer of shapes {shapes}: it takes vectors, np.outer all")
    return _outer(engine, x1, x2)


@implements(np.unstack)
def _unstack(engine: Engine, x: Any, /, *, axis: int = 0) -> tuple[Any, ...]:
    if not x.ndim:
        raise ShapeError("np.unstack is not defined for an array of shape ()")
    along = rules.axis_index(axis, x.ndim)
    return tuple(x[rules.at(along, i)] for i in range(x.shape[along]))


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
    return [ary[rules.at(along, part)] for part in parts]


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
    order = list(range(a.ndim))
    one, other = (rules.axis_index(axis, a.ndim) for axis in (axis1, axis2))
    order[one], order[other] = other, one
    return engine.permute(a, order)


@implements(np.moveaxis)
def _moveaxis(engine: Engine, a: Any, source: Any, destination: Any) -> Any:
    order = np.moveaxis(np.empty(range(a.ndim)), source, destination).shape
    return engine.permute(a, order)


@implements(np.meshgrid)
def _meshgrid(
    engine: Engine, *xi: Any, copy: bool = True, sparse: bool = False, indexing: str = "xy"
) -> tuple[Any, ...]:
    flat = [engine.reshape(engine.matrix(x), -1) for x in xi]
    places = list(range(len(flat)))
    if indexing == "xy":
        places[:2] = places[:2][::-1]
    lines = [
        engine.reshape(x, [-1 if i == place else 1 for i in places])
        for x, place in zip(flat, range(len(flat)), strict=True)
    ]
    found = tuple(lines) if sparse else _broadcast_arrays(engine, *lines)
    return tuple(x.mark_copy() for x in found) if copy else found
