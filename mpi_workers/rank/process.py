"""The process of a rank: it prepares its limits and MPI, runs the loop, and ends."""

from __future__ import annotations

import faulthandler
import json
import math
import os
import resource
import signal
import sys
import time
import traceback
from typing import NoReturn

from mpi4py import MPI
from threadpoolctl import threadpool_limits

from mpi_workers.node.specs import RankConfig
from mpi_workers.node.stacks import crash_file
from mpi_workers.rank import crash, output
from mpi_workers.rank.commands import Runner
from mpi_workers.rank.fabric import limit_endpoints
from mpi_workers.rank.libraries import Loader
from mpi_workers.rank.loop import RankLoop
from mpi_workers.wire.blocking import connect

INIT_SLACK_S = 10  # after the start's own time limit, whose error has more details
UNFIT_S = 2.0  # a process outside the gang's MPI world waits this long to be killed


def main(config: RankConfig, loader: Loader, runner: Runner) -> None:
    """Run a rank until it is told to exit. Does not return."""
    status = 1
    try:
        faulthandler.enable()
        output.buffer_lines()
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        threadpool_limits(config.threads)
        if not MPI.Is_initialized():
            limit_endpoints(config.host, one_node=config.one_node)
            # MPI_Init holds the GIL: only an alarm ends a rank that hangs in it without a proxy.
            signal.alarm(math.ceil(config.start_timeout_s) + INIT_SLACK_S)
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
            signal.alarm(0)
        if MPI.COMM_WORLD.size != config.size:
            _report_wrong_world(config)
        output.use_rank_pipes(config.directory, MPI.COMM_WORLD.rank)
        crash.write_frames_to(crash_file(config.directory, MPI.COMM_WORLD.rank))
        RankLoop(config, loader, runner).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not MPI_Finalize: it is collective, and would wait for ranks that have ended.
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def _report_wrong_world(config: RankConfig) -> NoReturn:
    """Report to the proxy that this process is not in the gang's MPI world, and end."""
    mpi = " ".join(MPI.Get_library_version().split("\n")[0].strip("\0 ").split())
    unfit = (
        f"is in an MPI world of {MPI.COMM_WORLD.size} instead of {config.size} ranks: the launcher "
        f"and the MPI library ({mpi}) do not speak the same PMI. {config.advice}".rstrip()
    )
    about = {"role": "rank", "rank": MPI.COMM_WORLD.rank, "pid": os.getpid(), "unfit": unfit}
    if MPI.COMM_WORLD.size == 1:
        MPI.Finalize()  # alone it does not wait, and removes its names from /dev/shm
    connect(config.control, config.token, about, take_fds=False)
    time.sleep(UNFIT_S)  # the proxies end them all; a launcher would at the first one's exit
    os._exit(1)


def print_world() -> None:
    """Print rank and size of the MPI world in which a launcher has started this process."""
    MPI.Init()
    sys.stdout.write(json.dumps({"rank": MPI.COMM_WORLD.rank, "size": MPI.COMM_WORLD.size}) + "\n")
    sys.stdout.flush()
    MPI.Finalize()
