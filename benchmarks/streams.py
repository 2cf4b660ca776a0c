"""Streams of an array from and to another process or host: ours, and plain sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import in_turns
from mpi_workers.data import node_connections
from mpi_workers.data.description import DataEndpoints, NodeAddress, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.matrix.layout import Distribution
from tests.faults.hosts import Host

# A data endpoint with one rank, which has matrix 1 to be written and matrix 2 to be read.
NODE = """
import sys, tempfile, threading, numpy as np
from mpi_workers.data.endpoint import DataEndpoint
from mpi_workers.data.loans import RankMemory
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.wire import sockets

storage = Storage(0, Pool(1 << 31, shared=True))
distribution = Distribution("VC_STAR", (int(sys.argv[1]), int(sys.argv[1])), (1, 1))
for ident in (1, 2):
    storage.put(ident, storage.new(distribution, np.dtype("float64")), sealed=ident == 2)
with tempfile.TemporaryDirectory() as folder:
    unix, near = sockets.listen_unix(folder + "/data.sock")
    tcp, far = sockets.listen_tcp(sys.argv[2])
    endpoint = DataEndpoint([unix, tcp], "token", range(1))
    threading.Thread(target=endpoint.serve, daemon=True).start()
    memory = RankMemory(storage, "token", near)
    print(far, flush=True)
    sys.stdin.read()
"""

# Serves plain streams: an order, r (receive) or s (send), and the number of bytes.
PLAIN = """
import socket, sys, threading, numpy as np
buffer = np.zeros(int(sys.argv[1]) ** 2)

def serve(peer):
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (order := peer.recv(9, socket.MSG_WAITALL)):
        view = memoryview(buffer).cast("B")[: int.from_bytes(order[1:], "little")]
        if order[:1] == b"r":
            got = 0
            while got < len(view):
                got += peer.recv_into(view[got:])
            peer.sendall(b"k")
        else:
            peer.sendall(view)

with socket.create_server((sys.argv[2], 0)) as server:
    print("%s:%s" % server.getsockname(), flush=True)
    while True:
        peer, _ = server.accept()
        threading.Thread(target=serve, args=(peer,), daemon=True).start()
"""


@contextmanager
def served(program: str, n: int, host: Host | None = None) -> Iterator[str]:
    """Run a program for n x n matrices, on a host or here; the address that it listens at."""
    words = [sys.executable, "-c", program, str(n), host.ip if host else "127.0.0.1"]
    process = subprocess.Popen(
        host.enter(*words) if host else words,
        env=host.environment() if host else None,
        cwd=Path(__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:  # the program itself ends with its host: do not wait for the end of its output
        process.kill()
        process.stdin.close()
        process.stdout.close()
        process.wait()


def measured(
    node: str, plain: str, n: int, counts: Sequence[int], rounds: int
) -> dict[str, list[float]]:
    """Seconds of the turns: sends and fetches in some numbers of streams, and plain ones."""
    A = np.random.default_rng(1).random((n, n))
    out = np.zeros_like(A)
    endpoints = DataEndpoints("token", (NodeAddress(0, 1, (node,)),))
    distribution = Distribution("VC_STAR", A.shape, (1, 1))
    works: dict[str, Callable[[], object]] = {}
    usual = node_connections.STREAMS_PER_NODE
    for streams in counts:
        node_connections.STREAMS_PER_NODE = streams
        nodes = NodeConnections(endpoints)
        with MatrixReader(nodes, TransferTarget(2, distribution, A.dtype)) as reader:
            reader.read_block(out, (0, 0))  # connects
        sockets = plain_sockets(plain, streams)
        works |= {
            f"plain send {streams}": plain_streams(sockets, A, b"r"),
            f"send {streams}": _sending(nodes, distribution, A),
            f"plain fetch {streams}": plain_streams(sockets, out, b"s"),
            f"fetch {streams}": _fetching(nodes, distribution, out),
        }
    node_connections.STREAMS_PER_NODE = usual
    return {name: list(took.turns) for name, took in in_turns(works, rounds).items()}


def plain_sockets(address: str, count: int) -> list[socket.socket]:
    """Connections to `PLAIN`."""
    host, _, port = address.rpartition(":")
    return [socket.create_connection((host, int(port))) for _ in range(count)]


def plain_streams(sockets: list[socket.socket], array: Any, order: bytes) -> Callable[[], None]:
    parts = [memoryview(part).cast("B") for part in np.array_split(array, len(sockets))]
    threads = ThreadPoolExecutor(len(sockets))

    def move(peer: socket.socket, part: memoryview) -> None:
        peer.sendall(order + len(part).to_bytes(8, "little"))
        if order == b"r":
            peer.sendall(part)
            peer.recv(1)
            return
        got = 0
        while got < len(part):
            got += peer.recv_into(part[got:])

    return lambda: list(threads.map(move, sockets, parts)).clear()


def _sending(nodes: NodeConnections, distribution: Distribution, array: Any) -> Callable[[], None]:
    def send() -> None:
        with MatrixWriter(nodes, TransferTarget(1, distribution, array.dtype)) as writer:
            writer.write_block(array, (0, 0))

    return send


def _fetching(nodes: NodeConnections, distribution: Distribution, out: Any) -> Callable[[], None]:
    def fetch() -> None:
        with MatrixReader(nodes, TransferTarget(2, distribution, out.dtype)) as reader:
            reader.read_block(out, (0, 0))

    return fetch
