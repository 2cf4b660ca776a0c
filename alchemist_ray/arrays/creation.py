"""Matrices from nothing, from NumPy, and from a function of the indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.errors import ShapeError
from alchemist_ray.functions import run
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.transfer.sending import send

LAYOUT = "VC_STAR"
VECTORS = 2  # below so many dimensions an array is NumPy's


def asarray(engine: Engine, obj: Any, dtype: Any, copy: bool | None) -> Any:
    """A handle of what has two dimensions, else a NumPy array."""
    if isinstance(obj, MatrixRef):
        made = obj if dtype is None else engine.astype(obj, dtype)
        return engine.copy(made) if copy and made is obj else made
    array = np.asarray(obj, dtype=dtype)
    if array.ndim < VECTORS:
        return array.copy() if copy else array
    if copy is False:
        raise ValueError("an array cannot become a matrix on ranks without a copy")
    if array.ndim > VECTORS:
        raise ShapeError(f"an array of shape {array.shape}: a matrix has two dimensions")
    kind = rules.matrix_dtype(array.dtype)
    if array.nbytes <= rules.SMALL and array.size:
        small = array.astype(kind, copy=False)
        return engine.call("array", *rules.encode_operand(small), LAYOUT)
    return send(engine.connection, array, layout=LAYOUT, dtype=kind)


def full(engine: Engine, shape: Any, value: Any, dtype: Any, layout: str) -> Any:
    """The same value everywhere; a handle for two dimensions, NumPy's array below."""
    if isinstance(shape, int | np.integer) or len(shape) < VECTORS:
        return np.full(shape, value, dtype)
    kind = rules.checked_dtype(np.asarray(value).dtype if dtype is None else dtype)
    m, n = rules.shape_of(shape)
    if isinstance(value, int) and abs(value) > rules.EXACT and kind == np.int64:
        one = engine.matrix(np.full((1, 1), value, kind))
        return engine.binary("add", engine.call("zeros", m, n, kind.name, layout), one)
    return engine.call("full", m, n, value if not isinstance(value, bool) else int(value),
                       kind.name, layout)  # fmt: skip


def eye(engine: Engine, m: int, n: int | None, k: int, dtype: Any, layout: str) -> Any:
    """Ones on the k-th diagonal."""
    kind = rules.checked_dtype(dtype)
    m, n = rules.shape_of((m, m if n is None else n))
    return engine.call("eye", m, n, kind.name, layout, int(k))


def random(engine: Engine, routine: str, shape: Any, seed: int, dtype: Any) -> Any:
    """Random numbers of a routine of linalg."""
    m, n = rules.shape_of(shape)
    found: Any = engine.call(routine, m, n, seed)
    return found if dtype is None else engine.astype(found, dtype)


def from_function(
    engine: Engine, function: Callable[..., Any], shape: Any, dtype: Any, layout: str
) -> Any:
    """A matrix of ``function(i, j)``, evaluated on the ranks."""
    m, n = rules.shape_of(shape)
    A: Any = engine.call("zeros", m, n, rules.checked_dtype(dtype).name, layout)

    # Nested, so that it travels by value: ranks do not import alchemist_ray.
    def fill(comm: Any, part: Any, function: Callable[..., Any]) -> None:
        if part.local.size:
            rows = np.arange(part.rows.start, part.rows.stop, part.rows.step)[:, None]
            cols = np.arange(part.cols.start, part.cols.stop, part.cols.step)[None, :]
            part.local[...] = function(rows, cols)

    run.run(engine.connection, fill, (A, function), {}, None)
    return A
