"""Functions that test_libraries.py and test_mpi_errors.py run on the ranks."""

from __future__ import annotations

import contextlib
import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from ali.registry import load
from mpi_workers.failures import Interrupted
from mpi_workers.local import local_gang
from mpi_workers.rank.commands import Libraries
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits.interruption import EndedWaits, uninterruptible

NO_SUCH_RANK = 12345


def _answer(libraries: Libraries, gang: GangView) -> list[int]:
    """The version of library "l" that each rank uses."""
    (version,) = libraries["l"].call(gang, "version", {})
    versions: list[int] = MPI.COMM_WORLD.allgather(version)
    return versions


def _load(libraries: Libraries, gang: GangView, path: str) -> list[str]:
    """The outcome of a load on each rank."""
    try:
        libraries.load(gang, "l", path)
        outcome = "loaded"
    except Interrupted:
        outcome = "Interrupted"
    except Exception as error:
        outcome = str(error).splitlines()[0]
    outcomes: list[str] = MPI.COMM_WORLD.allgather(outcome)
    return outcomes


def replaced(gang: GangView, folder: str) -> dict[str, Any]:
    """Load version 1, a version 2 that is broken on rank 1, and a whole version 3."""
    libraries = Libraries(load)
    found: dict[str, Any] = {"first": _load(libraries, gang, f"{folder}/v1.py")}
    libraries.settle(failed=False)
    broken = "broken" if gang.rank == 1 else "v2"
    found["second"] = _load(libraries, gang, f"{folder}/{broken}.py")
    found["after second"] = _answer(libraries, gang)
    libraries.settle(failed=True)
    found["settled"] = _answer(libraries, gang)
    found["third"] = _load(libraries, gang, f"{folder}/v3.py")
    found["after third"] = _answer(libraries, gang)
    return found


def cancelled(gang: GangView, folder: str) -> list[list[int]]:
    """Rank 0 commits version 2 and the others are interrupted in the agreement."""
    libraries = Libraries(load)
    libraries.load(gang, "l", f"{folder}/v1.py")
    libraries.settle(failed=False)
    local_gang.begin(5)
    with uninterruptible():
        MPI.COMM_WORLD.Barrier()
    if gang.rank == 0:  # as if its part of the agreement had completed before the interrupt
        with uninterruptible():
            Libraries.load(libraries, _Alone(), "l", f"{folder}/v2.py")
    else:
        local_gang.interrupt(5)
        with contextlib.suppress(Interrupted), EndedWaits():
            libraries.load(gang, "l", f"{folder}/v2.py")
    with uninterruptible():
        MPI.COMM_WORLD.Barrier()
    local_gang.begin(6)
    before = _answer(libraries, gang)
    libraries.settle(failed=True)
    return [before, _answer(libraries, gang)]


class _Alone:
    comm = MPI.COMM_SELF


def native_error(gang: GangView) -> dict[str, Any]:
    """Errors of MPI_Send to a rank that does not exist, in native code and in Python."""
    path = re.findall(r"/\S+/libmpi[^/\s]*\.so\S*", Path("/proc/self/maps").read_text())[0]
    native = ctypes.CDLL(path)
    native.MPI_Send.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_size_t] * 4]
    native.MPI_Comm_dup.argtypes = [ctypes.c_size_t, ctypes.c_void_p]
    native.MPI_Comm_create.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    byte = MPI._handleof(MPI.BYTE)
    found: dict[str, Any] = {}
    for name in ("gang", "duplicate", "created", "world"):
        gang.enter_native()
        comm = ctypes.c_size_t(MPI._handleof(MPI.COMM_WORLD if name == "world" else gang.comm))
        if name == "created":
            native.MPI_Comm_create(comm, MPI._handleof(gang.comm.Get_group()), ctypes.byref(comm))
        if name == "duplicate":
            native.MPI_Comm_dup(comm, ctypes.byref(comm))
        native.MPI_Send(None, 0, byte, NO_SUCH_RANK, 0, comm)
        found[name] = gang.leave_native()
    gang.enter_native()
    found["without an error"] = gang.leave_native()
    for name, comm in (("python", gang.comm), ("python, world", MPI.COMM_WORLD)):
        try:
            comm.Send(np.ones(1), NO_SUCH_RANK)
        except MPI.Exception as error:
            found[name] = str(error)
    found["total"] = gang.comm.allreduce(1)
    return found
