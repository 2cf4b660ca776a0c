"""The nodes of a gang: which of several losses is named."""

from __future__ import annotations

import asyncio
import time

import pytest

from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.launch.nodes import BLAME_S, Nodes
from mpi_workers.wire.frames import Body, Frame, Kind

KILLED, CRASHED = "was killed by signal 9 (SIGKILL)", "was killed by signal 11 (SIGSEGV)"


def ended(rank: int, cause: str) -> Frame:
    body: Body = {"op": "rank_ended", "rank": rank, "pid": 1, "hostname": "h", "cause": cause}
    return Frame(Kind.EVENT, body, 0)


@pytest.mark.parametrize(
    ("events", "named"),
    [
        ([(1, 3, CRASHED), (0, 1, KILLED)], 1),
        ([(0, 1, KILLED), (1, 3, CRASHED)], 1),
        ([(1, 3, "was killed by signal 6 (SIGABRT)"), (0, 0, "exited with code 3")], 0),
        ([(1, 3, CRASHED)], 3),
    ],
)
def test_a_crash_that_follows_another_loss_is_not_named(
    events: list[tuple[int, int, str]], named: int
) -> None:
    errors: list[AlchemistError] = []

    async def lose() -> float:
        nodes = Nodes(2, 4, errors.append, print, print)
        begin = time.monotonic()
        for node, rank, cause in events:
            nodes.receive(node, ended(rank, cause))
            nodes.left(node)  # its proxy ends next
            await asyncio.sleep(0.01)
        while not errors:
            await asyncio.sleep(0.005)
        return time.monotonic() - begin

    took = asyncio.run(lose())
    assert [error.rank for error in errors] == [named]
    assert took < BLAME_S + 1.0
