"""NumPy's ufuncs on handles: ``np.exp(A)``, ``np.add(1, A)``, ``np.float64(2) * A``."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import linear, rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.gang.matrix_ref import MatrixRef

OURS = {"absolute": "abs", "conjugate": "conj", "true_divide": "divide", "fabs": "abs"}
REDUCTIONS = {
    "add": "np.sum(A, axis)", "minimum": "np.min(A, axis)", "maximum": "np.max(A, axis)",
    "logical_and": "np.all(A, axis)", "logical_or": "np.any(A, axis)",
}  # fmt: skip


def apply_ufunc(
    engine: Engine, ufunc: np.ufunc, method: str, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out a ufunc on the gang; `NotImplemented` for operands that are no arrays.

    Raises
    ------
    BadArgumentError
        For a ufunc, a method or a keyword that is not there; it says what to do.
    """
    name = OURS.get(ufunc.__name__, ufunc.__name__)
    if method != "__call__":
        instead = REDUCTIONS.get(name, "") if method == "reduce" else ""
        raise rules.unsupported(f"np.{ufunc.__name__}.{method}", instead and f"use {instead}")
    if name == "vecdot":
        return linear.vecdot(engine, *inputs, **kwargs)
    _check_keywords(ufunc.__name__, kwargs)
    if not all(
        isinstance(x, MatrixRef) or rules.is_array(x) or rules.number(x) is not None for x in inputs
    ):
        return NotImplemented
    if name == "matmul":
        return engine.matmul(*inputs)
    if name == "positive":
        return engine.copy(inputs[0])
    if name == "divmod":
        return tuple(engine.binary(op, *inputs) for op in ("floor_divide", "remainder"))
    if name in rules.UNARY:
        return engine.unary(name, inputs[0])
    if name in rules.BINARY:
        return engine.binary(name, *inputs)
    raise rules.unsupported(
        f"np.{ufunc.__name__}",
        f"np.{ufunc.__name__}(A.fetch()) computes it here, and als.run(f, A) runs your own f on "
        "the ranks' parts A.local",
    )


def _check_keywords(name: str, kwargs: dict[str, Any]) -> None:
    """Only those that change nothing are taken."""
    if any(out is not None for out in kwargs.get("out") or ()):
        raise rules.unsupported(
            f"np.{name} with out=",
            "an expression gives a new matrix: write B = A + C; to add to a NumPy array, use "
            "A.fetch()",
        )
    for key, neutral in (("where", True), ("dtype", None), ("signature", None), ("subok", True)):
        if kwargs.get(key, neutral) is not neutral:
            instead = ".astype(dtype)" if key == "dtype" else "np.where(mask, A, B)"
            raise rules.unsupported(f"np.{name} with {key}=", f"use {instead}")
