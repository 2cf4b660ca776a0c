"""A library with all kinds of effects."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ali import Context, DistMatrix, routine


@routine("B")
def doubled(ctx: Context, A: DistMatrix) -> DistMatrix:
    """B = 2 A; nothing is declared."""
    B = ctx.empty_like(A)
    B.local[...] = 2 * A.local
    return B


@routine("B")
def itself(ctx: Context, A: DistMatrix) -> DistMatrix:
    """A under another number."""
    return A


@routine()
def increment(ctx: Context, A: DistMatrix, by: float = 1.0) -> None:
    """Change A in place; nothing is declared."""
    A.local[...] += by


@routine(writes=())
def note(ctx: Context, path: str, A: DistMatrix) -> None:
    """Append a line to a file."""
    if ctx.rank == 0:
        with Path(path).open("a") as file:
            file.write("line\n")


@routine("B", pure=True)
def slow(ctx: Context, A: DistMatrix, seconds: float) -> DistMatrix:
    """B = A + 1, after some time."""
    time.sleep(seconds)
    B = ctx.empty_like(A)
    B.local[...] = A.local + 1
    return B


@routine("B")
def slow_impure(ctx: Context, A: DistMatrix, seconds: float) -> DistMatrix:
    """The same, without a declaration."""
    A.local[...] += 1
    time.sleep(seconds)
    return A


@routine("B", pure=True)
def deadly(ctx: Context, A: DistMatrix, path: str) -> DistMatrix:
    """B = -A, or the end of rank 0 if the file exists."""
    if ctx.rank == 0 and os.path.exists(path):
        with Path(path).open("a") as file:
            file.write("death\n")
        os.kill(os.getpid(), signal.SIGKILL)
    B = ctx.empty_like(A)
    B.local[...] = -A.local
    return B


@routine(writes=("A",))
def half(ctx: Context, A: DistMatrix) -> None:
    """Change A on rank 0, then fail."""
    if ctx.rank == 0:
        A.local[...] = 0
    ctx.comm.Barrier()
    raise ValueError("half done")
