"""An MPI library with every fault that a library can have."""

from __future__ import annotations

import ctypes
import os
import sys
import time

import numpy as np
from mpi4py import MPI

from ali import Context, DistMatrix, routine


@routine("total")
def total(ctx: Context) -> int:
    """Sum of all rank numbers, over MPI."""
    return ctx.comm.allreduce(ctx.rank)


@routine("B")
def twice(ctx: Context, A: DistMatrix) -> DistMatrix:
    """B = 2 A."""
    B = ctx.empty_like(A)
    np.multiply(A.local, 2, out=B.local)
    return B


@routine()
def collective(ctx: Context, missing: int, native: bool = False) -> None:
    """All ranks but one wait in a collective; the last one sleeps instead."""
    if ctx.rank == missing:
        time.sleep(60)
    _meet(ctx, native)


@routine()
def churn(ctx: Context, seconds: float) -> None:
    """Repeat an Allreduce of a megabyte in native MPI."""
    ours, theirs = np.ones(1 << 17), np.empty(1 << 17)
    end = time.monotonic() + seconds
    while MPI.COMM_WORLD.allreduce(time.monotonic() < end, MPI.LAND):
        MPI.COMM_WORLD.Allreduce(ours, theirs)


@routine()
def segfault(ctx: Context, rank: int) -> None:
    """One rank reads address 0; the others wait for it."""
    if ctx.rank == rank:
        ctypes.string_at(0)
    _meet(ctx, True)


@routine()
def abort(ctx: Context, rank: int, code: int) -> None:
    """One rank calls MPI_Abort; the others wait for it."""
    if ctx.rank == rank:
        MPI.COMM_WORLD.Abort(code)
    _meet(ctx, True)


@routine()
def leave(ctx: Context, rank: int, code: int) -> None:
    """One rank prints a line and calls os._exit; the others wait for it."""
    if ctx.rank == rank:
        print("I cannot go on", file=sys.stderr, flush=True)
        os._exit(code)
    _meet(ctx, True)


@routine()
def quit(ctx: Context, rank: int) -> None:
    """One rank calls sys.exit; the others wait for it."""
    if ctx.rank == rank:
        sys.exit("I have had enough")
    _meet(ctx, False)


@routine("huge")
def greedy(ctx: Context, m: int, n: int) -> DistMatrix:
    """Ask for an m x n matrix."""
    return ctx.zeros((m, n), "float64")


@routine()
def stuck(ctx: Context, rank: int) -> None:
    """One rank raises; the others wait for it in native MPI."""
    if ctx.rank == rank:
        raise ValueError("before the barrier")
    _meet(ctx, True)


@routine()
def late(ctx: Context, rank: int, seconds: float) -> None:
    """One rank raises; the others return later."""
    if ctx.rank == rank:
        raise ValueError("before the others")
    time.sleep(seconds)


def _meet(ctx: Context, native: bool) -> None:
    if native:
        MPI.COMM_WORLD.Barrier()
    else:
        ctx.comm.Barrier()
