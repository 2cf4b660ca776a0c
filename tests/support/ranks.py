"""Ranks without MPI: a process with real `Storage`s behind the real data endpoints of nodes.

In a test::

    with ranks.Host(4) as host:
        distribution = Distribution("VC_STAR", (100, 7), (2, 2))
        host.new(1, distribution, "float64")
        target = TransferTarget(1, distribution, np.dtype("float64"))
        with MatrixWriter(NodeConnections(host.endpoints("far")), target) as writer:
            ...

The same file is the program of that process: it takes orders as JSON lines on its standard
input, and ends at the end of the input.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from mpi_workers.data import endpoint
from mpi_workers.data.description import DataEndpoints, NodeAddress
from mpi_workers.data.endpoint import DataEndpoint
from mpi_workers.data.loans import RankMemory
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.wire import handshake, sockets
from mpi_workers.wire.asynchronous import listen
from mpi_workers.wire.blocking import LINGER_S
from mpi_workers.wire.frames import Kind

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "the gang's secret"
SETTLING_S = 10.0


class Host:
    """A process with `size` ranks on `nodes` nodes, each with its Unix socket and its TCP port.

    Parameters
    ----------
    size : int
        How many ranks.
    nodes : int
        How many data endpoints; each has `size // nodes` ranks, the last one the rest.
    keep_bytes : int
        Bytes that each rank's pool keeps warm.
    handshake_timeout_s, max_peers : float, int
        Time limit of a handshake; most clients of an endpoint.

    Attributes
    ----------
    addresses : list of list of str
        By node: ``unix:...``, ``tcp:...``.
    control : str
        Address of an asyncio server that sends every frame back as a REPLY.
    listeners : dict
        The first node's addresses by kind: "unix", "tcp", "control".
    """

    def __init__(
        self,
        size: int,
        keep_bytes: int = 1 << 30,
        handshake_timeout_s: float = handshake.TIMEOUT_S,
        max_peers: int = endpoint.MAX_PEERS,
        nodes: int = 1,
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        about = [self.folder, size, nodes, keep_bytes, handshake_timeout_s, max_peers]
        self._ranks = ranks_of(size, nodes)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", *map(str, about)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid
        self._about = psutil.Process(self.pid)
        self.addresses: list[list[str]]
        self.control: str
        self.addresses, self.control = self._answer()
        unix, tcp = self.addresses[0]
        self.listeners = {"unix": unix, "tcp": tcp, "control": self.control}

    def __enter__(self) -> Host:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        errors = self.stop()
        assert kind is not None or not errors, f"the ranks' process wrote:\n{errors}"

    def stop(self) -> str:
        """End the process; returns its standard error."""
        try:
            _, errors = self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        return errors

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def endpoints(self, route: str = "near") -> DataEndpoints:
        """Addresses of the nodes: ``"near"`` (Unix and TCP), ``"far"`` (TCP only)."""
        first = 0 if route == "near" else 1
        return DataEndpoints(
            TOKEN,
            tuple(
                NodeAddress(its.start, len(its), tuple(addresses[first:]))
                for its, addresses in zip(self._ranks, self.addresses, strict=True)
            ),
        )

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the ranks' process is gone:\n{self.stop()}")
        answer = json.loads(line)
        if "failure" in answer:
            raise Failure.from_map(answer["failure"])
        return answer["value"]

    def _order(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def new(self, matrix: int, distribution: Distribution, dtype: Any) -> list[int]:
        """Allocate a matrix on every rank of its grid; returns the ids of the segments."""
        about = [distribution.layout, distribution.shape, distribution.grid]
        segments: list[int] = self._order("new", matrix, *about, np.dtype(dtype).name)
        return segments

    def fill(self, matrix: int) -> None:
        """Set element (i, j) to ``1000 i + j`` on every rank, and seal."""
        self._order("fill", matrix)

    def seal(self, matrix: int) -> None:
        self._order("seal", matrix)

    def free(self, matrix: int) -> None:
        self._order("free", matrix)

    def trim(self) -> None:
        """Make every rank return its warm memory to the system."""
        self._order("trim")

    def local(self, matrix: int, rank: int) -> np.ndarray[Any, Any]:
        """A copy of a rank's block."""
        shape, dtype, data = self._order("local", matrix, rank)
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape, order="F")

    def unhandled(self) -> list[str]:
        """Exceptions that ended a thread of the process or reached its event loop."""
        found: list[str] = self._order("unhandled")
        return found

    def rss_kb(self) -> int:
        """Resident memory."""
        return self._about.memory_info().rss >> 10

    def threads(self) -> int:
        return self._about.num_threads()

    def fds(self) -> int:
        return self._about.num_fds()

    def settled(self) -> tuple[int, int]:
        """Threads and file descriptors, once the last connections are closed.

        A refused peer may linger for `LINGER_S`: waits until nothing changes for longer.
        """
        deadline = time.monotonic() + SETTLING_S
        found, since = (self.threads(), self.fds()), time.monotonic()
        while time.monotonic() < min(deadline, since + LINGER_S + 0.2):
            time.sleep(0.02)
            last, found = found, (self.threads(), self.fds())
            if last != found:
                since = time.monotonic()
        return found


def ranks_of(size: int, nodes: int) -> list[range]:
    """The ranks of each node."""
    each = size // nodes
    return [range(k * each, size if k == nodes - 1 else (k + 1) * each) for k in range(nodes)]


class _Ranks:
    """Carries out the orders, in the process itself."""

    def __init__(self, folder: str, size: int, nodes: int, keep_bytes: int) -> None:
        self._unhandled: list[str] = []
        threading.excepthook = lambda args: self._unhandled.append(repr(args.exc_value))
        self._storages = [Storage(rank, Pool(keep_bytes, shared=True)) for rank in range(size)]
        self.addresses = []
        self._memories = []
        for node, ranks in enumerate(ranks_of(size, nodes)):
            listening = [
                sockets.listen_unix(f"{folder}/{node}.sock"),
                sockets.listen_tcp("127.0.0.1"),
            ]
            self.addresses.append([address for _, address in listening])
            served = DataEndpoint([sock for sock, _ in listening], TOKEN, ranks)
            threading.Thread(target=served.serve, daemon=True).start()
            for storage in self._storages[ranks.start : ranks.stop]:
                self._memories.append(RankMemory(storage, TOKEN, self.addresses[-1][0]))
        listener, self.control = sockets.listen_unix(f"{folder}/control.sock")
        threading.Thread(target=uvloop.run, args=(self._echo(listener),), daemon=True).start()

    async def _echo(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self._unhandled.append(repr(context)))
        listen(
            [listener],
            TOKEN,
            lambda protocol, body: {"rank": 0},
            lambda protocol, frame: protocol.send(Kind.REPLY, frame.body),
            lambda protocol: None,
        )
        await asyncio.Event().wait()

    def _holding(self, matrix: int) -> list[Storage]:
        held = []
        for storage in self._storages:
            with contextlib.suppress(Failure):
                storage.entry(matrix)
                held.append(storage)
        return held

    def new(
        self, matrix: int, layout: str, shape: list[int], grid: list[int], dtype: str
    ) -> list[int]:
        distribution = Distribution(layout, (shape[0], shape[1]), (grid[0], grid[1]))
        segments = []
        for storage in self._storages[: distribution.size]:
            part = storage.new(distribution, np.dtype(dtype))
            segments.append(part.block.segment.id)
            storage.put(matrix, part, sealed=False)
        return segments

    def fill(self, matrix: int) -> None:
        for storage in self._holding(matrix):
            part = storage.entry(matrix).matrix
            part.local[...] = 1000 * np.array(part.rows)[:, np.newaxis] + np.array(part.cols)
            storage.put(matrix, part, sealed=True)

    def seal(self, matrix: int) -> None:
        for storage in self._holding(matrix):
            storage.seal(matrix)

    def free(self, matrix: int) -> None:
        for storage in self._storages:
            storage.free(matrix)

    def trim(self) -> None:
        for storage in self._storages:
            storage.pool.trim()

    def local(self, matrix: int, rank: int) -> list[Any]:
        part = self._storages[rank].entry(matrix).matrix.local
        return [part.shape, part.dtype.name, base64.b64encode(part.tobytes("F")).decode()]

    def unhandled(self) -> list[str]:
        return self._unhandled


def _main(
    folder: str, size: str, nodes: str, keep_bytes: str, handshake_timeout_s: str, max_peers: str
) -> None:
    handshake.TIMEOUT_S, endpoint.MAX_PEERS = float(handshake_timeout_s), int(max_peers)
    ranks = _Ranks(folder, int(size), int(nodes), int(keep_bytes))
    print(json.dumps({"value": [ranks.addresses, ranks.control]}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"value": getattr(ranks, name)(*arguments)}
        except Failure as failure:
            answer = {"failure": failure.to_map()}
        print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the servers' threads wait for peers


if __name__ == "__main__":
    _main(*sys.argv[1:])
