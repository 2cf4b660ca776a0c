"""Runs on a host of `hosts.Hosts`: a program with a detached gang, whose head is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from tests.faults.inside import LIBRARY

NAME = "kept"
MATRIX = np.arange(600.0).reshape(60, 10)

_session: list[AlchemistSession] = []


def start(cpus: int) -> list[int]:
    """Start a detached gang with a matrix and a library; the ids of its ranks."""
    join()
    als = AlchemistSession(cpus, name=NAME, lifetime="detached")
    _session.append(als)
    als.load_library("breaking", LIBRARY)
    als.send_matrix(MATRIX, name="A")
    return [worker.pid for worker in als.list_workers()]


def attach() -> list[int]:
    """Attach to the gang from this process; the ids of its ranks."""
    join()
    als = AlchemistSession.attach(NAME)
    _session.append(als)
    return [worker.pid for worker in als.list_workers()]


def join() -> None:
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False)


def works() -> dict[str, Any]:
    """A call over MPI, and whether the matrix is unchanged."""
    als = _session[-1]
    return {
        "total": als.library("breaking").total(),
        "equal": bool(np.array_equal(als.matrix("A").fetch(), MATRIX)),
    }


def another(workers: int) -> int:
    """The total of a gang of another session."""
    with AlchemistSession(workers, start_timeout_s=60) as als:
        found: int = als.load_library("breaking", LIBRARY).total()
        return found


def end() -> list[str]:
    """End the gang; the names of those that are left."""
    AlchemistSession.stop_gang(NAME)
    return [gang.name for gang in AlchemistSession.list()]
