"""Carries out NumPy functions on a gang: ``np.mean(A)`` finds its implementation here."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from alchemist_ray.arrays import (
    borders,
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
from alchemist_ray.arrays.rules import FUNCTIONS, INSTEAD
from alchemist_ray.dtypes import check_unmasked
from alchemist_ray.errors import BadArgumentError

IMPLEMENTED_IN = (
    borders,
    fourier,
    functions,
    linear,
    ordering,
    reductions,
    statistics,
)  # these fill the table


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
        local = f"{rules.fetching(name, args, kwargs)} computes it here"
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
            f"{rules.fetching(name, args, kwargs)} computes it here"
        ) from None
    found = implementation(*bound.args, **bound.kwargs)
    return found if out is None else ufuncs.write_whole(name, found, out)
