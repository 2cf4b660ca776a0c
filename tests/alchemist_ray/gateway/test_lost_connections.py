"""Sessions and transfers over a link that breaks, between a client and the gateway."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.attached.control_channel import SocketChannel
from alchemist_ray.errors import SessionError, TransferError
from alchemist_ray.gateway import node, protocol
from alchemist_ray.gateway.client import ask
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server.actor import GatewayInfo
from mpi_workers.protocol.commands import COMMANDS, Turn
from tests.alchemist_ray.gateway.conftest import Client
from tests.support import traces
from tests.support.breakable_link import BreakableLink
from tests.support.suite import scaled
from tests.support.traces import wait_until

OUTAGE_S = float(scaled(3, 60))
ROWS = 6000  # of 1000 float64: 48 MB


@pytest.fixture(scope="module")
def link(gateway: GatewayInfo) -> Iterator[BreakableLink]:
    made = BreakableLink(gateway.port)
    yield made
    made.close()


@pytest.fixture(scope="module")
def als(link: BreakableLink, token: str) -> Iterator[AlchemistSession]:
    address = f"alchemist://127.0.0.1:{link.port}"
    with AlchemistSession(2, address=address, token=token) as session:
        yield session


def cut_at(link: BreakableLink, nbytes: int, times: int) -> int:
    """Cut the link each time that this many bytes have passed; how often that happened."""
    for done in range(times):
        start = link.passed
        if wait_until(lambda start=start: link.passed - start > nbytes, 30.0, 0.005) is None:
            return done
        link.cut()
    return times


def test_matrices_arrive_whole_over_a_link_that_breaks(
    als: AlchemistSession, link: BreakableLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "CHUNK_NBYTES", 4 << 20)  # 4 MiB: a client chooses the size
    A = np.random.default_rng(7).random((ROWS, 1000))
    with ThreadPoolExecutor(1) as pool:
        cuts = pool.submit(cut_at, link, 9 << 20, 3)
        handle = als.send_matrix(A)
        assert cuts.result(60) == 3
        again = pool.submit(cut_at, link, 9 << 20, 3)
        fetched = handle.fetch()
        assert again.result(60) == 3
    assert np.array_equal(fetched, A)
    assert np.array_equal(als.send_matrix(np.asfortranarray(A[:500])).fetch(), A[:500])


def test_a_transfer_goes_on_however_long_a_breaking_link_makes_it_take(
    als: AlchemistSession, link: BreakableLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time to come back begins again with each break: not all breaks have it together."""
    monkeypatch.setattr(protocol, "CHUNK_NBYTES", 1 << 20)
    monkeypatch.setattr(node, "RESUME_S", 1.0)
    A = np.random.default_rng(9).random((ROWS // 2, 1000))
    handle = als.send_matrix(A)
    with ThreadPoolExecutor(1) as pool:
        link.pause_s = 0.03  # 24 MB take some 3 s
        try:
            cuts = pool.submit(cut_at, link, 4 << 20, 4)
            assert np.array_equal(handle.fetch(), A)
            assert cuts.result(60) == 4
        finally:
            link.pause_s = 0.0


def test_a_fetch_over_a_link_that_breaks_is_repeated_and_keeps_no_writer_waiting(
    link: BreakableLink, token: str
) -> None:
    there = {"address": f"alchemist://127.0.0.1:{link.port}", "token": token}
    A = np.ones((20, 20))
    with (
        AlchemistSession(1, name="read", lifetime="detached") as writer,
        AlchemistSession.attach("read", **there) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        changed = writer.send_matrix(A, name="A")
        seen = reader.matrix("A")

        reads: list[int] = []

        def transfer(of: Handle) -> int:
            reads.append(len(reads))
            if len(reads) == 1:
                link.cut()
                reader.list_matrices()  # it is connected again
                write = pool.submit(writer.run, lambda comm, A: A.local.fill(2.0), changed)
                write.result(20)
            return len(reads)

        assert reader.connection.read(seen, transfer) == 2
        assert np.array_equal(seen.fetch(), 2 * A)
        AlchemistSession.stop_gang("read")


@pytest.mark.parametrize("name", [None, "sent once"])
@pytest.mark.parametrize("layout", ["VC_STAR", "STAR_STAR"])
def test_a_matrix_is_sent_once_though_the_first_answer_to_each_command_is_lost(
    als: AlchemistSession, link: BreakableLink, monkeypatch: pytest.MonkeyPatch, name: str | None,
    layout: str,
) -> None:  # fmt: skip
    A = np.random.default_rng(6).random((50, 40))
    before = {each.id for each in als.list_matrices()}
    lost: dict[str, threading.Timer] = {}
    real = SocketChannel.request

    def mend() -> None:
        link.cut()
        link.swallows = False

    def request(channel: SocketChannel, body: Any, *more: Any) -> Any:
        if COMMANDS[body["op"]].turn is Turn.QUEUED and body["op"] not in lost:
            link.swallows = True
            lost[body["op"]] = threading.Timer(1.0, mend)
            lost[body["op"]].start()
        return real(channel, body, *more)

    monkeypatch.setattr(SocketChannel, "request", request)
    blocks = iter([A[:30], A[30:]])  # which cannot be read twice
    handle = als.send_blocks(blocks, shape=A.shape, layout=layout, name=name)
    assert "create" in lost
    monkeypatch.undo()
    assert handle.layout == layout
    assert np.array_equal(handle.fetch(), A)
    assert {each.id for each in als.list_matrices()} - before == {handle.id}
    assert handle.name == name or name is None
    handle.free()


def test_a_session_survives_an_outage_with_its_matrices(
    als: AlchemistSession, link: BreakableLink
) -> None:
    A = np.random.default_rng(8).random((50, 40))
    handle = als.send_matrix(A)
    dropped = als.send_matrix(A)
    link.plugged = False
    link.cut()
    number = dropped.id
    del dropped  # the gateway is told when the client is connected again
    timer = threading.Timer(OUTAGE_S, lambda: setattr(link, "plugged", True))
    timer.start()
    begun = time.monotonic()
    assert handle.id in {one.id for one in als.list_matrices()}
    assert time.monotonic() - begun >= OUTAGE_S - 0.5
    assert np.array_equal(handle.fetch(), A)
    freed = wait_until(lambda: number not in {one.id for one in als.list_matrices()}, 10.0)
    assert freed is not None
    assert np.isclose(float(als.load_library("linalg").norm(handle)), np.linalg.norm(A))


def test_a_gateway_that_drops_a_connection_is_tried_again(link: BreakableLink, token: str) -> None:
    address = GatewayAddress("127.0.0.1", link.port)
    link.plugged = False
    with pytest.raises(SessionError, match="no gateway answers"):
        ask(address, token, {"op": "list_gangs"})
    timer = threading.Timer(0.1, lambda: setattr(link, "plugged", True))
    timer.start()
    assert "gangs" in ask(address, token, {"op": "list_gangs"})


def test_a_call_that_ran_at_the_cut_says_so_and_can_be_repeated(
    als: AlchemistSession, link: BreakableLink
) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(als.run, lambda comm: __import__("time").sleep(5))
        time.sleep(1.0)
        link.cut()
        with pytest.raises(TransferError, match="repeat it"):
            running.result(40)
    assert als.run(lambda comm: comm.size) == 2


def test_a_program_ends_while_its_call_is_under_way(client: Client) -> None:
    begin = traces.clock()
    client("""
        import time
        from alchemist_ray import AlchemistSession
        als = AlchemistSession(1)
        waits = als.load_library("echo").sleep.remote(60.0)
        time.sleep(1)
    """)
    assert traces.clock() - begin < 50
