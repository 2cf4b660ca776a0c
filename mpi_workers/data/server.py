"""A rank's data server: other processes put, get and map regions of its matrices.

It runs in threads beside the rank's main thread, so that data moves while MPI computes. On the
same node a peer maps the memory of a matrix by file descriptor (MAP) and reads or writes it
directly. From other nodes PUT and GET stream the rank's share of a region, in one frame.

A peer holds a lease on each matrix that it has mapped: the memory is not recycled before the
lease ends. A peer that is lost with a write lease may still write, so that memory is never used
again.
"""

from __future__ import annotations

import contextlib
import reprlib
import threading
from typing import Any, NamedTuple, TypeGuard

from numpy.typing import NDArray

from mpi_workers.data.streams import receive_stream, send_stream
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import positions
from mpi_workers.matrix.memory import MemoryBlock
from mpi_workers.matrix.regions import Region
from mpi_workers.matrix.storage import Entry, Storage
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Frame, Kind

MAX_PEERS = 4096  # authenticated connections, a thread each
MAX_KNOWN = 1024  # segments that a peer may report as mapped
STALL_TIMEOUT_S = 600.0  # for the next bytes of a payload; a lost node is noticed by TCP before


class DataServer:
    """Serves a rank's storage on a Unix socket and, if there are other nodes, on TCP.

    Parameters
    ----------
    storage : Storage
        The matrices.
    token : str
        The gang's secret; every peer must prove that it knows it.
    unix_path : str
        Path of the Unix socket, in a folder of mode 0700.
    host : str, optional
        The node's own address to listen on. None: no TCP.
    """

    def __init__(self, storage: Storage, token: str, unix_path: str, host: str | None) -> None:
        self._storage = storage
        self._peers = threading.Semaphore(MAX_PEERS)
        listeners = [sockets.listen_unix(unix_path)]
        if host is not None:
            listeners.append(sockets.listen_tcp(host))
        self.addresses = [address for _, address in listeners]
        acceptor = Acceptor(
            [sock for sock, _ in listeners],
            token,
            {"rank": storage.rank},
            keepalive=sockets.DATA,
        )
        threading.Thread(target=self._accept, args=(acceptor,), daemon=True).start()

    def _accept(self, acceptor: Acceptor) -> None:
        while True:
            for connection, _fields in acceptor.poll():
                if not self._peers.acquire(blocking=False):
                    self._reject(connection, f"rank {self._storage.rank} has {MAX_PEERS} peers")
                    continue
                try:
                    threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
                except RuntimeError:
                    self._reject(connection, f"rank {self._storage.rank} can start no more threads")
                    self._peers.release()

    def _reject(self, connection: Connection, why: str) -> None:
        with connection, contextlib.suppress(frames.WireError):
            connection.send(Kind.REFUSED, Failure("ResourceError", why).to_map())

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                Peer(connection, self._storage).serve()
        except (frames.WireError, OSError):
            pass  # the peer is lost or was refused; its leases have ended
        finally:
            self._peers.release()


class PeerMapping(NamedTuple):
    """A block that a peer has mapped. This reference keeps it from being recycled."""

    block: MemoryBlock
    entry: Entry
    write: bool


class Peer:
    """One authenticated connection."""

    def __init__(self, connection: Connection, storage: Storage) -> None:
        self._connection = connection
        self._storage = storage
        self._leases: dict[int, PeerMapping] = {}
        self._times = {"receive_s": 0.0, "place_s": 0.0}

    def serve(self) -> None:
        """Answer frames until the peer leaves. Raises `ConnectionLost`, or its protocol error."""
        try:
            while True:
                frame = self._connection.recv()
                try:
                    self._answer(frame)
                except Failure as failure:
                    if frame.payload_nbytes:  # unread: the next frame cannot be found
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
            raise frames.WireError(f"a {frame.kind.name} must not have a payload")
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
                raise frames.WireError(f"a rank does not accept {frame.kind.name}")

    def _entry(self, body: Body, *, write: bool) -> Entry:
        entry = self._storage.entry(body.get("matrix"))
        if write and entry.sealed:
            raise Failure(
                "TransferError", f"matrix {body['matrix']} is complete and accepts no more data"
            )
        if not write:
            self._storage.sealed(body["matrix"])
        return entry

    def _map(self, body: Body) -> None:
        if not self._connection.unix:
            raise Failure("TransferError", "memory can be mapped through the Unix socket only")
        write = body.get("write") is True
        entry = self._entry(body, write=write)
        matrix_id = body["matrix"]
        if matrix_id in self._leases:
            raise Failure("TransferError", f"matrix {matrix_id} is already mapped")
        known = body.get("known", [])
        if not isinstance(known, list) or len(known) > MAX_KNOWN or not all(map(_is_int, known)):
            words = f"'known' must be a list of up to {MAX_KNOWN} segment ids"
            raise Failure("TransferError", words)
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
            words = f"'written' is {reprlib.repr(written)}, not a number up to {most}"
            raise Failure("TransferError", words)
        self._storage.count(lease.entry, written)
        del self._leases[matrix_id], lease  # before the reply: a free may follow it
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
            raise frames.WireError(f"{nbytes} bytes were sent for a region of {share.nbytes} bytes")
        self._connection.sock.settimeout(STALL_TIMEOUT_S)
        tiled = body.get("tiled") is True  # the peer's array is C-ordered
        received, placed = receive_stream(
            self._connection, share, share.dtype, tiled=tiled, order="C" if tiled else "F"
        )
        self._times["receive_s"] += received
        self._times["place_s"] += placed
        self._storage.count(entry, share.size)

    def _get(self, body: Body) -> None:
        share = self._share(body, self._entry(body, write=False))
        self._connection.sock.settimeout(STALL_TIMEOUT_S)
        tiled = body.get("tiled") is True
        send_stream(self._connection, Kind.DATA, {}, share, share.dtype, tiled=tiled, order="F")


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int  # bool is excluded
