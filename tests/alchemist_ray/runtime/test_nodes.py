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


class Proxy:
    """The connection to a node's proxy, which answers every command at once."""

    def __init__(self, nodes: Nodes, node: int) -> None:
        self._reply = lambda seq: nodes.receive(node, Frame(Kind.REPLY, {"seq": seq}, 0))
        self._seq = 0

    def send_encoded(self, data: bytes) -> None:
        self._seq += 1
        asyncio.get_running_loop().call_soon(self._reply, self._seq)

    def close(self) -> None:
        """Nothing to close."""


def test_a_command_right_after_a_crash_is_not_complete_without_the_lost_node() -> None:
    """Its error is told only after `BLAME_S`; a round counted the nodes that were left."""

    async def lose() -> None:
        nodes = Nodes(2, 4, print, print, print)
        for node in range(2):
            nodes.joined(node, Proxy(nodes, node))  # type: ignore[arg-type]
        await asyncio.wait_for(nodes.round("free", matrices=[]), 5)
        nodes.receive(1, ended(3, CRASHED))
        nodes.left(1)
        with pytest.raises(AlchemistError, match="SIGSEGV"):
            await asyncio.wait_for(nodes.round("free", matrices=[]), 5)

    asyncio.run(lose())
