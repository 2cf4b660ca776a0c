"""Failing transfers: each ends with a clear error, and leaves the gang usable."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpi_workers.data import node_connections
from mpi_workers.data.description import DataEndpoints, NodeAddress, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.acceptor import Acceptor, authenticate
from mpi_workers.wire.blocking import Connection
from tests.mpi_workers.transfers import WAIT_S, distribution_of, fetch, new, numbers, send
from tests.support import ranks as support
from tests.support import traces


@pytest.mark.parametrize("origin", [(-1, 0), (0, -1), (1, 0), (0, 1), (100, 100)])
def test_a_block_partly_outside_the_matrix_is_refused(
    host: support.Host, gangs: dict[str, NodeConnections], origin: tuple[int, int], route: str
) -> None:
    array = numbers((10, 10))
    target = new(host, distribution_of("VC_STAR", (10, 10)))
    with pytest.raises(Failure, match="not a region of a 10 x 10 matrix") as caught:
        send(gangs[route], target, (array, origin))
    assert caught.value.kind == "ShapeError"
    send(gangs[route], target, (array, (0, 0)))
    host.seal(target.matrix)
    with pytest.raises(Failure, match="not a region"), MatrixReader(gangs[route], target) as reader:
        reader.read_block(array.copy(), origin)
    assert np.array_equal(fetch(gangs[route], target), array)
    host.free(target.matrix)


def test_an_unknown_matrix_is_named(gangs: dict[str, NodeConnections], route: str) -> None:
    target = TransferTarget(1 << 40, distribution_of("VC_STAR", (900, 900)), np.dtype("float64"))
    for action in (
        lambda: send(gangs[route], target, (numbers((900, 900)), (0, 0))),
        lambda: fetch(gangs[route], target),
    ):
        with pytest.raises(Failure, match=f"holds no matrix {1 << 40}") as caught:
            action()
        assert caught.value.kind == "MatrixNotFoundError"


def test_a_refused_stream_stops_with_the_reason(gangs: dict[str, NodeConnections]) -> None:
    much = np.broadcast_to(np.float64(1), (1 << 23, 1 << 10))  # 64 GiB that take no memory
    target = TransferTarget(1 << 40, distribution_of("VC_STAR", much.shape, 2), much.dtype)
    start = traces.clock()
    with pytest.raises(Failure, match="holds no matrix"):
        send(gangs["far"], target, (much, (0, 0)))
    assert traces.clock() - start < 5


def test_an_incomplete_matrix_is_not_read_and_a_complete_one_not_written(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    array = numbers((1000, 1000))
    target = new(host, distribution_of("STAR_VC", array.shape))
    send(gangs[route], target, (array[:500], (0, 0)))
    with pytest.raises(Failure, match="still being sent") as caught:
        fetch(gangs[route], target)
    assert caught.value.kind == "IncompleteMatrixError"
    send(gangs[route], target, (array[500:], (500, 0)))
    host.seal(target.matrix)
    with pytest.raises(Failure, match="accepts no more data") as caught:
        send(gangs[route], target, (array, (0, 0)))
    assert caught.value.kind == "TransferError"
    assert np.array_equal(fetch(gangs[route], target), array)
    host.free(target.matrix)


def test_an_error_during_a_transfer_counts_nothing_and_leaves_the_gang_usable(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    array = numbers((50, 50))
    target = new(host, distribution_of("MC_MR", array.shape))

    def fail() -> None:
        with MatrixWriter(gangs[route], target) as writer:
            if route == "near":  # what was streamed has been counted: it is there
                writer.write_block(array, (0, 0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(Failure, match="got 0 of"):
        host.seal(target.matrix)
    send(gangs[route], target, (array, (0, 0)))
    host.seal(target.matrix)
    assert np.array_equal(fetch(gangs[route], target), array)
    host.free(target.matrix)


def test_a_dead_gang_is_a_transfer_error_that_names_the_node(route: str) -> None:
    distribution = distribution_of("VC_STAR", (2000, 100), 2)
    with support.Host(2) as host:
        ranks = NodeConnections(host.endpoints(route))
        target = new(host, distribution)
        half = numbers((1000, 100))

        def send_half_and_die() -> None:
            with MatrixWriter(ranks, target) as writer:
                writer.write_block(half, (0, 0))
                host.kill()
                writer.write_block(half, (1000, 0))

        start = traces.clock()
        with pytest.raises(Failure, match="ranks 0 to 1") as caught:
            send_half_and_die()
        assert caught.value.kind == "TransferError"
        with pytest.raises(Failure, match=r"cannot connect to the node of ranks 0 to 1") as caught:
            send(ranks, target, (half, (0, 0)))
        assert caught.value.kind == "TransferError"
        assert traces.clock() - start < 5
        ranks.close()


@contextlib.contextmanager
def unresponsive_node(token: str = "token") -> Iterator[str]:
    """The address of a node that authenticates its peers, then neither reads nor answers."""
    listener, address = sockets.listen_tcp("127.0.0.1")
    opened: list[Connection] = []
    known = partial(authenticate, token=token, welcome={})
    acceptor = Acceptor([listener], known, lambda peer: opened.append(peer[0])).start()
    with contextlib.closing(acceptor):
        yield address
    for connection in opened:
        connection.close()


@contextlib.contextmanager
def lost_node(how: str) -> Iterator[str]:
    """The address of a node to which no connection gets ready: it answers nothing.

    "suspended": its kernel accepts connections. "gone": no packet comes back.
    """
    with contextlib.ExitStack() as stack:
        listener, address = sockets.listen_tcp("127.0.0.1")
        stack.enter_context(listener)
        if how == "gone":
            listener.listen(0)  # the queue has room for one, and the kernel ignores others
            stack.enter_context(socket.create_connection(listener.getsockname()))
        yield address


def one_node(address: str, size: int = 1, **options: Any) -> NodeConnections:
    """Connections to a node with so many ranks."""
    return NodeConnections(DataEndpoints("token", (NodeAddress(0, size, (address,)),)), **options)


def move(what: str, ranks: NodeConnections, size: int = 1) -> None:
    """Send or fetch an unknown matrix of 32 MB on so many ranks."""
    array = np.zeros((4000, 1000))
    target = TransferTarget(1 << 40, distribution_of("VC_STAR", array.shape, size), array.dtype)
    send(ranks, target, (array, (0, 0))) if what == "send" else fetch(ranks, target, array)


ways = pytest.mark.parametrize("what", ["send", "fetch"])


class GangFailedError(Exception):
    """What `watch` raises."""


@pytest.mark.parametrize(
    ("node", "what", "size"),
    [
        *[("unresponsive", what, size) for what in ("send", "fetch") for size in (1, 40)],
        ("suspended", "send", 1),
        ("gone", "send", 1),
    ],
)
@pytest.mark.parametrize("reason", ["the gang fails", "close"])
def test_a_transfer_that_hangs_ends_with_the_gang(
    reason: str, node: str, what: str, size: int
) -> None:
    """A connection is given up after two minutes only: the gang knows of the loss before."""
    start = time.monotonic()
    fails = reason == "the gang fails"

    def watch() -> None:
        if fails and time.monotonic() - start > 0.3:
            raise GangFailedError

    with unresponsive_node() if node == "unresponsive" else lost_node(node) as address:
        ranks = one_node(address, size, watch=watch)
        timer = threading.Timer(10.0 if fails else 0.3, ranks.close)
        timer.start()
        with pytest.raises((GangFailedError, Failure)) as caught:
            move(what, ranks, size)
        assert 0.2 < time.monotonic() - start < 8
        timer.cancel()
        ranks.close()
    assert isinstance(caught.value, GangFailedError) == fails
    if not fails:
        assert caught.value.kind == "TransferError"
        assert re.search(r"the transfer with|were closed", str(caught.value))


@ways
def test_a_refusal_of_one_node_ends_the_wait_for_the_others(host: support.Host, what: str) -> None:
    with unresponsive_node(support.TOKEN) as address:
        nodes = NodeAddress(0, 3, (address,)), NodeAddress(3, 3, (host.addresses[1][1],))
        ranks = NodeConnections(DataEndpoints(support.TOKEN, nodes))
        start = traces.clock()
        with pytest.raises(Failure, match=r"rank [345] holds no matrix"):
            move(what, ranks, 6)
        assert traces.clock() - start < 10
        ranks.close()


def test_a_second_interruption_leaves_no_lock(host: support.Host) -> None:
    """Ctrl-C twice: the first ends the transfer, the second the wait for its threads."""

    class CtrlCError(Exception): ...

    def interrupt(number: int, frame: object) -> None:
        raise CtrlCError

    distribution = distribution_of("VC_STAR", (40, 10))
    target, array = new(host, distribution), numbers((40, 10))
    ranks = NodeConnections(host.endpoints("far"))
    entered, resumed = threading.Event(), threading.Event()

    def progress(nbytes: int) -> None:  # on a thread of a stream
        entered.set()
        resumed.wait(WAIT_S)

    def send_interrupted() -> None:
        with MatrixWriter(ranks, target, progress) as writer:
            writer.write_block(array, (0, 0))

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
        with pytest.raises(CtrlCError) as caught:
            send_interrupted()
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert entered.is_set()
        assert isinstance(caught.value.__context__, CtrlCError)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    resumed.set()
    sending = threading.Thread(target=send, args=(ranks, target, (array, (0, 0))), daemon=True)
    sending.start()
    sending.join(5)
    assert not sending.is_alive()
    host.seal(target.matrix)
    assert np.array_equal(fetch(ranks, target, np.empty_like(array)), array)
    ranks.close()
    host.free(target.matrix)


@pytest.mark.parametrize(
    ("what", "why"), [("send", "timed out"), ("fetch", r"no answer for 0\.3 s")]
)
def test_a_node_that_does_not_answer_is_given_up(
    what: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_connections, "STALL_TIMEOUT_S", 0.3)
    with unresponsive_node() as address:
        ranks = one_node(address)
        with pytest.raises(Failure, match=rf"node of rank 0 .*failed: .*{why}"):
            move(what, ranks)
        ranks.close()


def test_a_node_without_a_reachable_address_is_named() -> None:
    ranks = one_node("unix:/nowhere/at/all")
    with pytest.raises(Failure, match=r"node of rank 0 .*has no address that this process"):
        move("send", ranks)
    ranks.close()


def test_closed_connections_are_a_transfer_error(
    host: support.Host, gangs: dict[str, NodeConnections], route: str
) -> None:
    array = numbers((2000, 200))
    target = new(host, distribution_of("VC_STAR", array.shape))
    ranks = NodeConnections(host.endpoints(route))

    def send_after_closing() -> None:
        with MatrixWriter(ranks, target) as writer:
            ranks.close()
            writer.write_block(array, (0, 0))

    with pytest.raises(Failure, match="the connections to the gang were closed") as caught:
        send_after_closing()
    assert caught.value.kind == "TransferError"
    send(gangs[route], target, (array, (0, 0)))
    host.seal(target.matrix)
    host.free(target.matrix)


def test_a_transfer_survives_a_rank_that_is_suspended_for_a_while() -> None:
    """For longer than a control connection may go without an acknowledgement."""
    array = np.ones((4000, 1000))
    with support.Host(1) as host:
        target = new(host, distribution_of("VC_STAR", array.shape, 1))
        ranks = NodeConnections(host.endpoints("far"))
        with MatrixWriter(ranks, target) as writer:
            writer.write_block(array[:10], (0, 0))
            os.kill(host.pid, signal.SIGSTOP)
            timer = threading.Timer(
                sockets.CONTROL.timeout_s + 2, os.kill, (host.pid, signal.SIGCONT)
            )
            timer.start()
            writer.write_block(array[10:], (10, 0))
            timer.join()
        host.seal(target.matrix)
        assert np.array_equal(fetch(ranks, target), array)
        ranks.close()
