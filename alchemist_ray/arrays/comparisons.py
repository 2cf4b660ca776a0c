"""NumPy's comparisons of whole arrays: isclose, allclose, array_equal, array_equiv."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import implements
from alchemist_ray.gang.matrix_ref import MatrixRef


@implements(np.isclose)
def _isclose(
    engine: Engine, a: Any, b: Any, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False
) -> Any:
    if not isinstance(b, MatrixRef):
        b = np.asarray(b)
    if b.dtype.kind in "biu":
        b = b.astype(np.float64)
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
