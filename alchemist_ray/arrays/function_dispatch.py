"""Carries out NumPy functions on a gang: ``np.mean(A)`` finds its implementation here."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from alchemist_ray.arrays import functions, linear, rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.function_table import FUNCTIONS
from alchemist_ray.errors import BadArgumentError

IMPLEMENTED_IN = (functions, linear)  # importing them fills the table
INSTEAD = {
    "argmax": "A.max(axis) gives the values", "argmin": "A.min(axis) gives the values",
    "sort": "np.sort(A.fetch()) sorts here", "unique": "np.unique(A.fetch()) looks here",
    "median": "np.median(A.fetch()) takes it here",
    "reshape": "a matrix on ranks keeps two dimensions; A.fetch().reshape(...)",
    "ravel": "a matrix on ranks keeps two dimensions; A.fetch().ravel()",
    "save": "A.save(path)", "lstsq": "als.load_library('linalg').lstsq(A, B)",
    "eig": "np.linalg.eigh(A) for Hermitian A, else np.linalg.eig(A.fetch())",
    "prod": "np.exp(np.sum(np.log(A))) of positive elements, or np.prod(A.fetch())",
}  # fmt: skip


def apply_function(
    engine: Engine, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Carry out one of NumPy's functions on the gang.

    Raises
    ------
    BadArgumentError
        For a function or a parameter that is not there; it says what to do.
    """
    name = f"{function.__module__}.{function.__name__}".replace("numpy", "np", 1)
    implementation = FUNCTIONS.get(function)
    if implementation is None:
        instead = INSTEAD.get(function.__name__, f"{name}(A.fetch()) computes it here")
        raise rules.unsupported(name, instead)
    known = inspect.signature(implementation).parameters
    told = {
        key: value for key, value in kwargs.items()
        if key in known or (value is not None and value is not np._NoValue)
    }  # fmt: skip
    try:
        bound = inspect.signature(implementation).bind(engine, *args, **told)
    except TypeError as error:
        taken = ", ".join(list(known)[1:])
        raise BadArgumentError(
            f"{name} of a matrix on ranks: {error}; it takes ({taken}). For the rest: "
            f"{name}(A.fetch(), ...)"
        ) from None
    return implementation(*bound.args, **bound.kwargs)
