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

import reprlib
import socket
import threading
import time
from typing import Any, NamedTuple, TypeGuard

from numpy.typing import NDArray

from mpi_workers.data.streams import receive_stream, send_stream
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import positions
from mpi_workers.matrix.memory import MemoryBlock
from mpi_workers.matrix.regions import Region
from mpi_workers.matrix.storage import Entry, Storage
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection, greet
from mpi_workers.wire.frames import Body, Frame, Kind

MAX_PEERS = 4096
MAX_KNOWN = 1024  # segments that a peer may say it has mapped
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
        listeners = [sockets.listen_unix(unix_path)]
        if host is not None:
            listeners.append(sockets.listen_tcp(host))
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
            try:
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
            except RuntimeError:  # no more threads: this peer is turned away, the door stays open
                sock.close()
                self._peers.release()

    def _serve(self, sock: socket.socket) -> None:
        try:
            with Connection(sock) as connection:
                sockets.tune(sock)
                greet(connection, self._token, {"rank": self._storage.rank})
                Peer(connection, self._storage).serve()
        except (frames.WireError, OSError):
            pass  # the peer is gone or was refused; what it held has been seen to
        finally:
            self._peers.release()


class PeerMapping(NamedTuple):
    """A block that a peer has mapped: held here, it is not recycled."""

    block: MemoryBlock
    entry: Entry
    write: bool


class Peer:
    """One connection after its handshake."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._leases: dict[int, PeerMapping] = {}
        self._times = {"receive_s": 0.0, "place_s": 0.0}

    def serve(self) -> None:
        """Answer until the peer leaves. Raises `ConnectionLost`, or what it did wrong."""
        try:
            while True:
                frame = self._connection.recv()
                try:
                    self._answer(frame)
                except Failure as failure:
                    if frame.payload_nbytes:  # it is on its way: no later frame can be found
                        self._connection.refuse(failure)
                        return
                    self._connection.send(Kind.REFUSED, failure.to_map())
        except frames.ConnectionLost:
            raise
        except (frames.WireError, TimeoutError) as error:
            self._connection.refuse(Failure("TransferError", f"refused: {error}"))
            raise
        finally:
            for lease in self._leases.values():
                if lease.write:
                    lease.block.taint()
            self._leases.clear()

    def _answer(self, frame: Frame) -> None:
        if frame.payload_nbytes and frame.kind != Kind.PUT:
            raise frames.WireError(f"a {frame.kind.name} carries no payload")
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
                raise frames.WireError(f"a rank does not take {frame.kind.name}")

    def _entry(self, body: Body, *, write: bool) -> Entry:
        entry = self._storage.entry(body.get("matrix"))
        if write and entry.sealed:
            raise Failure(
                "TransferError", f"matrix {body['matrix']} is whole and takes no more data"
            )
        if not write:
            self._storage.sealed(body["matrix"])
        return entry

    def _map(self, body: Body) -> None:
        if not self._connection.unix:
            raise Failure("TransferError", "memory is mapped through the Unix socket only")
        write = body.get("write") is True
        entry = self._entry(body, write=write)
        matrix_id = body["matrix"]
        if matrix_id in self._leases:
            raise Failure("TransferError", f"matrix {matrix_id} is mapped already")
        known = body.get("known", [])
        if not isinstance(known, list) or len(known) > MAX_KNOWN or not all(map(_is_int, known)):
            raise Failure("TransferError", f"'known' is not a list of up to {MAX_KNOWN} segments")
        block = entry.matrix.block
        segment = block.segment
        reply = {
            "segment": segment.id,
            "nbytes": segment.nbytes,
            "dead": [k for k in known if not self._storage.pool.is_live(k)],
        }
        self._leases[matrix_id] = PeerMapping(block, entry, write)
        self._connection.send(Kind.MAP, reply, fds=() if segment.id in known else (segment.fd,))

    def _unmap(self, body: Body) -> None:
        matrix_id, written = body.get("matrix"), body.get("written", 0)
        if not _is_int(matrix_id) or matrix_id not in self._leases:
            raise Failure("TransferError", f"matrix {reprlib.repr(matrix_id)} is not mapped")
        lease = self._leases[matrix_id]
        most = lease.entry.matrix.local.size if lease.write else 0
        if not _is_int(written) or not 0 <= written <= most:
            raise Failure("TransferError", f"{reprlib.repr(written)} is no number of elements here")
        self._storage.count(lease.entry, written)
        del self._leases[matrix_id], lease  # before the peer knows: what it frees is free at once
        self._connection.send(Kind.SYNC)

    def _share(self, body: Body, entry: Entry) -> NDArray[Any]:
        """The part of this rank's block that lies in the frame's region."""
        matrix = entry.matrix
        part = Region.checked(body.get("region"), matrix.shape).of(
            matrix.distribution.local_indices(matrix.rank)
        )
        share: NDArray[Any] = matrix.local[
            positions(matrix.rows, part.rows), positions(matrix.cols, part.cols)
        ]
        return share

    def _put(self, body: Body, nbytes: int) -> None:
        entry = self._entry(body, write=True)
        share = self._share(body, entry)
        if share.nbytes != nbytes:
            raise frames.WireError(f"{nbytes} bytes sent for a region of {share.nbytes}")
        self._connection.sock.settimeout(STALL_S)
        tiled = body.get("tiled") is True  # the peer's array is C-ordered
        received, placed = receive_stream(
            self._connection, share, share.dtype, tiled=tiled, order="C" if tiled else "F"
        )
        self._times["receive_s"] += received
        self._times["place_s"] += placed
        self._storage.count(entry, share.size)

    def _get(self, body: Body) -> None:
        share = self._share(body, self._entry(body, write=False))
        self._connection.sock.settimeout(STALL_S)
        tiled = body.get("tiled") is True
        send_stream(self._connection, Kind.DATA, {}, share, share.dtype, tiled=tiled, order="F")


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int  # a bool is not a number here
