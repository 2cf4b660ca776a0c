"""Where a rank is put together: ``python -m mpi_workers zygote FD | rank CONFIG | ...``.

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
from mpi_workers import pmi_relay, proxy, trial, worker, zygote  # noqa: E402
from mpi_workers.processes import sign_in  # noqa: E402
from mpi_workers.specs import RankConfig  # noqa: E402

WARM = ("ali.linalg",)  # what most gangs load first


def run_rank(config: RankConfig) -> None:
    worker.main(config, load, Programs())


def main(argv: list[str]) -> None:
    match argv:
        case ["zygote", fd]:
            for name in WARM:
                importlib.import_module(name)
            zygote.main(socket.socket(fileno=int(fd)), lambda spec: proxy.main(spec, run_rank))
        case ["rank", pattern]:
            config = RankConfig.find(pattern)
            sign_in(config.directory)
            pmi_relay.stand_between()
            run_rank(config)
        case ["world"]:
            pmi_relay.stand_between()
            worker.tell_world()
        case ["trial", *rest]:
            trial.main(rest)
        case _:
            sys.exit(f"python -m mpi_workers zygote FD | rank CONFIG | world | trial, not {argv}")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
