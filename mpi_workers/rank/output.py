"""Output of a rank: Python's and C's, line by line."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

from mpi_workers.node.rank_output import rank_pipe
from mpi_workers.protocol.proxy_messages import STDERR, STDOUT
from mpi_workers.rank.foreign_code import STREAMS, flush_python, open_stream

_IOLBF = 1  # of <stdio.h>: line buffering
_libc = ctypes.CDLL(None)


def buffer_lines() -> None:
    """Write the output of Python and C code line by line."""
    for number, name in enumerate(STREAMS):
        open_stream(number, getattr(sys, name))
    with contextlib.suppress(ValueError):  # a C library that names it otherwise
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IOLBF, 0)


def use_rank_pipes(folder: str, rank: int) -> None:
    """Print to this rank's own pipes, where its launcher has given all ranks the same ones."""
    for stream in (STDOUT, STDERR):
        with contextlib.suppress(FileNotFoundError):
            pipe = os.open(rank_pipe(folder, rank, stream), os.O_WRONLY)
            os.dup2(pipe, stream)
            os.close(pipe)
            open_stream(stream, getattr(sys, STREAMS[stream]))


def flush() -> None:
    """Write out the output that Python and C have buffered."""
    flush_python()
    _libc.fflush(None)
