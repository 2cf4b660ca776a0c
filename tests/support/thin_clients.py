"""Modules that a thin client lacks, and many thin clients that transfer at the same time."""

from __future__ import annotations

import json
import multiprocessing
import time
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession

NOT_ON_CLIENTS = (
    "ray", "mpi4py", "uvloop", "threadpoolctl", "tqdm", "scipy", "yaml",
    "fcntl", "resource", "pwd", "grp", "termios",
)  # fmt: skip


LAYOUTS = ("VC_STAR", "MC_MR")
ROWS, COLS = 1200, 1000  # of float64, 9.6 MB: two streams
ATTACHING = 16  # at a time: all clients share the cores of this machine
NBYTES = 2 * len(LAYOUTS) * ROWS * COLS * 8  # that each client moves


def main(gang: str, clients: int) -> None:
    """Attach this many clients to a gang, let them transfer; print each one's seconds as JSON.

    The gateway is that of ``ALCHEMIST_ADDRESS``. Call it in a program that has done nothing else:
    the clients are forked.
    """
    AlchemistSession.list()  # the key of the token is derived once, not by all on the same cores
    context = multiprocessing.get_context("fork")
    shared = context.Semaphore(ATTACHING), context.Barrier(clients), context.Array("d", clients)
    running = [context.Process(target=_work, args=(gang, k, *shared)) for k in range(clients)]
    for client in running:
        client.start()
    for client in running:
        client.join()
    failed = sum(client.exitcode != 0 for client in running)
    print(json.dumps({"failed": failed, "spent": list(shared[-1])}))


def _work(gang: str, number: int, attaching: Any, barrier: Any, spent: Any) -> None:
    matrix = np.random.default_rng(number).random((ROWS, COLS))
    try:
        with attaching:
            als = AlchemistSession.attach(gang)
        with als:
            barrier.wait()
            begun = time.monotonic()
            for layout in LAYOUTS:
                handle = als.send_matrix(matrix, layout=layout)
                if not np.array_equal(handle.fetch(), matrix):
                    raise ValueError(f"client {number}: another matrix came back")
                handle.free()
            spent[number] = time.monotonic() - begun
    except BaseException:
        barrier.abort()  # the others must not wait
        raise
