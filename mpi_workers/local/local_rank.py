"""A rank of `local_gang`: the program that mpiexec starts.

``python -m mpi_workers local-rank module:function '["float64"]' folder seconds``
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

from mpi4py import MPI

from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.node.cleanup import SHM, segments_of
from mpi_workers.node.processes import ANYONE, close_listeners, crowded, die_with_parent, let_trace
from mpi_workers.node.stacks import crash_file
from mpi_workers.rank.crashes import report_exits
from mpi_workers.rank.fabric import limit_endpoints
from mpi_workers.rank.gang_view import GangView
from mpi_workers.waits import interruption
from mpi_workers.waits.interruption import InterruptWord

POOL_BYTES = 256 << 20  # 256 MiB
FIRST_CALL = 1
SOON_S = 0.1  # to the stacks of a rank that started after the deadline


def main(argv: list[str]) -> None:
    """Run the function on this rank. Does not return."""
    try:
        _run(*argv)
        status = 0
    except BaseException:
        print(f"rank {os.environ.get('PMI_RANK', '?')}:\n{traceback.format_exc()}", flush=True)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # not MPI_Finalize: operations that a test has abandoned would block it


def _run(function: str, arguments: str, folder: str, deadline: str) -> None:
    if not _traced():  # the thread of gdb that is the parent ends early
        die_with_parent(os.getppid())
    faulthandler.enable()
    stacks = open(crash_file(folder, int(os.environ.get("PMI_RANK", "0"))), "w")  # noqa: SIM115
    faulthandler.dump_traceback_later(max(float(deadline) - time.time(), SOON_S), file=stacks)
    let_trace(ANYONE)  # local_gang shows the stacks of ranks that hang
    close_listeners()
    limit_endpoints(None, one_node=True)
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    report_exits()
    world = MPI.COMM_WORLD
    Path(folder, f"rank{world.rank}.pid").write_text(str(os.getpid()))
    world.Barrier()  # all have attached: the names are not needed, and none stays if all are killed
    for name in segments_of():
        (SHM / name).unlink(missing_ok=True)
    word = InterruptWord(Path(folder, "interrupt"))
    interruption.watch(word, crowded=crowded(world.size), one_node=True, index=world.rank)
    interruption.begin(FIRST_CALL)
    own = MPI.Intracomm(world.Dup())
    interruption.start_layer(own, wanted=os.environ.get("ALCHEMIST_MPI_WAITS") != "plain")
    gang = GangView(
        own, Storage(world.rank, Pool(POOL_BYTES, shared=True)), lambda *_: None, Path(folder)
    )
    module, name = function.split(":")
    result = getattr(importlib.import_module(module), name)(gang, *json.loads(arguments))
    if world.rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    Path(folder, f"done{world.rank}").touch()
    with interruption.uninterruptible():  # the last call may have been cancelled
        world.Barrier()  # no rank leaves before all have finished
    # MPICH says this in exit(). Hydra kills all others, and profilers that still write, when a rank
    # leaves without it.
    pmi = int(os.environ["PMI_FD"])
    os.write(pmi, b"cmd=finalize\n")
    os.read(pmi, 100)


def _traced() -> bool:
    """Whether a debugger has started this process."""
    return "TracerPid:\t0\n" not in Path("/proc/self/status").read_text()
