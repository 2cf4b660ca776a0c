"""Runs in the head pod: a gang across both worker pods that stands until this program's end."""

import json
import time

from alchemist_ray import AlchemistSession


def tell(what, value):
    print(f"TOLD {what} {json.dumps(value)}", flush=True)


start = time.monotonic()
with AlchemistSession(2, strategy="STRICT_SPREAD", start_timeout_s=400) as als:
    tell("hosts", [worker.hostname for worker in als.list_workers()])
    tell("seconds", time.monotonic() - start)
    tell("sum", als.run(lambda comm: comm.allreduce(comm.rank + 1)))
    time.sleep(SECONDS)  # noqa: F821 - the test puts a number here
tell("ended", True)
