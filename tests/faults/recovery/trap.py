"""A library that fails, ends its rank, or waits when it is loaded, if a file says so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mpi4py import MPI

from ali import Context, routine

_ORDER = Path(__file__).with_suffix(".order")

if _ORDER.exists() and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
    match _ORDER.read_text():
        case "raise":
            raise ValueError("not today")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wait":
            _ORDER.unlink()
            time.sleep(2)


@routine("count")
def calls(ctx: Context) -> int:
    """How often it was called."""
    ctx.state["calls"] = ctx.state.get("calls", 0) + 1
    return int(ctx.state["calls"])
