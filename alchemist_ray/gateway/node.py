"""GatewayNode: transfers through a gateway, which stands for all nodes of a gang.

A region travels in chunks (`protocol.chunks`), each in a frame of its own that is acknowledged.
When a connection is lost, unacknowledged chunks are sent again over another one; the gateway writes
each chunk once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from alchemist_ray.gateway.protocol import RESUME_S, WINDOW, GatewayAddress, chunks
from alchemist_ray.gateway.secure_socket import connect
from mpi_workers.data.description import DataEndpoints, NodeAddress, NodeTimes, TransferTarget
from mpi_workers.data.node_connections import Array, NodeConnection, closed
from mpi_workers.data.streams import Order
from mpi_workers.failures import Failure
from mpi_workers.matrix.node_shares import Region
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind

GATEWAY_TIMEOUT_S = 150.0  # for the gateway's next byte
RETRY_S = 0.2
MAX_BREAKS = 50  # of a connection, one after the other, without a chunk that arrives
BUSY_TIMEOUT_S, BUSY_RETRY_S = 120.0, 1.0  # a gateway that serves as many transfers as it can


class _Chunk:
    """A part of a transfer, that is asked for (or sent) in one frame and answered by another."""

    def __init__(self, target: TransferTarget, region: Region, array: Array, order: Order) -> None:
        self._target = target
        self.array = array
        self.order = order
        self._body = {"matrix": target.matrix, "region": list(region), "order": order}

    def ask(self, connection: Connection, times: NodeTimes) -> None:
        """Send the frame."""
        connection.send(Kind.GET, self._body)

    def take(self, connection: Connection, times: NodeTimes) -> None:
        """Receive the answer: the elements of the array."""
        clock = time.perf_counter()
        frame = connection.expect(Kind.DATA, GATEWAY_TIMEOUT_S)
        out = self.array
        connection.sock.settimeout(GATEWAY_TIMEOUT_S)
        if frame.payload_nbytes != out.nbytes:
            raise frames.WireError(f"got {frame.payload_nbytes} bytes, not {out.nbytes}")
        whole = out.flags.c_contiguous if self.order == "C" else out.flags.f_contiguous
        packed = out if whole else np.empty(out.shape, out.dtype, order=self.order)
        connection.read_into(packed.reshape(-1, order=self.order).view(np.uint8).data)
        arrived = time.perf_counter()
        if not whole:
            out[...] = packed
        times.receive_s += arrived - clock
        times.deserialize_s += time.perf_counter() - arrived


class _SentChunk(_Chunk):
    """A part that is sent, and acknowledged."""

    def ask(self, connection: Connection, times: NodeTimes) -> None:
        clock = time.perf_counter()
        packed = np.asarray(self.array, self._target.dtype, order=_order(self.array))
        self._body["order"] = _order(packed)
        flat = packed.reshape(-1, order=_order(packed)).view(np.uint8)
        times.serialize_s += time.perf_counter() - clock
        connection.send(Kind.PUT, self._body, flat.data)

    def take(self, connection: Connection, times: NodeTimes) -> None:
        body = connection.expect(Kind.SYNC, GATEWAY_TIMEOUT_S).body
        times.receive_s += float(body["receive_s"])
        times.deserialize_s += float(body["place_s"])


class _Stream:
    """One connection, and the chunks that are under way on it."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.chunks: deque[_Chunk] = deque()  # not answered
        self.sent = 0  # of them, over this connection
        self.times = NodeTimes(0, "gateway")
        self.arrived = 0  # chunks

    def drop(self) -> None:
        """Close the connection; its chunks are sent again over the next one."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None
        self.sent = 0


class GatewayNode(NodeConnection):
    """The connections for data to a gateway. The base describes the use of its methods.

    Parameters
    ----------
    gateway : GatewayAddress
    token : str
    fields : callable() -> dict
        What a connection tells the gateway of this process.
    """

    def __init__(self, gateway: GatewayAddress, token: str, fields: Callable[[], Body]) -> None:
        super().__init__(0, DataEndpoints("", (NodeAddress(0, 1, (str(gateway),)),)))
        self._gateway = gateway
        self._user_token = token
        self._fields = fields
        self._lanes = [_Stream() for _ in range(gateway.streams)]
        self._last_use = 0.0

    @property
    def route(self) -> str:
        return "gateway"

    @property
    def streams(self) -> int:
        return len(self._lanes)

    @property
    def name(self) -> str:
        return f"the gateway {self._gateway}"

    # --- connections ---

    def open(self, stream: int = 0) -> Connection:
        lane = self._lanes[stream]
        self._last_use = time.monotonic()
        if lane.connection is None:
            if self.shut.is_set():
                raise closed()
            lane.connection = self._connected()
            lane.connection.sock.settimeout(GATEWAY_TIMEOUT_S)
            if self.shut.is_set():  # by another thread, while the connection was opened
                sockets.hang_up(lane.connection.sock)
        return lane.connection

    def _connected(self) -> Connection:
        """A new connection; waits while the gateway has as many as it serves."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                return connect(self._gateway, self._user_token, self._fields(), shared=False)[0]
            except Failure as failure:
                if failure.kind != "ResourceError" or time.monotonic() > deadline:
                    raise
            if self.shut.wait(BUSY_RETRY_S):
                raise closed()

    def check(self) -> None:
        """Nothing is mapped: errors come with the answers."""

    def hang_up(self) -> None:
        self.shut.set()
        for lane in self._lanes:
            if lane.connection is not None:
                sockets.hang_up(lane.connection.sock)

    def rest(self, idle_s: float = 0.0) -> None:
        if time.monotonic() - self._last_use >= idle_s:
            self.close()

    @property
    def resting(self) -> bool:
        return all(lane.connection is None for lane in self._lanes)

    def close(self) -> None:
        for lane in self._lanes:
            lane.drop()
            lane.chunks.clear()
            lane.times = NodeTimes(0, self.route)
        self.shut.clear()

    def _persist(self, stream: int, action: Callable[[Connection], None]) -> None:
        """Run an action; after a lost connection, open another one, and begin it again.

        Gives up when the gateway cannot be reached for `RESUME_S`: however often a connection
        breaks, each time it is there again, the time begins again.
        """
        lane = self._lanes[stream]
        there = time.monotonic()
        breaks = 0
        arrived = lane.arrived
        while True:
            try:
                connection = self.open(stream)
                breaks += 1  # unless the action ends
                try:
                    action(connection)
                    return
                finally:
                    there = time.monotonic()
            except TimeoutError:
                if lane.connection is not None:
                    raise  # the gateway is there, and sends nothing
                lost: Exception = TimeoutError("the gateway cannot be reached")
            except (frames.WireError, OSError) as error:
                if self.shut.is_set():
                    raise closed() from error
                if not isinstance(error, frames.ConnectionLost | OSError):
                    raise
                self._raise_refusal(lane)
                lost = error
            lane.drop()
            if lane.arrived > arrived:
                breaks, arrived = 0, lane.arrived
            if time.monotonic() > there + RESUME_S or breaks > MAX_BREAKS:
                raise Failure("TransferError", f"{self.name} cannot be reached again: {lost}")
            time.sleep(RETRY_S)

    @staticmethod
    def _raise_refusal(lane: _Stream) -> None:
        """Raise what the gateway has said before it closed the connection."""
        if lane.connection is None:
            return
        while True:
            try:
                frame = lane.connection.recv(1.0)
            except (frames.WireError, OSError):
                return
            if frame.kind == Kind.REFUSED:
                raise Failure.from_map(frame.body)
            if frame.payload_nbytes:
                return

    # --- transfers ---

    def put(
        self, target: TransferTarget, ranks: list[int], region: Region, array: Array, stream: int
    ) -> NodeTimes:
        lane = self._lanes[stream]
        begun = time.perf_counter()
        before = lane.times.serialize_s
        self._move(_SentChunk, target, region, array, stream)
        spent = lane.times.serialize_s - before
        nbytes = array.size * target.dtype.itemsize
        return NodeTimes(0, self.route, nbytes, spent, time.perf_counter() - begun - spent)

    def get(
        self, target: TransferTarget, ranks: list[int], region: Region, array: Array, stream: int
    ) -> NodeTimes:
        self._move(_Chunk, target, region, array, stream)
        self._advance(stream, 0)
        times, self._lanes[stream].times = self._lanes[stream].times, NodeTimes(0, self.route)
        times.nbytes = array.size * target.dtype.itemsize
        return times

    def _move(
        self, kind: type[_Chunk], target: TransferTarget, region: Region, array: Array, stream: int
    ) -> None:
        """Ask for all chunks of a region, as many at a time as the window has."""
        order = _order(array)
        for part in chunks(region, target.dtype.itemsize, order):
            rows = slice(part.row0 - region.row0, part.row1 - region.row0)
            its = array[rows, part.col0 - region.col0 : part.col1 - region.col0]
            self._lanes[stream].chunks.append(kind(target, part, its, order))
            self._advance(stream, WINDOW - 1)

    def _advance(self, stream: int, most: int) -> None:
        """Send the chunks that are not under way; wait until at most `most` of all are."""
        lane = self._lanes[stream]

        def advance(connection: Connection) -> None:
            while lane.sent < len(lane.chunks):
                lane.chunks[lane.sent].ask(connection, lane.times)
                lane.sent += 1
            while lane.sent > most:
                lane.chunks[0].take(connection, lane.times)
                lane.chunks.popleft()
                lane.sent -= 1
                lane.arrived += 1

        self._persist(stream, advance)

    def sync(self) -> NodeTimes:
        total = NodeTimes(0, self.route)
        for stream, lane in enumerate(self._lanes):
            if lane.chunks:
                self._advance(stream, 0)
            total.receive_s += lane.times.receive_s
            total.deserialize_s += lane.times.deserialize_s
            lane.times = NodeTimes(0, self.route)
        return total


def _order(array: Array) -> Order:
    """The order in which an array's elements travel."""
    return "C" if abs(array.strides[0]) >= abs(array.strides[1]) else "F"
