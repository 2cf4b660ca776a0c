"""Runs in the head pod: a gang across both worker pods that goes on while these are replaced.

Its matrix is too large to be kept in memory: it comes back from the checkpoint.
"""

import json
import time

import numpy as np

from alchemist_ray import AlchemistSession


def tell(what, value):
    print(f"TOLD {what} {json.dumps(value)}", flush=True)


def hosts(session):
    return sorted(worker.hostname for worker in session.list_workers())


options = {"max_failures": 8, "checkpoint_folder": "/shared/gang", "start_timeout_s": 400}
with AlchemistSession(2, strategy="STRICT_SPREAD", **options) as als:
    values = np.random.default_rng(0).normal(size=(1000, 400))  # 3.2 MB
    A = als.send_matrix(values)
    als.checkpoint()
    linalg = als.load_library("linalg")
    first = last = hosts(als)
    tell("hosts", first)
    replaced = 0
    while replaced < 2:
        assert abs(linalg.norm(A) - np.linalg.norm(values)) < 1e-8
        now = hosts(als)
        if len(set(now) - set(first)) > replaced:
            replaced = len(set(now) - set(first))
            tell(f"hosts{replaced}", now)
        time.sleep(0.2)
    tell("equal", bool(np.array_equal(A.fetch(), values)))
