"""Functions that test_hpc.py runs on ranks."""

from __future__ import annotations

from typing import Any

from ali.hpc import about, allreduce, copy, matmul, ping_pong
from ali.interface import Context
from ali.registry import load
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang


def identities(gang: Gang) -> list[str]:
    return about(Context(gang, {}))


def refusals(gang: Gang, calls: list[Any]) -> list[tuple[str, str]]:
    """Kinds and messages of the failures of bad calls."""
    library, failures = load("hpc"), []
    for routine, arguments in calls:
        try:
            library.call(gang, routine, arguments)
        except Failure as failure:
            failures.append((failure.kind, str(failure)))
    assert gang.comm.allreduce(1) == gang.size
    return failures


def everything(gang: Gang) -> dict[str, Any]:
    ctx = Context(gang, {})
    return {
        "matmul": matmul(ctx, 200, 0.02),
        "copy": copy(ctx, 1 << 20, 0.02),
        "ping_pong": ping_pong(ctx, [0, 1 << 10, 1 << 26], seconds=0.02),
        "allreduce": allreduce(ctx, [8, 1 << 20], 0.02),
    }
