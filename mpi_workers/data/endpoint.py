"""The data endpoint: one process per gang and node that serves the matrices of all its ranks.

Clients put, get and map regions; the endpoint splits them by rank. On the same node a client maps
the ranks' memory through the Unix socket (MAP) and reads or writes it directly. From other nodes
PUT and GET stream the node's share of a region, in one frame. A JVM on the same node has no Unix
socket: it learns by SAME_NODE that it is there, and maps the ranks' memory by its path below
``/proc``.

The proxy starts it. It runs no code of users, and outlives the ranks: it has the descriptors of
their memory (`mpi_workers.data.keeping`), so that a rank that has ended is started again with its
matrices. Transfers wait for that, and go on.
"""

from __future__ import annotations

import contextlib
import os
import reprlib
import signal
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeGuard

import numpy as np

from mpi_workers.data.keeping import RETAIN, RETAIN_S, ROLE
from mpi_workers.data.loans import Loan, NodeMemory, NodeProof, full
from mpi_workers.data.meetings import ROLE as CHANNEL
from mpi_workers.data.meetings import Meetings
from mpi_workers.data.streams import Order, Share, move_stream
from mpi_workers.deadlines import STALL_TIMEOUT_S
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.node_shares import (
    Box,
    Region,
    checked_rows,
    elements_of,
    exchange,
    place,
    row_groups,
)
from mpi_workers.sigterm import outlive_sigterm
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer, authenticate
from mpi_workers.wire.blocking import MAX_FDS, Connection
from mpi_workers.wire.frames import Body, Frame, Kind

MAX_PEERS = 4096  # authenticated clients, a thread each
MAX_ROWS_BYTES = 64 << 20  # 64 MiB of rows in one frame


class DataEndpoint:
    """Serves the memory of a node's ranks on listening sockets.

    Parameters
    ----------
    listeners : sequence of socket
        The Unix socket, and TCP if other nodes may connect.
    token : str
        The gang's secret; every peer must prove that it knows it.
    ranks : range
        The ranks of this node, each of which connects to the Unix socket, twice.
    """

    def __init__(self, listeners: Sequence[socket.socket], token: str, ranks: range) -> None:
        self._memory = NodeMemory(ranks)
        self._proof = NodeProof()
        self._meetings = Meetings()
        self._clients: set[Connection] = set()
        self._lock = threading.Lock()
        welcome = {"ranks": [ranks.start, ranks.stop]}
        known = partial(authenticate, token=token, welcome=welcome)
        self._acceptor = Acceptor(
            listeners, known, self._serve, keepalive=sockets.DATA, expected=2 * len(ranks)
        )

    def serve(self) -> None:
        """Accept ranks and clients. Does not return."""
        self._acceptor.run()

    def _serve(self, peer: AuthenticatedPeer) -> None:
        connection, fields = peer
        try:
            if fields.get("role") == "rank":
                self._memory.join(fields.get("rank"), connection)
                return
            if fields.get("role") == ROLE:
                self._memory.kept(fields.get("rank"), connection).serve(connection)
                return
            if fields.get("role") == RETAIN:
                with connection:
                    body = connection.expect(Kind.COMMAND, RETAIN_S).body
                    self._memory.retain(body["matrices"])
                    connection.send(Kind.REPLY)
                return
            if fields.get("role") == CHANNEL:
                with contextlib.suppress(frames.WireError, OSError):  # it is gone
                    self._meetings.join(connection, fields)
                return
            self._admit(connection)
        except Failure as failure:
            with connection, contextlib.suppress(frames.WireError):
                connection.send(Kind.REFUSED, failure.to_map())
            return
        try:
            Client(connection, self._memory, self._proof).serve()
        except (frames.WireError, OSError):
            pass  # the client is lost or was refused; its loans have ended
        finally:
            with self._lock:
                self._clients.discard(connection)
            connection.close()

    def _admit(self, connection: Connection) -> None:
        with self._lock:
            if len(self._clients) >= MAX_PEERS:
                raise full(f"has {MAX_PEERS} clients, its limit")
            self._clients.add(connection)


class _InParts:
    """Elements in the blocks of several ranks."""

    def __init__(self, loans: Sequence[Loan]) -> None:
        self._distribution = loans[0].distribution
        self._parts = [loan.part() for loan in loans]
        self._stream = sum(part.local.nbytes for part in self._parts) > copy_kernels.CACHED_BYTES

    def views(self, piece: Box) -> tuple[()]:
        return ()

    def copy(self, packed: np.ndarray[Any, Any], piece: Box, *, out: bool) -> None:
        stream = self._stream and not out  # a piece stays in the cache until it is sent
        parts, distribution = self._parts, self._distribution
        exchange(packed, piece, parts, distribution, into_parts=not out, stream=stream)


class Client:
    """One authenticated connection of a client."""

    def __init__(self, connection: Connection, memory: NodeMemory, proof: NodeProof) -> None:
        self._connection = connection
        self._memory = memory
        self._proof = proof
        self._mapped: dict[int, dict[int, Loan]] = {}  # by matrix and rank
        self._put_loans: dict[int, dict[int, Loan]] = {}  # until SYNC
        self._times = {"receive_s": 0.0, "place_s": 0.0}

    def serve(self) -> None:
        """Answer frames until the client leaves. Raises `ConnectionLost`, or a protocol error."""
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
            with contextlib.suppress(Failure):
                self._memory.give_back(_all(self._mapped), tainted=True)
            put = _all(self._put_loans)
            for loan in put:
                loan.written = 0  # elements of a lost client do not count
            with contextlib.suppress(Failure):
                self._memory.give_back(put)

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
                self._sync()
            case Kind.SAME_NODE:
                body = {"path": self._proof.path, "nonce": self._proof.nonce}
                self._connection.send(Kind.SAME_NODE, body)
            case _:
                raise frames.WireError(f"a data endpoint does not accept {frame.kind.name}")

    # --- shared memory ---

    def _map(self, body: Body) -> None:
        by_path = body.get("paths") is True  # below /proc: as useful there as a descriptor
        if not self._connection.unix and not by_path:
            words = "file descriptors pass through the Unix socket only: ask for paths"
            raise Failure("TransferError", words)
        ranks = self._memory.chosen(body.get("ranks"))
        if len(ranks) > MAX_FDS and not by_path:
            raise Failure("TransferError", f"at most {MAX_FDS} ranks can be mapped at a time")
        matrix = body.get("matrix")
        already = self._mapped.get(matrix, {}) if _is_int(matrix) else {}
        if already.keys() & set(ranks):
            raise Failure("TransferError", f"matrix {matrix} is already mapped")
        loans = self._memory.lend(matrix, ranks, write=body.get("write") is True)
        self._mapped.setdefault(body["matrix"], {}).update({loan.rank: loan for loan in loans})
        answer: Body = {"parts": [[a.rank, a.segment.number, a.segment.nbytes] for a in loans]}
        fds = [loan.segment.fd for loan in loans]
        if by_path:
            answer["paths"] = [f"/proc/{os.getpid()}/fd/{fd}" for fd in fds]
            fds = []
        self._connection.send(Kind.MAP, answer, fds=fds)

    def _unmap(self, body: Body) -> None:
        """End all loans of a matrix."""
        matrix, pairs = body.get("matrix"), body.get("written", [])
        loans = self._mapped.get(matrix) if _is_int(matrix) else None
        if loans is None:
            raise Failure("TransferError", f"matrix {reprlib.repr(matrix)} is not mapped")
        written: dict[int, int] = {}
        for pair in pairs if isinstance(pairs, list) else [pairs]:
            is_pair = isinstance(pair, list) and list(map(type, pair)) == [int, int]
            loan = loans.get(pair[0]) if is_pair else None
            most = loan.size if loan is not None and loan.write else 0
            if loan is None or not 0 <= pair[1] <= most:
                words = f"'written' has {reprlib.repr(pair)}, not a rank and a number up to {most}"
                raise Failure("TransferError", words)
            written[pair[0]] = pair[1]
        for rank, count in written.items():
            loans[rank].written = count
        self._memory.give_back(self._mapped.pop(body["matrix"]).values())
        self._connection.send(Kind.SYNC)

    # --- streams ---

    def _put(self, body: Body, nbytes: int) -> None:
        matrix = body.get("matrix")
        ranks = self._memory.chosen(body.get("ranks"))
        borrowed = self._put_loans.setdefault(matrix, {}) if _is_int(matrix) else {}
        missing = [rank for rank in ranks if rank not in borrowed]
        if missing:
            lent = self._memory.lend(matrix, missing, write=True)
            borrowed.update({loan.rank: loan for loan in lent})
        loans = [borrowed[rank] for rank in ranks]
        self._connection.sock.settimeout(STALL_TIMEOUT_S)
        receive = self._receive_rows if "rows" in body else self._receive_region
        receive(body, nbytes, loans)

    def _receive_region(self, body: Body, nbytes: int, loans: Sequence[Loan]) -> None:
        share = _share(body, loans)
        _check_size(nbytes, share.nbytes)
        times = move_stream(self._connection, share, _InParts(loans), out=False)
        self._times["receive_s"] += times.moving
        self._times["place_s"] += times.copying
        for loan in loans:
            loan.written += elements_of(share.boxes, loan.rank, loan.distribution)

    def _receive_rows(self, body: Body, nbytes: int, loans: Sequence[Loan]) -> None:
        distribution, dtype = loans[0].distribution, loans[0].dtype
        rows = checked_rows(body["rows"], distribution.shape)
        groups = list(row_groups(distribution, [loan.rank for loan in loans], rows))
        _check_size(nbytes, sum(group.size for group in groups) * dtype.itemsize)
        if nbytes > MAX_ROWS_BYTES:
            raise Failure(
                "TransferError",
                f"{nbytes} bytes of rows exceed the limit of {MAX_ROWS_BYTES}: send several frames",
            )
        parts, by_rank = [loan.part() for loan in loans], {loan.rank: loan for loan in loans}
        for group in groups:
            clock = time.perf_counter()
            elements = np.empty((len(group.rows), len(group.cols)), dtype)
            self._connection.read_into(elements.reshape(-1).view(np.uint8).data)
            arrived = time.perf_counter()
            for rank, count in place(elements, group, parts, distribution):
                by_rank[rank].written += count
            self._times["receive_s"] += arrived - clock
            self._times["place_s"] += time.perf_counter() - arrived

    def _sync(self) -> None:
        """Report the elements that were put to their ranks."""
        while self._put_loans:
            _, loans = self._put_loans.popitem()
            self._memory.give_back(loans.values())
        times, self._times = self._times, {"receive_s": 0.0, "place_s": 0.0}
        self._connection.send(Kind.SYNC, times)

    def _get(self, body: Body) -> None:
        ranks = self._memory.chosen(body.get("ranks"))
        loans = self._memory.lend(body.get("matrix"), ranks, write=False)
        try:
            share = _share(body, loans)
            self._connection.sock.settimeout(STALL_TIMEOUT_S)
            self._connection.begin(Kind.DATA, {}, share.nbytes)
            move_stream(self._connection, share, _InParts(loans), out=True)
        finally:
            self._memory.give_back(loans)


def _check_size(nbytes: int, wanted: int) -> None:
    if nbytes != wanted:
        raise frames.WireError(f"{nbytes} bytes were sent for a region of {wanted} bytes")


def _share(body: Body, loans: Sequence[Loan]) -> Share:
    """The ranks' part of the region of a PUT or GET. Raises `Failure` (ShapeError)."""
    distribution = loans[0].distribution
    region = Region.checked(body.get("region"), distribution.shape)
    order: Order = "F" if body.get("order") == "F" else "C"
    return Share.of(distribution, [loan.rank for loan in loans], region, loans[0].dtype, order)


def _all(loans: dict[int, dict[int, Loan]]) -> list[Loan]:
    return [loan for by_rank in loans.values() for loan in by_rank.values()]


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int  # bool is excluded


def main(listeners: Sequence[socket.socket], token: str, ranks: range) -> None:
    """Run the data endpoint in a process of its own. Does not return."""
    outlive_sigterm()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    DataEndpoint(listeners, token, ranks).serve()
