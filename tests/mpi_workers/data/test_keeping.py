"""The memory of a rank whose process is killed: the next one has it, and transfers go on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpi_workers.data import keeping
from mpi_workers.data.description import DataEndpoints, NodeAddress, TransferTarget
from mpi_workers.data.endpoint import DataEndpoint
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import Kind
from tests.mpi_workers.data.rank_process import TOKEN
from tests.support.traces import wait_until

ROOT = Path(__file__).resolve().parents[3]
ROWS = 1000  # of the matrices: 80 kB
WAIT_S = 20.0


class Process:
    """A process of the rank."""

    def __init__(self, address: str, renewal: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mpi_workers.data.rank_process", address, str(renewal)],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def order(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps([name, arguments]) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._process.stdout.readline())
            if "failure" in answer:
                raise Failure.from_map(answer["failure"])
            return answer["value"]

        return order

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


class Node:
    """A data endpoint, and the processes of its rank, one after the other."""

    def __init__(self, folder: Path) -> None:
        listening = [sockets.listen_unix(f"{folder}/data.sock"), sockets.listen_tcp("127.0.0.1")]
        self.addresses = [address for _, address in listening]
        endpoint = DataEndpoint([sock for sock, _ in listening], TOKEN, range(1))
        threading.Thread(target=endpoint.serve, daemon=True).start()
        self.renewals = 0
        self.rank = Process(self.addresses[0], 0)
        self.connections: list[NodeConnections] = []

    def client(self, route: str) -> NodeConnections:
        addresses = tuple(self.addresses[route == "far" :])
        endpoints = DataEndpoints(TOKEN, (NodeAddress(0, 1, addresses),))
        self.connections.append(NodeConnections(endpoints, threads=1))
        return self.connections[-1]

    def renew(self, *matrices: int) -> list[int]:
        """Kill the process, and start the next one with these matrices; those that are gone."""
        self.rank.kill()
        self.renewals += 1
        self.rank = Process(self.addresses[0], self.renewals)
        gone: list[int] = self.rank.adopt(matrices)
        return gone

    def close(self) -> None:
        self.rank.kill()
        for connections in self.connections:
            connections.close()


@pytest.fixture
def node(folder: Path) -> Iterator[Node]:
    node = Node(folder)
    yield node
    node.close()


def target(matrix: int) -> TransferTarget:
    distribution = Distribution("CIRC_CIRC", (ROWS, 10), (1, 1))
    return TransferTarget(matrix, distribution, np.dtype("float64"))


def fetched(client: NodeConnections, matrix: int) -> list[float]:
    """The different elements of a matrix, through the client."""
    out = np.empty((ROWS, 10))
    with MatrixReader(client, target(matrix)) as reader:
        reader.read_block(out, (0, 0))
    found: list[float] = np.unique(out).tolist()
    return found


@pytest.fixture(params=["near", "far"])
def route(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_next_process_has_the_matrices(node: Node, route: str) -> None:
    client = node.client(route)
    node.rank.new(1, ROWS, 1.5)
    node.rank.new(2, ROWS, 2.5)
    node.rank.new(3, 0, 2.5, 2)  # has its memory
    node.rank.new(4, ROWS, 4.5)
    assert fetched(client, 1) == [1.5]
    for _ in range(3):
        assert node.renew(1, 2, 3, 9) == [9]
        assert fetched(client, 1) == node.rank.values(1) == [1.5]
        assert fetched(client, 3) == [2.5]
        assert node.rank.segment(2) == node.rank.segment(3)
        with pytest.raises(Failure, match="holds no matrix 4"):
            fetched(client, 4)


def test_a_client_never_takes_old_memory_for_that_of_a_new_matrix(node: Node) -> None:
    """Numbers of segments began at 1 in each process, and clients keep mappings by number."""
    client = node.client("near")
    first = [node.rank.new(matrix, ROWS, 1.0) for matrix in range(1, 6)]
    for matrix in range(1, 6):
        assert fetched(client, matrix) == [1.0]  # mapped
    node.renew(1)
    later = [node.rank.new(matrix, ROWS, 2.0) for matrix in range(6, 16)]
    assert not set(first) & set(later)
    for matrix in range(6, 16):
        assert fetched(client, matrix) == [2.0]
    assert fetched(client, 1) == [1.0]


def test_a_freed_matrix_is_not_there_again(node: Node) -> None:
    """Its row is removed before its memory is used again."""
    node.rank.new(1, ROWS, 1.0)
    node.rank.free(1)
    node.rank.new(2, ROWS, 2.0)  # in the same segment
    assert node.renew(1, 2) == [1]
    assert node.rank.values(2) == [2.0]


def test_memory_without_a_matrix_goes_with_the_process(node: Node) -> None:
    """Idle segments, and those of matrices that the gang does not have any more."""

    def kept() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:alchemist (")
        return found

    before = kept()
    for matrix in range(1, 9):
        node.rank.new(matrix, ROWS, 1.0)
    for matrix in range(3, 6):
        node.rank.free(matrix)
    assert wait_until(lambda: kept() == before + 8, WAIT_S) is not None
    node.renew(1, 2)
    assert wait_until(lambda: kept() == before + 2, WAIT_S) is not None
    node.rank.free(1)
    node.rank.trim()
    assert wait_until(lambda: kept() == before + 1, WAIT_S) is not None


def test_a_send_goes_on(node: Node, route: str) -> None:
    client = node.client(route)
    node.rank.new(1, ROWS, None)
    with MatrixWriter(client, target(1)) as writer:
        writer.write_blocks([ArrayBlock(np.full((ROWS // 2, 10), 3.0), (0, 0))])
        assert node.renew(1) == []
        rest = np.full((ROWS - ROWS // 2, 10), 3.0)
        writer.write_blocks([ArrayBlock(rest, (ROWS // 2, 0))])
    node.rank.seal(1)
    assert node.rank.values(1) == [3.0]
    node.renew(1)
    assert fetched(client, 1) == [3.0]


def test_a_request_waits_for_the_next_process(node: Node, route: str) -> None:
    client = node.client(route)
    node.rank.new(1, ROWS, 1.0)
    node.rank.kill()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fetched, client, 1)
        assert not asked.done()
        node.rank = Process(node.addresses[0], 1)
        assert node.rank.adopt([1]) == []
        assert asked.result(WAIT_S) == [1.0]


def test_memory_of_a_lost_writer_stays_tainted(node: Node) -> None:
    node.rank.new(1, ROWS, None)
    with connect(node.addresses[0], TOKEN, {"role": "test"})[0] as connection:
        connection.send(Kind.MAP, {"matrix": 1, "write": True})
        for fd in connection.expect(Kind.MAP, WAIT_S).fds:
            os.close(fd)
        node.renew(1)
    assert wait_until(lambda: node.rank.segment(1)[1], WAIT_S) is not None
    node.renew(1)
    segment, tainted = node.rank.segment(1)
    assert tainted
    node.rank.free(1)
    assert node.rank.new(2, ROWS, 1.0) != segment


def test_a_process_is_refused_while_the_one_before_lives(node: Node) -> None:
    node.rank.new(1, ROWS, 1.0)
    other, _ = connect(node.addresses[0], TOKEN, {"role": "rank", "rank": 0})
    with other, pytest.raises(Failure, match="is connected already"):
        other.expect(Kind.MAP, WAIT_S)


def test_more_segments_than_descriptors_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sock, address = sockets.listen_unix(f"{folder}/data.sock")
    endpoint = DataEndpoint([sock], TOKEN, range(1))
    threading.Thread(target=endpoint.serve, daemon=True).start()
    monkeypatch.setattr(keeping.resource, "getrlimit", lambda _: (0, keeping.SPARE_FDS + 12))
    pool = Pool(0, shared=True)
    pool.keeper = keeping.RankKeeper(0, TOKEN, address, ranks=4)
    blocks = [pool.take(10) for _ in range(3)]
    with pytest.raises(Failure, match="limit on open files") as caught:
        pool.take(10)
    assert caught.value.kind == "ResourceError"
    del blocks[0]
    blocks.append(pool.take(10))
    assert Storage(0, pool).pool.keeper is pool.keeper
