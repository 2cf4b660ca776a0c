"""Where a rank is put together: ``python -m mpi_workers fork-server FD | rank CONFIG | ...``.

The one place on the MPI side that knows of `ali`: the rank's loop is handed the
loader of libraries and the runner of users' own functions and scripts.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

import mpi4py

mpi4py.rc.initialize = False  # MPI_Init belongs to the rank, after the fork

from ali.registry import load  # noqa: E402
from ali.run import Programs  # noqa: E402
from mpi_workers.node import fork_server, pmi_relay, proxy  # noqa: E402
from mpi_workers.node.processes import sign_in  # noqa: E402
from mpi_workers.node.specs import RankConfig  # noqa: E402
from mpi_workers.rank import loop  # noqa: E402
from mpi_workers.testing import trial  # noqa: E402

WARM = ("ali.linalg",)  # what most gangs load first


def run_rank(config: RankConfig) -> None:
    loop.main(config, load, Programs())


def main(argv: list[str]) -> None:
    match argv:
        case ["fork-server", fd]:
            for name in WARM:
                importlib.import_module(name)
            fork_server.main(socket.socket(fileno=int(fd)), lambda spec: proxy.main(spec, run_rank))
        case ["rank", pattern]:
            config = RankConfig.find(pattern)
            sign_in(config.directory)
            pmi_relay.stand_between()
            run_rank(config)
        case ["world"]:
            pmi_relay.stand_between()
            loop.tell_world()
        case ["trial", *rest]:
            trial.main(rest)
        case _:
            sys.exit(
                f"python -m mpi_workers fork-server FD | rank CONFIG | world | trial, not {argv}"
            )
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
