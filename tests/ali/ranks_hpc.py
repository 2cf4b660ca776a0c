"""Functions that test_hpc.py runs on ranks."""

from __future__ import annotations

from typing import Any

from ali.hpc import about, allreduce, dgemm, ping_pong, ring, stream
from ali.hpc.measures import pairs
from ali.interface import Context
from ali.registry import load
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of

SHORT_S = 0.01


def identities(gang: GangView) -> list[str]:
    return about(Context(gang, {}))


def refusals(gang: GangView, calls: list[Any], *library: str) -> list[str]:
    """The failures of calls."""
    call = load(*(library or ["hpc"])).call
    failures = [failure_of(call, gang, *arguments) for arguments in calls]
    assert gang.comm.allreduce(1) == gang.size
    return failures


def everything(gang: GangView) -> dict[str, Any]:
    ctx = Context(gang, {})
    found = {
        "dgemm": dgemm(ctx, 100, SHORT_S),
        "stream": stream(ctx, 1 << 20, SHORT_S),
        "allreduce": allreduce(ctx, [8, 1 << 20], SHORT_S),
    }
    if gang.size > 1:
        found["ping_pong"] = ping_pong(ctx, [0, 1 << 10, 1 << 26], seconds=SHORT_S)
        found["ring"] = ring(ctx, [8, 1 << 20], SHORT_S)
    return found


def pairs_of(gang: GangView, hosts: list[str]) -> dict[str, tuple[int, int]]:
    return pairs(hosts)
