"""NumPy's ufuncs on handles: ``np.exp(A)``, ``np.add(A, 1, out=B, where=C)``."""

from __future__ import annotations

import functools
import inspect
import operator
from typing import Any

import numpy as np

from alchemist_ray.arrays import indexing, linear, rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.dtypes import check_unmasked
from alchemist_ray.errors import DtypeError, ShapeError
from mpi_workers.protocol.libraries import BINARY, SPECIAL_BINARY, SPECIAL_UNARY, UNARY

OURS = {
    "absolute": "abs", "conjugate": "conj", "true_divide": "divide", "deg2rad": "radians",
    "rad2deg": "degrees",
}  # fmt: skip
REDUCTIONS: dict[str, Any] = {  # of ufunc.reduce
    "add": np.sum, "multiply": np.prod, "minimum": np.min, "maximum": np.max,
    "logical_and": np.all, "logical_or": np.any,
}  # fmt: skip
INSTEAD_OF_METHODS = {
    "accumulate": "np.cumsum(A, axis=0) and np.cumprod add and multiply",
    "outer": "np.outer, or operands of shapes (m, 1) and (n,)",
    "reduceat": "als.xp.segment_sum adds groups",
}
ADDED: dict[np.ufunc, Any] = {np.add: operator.iadd, np.subtract: operator.isub}  # by ufunc.at


def apply_ufunc(
    engine: Engine, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out a ufunc on the gang; `NotImplemented` for operands that are no arrays.

    Raises
    ------
    BadArgumentError
        For a ufunc, a method or a keyword that is not there; it says what to do.
    """
    for given in inputs:
        check_unmasked(given, "an operand")
    name = _name(ufunc)
    if method == "reduce" and ufunc.__name__ in REDUCTIONS:
        if "out" in kwargs:
            kwargs["out"] = kwargs["out"][0]
        return REDUCTIONS[ufunc.__name__](*inputs, **{"axis": 0} | kwargs)
    if method == "at" and ufunc in ADDED and isinstance(inputs[0], MatrixRef):
        return indexing.accumulate(engine, ADDED[ufunc], *inputs)
    if method != "__call__":
        raise rules.unsupported(f"{name}.{method}", INSTEAD_OF_METHODS.get(method, ""))
    if ufunc.__name__ == "vecdot":
        return linear.vecdot(engine, *inputs, **kwargs)
    outs, where = kwargs.pop("out", ()), kwargs.pop("where", True)
    _check_keywords(name, kwargs)
    if where is not True and not outs:
        raise rules.unsupported(
            f"{name} with where= and without out=",
            "the other elements would be undefined, so write np.where(mask, A + B, A)",
        )
    if not all(
        isinstance(x, MatrixRef) or rules.is_array(x) or rules.number(x) is not None for x in inputs
    ):
        return NotImplemented
    found = _computed(engine, ufunc, inputs)
    if not outs:
        return found
    several = found if isinstance(found, tuple) else (found,)
    written = tuple(
        one if out is None else write(engine, name, one, out, where)
        for one, out in zip(several, outs, strict=True)
    )
    return written if isinstance(found, tuple) else written[0]


def _computed(engine: Engine, ufunc: np.ufunc, inputs: tuple[Any, ...]) -> Any:
    """One new matrix, or two."""
    name = OURS.get(ufunc.__name__, ufunc.__name__)
    if name == "matmul":
        return engine.matmul(*inputs)
    if name in ("matvec", "vecmat"):
        return getattr(linear, name)(engine, *inputs)
    if name == "positive":
        return engine.copy(inputs[0])
    if name == "divmod":
        return tuple(engine.binary(op, *inputs) for op in ("floor_divide", "remainder"))
    if name in UNARY | SPECIAL_UNARY:
        return engine.unary(name, engine.matrix(inputs[0]))
    if name in BINARY | SPECIAL_BINARY:
        if not any(isinstance(x, MatrixRef) for x in inputs):  # only out= is a handle
            inputs = (engine.matrix(np.asarray(inputs[0])), inputs[1])
        return engine.binary(name, *inputs)
    called = _name(ufunc)
    raise rules.unsupported(
        called,
        rules.INSTEAD.get(ufunc.__name__)
        or f"{rules.fetching(called, inputs, {})} computes it here, and als.run(f, A) runs your "
        "own f on the ranks' parts A.local",
    )


def _name(ufunc: np.ufunc) -> str:
    """As a program calls it: SciPy's are not NumPy's."""
    ours = getattr(np, ufunc.__name__, None) is ufunc or ufunc.__name__ in OURS
    return f"np.{ufunc.__name__}" if ours else ufunc.__name__


def _check_keywords(name: str, kwargs: dict[str, Any]) -> None:
    """Only those that change nothing are taken."""
    for key, neutral in (("dtype", None), ("signature", None), ("subok", True)):
        if kwargs.get(key, neutral) is not neutral:
            raise rules.unsupported(f"{name} with {key}=", "use .astype(dtype)")


# --- out= and where= of all functions ---------------------------------------------------
# The expression is computed into a new matrix, which is then copied: out= saves a name, not memory.


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
