"""Runs in the head pod: a gang with `max_failures` across both worker pods, one of which is lost.

Tells where it is, computes until no rank is on a lost pod, and tells whether the results are those
of NumPy.
"""

import json
import time

import numpy as np
import ray

from alchemist_ray import AlchemistSession


def tell(what, value):
    print(f"TOLD {what} {json.dumps(value)}", flush=True)


def hosts(session):
    return sorted({worker.hostname for worker in session.list_workers()})


X = np.random.default_rng(0).random((500, 40))
with AlchemistSession(2, strategy="STRICT_SPREAD", start_timeout_s=240, max_failures=50) as als:
    A = als.send_matrix(X, durable=True)
    B = als.send_matrix([(ray.put(X), 0, 0)])
    C = A.T @ B
    before = hosts(als)
    tell("hosts", before)
    while hosts(als) == before:
        (A + 1).free()
        time.sleep(0.1)
    right = np.allclose(C.fetch(), X.T @ X) and np.allclose((A - B).fetch(), 0)
    tell("again", hosts(als))
    tell("right", bool(right))
