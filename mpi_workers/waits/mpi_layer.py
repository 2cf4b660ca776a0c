"""The layer under MPI (`mpi_waits.c`): its state, and how a process gets it. Needs no MPI.

Without a C compiler at the installation it is missing, and waits in MPI cannot be interrupted.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from mpi_workers.failures import Failure
from mpi_workers.waits import mpi_calls

HANDLE_NBYTES = 4  # of a communicator in the ABI of MPICH, for which the layer is written
LIBRARY = Path(__file__).with_name("mpi_waits.so")
FUNCTIONS = ("leave", "drop", "end")  # without parameters and result


class State(ctypes.Structure):
    """`alchemist_waits` of the layer, or what stands for it in a process without one."""

    _fields_ = tuple((name, getattr(ctypes, kind)) for name, _, kind, _ in mpi_calls.STATE)


@cache
def loaded() -> ctypes.CDLL | None:
    """The layer. It has to be loaded before mpi4py: the first definition of a function counts.

    Raises
    ------
    Failure
        LaunchError, if it was built of other sources than these.
    """
    try:
        found = ctypes.CDLL(str(LIBRARY), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
    except OSError:
        return None
    try:
        size = len(mpi_calls.version())
        built = (ctypes.c_char * size).in_dll(found, "alchemist_waits_version").value.decode()
    except ValueError:  # it is older than its versions
        built = "unknown"
    if built != mpi_calls.version():
        raise Failure(
            "LaunchError",
            f"{LIBRARY} is version {built} and was not built of the sources beside it, version "
            f"{mpi_calls.version()}: rebuild it, by `python -m mpi_workers.build_native`",
        )
    for name in FUNCTIONS:
        getattr(found, f"alchemist_waits_{name}").restype = None
    return found


@cache
def state() -> State:
    """The state of the waits of this process."""
    layer = loaded()
    return State() if layer is None else State.in_dll(layer, "alchemist_waits")
