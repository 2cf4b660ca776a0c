"""NumPy's functions of real and imaginary parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import implements


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
    whole = engine.astype(z, np.float64) if z.dtype.kind in "bi" else z
    found = engine.binary("arctan2", engine.unary("imag", whole), whole.real)
    return found * (180 / math.pi) if deg else found


@implements(np.iscomplex)
def _iscomplex(engine: Engine, x: Any) -> Any:
    return engine.binary("not_equal", engine.unary("imag", x), 0)


@implements(np.isreal)
def _isreal(engine: Engine, x: Any) -> Any:
    return engine.binary("equal", engine.unary("imag", x), 0)
