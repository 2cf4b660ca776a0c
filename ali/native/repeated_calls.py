"""Repeated calls of a native routine with numbers, at low cost."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali.interface import Context
from ali.native.abi import CCall, CValue
from ali.native.host import Frame
from mpi_workers.failures import Failure

if TYPE_CHECKING:
    from ali.native.library import NativeLibrary
    from mpi_workers.rank.gang import Gang

NUMBERS = ["list[float]"]
FLAG = ["bool"]
NOTHING = np.zeros(0)


class PreparedCall:
    """Calls a routine whose parameter is a list of floats or none, and its result a list, a bool
    or none.

    Structures are reused between calls and numbers are not converted to Python objects: a call
    costs a few microseconds.

    Parameters
    ----------
    library : NativeLibrary
    gang : Gang
        The ranks that run it.
    routine : str

    Raises
    ------
    Failure
        NoSuchRoutineError; RoutineError for a routine with other types.
    """

    def __init__(self, library: NativeLibrary, gang: Gang, routine: str) -> None:
        self._library = library
        self._gang = gang
        self._routine = routine
        native, signature = library.routine(routine)
        taken = [p.type for p in signature.parameters]
        given = [r.type for r in signature.results]
        if taken not in ([], NUMBERS) or given not in ([], NUMBERS, FLAG):
            raise Failure("RoutineError", f"{signature} takes or returns other types than numbers")
        self._run = native.run  # kept: each access to the struct creates an object
        self._flag = given == FLAG
        self._given = CValue(given=1)
        self._found = CValue()
        self._call = CCall(library.host.address, 0, gang.rank, gang.size, *gang.grid, None)
        self._comm: object = None
        self._context = Context(gang, {})
        self._frame: Frame | None = None
        self._where: tuple[int, int | None] = (0, None)
        self._view = NOTHING

    def __call__(self, numbers: NDArray[np.float64] | None = None) -> int:
        """Run it with `numbers` (contiguous).

        Returns the count of returned numbers, or 0 or 1 for a bool. Only rank 0 of the
        communicator must return a list. Raises as `NativeLibrary.call`.
        """
        self._frame = self._called(numbers)
        return int(self._found.flag != 0) if self._flag else int(self._found.count)

    def numbers(self) -> NDArray[np.float64]:
        """Run it without arguments; its result, in memory of the library, until the next call."""
        self._frame = self._called(None)  # has the library's allocations
        found = self._found
        where = found.count, found.pointer
        if where != self._where:
            self._where = where
            self._view = NOTHING
            if found.count and found.pointer:
                memory = (ctypes.c_double * found.count).from_address(found.pointer)
                self._view = np.frombuffer(memory)
        return self._view

    def _called(self, numbers: NDArray[np.float64] | None) -> Frame:
        call = self._call
        if self._gang.comm is not self._comm:
            self._comm = self._gang.comm
            call.comm = MPI._handleof(self._gang.comm)
        if numbers is not None:
            self._given.count, self._given.pointer = len(numbers), numbers.ctypes.data
        found = self._found
        found.count, found.pointer = 0, None
        frame = Frame(self._context)
        self._library.enter(self._run, call, self._given, found, self._routine, frame)
        return frame
