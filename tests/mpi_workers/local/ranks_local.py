"""Functions that test_local_gang.py runs on ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from mpi_workers.rank.gang_view import GangView


def variable(gang: GangView, name: str) -> list[str | None]:
    return gang.comm.allgather(os.environ.get(name))


def killed(gang: GangView) -> None:
    """The last rank is killed while the others wait for it."""
    if gang.rank == gang.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gang.comm.Barrier()


def waits(gang: GangView, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    time.sleep(1000.0)
