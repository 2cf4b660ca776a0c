"""NumPy's functions on handles: ``np.mean(A, axis=0)``, ``np.concatenate([A, B])``, ...

Each implementation has the parameters that it supports and no others; `function_dispatch`
refuses the rest by name. The functions of `numpy.linalg` are in `linear.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import Implementation, implements
from alchemist_ray.errors import ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef

# --- what it is -------------------------------------------------------------------------


@implements(np.shape)
def _shape(engine: Engine, a: Any) -> tuple[int, int]:
    shape: tuple[int, int] = a.shape
    return shape


@implements(np.ndim)
def _ndim(engine: Engine, a: Any) -> int:
    return 2


@implements(np.size)
def _size(engine: Engine, a: Any, axis: int | None = None) -> int:
    along = rules.axis_of(axis)
    size: int = a.size if along is None else a.shape[along]
    return size


@implements(np.iscomplexobj)
def _iscomplexobj(engine: Engine, x: Any) -> bool:
    return bool(x.dtype.kind == "c")


@implements(np.isrealobj)
def _isrealobj(engine: Engine, x: Any) -> bool:
    return bool(x.dtype.kind != "c")


@implements(np.result_type)
def _result_type(engine: Engine, *arrays_and_dtypes: Any) -> np.dtype[Any]:
    return np.result_type(*(x.dtype if isinstance(x, MatrixRef) else x for x in arrays_and_dtypes))


@implements(np.can_cast)
def _can_cast(engine: Engine, from_: Any, to: Any, casting: Any = "safe") -> bool:
    return np.can_cast(from_.dtype if isinstance(from_, MatrixRef) else from_, to, casting)


# --- reductions -------------------------------------------------------------------------


@implements(np.sum)
def _sum(engine: Engine, a: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    whole = a if dtype is None else engine.astype(a, dtype)
    found = engine.reduce("sum", whole, axis, keepdims=bool(keepdims))
    return found if dtype is None else found.astype(rules.checked_dtype(dtype))


@implements(np.mean)
def _mean(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return engine.reduce("mean", a, axis, keepdims=bool(keepdims))


def _deviation(op: str) -> Implementation:
    def deviation(
        engine: Engine,
        a: Any,
        axis: Any = None,
        *,
        ddof: Any = 0,
        correction: Any = None,
        keepdims: Any = False,
    ) -> Any:
        less = ddof if correction is None else correction
        whole = less == int(less) and less >= 0
        found = engine.reduce(
            op, a, axis, keepdims=bool(keepdims), ddof=int(less) if whole else 0
        )  # fmt: skip
        if whole:
            return found
        along = rules.axis_of(axis)
        count = a.size if along is None else a.shape[along]
        factor = count / (count - less) if count > less else math.nan
        return found * (math.sqrt(factor) if op == "std" else factor)

    return deviation


implements(np.var)(_deviation("var"))
implements(np.std)(_deviation("std"))


@implements(np.min, np.amin)
def _min(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return engine.reduce("min", a, axis, keepdims=bool(keepdims))


@implements(np.max, np.amax)
def _max(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return engine.reduce("max", a, axis, keepdims=bool(keepdims))


@implements(np.ptp)
def _ptp(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return _max(engine, a, axis, keepdims) - _min(engine, a, axis, keepdims)


@implements(np.any)
def _any(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return _truth(engine, "max", a, axis, keepdims)


@implements(np.all)
def _all(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return _truth(engine, "min", a, axis, keepdims)


def _truth(engine: Engine, op: str, a: Any, axis: Any, keepdims: Any) -> Any:
    found = engine.reduce(op, engine.binary("not_equal", a, 0), axis, keepdims=bool(keepdims))
    return found if isinstance(found, MatrixRef) else found.astype(bool)


@implements(np.count_nonzero)
def _count_nonzero(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return engine.reduce("sum", engine.binary("not_equal", a, 0), axis, keepdims=bool(keepdims))


@implements(np.trace, np.linalg.trace)
def _trace(engine: Engine, a: Any, /, *, dtype: Any = None) -> Any:
    found = engine.call("diagonal", a if dtype is None else engine.astype(a, dtype))
    return engine.reduce("sum", found, None)


# --- shapes and pieces ------------------------------------------------------------------


@implements(np.transpose, np.permute_dims)
def _transpose(engine: Engine, a: Any, axes: Any = None) -> Any:
    order = (1, 0) if axes is None else tuple(range(2)[axis] for axis in axes)
    if sorted(order) != [0, 1]:
        raise ShapeError(f"axes={axes}: a matrix has the axes 0 and 1")
    return engine.transpose(a) if order == (1, 0) else a


@implements(np.matrix_transpose, np.linalg.matrix_transpose)
def _matrix_transpose(engine: Engine, x: Any, /) -> Any:
    return engine.transpose(x)


@implements(np.concatenate)
def _concatenate(engine: Engine, arrays: Sequence[Any], axis: Any = 0) -> Any:
    return engine.concatenate(arrays, axis)


@implements(np.vstack)
def _vstack(engine: Engine, tup: Sequence[Any]) -> Any:
    return engine.concatenate(tup, 0)


@implements(np.hstack)
def _hstack(engine: Engine, tup: Sequence[Any]) -> Any:
    return engine.concatenate([x if isinstance(x, MatrixRef) else _column(x) for x in tup], 1)


def _column(x: Any) -> Any:
    array = np.asarray(x)
    return array[:, None] if array.ndim == 1 else array


@implements(np.diagonal, np.linalg.diagonal)
def _diagonal(engine: Engine, a: Any, /) -> Any:
    return engine.diagonal(a)


@implements(np.diag)
def _diag(engine: Engine, v: Any) -> Any:
    if 1 in v.shape and v.shape != (1, 1):
        return engine.call("diag", v)  # what a 1-D array would be
    return engine.diagonal(v)


@implements(np.triu)
def _triu(engine: Engine, m: Any, k: int = 0) -> Any:
    return engine.call("triu", m, int(k))


@implements(np.tril)
def _tril(engine: Engine, m: Any, k: int = 0) -> Any:
    return engine.call("tril", m, int(k))


@implements(np.take)
def _take(engine: Engine, a: Any, indices: Any, axis: Any = None) -> Any:
    along = rules.axis_of(axis)
    if along is None:
        raise rules.unsupported("np.take of a flattened matrix", "give axis=0 or axis=1")
    return a[indices] if along == 0 else a[:, indices]


@implements(np.flip)
def _flip(engine: Engine, m: Any, axis: Any = None) -> Any:
    along = rules.axis_of(axis)
    back = slice(None, None, -1)
    return m[back if along != 1 else slice(None), back if along != 0 else slice(None)]


@implements(np.copy)
def _copy(engine: Engine, a: Any) -> Any:
    return engine.copy(a)


@implements(np.astype)
def _astype(engine: Engine, x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Any:
    return engine.astype(x, dtype)


# --- element by element, but no ufuncs --------------------------------------------------


@implements(np.where)
def _where(engine: Engine, condition: Any, x: Any = None, y: Any = None, /) -> Any:
    if x is None or y is None:
        raise rules.unsupported("np.where(mask) without values", "A[mask] picks rows by an (m, 1)")
    return engine.where(condition, x, y)


@implements(np.clip)
def _clip(engine: Engine, a: Any, a_min: Any = None, a_max: Any = None, *,
          min: Any = None, max: Any = None) -> Any:  # fmt: skip
    low, high = (a_min if min is None else min), (a_max if max is None else max)
    found = a if low is None else np.maximum(a, low)
    return found if high is None else np.minimum(found, high)


@implements(np.round)
def _round(engine: Engine, a: Any, decimals: int = 0) -> Any:
    if a.dtype.kind == "i" and decimals >= 0:
        return a
    if decimals == 0:
        return engine.unary("rint", a)
    scale = 10.0 ** abs(decimals)
    return np.rint(a * scale) / scale if decimals > 0 else np.rint(a / scale) * scale


@implements(np.real)
def _real(engine: Engine, val: Any) -> Any:
    return val.real


@implements(np.imag)
def _imag(engine: Engine, val: Any) -> Any:
    return val.imag


@implements(np.isclose)
def _isclose(engine: Engine, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8) -> Any:
    near = abs(a - b) <= atol + rtol * abs(b)
    return engine.where(np.isfinite(b), near, a == b) if _floats(b) else near


def _floats(x: Any) -> bool:
    return isinstance(x, MatrixRef) and x.dtype.kind in "fc"


@implements(np.allclose)
def _allclose(engine: Engine, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8) -> bool:
    return bool(_all(engine, _isclose(engine, a, b, rtol, atol)))


@implements(np.array_equal)
def _array_equal(engine: Engine, a1: Any, a2: Any) -> bool:
    if np.shape(a1) != np.shape(a2):
        return False
    return bool(_all(engine, engine.binary("equal", a1, a2)))


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
    value = int(fill_value) if isinstance(fill_value, bool | np.bool_) else fill_value
    return engine.call("full", *a.shape, value, kind.name, a.layout)
