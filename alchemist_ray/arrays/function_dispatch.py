"""Carries out NumPy functions on a gang: ``np.mean(A)`` finds its implementation here."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from alchemist_ray.arrays import (
    fourier,
    functions,
    linear,
    ordering,
    reductions,
    rules,
    statistics,
    ufuncs,
)
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import FUNCTIONS
from alchemist_ray.dtypes import check_unmasked
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.gang.matrix_ref import MatrixRef

IMPLEMENTED_IN = (
    fourier,
    functions,
    linear,
    ordering,
    reductions,
    statistics,
)  # these fill the table
INSTEAD = {  # of functions that are missing: code that runs as it is here, and when it is the same
    "save": "A.save('matrix.npy')",
    "eig": "np.linalg.eigh(A) for Hermitian A, else np.linalg.eig(A.fetch())",
    "eigvals": "np.linalg.eigvalsh(A) for Hermitian A, else np.linalg.eigvals(A.fetch())",
    "sort_complex": "np.sort(A)",
    "delete": "A[np.arange(len(A)) != 2], a mask of the rows that stay",
    "insert": "np.concatenate([A[:2], A[:1], A[2:]])",
    "compress": "A[A[:, 0] > 0], a mask of rows", "extract": "A[A > 0], a mask of elements",
    "place": "A[A > 0] = 1", "putmask": "A[A > 0] = 1", "copyto": "A[...] = 1",
    "rot90": "A.T[::-1]",
    "trapezoid": "(A[1:] + A[:-1]).sum(axis=0) / 2", "ediff1d": "np.diff(A.ravel())",
    "piecewise": "np.where(A > 0, A, -A)",
    "setxor1d": "np.setdiff1d(np.union1d(A, A), np.intersect1d(A, A))",
}  # fmt: skip


_signature = functools.cache(inspect.signature)  # 8 us, for each function once


def apply_function(
    engine: Engine, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out one of NumPy's functions on the gang.

    Raises
    ------
    BadArgumentError
        For a function or a parameter that is not there; it says what to do.
    """
    for given in (*args, *kwargs.values()):
        check_unmasked(given, "an argument")
    name = f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1)
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        local = f"{_fetching(name, args, kwargs)} computes it here"
        raise rules.unsupported(name, INSTEAD.get(function.__name__, local))
    signature = _signature(implementation)
    known = signature.parameters
    plain, rest, out = ufuncs.separate(function, args, kwargs)
    told = {
        key: value for key, value in rest.items()
        if value is not np._NoValue and (key in known or value is not None)
    }  # fmt: skip
    try:
        bound = signature.bind(engine, *plain, **told)
    except TypeError as error:
        taken = ", ".join(list(known)[1:])
        raise BadArgumentError(
            f"{name} of a matrix on ranks: {error}; it takes ({taken}). "
            f"{_fetching(name, args, kwargs)} computes it here"
        ) from None
    found = implementation(*bound.args, **bound.kwargs)
    return found if out is None else ufuncs.write_whole(name, found, out)


def _fetching(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call as code that fetches the handles in it, which are named A, B, ..."""
    letters: dict[int, str] = {}

    def told(value: Any) -> str:
        if isinstance(value, MatrixRef):
            return letters.setdefault(value.id, chr(ord("A") + len(letters))) + ".fetch()"
        if isinstance(value, tuple | list):
            inner = ", ".join(map(told, value))
            left, right = "()" if isinstance(value, tuple) else "[]"
            return f"{left}{inner}{',' if left == '(' and len(value) == 1 else ''}{right}"
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        return getattr(value, "__name__", "...")

    given = [told(x) for x in args]
    given += [f"{key}={told(x)}" for key, x in kwargs.items() if x is not np._NoValue]
    return f"{name}({', '.join(given)})"
