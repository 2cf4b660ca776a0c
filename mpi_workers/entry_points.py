"""The programs of the MPI side, which `python -m mpi_workers` starts.

Only this file imports `ali`: it passes the loader of libraries and the runner of users' functions
and scripts to the rank's loop.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from multiprocessing.connection import Connection

from ali.loader import set_mpi_variables
from ali.registry import load
from ali.run import Programs
from mpi_workers.local import local_rank, rank_server
from mpi_workers.node import fork_server, pmi_relay, proxy
from mpi_workers.node.processes import close_listeners, sign_in
from mpi_workers.node.specs import RankConfig
from mpi_workers.rank import process

PRELOADED = ("ali.linalg",)  # most gangs load it first
PRELOADED_LOCAL = (*PRELOADED, "ali.conformance")  # which needs pytest


def run_rank(config: RankConfig) -> None:
    set_mpi_variables()
    process.main(config, load, Programs())


def _run_local_rank(argv: list[str]) -> None:
    set_mpi_variables()
    local_rank.main(argv)


def main(argv: list[str]) -> None:
    match argv:
        case ["fork-server", fd]:
            for name in PRELOADED:
                importlib.import_module(name)
            process.refuse_spawned_pools()
            agent = Connection(int(fd))
            fork_server.main(agent, lambda plan, node: proxy.main(plan, node, run_rank))
        case ["rank", pattern]:
            config = RankConfig.find(pattern)
            sign_in(config.directory)
            close_listeners()
            pmi_relay.start_if_needed()
            run_rank(config)
        case ["world"]:
            pmi_relay.start_if_needed()
            process.print_world()
        case ["local-rank", *rest]:
            _run_local_rank(rest)
        case ["local-server", fd]:
            with contextlib.suppress(ImportError):
                for name in PRELOADED_LOCAL:
                    importlib.import_module(name)
            rank_server.main(socket.socket(fileno=int(fd)), _run_local_rank)
        case _:
            sys.exit(
                "usage: python -m mpi_workers fork-server FD | rank CONFIG | world | "
                f"local-rank ... | local-server FD, not {argv}"
            )
    os._exit(0)
