"""Matrices from shapes, from NumPy arrays, and from a function of the indices."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import LAYOUT, Engine
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.dtypes import check_range, check_unmasked
from alchemist_ray.errors import ShapeError
from alchemist_ray.functions import user_code
from mpi_workers.matrix import dtypes
from mpi_workers.matrix.layout import stored_shape

# Columns from which on each row has a random stream of its own: setting it up takes as long as
# this many numbers, and saves sending them.
OWN_STREAM = 256


def asarray(engine: Engine, obj: Any, dtype: Any, copy: bool | None) -> Any:
    """A handle of an array, or of what NumPy makes one of."""
    if isinstance(obj, MatrixRef):
        return engine.astype(obj, obj.dtype if dtype is None else dtype, copy=bool(copy))
    if copy is False:
        raise ValueError("an array must be copied to the ranks: leave out copy=False")
    check_unmasked(obj, "the array")
    array = np.asarray(obj) if isinstance(obj, np.ndarray) else np.asarray(obj, dtype=dtype)
    if dtype is not None and array.dtype.kind in "biufc":
        check_range(array, rules.checked_dtype(dtype), "the array", cut=True)
        array = array.astype(dtype, copy=False)
    array = rules.operand(array)
    if array.nbytes <= rules.INLINE_NBYTES:
        return engine.call("array", *rules.encode_operand(array), LAYOUT)
    return engine.sent(array)


def full(engine: Engine, shape: Any, value: Any, dtype: Any, layout: str) -> Any:
    """The same value everywhere."""
    kind = rules.checked_dtype(np.asarray(value).dtype if dtype is None else dtype)
    return filled(engine, rules.shape_of(shape), value, kind, layout)


def filled(
    engine: Engine, shape: tuple[int, ...], value: Any, kind: np.dtype[Any], layout: str
) -> Any:
    """The same value everywhere; also integers that a float cannot hold."""
    value = bool(value) if kind.kind == "b" else value
    if isinstance(value, int | np.integer) and abs(int(value)) > rules.EXACT and kind.kind in "iu":
        zeros = engine.call("filled", list(shape), 0, kind.name, layout)
        return engine.binary("add", zeros, np.asarray(value, kind))
    return engine.call("filled", list(shape), complex(value), kind.name, layout)


def arange(engine: Engine, start: Any, stop: Any, step: Any, dtype: Any) -> Any:
    """`numpy.arange`: evenly spaced numbers from start to before stop."""
    start, stop = (0, start) if stop is None else (start, stop)
    if not step:
        raise ShapeError("arange: step must not be 0")
    kind = rules.checked_dtype(
        np.result_type(np.asarray(start), np.asarray(stop), np.asarray(step))
        if dtype is None else dtype
    )  # fmt: skip
    length = (stop - start) / step
    if not math.isfinite(length):
        raise ShapeError(
            f"arange: start={start!r}, stop={stop!r}, step={step!r}: they must be finite"
        )
    count = max(0, math.ceil(length))
    return engine.call("progression", float(start), float(step), count, kind.name)


def linspace(engine: Engine, start: Any, stop: Any, num: int, dtype: Any, *, endpoint: bool) -> Any:
    """`numpy.linspace`: `num` evenly spaced numbers."""
    if isinstance(start, complex) or isinstance(stop, complex):
        return asarray(engine, np.linspace(start, stop, num, endpoint=endpoint, dtype=dtype), None,
                       copy=None)  # fmt: skip
    try:
        num = operator.index(num)
    except TypeError:
        raise ShapeError(f"linspace: num={num!r} must be an integer") from None
    step = (stop - start) / max(1, num - endpoint)
    found = engine.call("progression", float(start), float(step), num, "float64")
    if endpoint and num > 1:
        found[-1] = float(stop)  # as NumPy: the last one is exact
    return engine.cast(found, dtype)


def eye(engine: Engine, m: int, n: int | None, k: int, dtype: Any, layout: str) -> Any:
    """Ones on the k-th diagonal."""
    kind = rules.checked_dtype(dtype)
    m, n = rules.shape_of((m, m if n is None else n))
    return engine.call("eye", m, n, kind.name, layout, int(k))


def random(engine: Engine, kind: str, shape: Any, seed: int, dtype: Any) -> Any:
    """Random numbers from 0 to 1 ("uniform"), or of mean 0 and standard deviation 1 ("normal")."""
    wanted = rules.shape_of(shape)
    m, n = stored_shape(wanted)
    if len(wanted) == 2 and n >= OWN_STREAM:
        found: Any = engine.call(f"random_{kind}", m, n, seed)
    else:
        found = engine.call("draw", kind, list(wanted), seed, [0.0, 1.0], [])
    return engine.cast(found, dtype)


def from_function(
    engine: Engine, function: Callable[..., Any], shape: Any, dtype: Any, layout: str
) -> Any:
    """A matrix of ``function(i, j)``, or a vector of ``function(i)``, evaluated on the ranks."""
    wanted = rules.shape_of(shape)
    if len(wanted) > 2:
        raise ShapeError(f"from_function: shape {wanted}: give a matrix's, and reshape the result")
    A: Any = engine.call("filled", list(wanted), 0, rules.checked_dtype(dtype).name, layout)

    # Nested, so that it travels by value: ranks do not import alchemist_ray.
    def fill(comm: Any, part: Any, function: Callable[..., Any]) -> None:
        if part.local.size:
            rows, cols = (
                np.arange(i.start, i.stop, i.step) if isinstance(i, range) else np.asarray(i)
                for i in (part.rows, part.cols)
            )
            rows, cols = rows[:, None], cols[None, :]
            if part.ndim == 2:
                found = np.asarray(function(rows, cols))
            else:
                found = np.asarray(function(rows[:, 0]))[..., None]
            dtypes.check_range(found, part.dtype, "the result of the function", cut=True)
            part.local[...] = found

    user_code.run(engine.connection, fill, (A, function), {})
    return A
