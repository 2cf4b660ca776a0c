"""Runs in the head pod: a gang across both worker pods, and a neighbour within one of them.

Tells where both are, works until the first is gone, tells why, and what the neighbour still
knows; then starts the gang again, as often as it takes.
"""

import json
import time

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, GroupFailedError


def tell(what, value):
    print(f"TOLD {what} {json.dumps(value)}", flush=True)


def work(comm, seconds):
    end = time.monotonic() + seconds
    while comm.bcast(time.monotonic() < end):
        comm.allreduce(comm.rank)
        time.sleep(0.01)


def hosts(session):
    return sorted({worker.hostname for worker in session.list_workers()})


with (
    AlchemistSession(2, strategy="STRICT_SPREAD", start_timeout_s=240) as wide,
    AlchemistSession(2, strategy="STRICT_PACK", start_timeout_s=240) as neighbour,
):
    kept = neighbour.send_matrix([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    tell("wide", hosts(wide))
    tell("neighbour", hosts(neighbour))
    try:
        wide.run(work, 600.0)
    except GroupFailedError as error:
        tell("error", str(error))
    tell("kept", kept.fetch().tolist())
    tell("sum", neighbour.run(lambda comm: comm.allreduce(comm.rank + 1)))
    while True:  # a pod that is leaving is part of Ray's cluster for some seconds yet
        try:
            wide.request_workers(2)
            wide.run(work, 8.0)
            break
        except AlchemistError as error:
            print(error, flush=True)
            time.sleep(1.0)
    tell("again", hosts(wide))
    tell("ranks", wide.run(lambda comm: comm.allgather(comm.rank)))
