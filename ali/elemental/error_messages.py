"""Captures Elemental's error messages: its C interface prints them and returns only a code.

Elemental writes to C++'s `std::cerr`. Redirecting the process's stderr during a call would also
hide the output of a crash or of MPI_Abort. Therefore only `std::cerr` gets another buffer during
a call, through libstdc++'s own functions.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

LIMIT = 2000  # characters of Elemental's message that are passed on
APPEND_OUT = 1 | 16  # libstdc++'s std::ios_base::app | std::ios_base::out
FILEBUF_BYTES = 1024  # a std::filebuf takes about 240

# libstdc++'s names (its ABI has been frozen since GCC 3.4).
CERR = "_ZSt4cerr"
RDBUF = "_ZNSt9basic_iosIcSt11char_traitsIcEE5rdbufEPSt15basic_streambufIcS1_E"
FILEBUF = "_ZNSt13basic_filebufIcSt11char_traitsIcEEC1Ev"
OPEN = "_ZNSt13basic_filebufIcSt11char_traitsIcEE4openEPKcSt13_Ios_Openmode"


class ErrorMessages:
    """Captures the output of native code to `std::cerr`, with libstdc++ only.

    Parameters
    ----------
    library : ctypes.CDLL
        A library that is linked to libstdc++. With another C++ runtime `capture` captures
        nothing, and the messages stay in the rank's stderr.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._file = -1
        try:
            cerr = ctypes.addressof(ctypes.c_char.in_dll(library, CERR))
            construct, opened = getattr(library, FILEBUF), getattr(library, OPEN)
            self._rdbuf = getattr(library, RDBUF)
        except (AttributeError, ValueError):
            return
        # An ostream inherits its std::ios virtually: the offset stands before the vtable.
        table = ctypes.c_void_p.from_address(cerr).value
        if table is None:  # the streams are not initialised
            return
        self._ios = cerr + ctypes.c_ssize_t.from_address(table - 24).value
        construct.argtypes, construct.restype = [ctypes.c_void_p], None
        opened.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
        opened.restype = ctypes.c_void_p
        self._rdbuf.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._rdbuf.restype = ctypes.c_void_p
        self._buffer = ctypes.create_string_buffer(FILEBUF_BYTES)
        construct(self._buffer)
        file = os.memfd_create("elemental-errors", os.MFD_CLOEXEC)
        if opened(self._buffer, f"/proc/self/fd/{file}".encode(), APPEND_OUT):
            self._file = file
        else:
            os.close(file)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the output inside the block."""
        if self._file < 0:
            yield
            return
        before = self._rdbuf(self._ios, self._buffer)
        try:
            yield
        finally:
            self._rdbuf(self._ios, before)

    def take(self) -> str:
        """The output captured since the last call, on one line."""
        if self._file < 0:
            return ""
        said = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        os.ftruncate(self._file, 0)
        # "Process 3 caught error message:" stands before every message of Elemental's.
        lines = [line.strip() for line in said.splitlines() if " caught " not in line]
        return " ".join(filter(None, lines))[:LIMIT]
