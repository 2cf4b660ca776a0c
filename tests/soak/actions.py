"""The actions of the soak: each leaves a working session, or none."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import CallTimeoutError, GroupFailedError, RoutineError
from tests.soak.measure import Report, held
from tests.support import traces

WARM_UP = 2  # rounds of all actions before the first measurement
WARM_UP_SESSIONS = 20
SETTLE_S = 10.0  # for agents and ranks to give back what they keep warm
ROWS = 40_000  # of the largest matrix


def transfer(als: AlchemistSession, choose: random.Random) -> None:
    """Send and fetch a matrix of any shape, dtype and layout."""
    shape = (choose.randrange(1, ROWS), choose.randrange(1, 20))
    dtype = choose.choice(["float32", "float64", "int64", "complex128"])
    layout = choose.choice(["VC_STAR", "MC_MR", "STAR_VR", "STAR_STAR", "CIRC_CIRC"])
    a = np.random.default_rng(choose.randrange(1 << 30)).integers(0, 9, shape).astype(dtype)
    np.testing.assert_array_equal(als.send_matrix(a, layout=layout).fetch(), a)


def blocks(als: AlchemistSession, choose: random.Random) -> None:
    """Send blocks of the object store."""
    rows, count = choose.randrange(1, 500), choose.randrange(1, 9)
    refs = [(ray.put(np.full((rows, 7), float(i))), rows * i, 0) for i in range(count)]
    A = als.send_matrix(refs)
    assert float(A.sum()) == rows * 7 * sum(range(count))


def expression(als: AlchemistSession, choose: random.Random) -> None:
    """Expressions, whose matrices are freed as they go."""
    A = als.send_matrix(np.ones((choose.randrange(1, 3000), 8)))
    for i in range(5):
        A = A * 2 - A + i
    assert A.fetch()[0, 0] == 11


def function(als: AlchemistSession, choose: random.Random) -> None:
    """A function with arguments and a result that travel in files."""
    data = os.urandom(choose.randrange(1, 300_000))
    assert als.run(lambda comm, x: (comm.size, x), data)[1] == data


def failure(als: AlchemistSession, choose: random.Random) -> None:
    """A call that fails on one rank while others wait in MPI."""

    def fail(comm: Any) -> None:
        if comm.rank == comm.size - 1:
            raise ValueError("as asked")
        comm.barrier()

    with pytest.raises(RoutineError):
        als.run(fail)


def timeout(als: AlchemistSession, choose: random.Random) -> None:
    """A call that is cancelled."""
    with pytest.raises(CallTimeoutError):
        als.run(lambda comm: time.sleep(30), timeout_s=0.1)


def task(als: AlchemistSession, choose: random.Random) -> None:
    """A Ray task that uses a handle."""

    @ray.remote(num_cpus=0)
    def total(handle: Handle) -> float:
        return float((handle + 1).sum())

    assert ray.get(total.remote(als.send_matrix(np.ones((10, 3)))), timeout=60) == 60


def threads(als: AlchemistSession, choose: random.Random) -> None:
    """Several threads of one session."""
    A = als.send_matrix(np.arange(40.0).reshape(20, 2))
    found: list[float] = []
    workers = [
        threading.Thread(target=lambda i=i: found.append((A * i).fetch(rows=1)[0, 0]))
        for i in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(found) == [0, 2, 4, 6]


def fork(als: AlchemistSession, choose: random.Random) -> None:
    """A forked child that fetches."""
    A = als.send_matrix(np.ones((10, 3)))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if A.fetch(rows=2).sum() == 3 else 1
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def kill(als: AlchemistSession, choose: random.Random) -> None:
    """A rank that is killed, and a new gang."""
    victim = choose.choice(als.list_workers())
    os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(GroupFailedError):
        _call_until_it_fails(als)
    als.request_workers(choose.randrange(1, 4))


def _call_until_it_fails(als: AlchemistSession) -> None:
    while True:
        als.run(lambda comm: comm.barrier())


def reopen(als: AlchemistSession, choose: random.Random) -> None:
    """A new gang of another size."""
    als.yield_workers()
    als.request_workers(choose.randrange(1, 4))


ACTIONS: tuple[Callable[[AlchemistSession, random.Random], None], ...] = (
    transfer, blocks, expression, function, failure, timeout, task, threads, fork, kill, reopen,
)  # fmt: skip


def soak(seconds: float, seed: int) -> Report:
    """Run random actions in new sessions; Ray must be initialised."""
    choose = random.Random(seed)
    with AlchemistSession(2) as als:
        for _ in range(WARM_UP):
            for action in ACTIONS:
                action(als, choose)
    report = Report(_settled())
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        with AlchemistSession(choose.randrange(1, 4)) as als:
            for _ in range(choose.randrange(1, 12)):
                action = choose.choice(ACTIONS)
                action(als, choose)
                report.counts[action.__name__] = report.counts.get(action.__name__, 0) + 1
        report.counts["session"] = report.counts.get("session", 0) + 1
    report.seconds = time.monotonic() - begun
    report.after = _settled()
    return report


def sessions(count: int) -> Report:
    """Open and close sessions, each with a gang, a transfer and a call; Ray must be initialised."""
    for _ in range(WARM_UP_SESSIONS):
        _session()
    report = Report(_settled())
    begun = time.monotonic()
    for _ in range(count):
        _session()
    report.seconds = time.monotonic() - begun
    report.after = _settled()
    return report


def _session() -> None:
    a = np.arange(1000.0).reshape(100, 10)  # small: allocators keep the memory of large ones
    with AlchemistSession(1) as als:
        np.testing.assert_array_equal(als.send_matrix(a).fetch(), a)
        assert als.run(lambda comm: comm.size) == 1


def _settled() -> dict[str, dict[str, float]]:
    """Measure when nothing is left of the gangs."""
    gc.collect()
    traces.wait_until(lambda: held()["files"]["files"] == 0, SETTLE_S, 0.5)
    return held()
