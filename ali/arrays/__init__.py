"""The library behind expressions on handles: all of linalg, and array operations.

A gang loads it as ``ali.arrays``, in addition to any linalg that a user loads.
"""

from ali.arrays.operands import array, combine, filled, plan, progression, reduce
from ali.arrays.selecting import (
    assign,
    assign_elements,
    elements,
    nonzero,
    part,
    pick,
    reshape,
)
from ali.linalg import *  # noqa: F403

__all__ = [
    "array", "assign", "assign_elements", "combine", "elements", "filled", "nonzero", "part",
    "pick", "plan", "progression", "reduce", "reshape",
]  # fmt: skip
