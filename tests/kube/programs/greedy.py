"""Runs in the head pod: of two ranks, each in a pod of its own, one wants more than its pod has."""

import json

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import GroupFailedError


def tell(what, value):
    print(f"TOLD {what} {json.dumps(value)}", flush=True)


def greedy(comm, gib):
    if comm.rank == 1:
        np.ones(int(gib * (1 << 27)))
    comm.barrier()


with AlchemistSession(2, strategy="STRICT_SPREAD", start_timeout_s=240) as als:
    tell("hosts", [worker.hostname for worker in als.list_workers()])
    try:
        als.run(greedy, 3.0)
    except GroupFailedError as error:
        tell("error", str(error))
        tell("rank", error.rank)
    als.request_workers(2)
    tell("again", als.run(lambda comm: comm.allreduce(1)))
