"""The library behind expressions on handles: all of linalg, and small operands in commands.

A gang loads it as ``ali.arrays``, in addition to any linalg that a user loads.
"""

from ali.arrays.operands import array, combine, plan, reduce
from ali.linalg import *  # noqa: F403

__all__ = ["array", "combine", "plan", "reduce"]
