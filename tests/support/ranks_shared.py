"""Rank side of `launches`: functions that one gang runs one after the other, and their failures."""

from __future__ import annotations

import faulthandler
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from mpi_workers.failures import Failure
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits.interruption import uninterruptible


def failure_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The failure of a call, as kind and message; "nothing" if it succeeds."""
    try:
        call(*arguments, **options)
    except (Failure, ValueError) as error:
        return f"{getattr(error, 'kind', type(error).__name__)}: {error}"
    return "nothing"


def serve(gang: GangView, folder: str) -> None:
    """Run functions until the pipe of this rank's orders is closed; rank 0 returns the results."""
    # Here: `envs` takes a process that has imported a rank's program for a rank.
    from mpi_workers.local.local_rank import POOL_BYTES  # noqa: PLC0415

    with open(Path(folder, str(gang.rank))) as orders, open(Path(folder, "result"), "w") as results:
        for line in orders:
            function, arguments, timeout = json.loads(line)
            faulthandler.dump_traceback_later(timeout, exit=True)
            module, name = function.split(":")
            storage = Storage(gang.rank, Pool(POOL_BYTES, shared=True))
            fresh = GangView(MPI.COMM_WORLD, storage, lambda *_: None, gang.folder)
            result = getattr(importlib.import_module(module), name)(fresh, *arguments)
            with uninterruptible():
                MPI.COMM_WORLD.Barrier()  # no rank has the next order before all have finished
            faulthandler.cancel_dump_traceback_later()
            if gang.rank == 0:
                print(json.dumps(result), file=results, flush=True)
