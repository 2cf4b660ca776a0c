"""The gateway's end of transfers: chunks between a client and the nodes of a gang.

A thread serves each data connection. It holds a piece of a chunk, and writes it to the nodes or
reads it from them by layout, as any attached process does, over connections of its own: a slow
client keeps no other one waiting. Ray has no part in it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.errors import AlchemistError, failure_of
from alchemist_ray.gateway.protocol import CHUNK_NBYTES, MIN_LINES, chunks
from alchemist_ray.gateway.secure_socket import SharedConnection
from alchemist_ray.measures import metrics
from mpi_workers.data.description import TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, stored_shape
from mpi_workers.matrix.node_shares import Region
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import UNAUTHENTICATED_MAP_LIMIT, Frame, Kind

LIMIT_NBYTES = CHUNK_NBYTES + 16 * MIN_LINES  # of a chunk: a line more than fits
PIECE_NBYTES = 4 << 20  # 4 MiB of a chunk: the memory of a data connection; smaller copies are slow
MATRICES = 256  # of which the gateway remembers layout and finished chunks
CHUNK_TIMEOUT_S = 120.0  # for the next bytes of a chunk
IDLE_TIMEOUT_S = 60.0  # for the next chunk: then a client has to connect again
# Threads of transfers that encrypt and decrypt at a time, for all gangs: more would share the
# interpreter's lock with those of commands, and no handshake would be in time.
TURNS = threading.Semaphore(4)


_Piece = tuple[memoryview, Any, tuple[int, int]]  # bytes, elements, row and column of the first


class _Arrivals:
    """The chunks of a matrix that have arrived, or are being written."""

    def __init__(self, target: TransferTarget) -> None:
        self.target = target
        self._lock = threading.Condition()
        self._done: set[Region] = set()
        self._writers: dict[Region, Connection] = {}

    @contextlib.contextmanager
    def writing(self, region: Region, connection: Connection) -> Iterator[bool]:
        """While a chunk arrives; False if it was written when its sender lost the answer.

        A sender that repeats a chunk has given up the connection on which it has sent it before.
        """
        with self._lock:
            while (writer := self._writers.get(region)) is not None:
                writer.hang_up()
                if not self._lock.wait(CHUNK_TIMEOUT_S):
                    raise Failure("TransferError", "another connection is writing this chunk")
            wanted = region not in self._done
            self._writers[region] = connection
        written = False
        try:
            yield wanted
            written = True
        finally:
            with self._lock:
                del self._writers[region]
                if written:
                    self._done.add(region)
                self._lock.notify_all()


class GangTransfers:
    """Serves the data connections of one gang's clients.

    Parameters
    ----------
    connection : GangConnection
        The gateway's own.
    """

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._matrices: OrderedDict[int, _Arrivals] = OrderedDict()
        self._clients: set[Connection] = set()
        self._closed = False

    def serve(self, connection: SharedConnection, check: Callable[[Kind], None]) -> None:
        """Serve a client until it leaves, in the calling thread.

        `check` is called for each chunk and raises if the client may not send or fetch it.
        """
        with self._lock:
            self._clients.add(connection)
            closed = self._closed
        connection.shared.use_alone(TURNS)
        connection.map_limit = UNAUTHENTICATED_MAP_LIMIT
        client = _DataClient(connection, self._connection)
        try:
            while not closed:
                try:
                    frame = connection.recv(IDLE_TIMEOUT_S)
                except TimeoutError:
                    return  # it has left, or keeps the connection from others
                connection.sock.settimeout(CHUNK_TIMEOUT_S)
                check(frame.kind)
                client.answer(frame, self._arrivals(frame.body.get("matrix")))
        except (AlchemistError, Failure) as error:
            connection.refuse(failure_of(error, "transfer"))
        except (frames.WireError, TimeoutError) as error:
            if not isinstance(error, frames.ConnectionLost):
                connection.refuse(Failure("TransferError", f"refused: {error}"))
        except (OSError, ValueError):
            pass  # the client is gone
        finally:
            with self._lock:
                self._clients.discard(connection)
            client.close()

    def forget(self, matrices: list[Any]) -> None:
        """No chunk of these matrices will come any more."""
        with self._lock:
            for matrix in matrices:
                if isinstance(matrix, int):
                    self._matrices.pop(matrix, None)

    def reopen(self) -> None:
        """The gang has other ranks now, among which its matrices are divided in another way."""
        with self._lock:
            self._matrices.clear()

    def close(self) -> None:
        """Hang up on all clients."""
        with self._lock:
            self._closed = True
            for connection in self._clients:
                connection.hang_up()

    def _arrivals(self, matrix: object) -> _Arrivals:
        if type(matrix) is not int:
            raise Failure("TransferError", "a transfer must name its matrix by number")
        with self._lock:
            found = self._matrices.get(matrix)
            if found is not None:
                self._matrices.move_to_end(matrix)
                return found
        about = self._connection.request({"op": "describe", "matrix": matrix})
        grid = self._connection.grid
        distribution = Distribution(about["layout"], stored_shape(tuple(about["shape"])), grid)
        target = TransferTarget(matrix, distribution, np.dtype(about["dtype"]))
        with self._lock:
            found = self._matrices.setdefault(matrix, _Arrivals(target))
            while len(self._matrices) > MATRICES:
                self._matrices.popitem(last=False)
            return found


class _DataClient:
    """One client's data connection, with its own connections to the gang's nodes."""

    def __init__(self, connection: Connection, gang: GangConnection) -> None:
        self._connection = connection
        self._gang = gang
        self._nodes: NodeConnections | None = None
        self._buffer = np.empty(0, np.uint8)

    def close(self) -> None:
        self._connection.close()
        if self._nodes is not None:
            self._nodes.close()

    def answer(self, frame: Frame, arrivals: _Arrivals) -> None:
        """Receive or send a chunk. Raises `Failure` if nothing of an answer has been sent."""
        if frame.kind not in (Kind.PUT, Kind.GET) or (frame.kind == Kind.GET) != (
            not frame.payload_nbytes
        ):
            raise frames.WireError(f"unexpected {frame.kind.name}")
        target = arrivals.target
        region = Region.checked(frame.body.get("region"), target.distribution.shape)
        nbytes = math.prod(region.shape) * target.dtype.itemsize
        if not 0 < nbytes <= LIMIT_NBYTES:
            raise Failure(
                "TransferError", f"a chunk must have 1 to {LIMIT_NBYTES} bytes, not {nbytes}"
            )
        order = "F" if frame.body.get("order") == "F" else "C"
        pieces = self._pieces(target, region, order)
        if frame.kind == Kind.GET:
            self._send(target, region, pieces, nbytes)
            metrics.count("alchemist_gateway_bytes_total", ("fetch",), nbytes)
            return
        if frame.payload_nbytes != nbytes:
            raise frames.WireError(f"got {frame.payload_nbytes} bytes, not {nbytes}")
        with arrivals.writing(region, self._connection) as wanted:
            times = self._receive(target, region, pieces, wanted=wanted)
        metrics.count("alchemist_gateway_bytes_total", ("send",), nbytes)
        self._connection.send(Kind.SYNC, times)

    def _send(
        self, target: TransferTarget, region: Region, pieces: Iterator[_Piece], nbytes: int
    ) -> None:
        begun = False
        try:
            with MatrixReader(self._own_nodes(), target, region=region) as reader:
                for raw, block, origin in pieces:
                    reader.read_block(block, origin)
                    if not begun:
                        self._connection.begin(Kind.DATA, {}, nbytes)
                        begun = True
                    self._connection.write(raw)
        except Failure as failure:
            if not begun:
                raise
            # The client takes the next bytes for data: it asks again, and then gets the reason.
            raise frames.ConnectionLost(failure.message) from failure

    def _receive(
        self, target: TransferTarget, region: Region, pieces: Iterator[_Piece], *, wanted: bool
    ) -> dict[str, float]:
        receive_s = place_s = 0.0
        with contextlib.ExitStack() as stack:
            if wanted:
                nodes = self._own_nodes()
                writer = stack.enter_context(MatrixWriter(nodes, target, region=region))
            for raw, block, origin in pieces:
                begun = time.perf_counter()
                self._connection.read_into(raw)
                arrived = time.perf_counter()
                if wanted:
                    writer.write_block(block, origin)
                receive_s += arrived - begun
                place_s += time.perf_counter() - arrived
            arrived = time.perf_counter()
        return {"receive_s": receive_s, "place_s": place_s + time.perf_counter() - arrived}

    def _own_nodes(self) -> NodeConnections:
        current = self._gang.nodes
        if self._nodes is None or self._nodes.endpoints is not current.endpoints:
            if self._nodes is not None:
                self._nodes.close()
            self._nodes = NodeConnections(current.endpoints, 1, current.watch)
        return self._nodes

    def _pieces(self, target: TransferTarget, region: Region, order: str) -> Iterator[_Piece]:
        """The parts of a region in the order in which they travel, all in the same memory."""
        itemsize = target.dtype.itemsize
        for part in chunks(region, itemsize, order, PIECE_NBYTES, 1):
            nbytes = math.prod(part.shape) * itemsize
            if self._buffer.size < nbytes:
                self._buffer = np.empty(nbytes, np.uint8)
            raw = self._buffer[:nbytes]
            block = raw.view(target.dtype).reshape(part.shape, order="F" if order == "F" else "C")
            yield raw.data, block, (part.row0, part.col0)
