"""The table of NumPy functions that handles implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Implementation = Callable[..., Any]
FUNCTIONS: dict[Any, Implementation] = {}


def implements(*functions: Any) -> Callable[[Implementation], Implementation]:
    """Register an implementation of NumPy functions; its first parameter is the engine."""

    def register(implementation: Implementation) -> Implementation:
        for function in functions:
            FUNCTIONS[function] = implementation
        return implementation

    return register
