"""Returns its arguments: every type of parameter and result; fails on request.

For trying out a gang and for tests of clients.
"""

from __future__ import annotations

import time

from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

PURE = True

INTS = [1, 2]  # defaults of lists
FLOATS = [0.5, 1.5]
FLAGS = [True, False]
TEXTS = ["a", "b"]


@routine()
def nothing(ctx: Context) -> None:
    """Do nothing: measures the overhead of a call."""


@routine("A", "i", "x", "z", "flag", "text", "ints", "floats", "flags", "texts")
def echo(
    ctx: Context,
    A: DistMatrix,
    i: int = 1,
    x: float = 0.5,
    z: complex = 1j,
    flag: bool = True,
    text: str = "echo",
    ints: list[int] = INTS,
    floats: list[float] = FLOATS,
    flags: list[bool] = FLAGS,
    texts: list[str] = TEXTS,
) -> tuple[
    DistMatrix, int, float, complex, bool, str, list[int], list[float], list[bool], list[str]
]:
    """Return every parameter unchanged; the matrix as a new handle to the same elements."""
    return A, i, x, z, flag, text, ints, floats, flags, texts


@routine("ranks")
def who(ctx: Context) -> list[int]:
    """The ranks of the gang, gathered over MPI."""
    ranks: list[int] = ctx.comm.allgather(ctx.rank)
    return ranks


@routine()
def say(ctx: Context, text: str) -> None:
    """Print a line on every rank."""
    print(text)


@routine()
def sleep(ctx: Context, seconds: float) -> None:
    """Sleep on every rank, reporting progress."""
    start = time.monotonic()
    while (passed := time.monotonic() - start) < seconds:
        ctx.progress(passed / seconds, "sleeping")
        time.sleep(min(0.05, seconds - passed))


@routine()
def fail(ctx: Context, rank: int = -1, message: str = "on purpose", meet: bool = True) -> None:
    """Raise ValueError on one rank (-1: on all); the others wait for it in MPI if `meet`."""
    if rank in (-1, ctx.rank):
        raise ValueError(message)
    if meet:
        ctx.comm.Barrier()
