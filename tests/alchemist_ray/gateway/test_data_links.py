"""Frames of data connections: clients that stall, vanish, repeat chunks, or break the rules."""

from __future__ import annotations

import contextlib
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import MatrixError
from alchemist_ray.gateway import client
from alchemist_ray.gateway.protocol import CHUNK_NBYTES, GatewayAddress
from alchemist_ray.gateway.secure_socket import SharedConnection, SharedSocket, connect
from alchemist_ray.gateway.server import transfers
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from alchemist_ray.gateway.server.gateway import MAX_DATA_LINKS_OF_USER
from alchemist_ray.gateway.server.transfers import GangTransfers
from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind
from tests.support import traces
from tests.support.breakable_link import BreakableLink

WAIT_S = 20.0
ROWS, COLS = 1500, 1000  # 12 MB: a chunk of three pieces
X = np.random.default_rng(0).random((ROWS, COLS))
PART = 5_000_000  # bytes: a piece has been written, and a part of the next one has arrived

Open = Callable[[], Connection]


@pytest.fixture(scope="module")
def als(there: dict[str, Any]) -> Iterator[AlchemistSession]:
    with AlchemistSession(2, **there) as session:
        yield session


@pytest.fixture
def matrix(als: AlchemistSession) -> Iterator[int]:
    """A matrix without elements."""
    body = {"op": "create", "shape": [ROWS, COLS], "dtype": "float64", "layout": "MC_MR"}
    created = als.connection.request(body | {"send": "mine"})  # with the lease
    yield created["matrix"]
    als.connection.request({"op": "free", "matrices": [created["matrix"]]})


@pytest.fixture(scope="module")
def fields(als: AlchemistSession, gateway: GatewayInfo, token: str) -> Iterator[dict[str, str]]:
    """What data connections of a process tell, which is attached to the session's gang."""
    gang, process = als.connection.address.gang, uuid.uuid4().hex
    address = GatewayAddress.parse(gateway.address)
    described = client.ask(address, token, {"op": "find_gang", "gang": gang})
    attached = client.connection_to(address, token, described, process)
    attached.ping()
    yield {"role": "data", "gang": gang, "process": process}
    attached.close()


@pytest.fixture
def opened(fields: dict[str, str], gateway: GatewayInfo, token: str) -> Iterator[Open]:
    """Opens data connections."""
    address = GatewayAddress.parse(gateway.address)
    with contextlib.ExitStack() as stack:

        def one() -> Connection:
            connection, _ = connect(address, token, fields, shared=False)
            connection.sock.settimeout(WAIT_S)
            return stack.enter_context(connection)

        yield one


def put(matrix: int, **more: Any) -> dict[str, Any]:
    return {"matrix": matrix, "region": [0, ROWS, 0, COLS], "order": "C", **more}


def seal(als: AlchemistSession, matrix: int) -> np.ndarray[Any, Any]:
    record = als.connection.request({"op": "seal", "send": "mine", "matrix": matrix})
    found: np.ndarray[Any, Any] = als.connection.handle(record).fetch()
    return found


def send(connection: Connection, matrix: int) -> None:
    connection.send(Kind.PUT, put(matrix), X.data)
    connection.expect(Kind.SYNC, WAIT_S)


def test_a_chunk_that_broke_off_is_not_counted_and_can_be_repeated(
    als: AlchemistSession, matrix: int, opened: Open
) -> None:
    for _ in range(2):
        broken = opened()
        broken.begin(Kind.PUT, put(matrix), X.nbytes)
        broken.write(X.data.cast("B")[:PART])
        broken.close()
    with pytest.raises(MatrixError, match="elements"):
        als.connection.request({"op": "seal", "send": "mine", "matrix": matrix})
    again = opened()
    send(again, matrix)
    send(again, matrix)  # the answer was lost: it is not written twice
    assert np.array_equal(seal(als, matrix), X)


def test_a_chunk_on_a_connection_that_died_silently_is_taken_over(
    als: AlchemistSession, matrix: int, opened: Open
) -> None:
    silent = opened()
    silent.begin(Kind.PUT, put(matrix), X.nbytes)
    silent.write(X.data.cast("B")[:PART])
    time.sleep(0.5)
    begun = traces.clock()
    send(opened(), matrix)
    assert traces.clock() - begun < WAIT_S / 2
    with contextlib.suppress(frames.ConnectionLost):
        silent.write(bytes(X.nbytes - PART))
    with pytest.raises((frames.ConnectionLost, OSError)):
        silent.recv(WAIT_S)
    assert np.array_equal(seal(als, matrix), X)


def test_clients_that_stall_in_a_chunk_keep_no_other_one_waiting(
    als: AlchemistSession, matrix: int, opened: Open
) -> None:
    kept = als.send_matrix(X)
    stalled = [opened() for _ in range(8)]
    for k, connection in enumerate(stalled):
        if k % 2:
            connection.begin(Kind.PUT, put(matrix, region=[k, k + 1000, 0, COLS]), 8_000_000)
            connection.write(X.data.cast("B")[:PART])
        else:  # asks, and does not read
            for _ in range(4):
                connection.send(Kind.GET, put(kept.id))
    time.sleep(0.5)
    begun = traces.clock()
    assert np.array_equal(als.send_matrix(X, layout="STAR_VR").fetch(), X)
    assert np.array_equal(kept.fetch(), X)
    assert traces.clock() - begun < WAIT_S / 2
    for connection in stalled:
        connection.close()
    send(opened(), matrix)
    assert np.array_equal(seal(als, matrix), X)


@pytest.mark.parametrize(
    ("body", "nbytes", "words"),
    [
        ({}, CHUNK_NBYTES * 4, r"got \d+ bytes"),
        ({}, X.nbytes - 8, r"got \d+ bytes"),
        ({"region": [0, ROWS + 1, 0, COLS]}, X.nbytes, "not a region of a 1500 x 1000"),
        ({"region": [0, 0, 0, COLS]}, 8, "1 to"),
        ({"region": "all"}, 8, "not a region"),
        ({"matrix": 10**9}, 8, "no matrix"),
        ({"matrix": "A"}, 8, "by number"),
    ],
)
def test_frames_that_do_not_fit_are_refused(
    als: AlchemistSession, matrix: int, opened: Open, body: Any, nbytes: int, words: str
) -> None:
    connection = opened()
    connection.begin(Kind.PUT, put(matrix) | body, nbytes)
    with pytest.raises(Failure, match=words):
        connection.expect(Kind.SYNC, WAIT_S)
    send(opened(), matrix)
    assert np.array_equal(seal(als, matrix), X)


def test_a_fetch_of_a_matrix_that_is_freed_meanwhile_ends_with_the_reason(
    als: AlchemistSession, opened: Open
) -> None:
    handle = als.send_matrix(X)
    connection = opened()
    connection.send(Kind.GET, put(handle.id))
    frame = connection.expect(Kind.DATA, WAIT_S)
    als.connection.request({"op": "free", "matrices": [handle.id]})
    rest = memoryview(bytearray(frame.payload_nbytes))
    connection.read_into(rest)  # the reader keeps the memory
    assert np.array_equal(np.frombuffer(rest).reshape(X.shape), X)
    connection.send(Kind.GET, put(handle.id))
    with pytest.raises(Failure, match=str(handle.id)):
        connection.expect(Kind.DATA, WAIT_S)


def test_a_transfer_waits_while_the_gateway_serves_as_many_as_it_can(
    als: AlchemistSession, there: dict[str, Any], tokens: TokenFile, opened: Open
) -> None:
    others = []
    with (
        AlchemistSession(1, **there) as session,
        AlchemistSession(1, **there | {"token": tokens.create("bea")}) as of_another,
        ThreadPoolExecutor(1) as pool,
    ):
        with pytest.raises(Failure, match="connections transfer data: 64 by anna"):  # noqa: PT012
            for _ in range(MAX_DATA_LINKS_OF_USER + 1):
                others.append(opened())
        assert np.array_equal(of_another.send_matrix(X).fetch(), X)
        fetched = pool.submit(lambda: session.send_matrix(X).fetch())
        time.sleep(1.5)
        assert not fetched.done()
        for connection in others:
            connection.close()
        assert np.array_equal(fetched.result(WAIT_S), X)


def test_a_connection_that_transfers_nothing_is_closed(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "IDLE_TIMEOUT_S", 0.3)
    near, far = socket.socketpair()
    with near, far, ThreadPoolExecutor(1) as pool:
        link = SharedConnection(SharedSocket(far))
        served = pool.submit(GangTransfers(als.connection).serve, link, lambda kind: None)
        near.settimeout(WAIT_S)
        assert near.recv(1) == b""
        served.result(WAIT_S)


@pytest.mark.parametrize("streams", [1, 4])
def test_a_transfer_has_as_many_streams_as_the_address_says(
    gateway: GatewayInfo, token: str, streams: int
) -> None:
    large = np.random.default_rng(1).random((5000, 1000))  # 40 MB
    link = BreakableLink(gateway.port)  # as `ssh -L` or `kubectl port-forward`
    address = f"alchemist://localhost:{link.port}?streams={streams}"
    try:
        with AlchemistSession(2, address=address, token=token) as als:
            before = connections_to(link.port)
            assert np.array_equal(als.send_matrix(large).fetch(), large)
            assert connections_to(link.port) - before == streams
    finally:
        link.close()


def connections_to(port: int) -> int:
    """Connections to a port of this machine."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(line[2].endswith(f":{port:04X}") and line[3] == "01" for line in lines)
