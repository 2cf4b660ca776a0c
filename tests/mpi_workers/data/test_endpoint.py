"""A node's data endpoint, frame by frame: loans, refusals, counts of received elements."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Frame, Kind
from tests.support import ranks
from tests.support.traces import wait_until

SHAPE = (40, 30)
DISTRIBUTION = Distribution("CIRC_CIRC", SHAPE, (1, 1))
SIZE = SHAPE[0] * SHAPE[1]
ALL = [0, SHAPE[0], 0, SHAPE[1]]
WAIT_S = 10.0


@pytest.fixture(scope="module")
def host() -> Iterator[ranks.Host]:
    with ranks.Host(1) as host:
        yield host
        assert host.unhandled() == []


@pytest.fixture
def matrix(host: ranks.Host) -> Iterator[int]:
    """Id of a matrix that waits for its elements."""
    matrix = next(ids)
    host.new(matrix, DISTRIBUTION, "float64")
    yield matrix
    host.free(matrix)


ids = itertools.count(1)


def data() -> np.ndarray[Any, Any]:
    return np.asfortranarray(np.random.default_rng(0).random(SHAPE))


def peer(host: ranks.Host, address: int = 0) -> Connection:
    connection, welcome = connect(host.addresses[0][address], ranks.TOKEN, {"role": "test"})
    assert welcome == {"ranks": [0, 1]}
    return connection


def ask(connection: Connection, kind: Kind, **body: Any) -> Frame:
    connection.send(kind, body)
    return connection.expect({Kind.UNMAP: Kind.SYNC, Kind.GET: Kind.DATA}.get(kind, kind), WAIT_S)


def mapped(frame: Frame) -> np.ndarray[Any, Any]:
    """The memory that came with a MAP, as the whole matrix."""
    (fd,), ((_rank, _segment, nbytes),) = frame.fds, frame.body["parts"]
    memory = mmap.mmap(fd, nbytes)
    os.close(fd)
    return np.frombuffer(memory, np.float64, SIZE).reshape(SHAPE, order="F")


def put(
    connection: Connection, matrix: int, region: list[int], block: np.ndarray[Any, Any]
) -> None:
    body = {"matrix": matrix, "region": region, "order": "F"}
    connection.send(Kind.PUT, body, np.asfortranarray(block).tobytes("F"))


def get(connection: Connection, matrix: int, region: list[int]) -> np.ndarray[Any, Any]:
    frame = ask(connection, Kind.GET, matrix=matrix, region=region, order="F")
    payload = bytearray(frame.payload_nbytes)
    connection.read_into(memoryview(payload))
    shape = (region[1] - region[0], region[3] - region[2])
    return np.frombuffer(payload).reshape(shape, order="F")


def refused(connection: Connection, kind: Kind, **body: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        ask(connection, kind, **body)
    return caught.value


# --- streams ---


@pytest.mark.parametrize("address", [0, 1])
def test_elements_that_were_put_can_be_fetched(host: ranks.Host, matrix: int, address: int) -> None:
    array = data()
    with peer(host, address) as connection:
        put(connection, matrix, ALL, array)
        times = ask(connection, Kind.SYNC).body
        assert set(times) == {"receive_s", "place_s"}
        host.seal(matrix)
        assert np.array_equal(get(connection, matrix, ALL), array)
        assert np.array_equal(get(connection, matrix, [3, 17, 29, 30]), array[3:17, 29:30])
        assert get(connection, matrix, [5, 5, 0, 30]).size == 0
        assert np.array_equal(host.local(matrix, 0), array)


def test_times_are_reported_once(host: ranks.Host, matrix: int) -> None:
    with peer(host) as connection:
        put(connection, matrix, [0, 7, 0, 30], data()[:7])
        assert ask(connection, Kind.SYNC).body["receive_s"] > 0
        assert ask(connection, Kind.SYNC).body == {"receive_s": 0.0, "place_s": 0.0}


def test_missing_elements_keep_a_matrix_unsealed(host: ranks.Host, matrix: int) -> None:
    array = data()
    with peer(host) as connection:
        put(connection, matrix, [0, 39, 0, 30], array[:39])
        ask(connection, Kind.SYNC)
        with pytest.raises(Failure, match="got 1170 of the 1200 elements") as caught:
            host.seal(matrix)
        assert caught.value.kind == "IncompleteMatrixError"
        failure = refused(connection, Kind.GET, matrix=matrix, region=ALL)
        assert failure.kind == "IncompleteMatrixError"
        put(connection, matrix, [39, 40, 0, 30], array[39:])
        ask(connection, Kind.SYNC)
        host.seal(matrix)
        assert np.array_equal(get(connection, matrix, ALL), array)


def test_duplicate_elements_keep_a_matrix_unsealed(host: ranks.Host, matrix: int) -> None:
    with peer(host) as connection:
        put(connection, matrix, ALL, data())
        put(connection, matrix, [0, 1, 0, 1], data()[:1, :1])
        ask(connection, Kind.SYNC)
    with pytest.raises(Failure, match="got 1201 of the 1200 elements") as caught:
        host.seal(matrix)
    assert caught.value.kind == "IncompleteMatrixError"


def test_an_incomplete_payload_does_not_count(host: ranks.Host, matrix: int) -> None:
    array = data()
    with peer(host) as connection:
        body = {"matrix": matrix, "region": ALL, "order": "F"}
        head = frames.encode(Kind.PUT, body, array.nbytes)
        connection.sock.sendall(head + array.tobytes("F")[:-8])
    with peer(host) as connection:
        with pytest.raises(Failure, match="got 0 of"):
            host.seal(matrix)
        put(connection, matrix, ALL, array)
        ask(connection, Kind.SYNC)
        host.seal(matrix)
        assert np.array_equal(get(connection, matrix, ALL), array)


def test_a_sealed_matrix_accepts_no_more_data(host: ranks.Host, matrix: int) -> None:
    host.fill(matrix)
    before = host.local(matrix, 0)
    with peer(host) as connection:
        assert "accepts no more" in refused(connection, Kind.MAP, matrix=matrix, write=True).message
        put(connection, matrix, ALL, data())
        with pytest.raises(Failure, match="accepts no more"):
            connection.expect(Kind.SYNC, WAIT_S)
        with pytest.raises(frames.ConnectionLost):  # the refused payload is still in the stream
            connection.recv(WAIT_S)
    assert np.array_equal(host.local(matrix, 0), before)


# --- shared memory ---


def test_elements_written_into_a_mapping_can_be_read(host: ranks.Host, matrix: int) -> None:
    array = data()
    with peer(host) as writer, peer(host) as reader:
        mapped(ask(writer, Kind.MAP, matrix=matrix, write=True))[...] = array
        ask(writer, Kind.UNMAP, matrix=matrix, written=[[0, SIZE]])
        host.seal(matrix)
        assert np.array_equal(mapped(ask(reader, Kind.MAP, matrix=matrix)), array)
        ask(reader, Kind.UNMAP, matrix=matrix)


@pytest.mark.parametrize("address", [0, 1])
def test_memory_is_opened_by_its_path(host: ranks.Host, matrix: int, address: int) -> None:
    """As a JVM does, after it has found the endpoint's nonce on its own node."""
    array = data()
    with peer(host, address) as connection:
        told = ask(connection, Kind.SAME_NODE).body
        assert Path(told["path"]).read_bytes() == told["nonce"]
        answer = ask(connection, Kind.MAP, matrix=matrix, write=True, paths=True)
        ((_rank, _segment, nbytes),), (path,) = answer.body["parts"], answer.body["paths"]
        assert answer.fds == ()
        with open(path, "r+b") as file:
            mmap.mmap(file.fileno(), nbytes)[: array.nbytes] = array.tobytes("F")
        ask(connection, Kind.UNMAP, matrix=matrix, written=[[0, SIZE]])
        host.seal(matrix)
        assert np.array_equal(get(connection, matrix, ALL), array)


def test_memory_is_mapped_through_the_unix_socket_only(host: ranks.Host, matrix: int) -> None:
    with peer(host, 1) as connection:
        assert "Unix socket only" in refused(connection, Kind.MAP, matrix=matrix).message


def test_a_freed_matrix_keeps_its_memory_until_its_reader_is_done(host: ranks.Host) -> None:
    matrix, other, third = next(ids), next(ids), next(ids)
    (segment,) = host.new(matrix, DISTRIBUTION, "float64")
    host.fill(matrix)
    with peer(host) as connection:
        seen = mapped(ask(connection, Kind.MAP, matrix=matrix))
        before = seen.copy()
        host.free(matrix)
        assert host.new(other, DISTRIBUTION, "float64") != [segment]
        host.fill(other)
        assert np.array_equal(seen, before)
        assert refused(connection, Kind.GET, matrix=matrix, region=ALL).kind == (
            "MatrixNotFoundError"
        )
        ask(connection, Kind.UNMAP, matrix=matrix)
        assert host.new(third, DISTRIBUTION, "float64") == [segment]
    host.free(other)
    host.free(third)


def test_a_warm_segment_is_reused(host: ranks.Host) -> None:
    distribution = Distribution("CIRC_CIRC", (700, 100), (1, 1))
    segments = set()
    for _ in range(10):
        matrix = next(ids)
        segments |= set(host.new(matrix, distribution, "float64"))
        with peer(host) as connection:
            for fd in ask(connection, Kind.MAP, matrix=matrix, write=True).fds:
                os.close(fd)
            ask(connection, Kind.UNMAP, matrix=matrix, written=[])
        host.free(matrix)
    assert len(segments) == 1


@pytest.mark.parametrize("write", [True, False])
def test_only_memory_of_a_lost_writer_is_never_reused(host: ranks.Host, write: bool) -> None:
    distribution = Distribution("CIRC_CIRC", (900, 100), (1, 1))
    matrix, other = next(ids), next(ids)
    (segment,) = host.new(matrix, distribution, "float64")
    if not write:
        host.fill(matrix)
    threads, _ = host.settled()
    with peer(host) as connection:
        for fd in ask(connection, Kind.MAP, matrix=matrix, write=write).fds:
            os.close(fd)
    assert wait_until(lambda: host.threads() == threads, WAIT_S) is not None
    host.free(matrix)
    taken = host.new(other, distribution, "float64")
    assert (taken == [segment]) is not write
    host.free(other)


def test_a_matrix_whose_writer_was_lost_can_be_sent_again(host: ranks.Host, matrix: int) -> None:
    array = data()
    with peer(host) as connection:
        mapped(ask(connection, Kind.MAP, matrix=matrix, write=True))[:20] = array[:20]
    with peer(host) as connection:
        mapped(ask(connection, Kind.MAP, matrix=matrix, write=True))[...] = array
        ask(connection, Kind.UNMAP, matrix=matrix, written=[[0, SIZE]])
        host.seal(matrix)
        assert np.array_equal(get(connection, matrix, ALL), array)


def test_two_peers_may_map_one_matrix(host: ranks.Host, matrix: int) -> None:
    array = data()
    with peer(host) as left, peer(host) as right:
        views = [mapped(ask(c, Kind.MAP, matrix=matrix, write=True)) for c in (left, right)]
        views[0][:, :15], views[1][:, 15:] = array[:, :15], array[:, 15:]
        for connection in (left, right):
            ask(connection, Kind.UNMAP, matrix=matrix, written=[[0, SIZE // 2]])
        host.seal(matrix)
        assert np.array_equal(get(left, matrix, ALL), array)


def test_written_elements_are_counted_once_and_at_most_all(host: ranks.Host, matrix: int) -> None:
    with peer(host) as connection:
        mapped(ask(connection, Kind.MAP, matrix=matrix, write=True))
        for wrong in ([[0, SIZE + 1]], [[0, [SIZE]]], [[1, 0]]):
            failure = refused(connection, Kind.UNMAP, matrix=matrix, written=wrong)
            assert "not a rank and a number" in failure.message
        ask(connection, Kind.UNMAP, matrix=matrix, written=[[0, SIZE]])
        assert "not mapped" in refused(connection, Kind.UNMAP, matrix=matrix, written=[]).message
    host.seal(matrix)
