"""Memory for a matrix is checked before any rank allocates it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mpi_workers.node import command_relay
from mpi_workers.node.command_relay import CommandRelay
from mpi_workers.node.processes import RankProcess
from mpi_workers.rank.interruption import InterruptWord
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Frame, Kind, encode

RANKS = 2
CREATE: Body = {
    "op": "create",
    "seq": 1,
    "matrix": 7,
    "reserve": True,
    "shape": [1000, 1000],
    "dtype": "float64",
    "layout": "VC_STAR",
}
NEEDED = 8_000_000


class Node:
    """A relay, the ranks' ends of its connections, and everything that it has told the manager."""

    def __init__(self, folder: Path) -> None:
        self.replies: list[Body] = []
        self.ranks = {rank: RankProcess(rank) for rank in range(RANKS)}
        self.ends: list[Connection] = []
        self.relay = CommandRelay(RANKS, 0, self.ranks, InterruptWord(folder / "word"), self)

    def send_event(self, op: str, **fields: Any) -> None:
        self.replies.append({"event": op, **fields})

    def send_reply(self, body: Body) -> None:
        self.replies.append(body)

    def send_output(self, rank: int | None = None) -> None:
        """No rank prints."""

    def command(self, body: Body) -> None:
        self.relay.relay(body, encode(Kind.COMMAND, body))

    async def received(self) -> list[str]:
        """The next operation of each rank."""
        frames = [await asyncio.to_thread(end.recv, 5.0) for end in self.ends]
        return [frame.body["op"] for frame in frames]

    def answer(self, **fields: Any) -> None:
        for rank in self.ranks:
            self.relay.receive(rank, Frame(Kind.REPLY, {"seq": 1, **fields}, 0, ()))


@asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Node]:
    made = Node(folder)
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        for process in made.ranks.values():
            near, far = socket.socketpair()
            made.ends.append(stack.enter_context(Connection(far)))
            transport, process.control = await loop.create_connection(
                lambda: FrameProtocol(lambda *_: None, lambda _: None), sock=near
            )
            stack.callback(transport.abort)
        yield made


def test_a_command_goes_to_the_ranks_at_once_if_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_relay, "available_bytes", lambda: NEEDED)

    async def run() -> None:
        async with node(tmp_path) as its:
            its.command(CREATE)
            assert await its.received() == ["create"] * RANKS
            its.answer()
            assert its.replies == [{"seq": 1, "node": 0}]

    asyncio.run(run())


@pytest.mark.parametrize("idle", [0, 1_000_000])
def test_ranks_first_return_idle_memory_if_it_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: int
) -> None:
    monkeypatch.setattr(command_relay, "available_bytes", lambda: NEEDED - 2_000_000)

    async def run() -> None:
        async with node(tmp_path) as its:
            its.command(CREATE)
            assert await its.received() == ["reserve"] * RANKS
            its.answer(idle=idle)
            if not idle:
                [reply] = its.replies
                assert reply["failed"] == 1
                assert "needs 8.0 MB on node" in reply["errors"][0]["message"]
                return
            assert its.replies == []
            assert await its.received() == ["create"] * RANKS
            its.answer()
            assert its.replies == [{"seq": 1, "node": 0}]

    asyncio.run(run())
