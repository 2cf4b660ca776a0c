"""``out=`` and ``where=`` of NumPy's functions: a result that is assigned to an existing array.

The expression is computed into a new matrix, which is then copied: ``out=`` saves a name, not
memory.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef


def separate(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Arguments of one of NumPy's functions without `out`, and `out`, or None.

    The arguments that follow `out` by position become keywords.
    """
    names = _parameters(function)
    if "out" in names[: len(args)]:
        place = names.index("out")
        kwargs = dict(zip(names[place:], args[place:], strict=False)) | kwargs
        args = args[:place]
    return args, {key: x for key, x in kwargs.items() if key != "out"}, kwargs.get("out")


@functools.cache
def _parameters(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a few functions of NumPy have no signature
        return []
    several = any(one.kind is one.VAR_POSITIONAL for one in parameters.values())
    return [] if several else list(parameters)  # of einsum, no argument by position is `out`


def write(engine: Engine, name: str, found: Any, out: Any, where: Any = True) -> Any:
    """Assign the result of a ufunc to `out`, where a mask is True, and return `out`.

    Raises
    ------
    BadArgumentError
        If `out` is no handle.
    DtypeError
        If NumPy's rule "same_kind" does not let the elements be cast.
    ShapeError
        If the result or the mask does not broadcast to `out`.
    """
    shapes = [found.shape] if where is True else [found.shape, np.shape(where)]
    try:
        fits = np.broadcast_shapes(*shapes, np.shape(out)) == np.shape(out)
    except ValueError:
        fits = False
    if not fits:
        told = " and ".join(map(str, shapes))
        raise ShapeError(f"{name}: {told} do not broadcast to out= of shape {np.shape(out)}")
    return _assigned(name, found if where is True else engine.where(where, found, out), found, out)


def write_whole(name: str, found: Any, out: Any) -> Any:
    """Assign the result of a function to `out`, which has its shape; see `write`."""
    if found.shape != np.shape(out):
        raise ShapeError(
            f"{name}: the result has shape {found.shape}, and out= has {np.shape(out)}"
        )
    return _assigned(name, found, found, out)


def _assigned(name: str, value: Any, found: Any, out: Any) -> Any:
    if not isinstance(out, MatrixRef):
        raise rules.unsupported(
            f"{name} with out= of a {type(out).__name__}",
            "write B = A + C for a new matrix, or x[...] = (A + C).fetch() to fill a NumPy array",
        )
    if not np.can_cast(found.dtype, out.dtype, "same_kind"):
        raise DtypeError(
            f"{name}: the result of {found.dtype} cannot be cast to out= of {out.dtype}: write "
            f"B[...] = result.astype('{out.dtype}')"
        )
    target: Any = out
    target[...] = value
    return out
