"""Output of a rank: buffers of Python and C, written line by line."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys

from mpi_workers.node.output_lines import STDERR, STDOUT, rank_pipe

_IOLBF = 1  # of <stdio.h>: line buffering


_libc = ctypes.CDLL(None)


def buffer_lines() -> None:
    """Write the output of Python and C code line by line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    with contextlib.suppress(ValueError):  # a C library that names it otherwise
        _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, _IOLBF, 0)


def use_rank_pipes(folder: str, rank: int) -> None:
    """Print to this rank's own pipes, where its launcher has given all ranks the same ones."""
    for stream in (STDOUT, STDERR):
        with contextlib.suppress(FileNotFoundError):
            pipe = os.open(rank_pipe(folder, rank, stream), os.O_WRONLY)
            os.dup2(pipe, stream)
            os.close(pipe)


def flush() -> None:
    """Write out the output that Python and C have buffered."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a routine may have closed it
            stream.flush()
    _libc.fflush(None)
