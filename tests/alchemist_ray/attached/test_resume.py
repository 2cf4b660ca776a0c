"""A connection that is lost and restored, while other threads of the process use it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from alchemist_ray.arrays.handle import Handle
from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import GangConnection, Transport
from alchemist_ray.attached.control_channel import SocketChannel
from mpi_workers.data.description import NodeAddress
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind
from tests.faults.conftest import Call
from tests.support.traces import wait_until

WAIT_S = 10.0
NEW = 7  # the matrix that a command makes


class Dispatcher(Transport):
    """Gives `connection` the ends of sockets; the test answers at the other ones."""

    resume_s = WAIT_S

    def __init__(self) -> None:
        self.ends: list[Connection] = []
        self.dialled: Callable[[], object] = lambda: None

    def open_channel(self, address: GangAddress, hello: Body, on_frame: Any) -> SocketChannel:
        here, there = socket.socketpair()
        self.ends.append(Connection(there))
        self.dialled()
        return SocketChannel(Connection(here), "tcp:here:1", on_frame)

    def command(self) -> Body:
        return self.ends[-1].expect(Kind.COMMAND, WAIT_S).body

    def answer(self, result: Body) -> Body:
        """Answer the next command, which is returned."""
        body = self.command()
        self.ends[-1].send(Kind.REPLY, {"id": body["id"], "result": result})
        return body


@pytest.fixture
def gang() -> Iterator[tuple[GangConnection, Dispatcher]]:
    dispatcher = Dispatcher()
    address = GangAddress(
        "g1", "s1", 1, "secret", ("tcp:here:1",), (NodeAddress(0, 1, ()),), "g1.1",
        lease_grace_s=60.0,
    )  # fmt: skip
    connection = GangConnection(address, Handle, transport=dispatcher)
    connection._open_channel()
    yield connection, dispatcher
    connection.close()
    for end in dispatcher.ends:
        end.close()


@pytest.mark.parametrize(
    "result",
    [{"matrix": NEW}, {"values": [{"matrix": {"matrix": NEW}, "elements": None}], "names": []}],
    ids=["create", "call"],
)
def test_matrices_of_answers_that_arrived_are_among_those_that_stay(
    gang: tuple[GangConnection, Dispatcher], result: Body
) -> None:
    connection, dispatcher = gang
    creating = Call(lambda: connection.request({"op": "create", "shape": [1, 1]}))
    dispatcher.answer(result)
    made = [creating.outcome(0.0, WAIT_S).result]  # the thread has the answer, and no handle yet
    del creating
    dispatcher.ends[-1].close()
    other = Call(connection.ping)
    assert wait_until(lambda: len(dispatcher.ends) == 2, WAIT_S, 0.01) is not None
    assert dispatcher.command() == {"op": "resume", "matrices": [NEW]}
    dispatcher.answer({})
    other.outcome(0.0, WAIT_S)
    made.clear()  # without a handle: given back
    assert dispatcher.command() == {"op": "release", "matrices": [NEW]}


def test_a_release_during_a_resume_waits_and_is_not_lost(
    gang: tuple[GangConnection, Dispatcher],
) -> None:
    connection, dispatcher = gang
    leases = [connection.leases.lease(NEW)]
    sweeps: list[Call] = []

    def dialled() -> None:
        leases.clear()
        sweeps.append(Call(connection.leases.sweep))
        time.sleep(0.5)

    dispatcher.dialled = dialled
    dispatcher.ends[-1].close()
    pinged = Call(connection.ping)
    assert wait_until(lambda: len(dispatcher.ends) == 2, WAIT_S, 0.01) is not None
    assert dispatcher.command()["op"] == "resume"
    commands = [dispatcher.command() for _ in range(2)]
    assert {"op": "release", "matrices": [NEW]} in commands
    (ping,) = (body for body in commands if body["op"] == "ping")
    dispatcher.ends[-1].send(Kind.REPLY, {"id": ping["id"], "result": {}})
    pinged.outcome(0.0, WAIT_S)


def test_a_part_that_asks_the_gang_blocks_no_thread_that_reads(
    gang: tuple[GangConnection, Dispatcher],
) -> None:
    connection, dispatcher = gang
    reader = Call(lambda: connection.request({"op": "create", "shape": [1, 1]}))
    create = dispatcher.command()
    part = Call(lambda: connection.part(lambda of: of.request({"op": "ping"})))
    ping = dispatcher.command()
    dispatcher.ends[-1].send(Kind.EVENT, {"moved": connection.address.move()})
    dispatcher.ends[-1].send(Kind.REPLY, {"id": create["id"], "result": {"matrix": NEW}})
    dispatcher.ends[-1].send(Kind.REPLY, {"id": ping["id"], "result": {"busy": False}})
    assert [call.outcome(0.0, WAIT_S).error for call in (reader, part)] == [None, None]
