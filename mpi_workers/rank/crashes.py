"""Traces of a rank's process that crashes, or that a library or MPI ends."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import sys
import time
from pathlib import Path

from mpi4py import MPI

from mpi_workers.deadlines import BLAME_S

FINALIZED = (
    "a library has called MPI_Finalize, which ends MPI for all ranks of the gang: remove that call "
    "from its routines"
)
_libc = ctypes.CDLL(None)
LIBRARY = Path(__file__).with_name("crash_frames.so")  # `crash_frames.c`, where it was built


def write_frames_to(path: str) -> None:
    """Have a crash write the frames of its thread to a file: of C where we can, then of Python."""
    file = open(path, "wb", buffering=0)  # noqa: SIM115  # faulthandler keeps it
    faulthandler.enable(file, all_threads=False)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(str(LIBRARY)).alchemist_show_crashes(file.fileno())


_EXIT_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)
EXIT_FRAMES = 64


def report_exits() -> None:
    """Have this process print why it ends, if a library ends it, and end with a code other than 0.

    Ranks end themselves without the handlers of exit(3), so only exit(3) in a library or in MPI
    runs them.
    """
    on_exit = getattr(_libc, "on_exit", None)  # of glibc
    if on_exit is not None:
        on_exit(_report_exit, ctypes.c_void_p(os.getpid()))


@_EXIT_HANDLER  # type: ignore[untyped-decorator]  # keeps the function alive
def _report_exit(code: int, pid: int | None) -> None:
    if os.getpid() != pid:
        return  # a child that a library has forked
    callers = _calling_frames()
    delay_s = 0.0
    if MPI.Is_finalized():
        words = FINALIZED
    elif any("MPI_Abort" in frame for frame in callers):
        words = ""  # MPI has printed the call, from which the proxy knows it
    elif any("libmpi" in os.path.basename(frame.partition("(")[0]) for frame in callers):
        words = (
            f"MPI has ended this rank's process with code {code}: another rank has called "
            "MPI_Abort or has ended, or MPI cannot continue after an error"
        )
        delay_s = BLAME_S
    else:
        words = (
            f"a library has ended this rank's process with code {code}: it called exit(), or STOP "
            "in Fortran. It must return an error instead (alchemist_fail, alchemist_failed)"
        )
    sys.stderr.write(words + "\n" * bool(words))
    sys.stderr.flush()
    time.sleep(delay_s)
    os._exit(code or 1)


def _calling_frames() -> list[str]:
    """The C frames of this thread: ``/lib/libmpi.so.12(MPI_Abort+0x1b) [0x7f...]``."""
    _libc.backtrace_symbols.restype = ctypes.POINTER(ctypes.c_char_p)
    addresses = (ctypes.c_void_p * EXIT_FRAMES)()
    count = _libc.backtrace(addresses, EXIT_FRAMES)
    symbols = _libc.backtrace_symbols(addresses, count)
    return [(symbols[i] or b"").decode(errors="replace") for i in range(count)] if symbols else []
