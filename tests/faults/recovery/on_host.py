"""Runs on a host of `hosts.Hosts`: a program whose gang is started again when a host is lost."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import FileError

X = np.random.default_rng(0).random((400, 30))

sessions: list[AlchemistSession] = []
matrices: dict[str, Handle] = {}


def refused_folder(workers: int) -> str:
    """The error for a checkpoint folder that is on this host only."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            AlchemistSession(workers, max_failures=1, checkpoint_folder=folder).close()
        except FileError as error:
            return str(error)
    return ""


def start(workers: int | list[int], cpus: int) -> list[str]:
    """A gang with matrices of several origins, when this many CPUs are free; its hosts."""
    while ray.available_resources().get("CPU", 0) < cpus:  # Ray reports them late
        time.sleep(0.1)
    wanted: Any = tuple(workers) if isinstance(workers, list) else workers
    als = AlchemistSession(wanted, max_failures=20)
    sessions.append(als)
    A = als.send_matrix(X, name="A", durable=True, layout="MC_MR")
    B = als.send_matrix([(ray.put(X), 0, 0)], name="B")
    matrices.update(A=A, B=B, C=A.T @ B)
    return hosts()


def hosts() -> list[str]:
    """Where its ranks are, in their order."""
    return [worker.hostname for worker in sessions[-1].list_workers()]


def until_back(host: str) -> dict[str, Any]:
    """Compute until no rank is on a host any more; where they are, and whether all is right."""
    begin = time.monotonic()
    while host in (found := hosts()):
        (matrices["A"] + 1).free()
        time.sleep(0.05)
    C = (matrices["A"].T @ matrices["B"]).fetch()
    right = np.allclose(C, X.T @ X) and np.allclose(matrices["C"].fetch(), X.T @ X)
    return {"hosts": found, "seconds": time.monotonic() - begin, "right": bool(right)}


def close() -> None:
    """End the gang."""
    matrices.clear()
    sessions.pop().close()
