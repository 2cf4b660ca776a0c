"""What expressions on handles call on the ranks: all of linalg, and small arrays in the command.

A gang loads it as ``ali.arrays``, beside the linalg that a user may have loaded.
"""

from ali.arrays.operands import array, combine, plan, reduce
from ali.linalg import *  # noqa: F403

__all__ = ["array", "combine", "plan", "reduce"]
