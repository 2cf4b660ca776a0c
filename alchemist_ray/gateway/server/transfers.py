"""The gateway's end of transfers: chunks between a client and the nodes of a gang.

A thread serves each data connection. It holds one chunk, and writes it to the nodes or reads it
from them by layout, as any attached process does. Ray has no part in it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gateway.protocol import CHUNK_NBYTES, MIN_LINES
from mpi_workers.data.description import TransferTarget
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, stored_shape
from mpi_workers.matrix.regions import Region
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import UNAUTHENTICATED_MAP_LIMIT, Frame, Kind
from mpi_workers.wire.sockets import hang_up

LIMIT_NBYTES = CHUNK_NBYTES + 16 * MIN_LINES  # of a chunk: a line more than fits
MATRICES = 256  # of which the gateway remembers layout and finished chunks
STALL_TIMEOUT_S = 120.0  # for the next bytes of a chunk


class _Arrivals:
    """The chunks of a matrix that have arrived, or are being written."""

    def __init__(self, target: TransferTarget) -> None:
        self.target = target
        self._lock = threading.Condition()
        self._done: dict[Region, bool] = {}  # False: being written

    def begin(self, region: Region) -> bool:
        """Whether to write a chunk; False if it was written when its sender lost the answer."""
        with self._lock:
            while self._done.get(region) is False:
                if not self._lock.wait(STALL_TIMEOUT_S):
                    raise Failure("TransferError", "another connection writes this chunk")
            if self._done.get(region):
                return False
            self._done[region] = False
            return True

    def end(self, region: Region, *, written: bool) -> None:
        with self._lock:
            if written:
                self._done[region] = True
            else:
                self._done.pop(region, None)
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
        self._sockets: set[socket.socket] = set()
        self._closed = False

    def serve(self, sock: socket.socket, received: bytes, check_token: Callable[[], None]) -> None:
        """Serve a client until it leaves, in the calling thread.

        `check_token` is called for each chunk and raises if the client's token is no longer valid.
        """
        with self._lock:
            self._sockets.add(sock)
            closed = self._closed
        connection = Connection(sock, map_limit=UNAUTHENTICATED_MAP_LIMIT, received=received)
        buffer = np.empty(0, np.uint8)
        try:
            while not closed:
                frame = connection.recv()
                sock.settimeout(STALL_TIMEOUT_S)
                try:
                    check_token()
                    buffer = self._answer(connection, frame, buffer)
                except (AlchemistError, Failure) as error:
                    failure = to_failure(error) if isinstance(error, AlchemistError) else error
                    connection.refuse(failure)
                    return
        except (frames.WireError, TimeoutError) as error:
            if not isinstance(error, frames.ConnectionLost):
                connection.refuse(Failure("TransferError", f"refused: {error}"))
        except (OSError, ValueError):
            pass  # the client is gone
        finally:
            with self._lock:
                self._sockets.discard(sock)
            connection.close()

    def forget(self, matrices: list[Any]) -> None:
        """No chunk of these matrices will come any more."""
        with self._lock:
            for matrix in matrices:
                if isinstance(matrix, int):
                    self._matrices.pop(matrix, None)

    def renew(self) -> None:
        """The gang has other ranks now, among which its matrices are divided in another way."""
        with self._lock:
            self._matrices.clear()

    def close(self) -> None:
        """Hang up on all clients."""
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                hang_up(sock)

    def _answer(self, connection: Connection, frame: Frame, buffer: Any) -> Any:
        """Receive or send a chunk; the buffer for the next one."""
        if frame.kind not in (Kind.PUT, Kind.GET) or (frame.kind == Kind.GET) != (
            not frame.payload_nbytes
        ):
            raise frames.WireError(f"unexpected {frame.kind.name}")
        arrivals = self._arrivals(frame.body.get("matrix"))
        target = arrivals.target
        region = Region.checked(frame.body.get("region"), target.distribution.shape)
        shape = (region.row1 - region.row0, region.col1 - region.col0)
        nbytes = shape[0] * shape[1] * target.dtype.itemsize
        if not 0 < nbytes <= LIMIT_NBYTES:
            raise Failure("TransferError", f"a chunk has 1 to {LIMIT_NBYTES} bytes, not {nbytes}")
        order = "F" if frame.body.get("order") == "F" else "C"
        if buffer.size < nbytes:
            buffer = np.empty(nbytes, np.uint8)
        raw = buffer[:nbytes]
        block = raw.view(target.dtype).reshape(shape, order=order)
        origin = (region.row0, region.col0)
        nodes = self._connection.nodes
        if frame.kind == Kind.GET:
            with MatrixReader(nodes, target) as reader:
                reader.read_block(block, origin)
            connection.send(Kind.DATA, {}, raw.data)
            return buffer
        if frame.payload_nbytes != nbytes:
            raise frames.WireError(f"{frame.payload_nbytes} bytes came for {nbytes}")
        begun = time.perf_counter()
        connection.read_into(raw.data)
        arrived = time.perf_counter()
        if arrivals.begin(region):
            written = False
            try:
                with MatrixWriter(nodes, target) as writer:
                    writer.write_block(block, origin)
                written = True
            finally:
                arrivals.end(region, written=written)
        placed = time.perf_counter() - arrived
        connection.send(Kind.SYNC, {"receive_s": arrived - begun, "place_s": placed})
        return buffer

    def _arrivals(self, matrix: object) -> _Arrivals:
        if type(matrix) is not int:
            raise Failure("TransferError", "a transfer names its matrix by number")
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
