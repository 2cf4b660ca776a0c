"""NumPy's reductions on handles: ``np.sum(A, axis=0, where=B > 0)``, ``np.nanmean(A)``, ...

Without ``where`` and ``initial``, a reduction is one command. A mask replaces the elements that
are not selected by the identity of the operation, in one more command.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import creation
from alchemist_ray.arrays.engine import LAYOUT, Engine
from alchemist_ray.arrays.rules import Implementation, implements
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import BadArgumentError, ShapeError

IDENTITY: dict[str, Any] = {"sum": 0, "prod": 1, "any": False, "all": True}


def _mask(name: str, a: Any, where: Any) -> Any:
    """`where` as bool, checked to broadcast to `a`."""
    mask = where if isinstance(where, MatrixRef) else np.asarray(where)
    try:
        fits = np.broadcast_shapes(mask.shape, a.shape) == a.shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"np.{name}: where= of shape {mask.shape} does not broadcast to an array of {a.shape}"
        )
    return mask if mask.dtype.kind == "b" else mask != 0


def _kept(engine: Engine, a: Any, mask: Any, neutral: Any) -> Any:
    """`a` with `neutral` in place of the elements that are not selected."""
    return engine.where(mask, a, np.full((), neutral, a.dtype))


# --- sums and products, also of what is not nan -----------------------------------------


def _total(name: str) -> Implementation:
    op = name.removeprefix("nan")

    def total(
        engine: Engine, a: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False,
        initial: Any = None, where: Any = True,
    ) -> Any:  # fmt: skip
        if op != name and dtype is not None and a.dtype.kind in "fc":  # nan cannot be cast
            a = _kept(engine, a, _not_nan(engine, a, True), IDENTITY[op])
        whole = engine.cast(a, dtype)
        if where is not True:
            whole = _kept(engine, whole, _mask(name, a, where), IDENTITY[op])
        found = engine.reduce(name, whole, axis, keepdims=bool(keepdims))
        found = engine.cast(found, dtype)
        if initial is None:
            return found
        join = "add" if op == "sum" else "multiply"
        return engine.binary(join, found, np.array(initial, found.dtype))

    return total


def _extreme(name: str) -> Implementation:
    op = name.removeprefix("nan")

    def extreme(
        engine: Engine, a: Any, axis: Any = None, keepdims: Any = False, initial: Any = None,
        where: Any = True,
    ) -> Any:  # fmt: skip
        if initial is None and where is not True:
            raise BadArgumentError(
                f"np.{name} with where= needs initial=, the result where nothing is selected"
            )
        if initial is None:
            return engine.reduce(name, a, axis, keepdims=bool(keepdims))
        start = np.array(initial, a.dtype)
        mask = True if where is True else _mask(name, a, where)
        if op != name and a.dtype.kind in "fc":
            mask = _not_nan(engine, a, mask)
        whole = a if mask is True else _kept(engine, a, mask, start)
        if not a.size:  # a reduction of nothing has no smallest element
            like = np.any(np.empty(a.shape, bool), axis=axis, keepdims=bool(keepdims))
            return creation.filled(engine, like.shape, start[()], a.dtype, LAYOUT)
        found = engine.reduce(op, whole, axis, keepdims=bool(keepdims))
        return engine.binary(f"{op}imum" if op == name else f"f{op}", found, start)

    return extreme


def _truth(op: str) -> Implementation:
    def truth(
        engine: Engine, a: Any, axis: Any = None, keepdims: Any = False, *, where: Any = True
    ) -> Any:
        if where is not True:
            a = _kept(engine, a, _mask(op, a, where), IDENTITY[op])
        return engine.reduce(op, a, axis, keepdims=bool(keepdims))

    return truth


def _not_nan(engine: Engine, a: Any, mask: Any) -> Any:
    """The mask of the elements that are selected and not nan."""
    numbers = engine.unary("logical_not", engine.unary("isnan", a))
    return numbers if mask is True else engine.binary("logical_and", numbers, mask)


_function: Any
for _function in (np.sum, np.prod, np.nansum, np.nanprod):
    implements(_function)(_total(_function.__name__))
for _function in (np.min, np.max, np.nanmin, np.nanmax):
    implements(_function)(_extreme(_function.__name__))
for _function in (np.any, np.all):
    implements(_function)(_truth(_function.__name__))
implements(np.amin)(_extreme("min"))
implements(np.amax)(_extreme("max"))


@implements(np.ptp)
def _ptp(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    ends = [engine.reduce(op, a, axis, keepdims=bool(keepdims)) for op in ("max", "min")]
    return engine.binary("subtract", *ends)


@implements(np.count_nonzero)
def _count_nonzero(engine: Engine, a: Any, axis: Any = None, keepdims: Any = False) -> Any:
    return engine.reduce("sum", engine.binary("not_equal", a, 0), axis, keepdims=bool(keepdims))


# --- means and deviations ---------------------------------------------------------------


def _mean(name: str) -> Implementation:
    def mean(
        engine: Engine, a: Any, axis: Any = None, dtype: Any = None, keepdims: Any = False, *,
        where: Any = True,
    ) -> Any:  # fmt: skip
        whole = engine.cast(a, dtype)
        keep = bool(keepdims)
        if where is True:
            found = engine.reduce(name, whole, axis, keepdims=keep)
        else:
            whole, mask = _selected(engine, name, whole, where)
            found = _mean_of(engine, whole, mask, axis, keep)
        return engine.cast(found, dtype)

    return mean


def _selected(engine: Engine, name: str, a: Any, where: Any) -> tuple[Any, Any]:
    """`a` in the dtype of its mean, and the mask of the elements that count, in its shape."""
    mask = _mask(name, a, where)
    whole = engine.astype(a, np.float64) if a.dtype.kind in "biu" else a
    if name.startswith("nan") and a.dtype.kind in "fc":
        return whole, _not_nan(engine, a, mask)
    return whole, engine.call("broadcast", engine.matrix(mask), list(a.shape))


def _mean_of(engine: Engine, a: Any, mask: Any, axis: Any, keepdims: bool) -> Any:
    total = engine.reduce("sum", _kept(engine, a, mask, 0), axis, keepdims=keepdims)
    count = engine.reduce("sum", mask, axis, keepdims=keepdims)
    return engine.cast(engine.binary("divide", total, count), a.dtype)


def _deviation(given: str) -> Implementation:
    op = given.removeprefix("nan")

    def deviation(
        engine: Engine, a: Any, axis: Any = None, dtype: Any = None, *, ddof: Any = 0,
        correction: Any = None, keepdims: Any = False, where: Any = True,
    ) -> Any:  # fmt: skip
        name = given if a.dtype.kind in "fc" else op  # as NumPy: also in what has no variance
        a = engine.cast(a, dtype)
        keep = bool(keepdims)
        less = ddof if correction is None else correction
        if where is True and less == int(less) and less >= 0:
            return engine.reduce(name, a, axis, keepdims=keep, ddof=int(less))
        a, mask = _selected(engine, name, a, where)
        less_mean = engine.binary("subtract", a, _mean_of(engine, a, mask, axis, True))
        squares = np.square(np.abs(less_mean))
        total = engine.reduce("sum", _kept(engine, squares, mask, 0), axis, keepdims=keep)
        count = engine.reduce("sum", mask, axis, keepdims=keep) - less
        count = np.where(count <= 0, 0 if op == name else np.nan, count)
        found = engine.cast(total / count, squares.dtype)
        return np.sqrt(found) if op == "std" else found

    return deviation


for _function in (np.mean, np.nanmean):
    implements(_function)(_mean(_function.__name__))
for _function in (np.var, np.std, np.nanvar, np.nanstd):
    implements(_function)(_deviation(_function.__name__))
