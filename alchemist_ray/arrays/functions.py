"""NumPy's functions on handles: ``np.reshape(A, -1)``, ``np.concatenate([A, B])``, ...

Each implementation has the parameters that it supports and no others; `function_dispatch`
refuses the rest by name. Reductions are in `reductions.py`, those of `numpy.linalg` in `linear.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from alchemist_ray.arrays import creation, rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import implements
from alchemist_ray.errors import ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef

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
    along = rules.axis_of(axis, a.ndim)
    size: int = a.size if along is None else a.shape[along]
    return size


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


@implements(np.trace, np.linalg.trace)
def _trace(engine: Engine, a: Any, /, offset: int = 0, *, dtype: Any = None) -> Any:
    _require_matrix("np.trace", a)
    found = _diagonal(engine, a if dtype is None else engine.astype(a, dtype), offset)
    return engine.reduce("sum", found, None)


@implements(np.transpose, np.permute_dims)
def _transpose(engine: Engine, a: Any, axes: Any = None) -> Any:
    order = [rules.axis_index(axis, a.ndim) for axis in (reversed(range(a.ndim)) if axes is None
                                                        else axes)]  # fmt: skip
    if sorted(order) != list(range(a.ndim)):
        raise ShapeError(f"axes={axes}: they must be the axes of an array of shape {a.shape}")
    return engine.transpose(a) if order == [1, 0] else a


@implements(np.matrix_transpose, np.linalg.matrix_transpose)
def _matrix_transpose(engine: Engine, x: Any, /) -> Any:
    _require_matrix("np.matrix_transpose", x)
    return engine.transpose(x)


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
    if any(len(np.shape(x)) > 1 for x in arrays):
        raise ShapeError("np.stack: the result would have three dimensions; use np.concatenate")
    if len({np.shape(x) for x in arrays}) > 1:
        raise ShapeError("np.stack: all arrays must have the same shape")
    along = rules.axis_index(axis, len(np.shape(arrays[0])) + 1)
    ndim = len(np.shape(arrays[0])) + 1
    parts = [_with_axes(engine, x, ndim, front=along == 0) for x in arrays]
    return engine.concatenate(parts, along)


def _with_axes(engine: Engine, x: Any, ndim: int, *, front: bool = False) -> Any:
    """An array with at least `ndim` dimensions: new axes follow its own, or precede them."""
    shape = np.shape(x)
    if len(shape) >= ndim:
        return x
    new = (1,) * (ndim - len(shape))
    wanted = new + shape if front else shape + new
    return engine.reshape(x, wanted) if isinstance(x, MatrixRef) else np.reshape(x, wanted)


@implements(np.diagonal, np.linalg.diagonal)
def _diagonal(engine: Engine, a: Any, /, offset: int = 0) -> Any:
    _require_matrix("np.diagonal", a)
    if offset:  # the main diagonal of a part
        a = a[:, offset:] if offset > 0 else a[-offset:]
    return engine.call("diagonal", a)


@implements(np.diag)
def _diag(engine: Engine, v: Any, k: int = 0) -> Any:
    if v.ndim != 1:
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
    return engine.call("triu", _rows_of(engine, "np.triu", m), int(k))


@implements(np.tril)
def _tril(engine: Engine, m: Any, k: int = 0) -> Any:
    return engine.call("tril", _rows_of(engine, "np.tril", m), int(k))


def _rows_of(engine: Engine, name: str, m: Any) -> Any:
    """A matrix, or as NumPy has it a square one whose rows are all the vector."""
    if m.ndim == 1:
        return engine.call("broadcast", m, [m.size, m.size])
    _require_matrix(name, m)
    return m


@implements(np.take)
def _take(engine: Engine, a: Any, indices: Any, axis: Any = None) -> Any:
    if axis is None:
        return (a if a.ndim == 1 else engine.reshape(a, -1))[indices].mark_copy()
    found = a[indices] if rules.axis_index(axis, a.ndim) == 0 else a[:, indices]
    return found.mark_copy()


@implements(np.flip)
def _flip(engine: Engine, m: Any, axis: Any = None) -> Any:
    back, along = slice(None, None, -1), rules.axis_of(axis, m.ndim)
    if m.ndim < 2:
        return m[back] if m.ndim else m
    return m[back if along != 1 else slice(None), back if along != 0 else slice(None)]


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
    found = a if low is None else np.maximum(a, low)
    if high is not None:
        return np.minimum(found, high)
    return engine.copy(a) if low is None else found


@implements(np.round)
def _round(engine: Engine, a: Any, decimals: int = 0) -> Any:
    if a.dtype.kind == "b":  # as NumPy, which gives float16
        a = engine.astype(a, np.float32)
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
