"""A rank's data door: other processes put, get and map regions of its matrices.

Threads beside the rank's main thread, so that data moves while MPI computes.
Same node: the peer asks for the memory behind a matrix by file descriptor (MAP)
and writes or reads it itself. Other node: PUT and GET stream the rank's share
of a region in Fortran order, in one frame.

While a peer has a matrix mapped it holds a lease: the memory is not recycled
under it. A peer that vanishes with a write lease may still be writing, so that
memory is never used again.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

import numpy as np

from mpi_workers import tiles, wire
from mpi_workers.failures import Failure
from mpi_workers.layout import positions
from mpi_workers.memory import Block
from mpi_workers.regions import CHUNK, Region, stream
from mpi_workers.storage import Entry, Storage
from mpi_workers.wire import Body, Connection, Frame, Kind

MAX_PEERS = 4096
STALL_S = 60.0  # a peer that stops in the middle of a payload for so long is given up


class DataServer:
    """Serves a rank's storage on a Unix socket and, if there are other nodes, on TCP.

    Parameters
    ----------
    storage : Storage
        The matrices.
    token : str
        The gang's secret; every connection must open with it.
    unix_path : str
        Where to put the Unix socket (in a directory of mode 700).
    host : str, optional
        The node's own address to listen on. None: no TCP.
    """

    def __init__(self, storage: Storage, token: str, unix_path: str, host: str | None) -> None:
        self._storage = storage
        self._token = token
        self._peers = threading.Semaphore(MAX_PEERS)
        self.addresses: list[str] = []
        listeners = [wire.listen_unix(unix_path)]
        if host is not None:
            listeners.append(wire.listen_tcp(host))
        for sock, address in listeners:
            self.addresses.append(address)
            threading.Thread(target=self._accept, args=(sock,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                time.sleep(0.05)  # out of file descriptors: those in use will be given back
                continue
            if not self._peers.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            wire.tune(sock)
            with Connection(sock) as connection:
                wire.greet(connection, self._token, {"rank": self._storage.rank})
                Peer(connection, self._storage).serve()
        except (wire.WireError, OSError):
            pass  # the peer is gone or was refused; what it held has been seen to
        finally:
            self._peers.release()


class Peer:
    """One connection after its handshake."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._leases: dict[int, tuple[Block, Entry, bool]] = {}
        self._times = {"receive_s": 0.0, "place_s": 0.0}

    def serve(self) -> None:
        """Answer until the peer leaves."""
        try:
            while True:
                frame = self._connection.recv()
                try:
                    self._answer(frame)
                except Failure as failure:
                    self._connection.send(Kind.REFUSED, failure.to_map())
                    if frame.payload_nbytes:
                        raise wire.WireError("refused a payload") from None
                except wire.ConnectionLost:
                    raise
                except (wire.WireError, TimeoutError) as error:
                    refusal = Failure("TransferError", f"refused: {error or 'the peer stalled'}")
                    self._connection.send(Kind.REFUSED, refusal.to_map())
                    raise wire.WireError(str(error)) from None
        except wire.ConnectionLost:
            raise
        except wire.WireError as error:
            with contextlib.suppress(wire.WireError, OSError):
                self._connection.send(
                    Kind.REFUSED, Failure("TransferError", f"refused: {error}").to_map()
                )
            raise
        finally:
            for block, _, write in self._leases.values():
                if write:
                    block.taint()
            self._leases.clear()

    def _answer(self, frame: Frame) -> None:
        if frame.payload_nbytes and frame.kind != Kind.PUT:
            raise wire.WireError(f"a {frame.kind.name} carries no payload")
        match frame.kind:
            case Kind.MAP:
                self._map(frame.body)
            case Kind.UNMAP:
                self._unmap(frame.body)
            case Kind.PUT:
                self._put(frame.body, frame.payload_nbytes)
            case Kind.GET:
                self._get(frame.body)
            case Kind.SYNC:
                times, self._times = self._times, {"receive_s": 0.0, "place_s": 0.0}
                self._connection.send(Kind.SYNC, times)
            case _:
                raise wire.WireError(f"a rank does not take {frame.kind.name}")

    def _entry(self, body: Body, *, write: bool) -> Entry:
        entry = self._storage.entry(body.get("matrix"))
        if write and entry.sealed:
            raise Failure("TransferError", f"matrix {body['matrix']} is whole and takes no more data")
        if not write:
            self._storage.sealed(body.get("matrix"))
        return entry

    def _map(self, body: Body) -> None:
        write = body.get("write") is True
        entry = self._entry(body, write=write)
        matrix_id = body["matrix"]
        if matrix_id in self._leases:
            raise Failure("TransferError", f"matrix {matrix_id} is mapped already")
        block = entry.matrix.block
        segment = block.segment
        known = body.get("known")
        known = known if isinstance(known, list) else []
        reply = {
            "segment": segment.id,
            "nbytes": segment.nbytes,
            "dead": [k for k in known if isinstance(k, int) and not self._storage.pool.is_live(k)],
        }
        self._leases[matrix_id] = (block, entry, write)
        self._connection.send(Kind.MAP, reply, fds=() if segment.id in known else (segment.fd,))

    def _unmap(self, body: Body) -> None:
        lease = self._leases.pop(body.get("matrix"), None)  # type: ignore[arg-type]
        if lease is None:
            raise Failure("TransferError", f"matrix {body.get('matrix')!r} is not mapped")
        _, entry, write = lease
        written = body.get("written", 0)
        if write and isinstance(written, int) and 0 <= written <= entry.matrix.local.size:
            self._storage.count(entry, written)
        self._connection.send(Kind.SYNC)

    def _share(self, body: Body, entry: Entry) -> np.ndarray[Any, Any]:
        """The part of this rank's block that lies in the frame's region."""
        matrix = entry.matrix
        part = Region.checked(body.get("region"), matrix.shape).of(matrix.spread.piece(matrix.rank))
        share: np.ndarray[Any, Any] = matrix.local[
            positions(matrix.rows, part.rows), positions(matrix.cols, part.cols)
        ]
        return share

    def _put(self, body: Body, nbytes: int) -> None:
        entry = self._entry(body, write=True)
        share = self._share(body, entry)
        if share.nbytes != nbytes:
            raise wire.WireError(f"{nbytes} bytes sent for a region of {share.nbytes}")
        staging = np.empty(0, np.uint8)
        self._connection.sock.settimeout(STALL_S)
        clock = time.perf_counter()
        for rows, cols in stream(share.shape, share.itemsize):
            target = share[rows, cols]
            if target.flags.f_contiguous:
                self._connection.read_into(memoryview(target.reshape(-1, order="F")).cast("B"))
                placed = clock
                now = time.perf_counter()
                self._times["receive_s"] += now - placed
                clock = now
                continue
            if staging.nbytes < target.nbytes:
                staging = np.empty(max(CHUNK, target.nbytes), np.uint8)
            raw = staging[: target.nbytes]
            self._connection.read_into(memoryview(raw))
            arrived = time.perf_counter()
            target[...] = raw.view(target.dtype).reshape(target.shape, order="F")
            now = time.perf_counter()
            self._times["receive_s"] += arrived - clock
            self._times["place_s"] += now - arrived
            clock = now
        self._connection.sock.settimeout(None)
        self._storage.count(entry, share.size)

    def _get(self, body: Body) -> None:
        share = self._share(body, self._entry(body, write=False))
        self._connection.sock.settimeout(STALL_S)
        send_stream(self._connection, Kind.DATA, {}, share)
        self._connection.sock.settimeout(None)


def send_stream(
    connection: Connection, kind: Kind, body: Body, array: np.ndarray[Any, Any]
) -> tuple[float, float]:
    """Send an array of any strides as one frame whose payload is in Fortran order.

    Returns the seconds spent packing and sending.
    """
    packing = sending = 0.0
    clock = time.perf_counter()
    connection.sock.sendall(wire.encode(kind, body, array.nbytes))
    staging = np.empty(0, array.dtype)
    for rows, cols in stream(array.shape, array.itemsize):
        source = array[rows, cols]
        if source.flags.f_contiguous:
            packed = source.reshape(-1, order="F")
        else:
            if staging.size < source.size:
                staging = np.empty(source.size, array.dtype)
            packed = staging[: source.size]
            tiles.copy(packed.reshape(source.shape, order="F"), source)
        now = time.perf_counter()
        packing += now - clock
        clock = now
        try:
            connection.sock.sendall(memoryview(packed).cast("B"))
        except TimeoutError:
            raise
        except OSError as error:
            raise wire.ConnectionLost(f"the connection broke while sending: {error}") from error
        now = time.perf_counter()
        sending += now - clock
        clock = now
    return packing, sending
