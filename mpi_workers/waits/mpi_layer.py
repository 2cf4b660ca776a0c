"""The layer under MPI (`mpi_waits.c`): its state, and how a process gets it. Needs no MPI.

Without a C compiler at the installation it is missing, and waits in MPI cannot be interrupted.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

HANDLE_NBYTES = 4  # of a communicator in the ABI of MPICH, for which the layer is written
LIBRARY = Path(__file__).with_name("mpi_waits.so")


class State(ctypes.Structure):
    """`alchemist_waits` of the layer, or what stands for it in a process without one."""

    _fields_ = (
        ("word", ctypes.c_void_p),
        ("call", ctypes.c_uint64),
        ("active", ctypes.c_int32),
        ("crowded", ctypes.c_int32),
        ("version", ctypes.c_int32),
        ("ended", ctypes.c_int32),
        ("broken", ctypes.c_int32),
        ("ours", ctypes.c_int32),
        ("mixed", ctypes.c_int32),
        ("started", ctypes.c_int32),
        ("waited_s", ctypes.c_double),
        ("left_s", ctypes.c_double),
        ("waits_in", ctypes.c_void_p),
        ("left_in", ctypes.c_char_p),
    )


@cache
def loaded() -> ctypes.CDLL | None:
    """The layer. It has to be loaded before mpi4py: the first definition of a function counts."""
    try:
        found = ctypes.CDLL(str(LIBRARY), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
        found.alchemist_waits_start.argtypes = [ctypes.c_void_p, ctypes.c_int]
        found.alchemist_waits_leave.restype = None
    except (OSError, AttributeError):
        return None
    return found


@cache
def state() -> State:
    """The state of the waits of this process."""
    layer = loaded()
    return State() if layer is None else State.in_dll(layer, "alchemist_waits")
