"""The library behind expressions on handles: all of linalg, and array operations.

A gang loads it as ``ali.arrays``, in addition to any linalg that a user loads.
"""

from ali.interface import collect_routines
from ali.linalg import *  # noqa: F403
from ali.linalg import PURE as PURE

__all__ = collect_routines(__name__)
