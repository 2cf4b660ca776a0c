"""Loans: how ranks lend the memory of their matrices to the data endpoint of their node.

Each rank keeps one connection to the endpoint (`RankMemory`, a thread beside its main thread). MAP
asks for a matrix and begins a loan: the memory is not recycled before UNMAP ends it. The rank
counts the elements that UNMAP reports as written. Memory that a lost process may still write is
never used again.

The endpoint (`NodeMemory`) borrows for its clients. If a rank is started again, loans go on: the
endpoint repeats them at its next process, and requests wait for it.

A JVM (Java 8 has no Unix sockets) maps the ranks' memory by its path below ``/proc``. On another
node, or in another container, the path may exist and be another file: a client first reads the
nonce from a file of the endpoint (`NodeProof`). The file has no name, and ends with the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import reprlib
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpi_workers.data.keeping import TABLE_NUMBER, KeptMemory, RankKeeper, Segment
from mpi_workers.deadlines import STALL_TIMEOUT_S
from mpi_workers.failures import Failure
from mpi_workers.matrix.copy_kernels import RankPart
from mpi_workers.matrix.layout import Distribution, stored_shape
from mpi_workers.matrix.memory import MemoryBlock
from mpi_workers.matrix.storage import Entry, Storage
from mpi_workers.matrix.table import MatrixTable, rows
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Frame, Kind

LOAN_NONCE_BYTES = 16

T = TypeVar("T")

# --- a rank lends ---


class RankMemory:
    """Lends a rank's storage to the data endpoint of its node, which keeps its memory.

    Parameters
    ----------
    storage : Storage
        The matrices.
    token : str
        The gang's secret.
    endpoint : str
        Address of the endpoint: a Unix socket.
    ranks : int
        Ranks of the node.
    first : int
        The first number of a segment of this process. 0: this is the rank's first process. Else
        there was another one, and `adopt` is the first command.

    Raises
    ------
    Failure, OSError, WireError
        If the endpoint cannot be reached.
    """

    def __init__(
        self, storage: Storage, token: str, endpoint: str, *, ranks: int = 1, first: int = 0
    ) -> None:
        self._storage, self._first = storage, first
        self._endpoint = endpoint, token
        self._keeper = storage.pool.keeper = RankKeeper(storage.rank, token, endpoint, ranks)
        storage.table = MatrixTable()
        # With whether it may be written. The entry keeps its block from being recycled.
        self._loans: dict[int, tuple[Entry, bool]] = {}
        if not first:
            self._keeper.keep_table(storage.table.fd)
            self._lend()

    def adopt(self, idents: Iterable[int]) -> list[int]:
        """Have these matrices of the rank's process before, and lend; those that are not there."""
        wanted = set(idents)
        pool = self._storage.pool
        assert self._storage.table is not None
        table = self._keeper.held([TABLE_NUMBER]).get(TABLE_NUMBER)
        found = [] if table is None else [row for row in rows(table) if row.ident in wanted]
        blocks: dict[int, MemoryBlock] = {}
        held = self._keeper.held(list({row.about["segment"] for row in found}))
        for row in found:
            number = row.about["segment"]
            if number in held and number not in blocks:
                blocks[number] = pool.adopt(number, held[number], row.about["nbytes"])
            if number in blocks:  # matrices may share memory
                self._storage.adopt(row, blocks[number])
                wanted.discard(row.ident)
        self._keeper.keep_table(self._storage.table.fd, self._first, blocks)
        if table is not None:
            os.close(table)
        self._lend()
        return sorted(wanted)

    def _lend(self) -> None:
        fields = {"role": "rank", "rank": self._storage.rank}
        address, token = self._endpoint
        connection, _ = connect(address, token, fields, take_fds=False)
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                frame = connection.recv()
                try:
                    if frame.kind == Kind.MAP:
                        self._map(connection, frame.body)
                    else:
                        self._unmap(connection, frame.body)
                except Failure as failure:
                    connection.send(Kind.REFUSED, failure.to_map())
        except (frames.WireError, OSError):
            pass  # the endpoint is gone: the gang ends
        finally:
            for entry, write in self._loans.values():
                if write:
                    self._storage.taint(entry)
            self._loans.clear()
            connection.close()

    def _map(self, connection: Connection, body: Body) -> None:
        entry = self._storage.entry(body["matrix"])
        if body["write"] and entry.sealed and not body["again"]:
            raise Failure(
                "TransferError", f"matrix {body['matrix']} is complete and accepts no more data"
            )
        if not body["write"]:
            self._storage.sealed(body["matrix"])
        matrix = entry.matrix
        reply = {
            "segment": matrix.block.segment.id,
            "shape": list(matrix.shape),
            "layout": matrix.layout,
            "grid": list(matrix.grid),
            "dtype": matrix.dtype.name,
        }
        self._loans[body["loan"]] = entry, body["write"]
        connection.send(Kind.MAP, reply)

    def _unmap(self, connection: Connection, body: Body) -> None:
        """End a loan; `tainted`: a process that is lost may still write."""
        entry, write = self._loans.pop(body["loan"], (None, False))
        if entry is not None:  # else its matrix was freed when the rank was started again
            if body["tainted"] and write:
                self._storage.taint(entry)
            self._storage.count(entry, body["written"], body["loan"])
        del entry  # before the reply: a free may follow it
        connection.send(Kind.SYNC)


# --- the endpoint borrows ---


@dataclass(slots=True, eq=False)
class Loan:
    """A rank's block of a matrix that must not be recycled until `NodeMemory.give_back`.

    Attributes
    ----------
    written : int
        Elements that clients have stored in it.
    """

    rank: int
    number: int
    matrix: object
    write: bool
    segment: Segment
    distribution: Distribution
    dtype: np.dtype[Any]
    written: int = 0

    def part(self) -> RankPart:
        """The block, mapped into this process."""
        indices = self.distribution.local_indices(self.rank)
        raw = self.segment.array()[: indices.size * self.dtype.itemsize]
        local = raw.view(self.dtype).reshape(indices.shape, order="F")
        return RankPart(self.rank, indices, local)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.distribution.local_indices(self.rank).size


class RankLink:
    """A rank's connection, which the rank dials; of the next process of the rank when one ends.

    Attributes
    ----------
    lock : Lock
        One request at a time.
    open : dict of int to Loan
        Loans that have not ended, by number.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.lock = threading.Lock()
        self.open: dict[int, Loan] = {}
        self._connection: Connection | None = None
        self._silent = False  # its process lives, and has not answered in time
        self._next: Connection | None = None  # of a process that has just dialled
        self._dialled = threading.Condition()
        self._table: Segment | None = None  # while the rank has no process, and none was lost since

    def retained(self, table: Segment | None) -> None:
        """The rank has no process; its table. Until one dials, matrices are read by it."""
        with self._dialled:
            before = self._next or self._connection
            if before is None or _hung_up(before):
                self._table = table
                self._dialled.notify_all()

    def _from_table(self, kind: Kind, body: Body) -> Frame | None:
        """The answer to a request about reading, of a rank without a process; None: wait for it."""
        with self._dialled:
            table = self._table
        loan = self.open.get(body["loan"])
        if table is None or (
            body["write"] if kind is Kind.MAP else loan is not None and loan.write
        ):
            return None
        if kind is Kind.UNMAP:
            return Frame(Kind.SYNC, {}, 0)
        row = next((row for row in rows(table.fd) if row.ident == body["matrix"]), None)
        if row is None or not row.sealed:
            return None
        shape = list(stored_shape(tuple(row.about["shape"])))
        return Frame(Kind.MAP, {**row.about, "shape": shape}, 0)

    def join(self, connection: Connection) -> None:
        """A process of the rank has dialled. Raises `Failure` if the one before it lives."""
        with self._dialled:
            before = self._next or self._connection
            if before is not None and not _hung_up(before):
                raise Failure("AuthError", f"rank {self.rank} is connected already")
            self._next = connection
            self._table = None
            self._dialled.notify_all()

    def send(self, kind: Kind, body: Body, deadline: float) -> None:
        """Send a request, again if the process of the rank ends meanwhile. Raises `Failure`."""
        while self._from_table(kind, body) is None:
            try:
                self._connected(deadline).send(kind, body)
                return
            except (frames.WireError, OSError):
                self._lost()

    def answer(self, kind: Kind, body: Body, reply: Kind, deadline: float) -> Frame:
        """The answer to a request that was sent. Raises `Failure`: it is refused, or too late."""
        while True:
            if (found := self._from_table(kind, body)) is not None:
                return found
            try:
                if self._connection is None:
                    raise frames.ConnectionLost("the rank has ended")
                return self._connection.expect(reply, max(0.001, deadline - time.monotonic()))
            except TimeoutError as error:
                self._silent = True
                self._lost()  # an answer that comes later belongs to no request
                raise self._failed(str(error)) from error
            except (frames.WireError, OSError):
                self._lost()
                self.send(kind, body, deadline)

    def _lost(self) -> None:
        if self._connection is not None:
            self._connection.hang_up()
            self._connection.close()
            self._connection = None

    def _failed(self, why: str) -> Failure:
        words = f"the transfer with rank {self.rank} failed: {why}"
        return Failure("TransferError", words, rank=self.rank)

    def _connected(self, deadline: float) -> Connection:
        """The connection; of a further process, when it has the loans of the one before."""
        with self._dialled:
            table = self._table
            while self._next is None and self._connection is None:
                if self._table is not table:
                    raise frames.ConnectionLost("the rank has no process")
                left = deadline - time.monotonic()
                if self._silent or not self._dialled.wait(max(0.0, left)):
                    raise self._failed("it has ended, or does not answer")
            dialled, self._next = self._next, None
        if dialled is not None:
            self._lost()
            self._connection, self._silent = dialled, False
            for loan in self.open.values():
                body = {"matrix": loan.matrix, "write": loan.write, "loan": loan.number}
                dialled.send(Kind.MAP, {**body, "again": True})
                with contextlib.suppress(Failure):  # it was freed
                    dialled.expect(Kind.MAP, max(0.001, deadline - time.monotonic()))
        assert self._connection is not None
        return self._connection


def _hung_up(connection: Connection) -> bool:
    """Whether the process at the other end of a Unix socket has ended."""
    if connection.sock.fileno() < 0:
        return True
    poller = select.poll()
    poller.register(connection.sock, select.POLLRDHUP)
    return bool(poller.poll(0))


def full(problem: str) -> Failure:
    return Failure(
        "ResourceError",
        f"the data endpoint of the gang on {os.uname().nodename} {problem}: end processes or "
        "sessions that are attached to the gang",
    )


class NodeMemory:
    """The ranks of one node. Thread-safe: one request to a rank at a time.

    Parameters
    ----------
    ranks : range
        The ranks of the node.
    """

    def __init__(self, ranks: range) -> None:
        self.ranks = ranks
        self._links = {rank: RankLink(rank) for rank in ranks}
        self._kept = {rank: KeptMemory() for rank in ranks}
        self._numbers = itertools.count(1)

    def _rank(self, rank: object, connection: Connection) -> int:
        if type(rank) is not int or rank not in self.ranks or not connection.unix:
            raise Failure("AuthError", f"no rank {reprlib.repr(rank)} is expected here")
        return rank

    def join(self, rank: object, connection: Connection) -> None:
        """A process of a rank lends its memory. Raises `Failure` if none of that is expected."""
        self._links[self._rank(rank, connection)].join(connection)

    def kept(self, rank: object, connection: Connection) -> KeptMemory:
        """The memory of a rank of which a process has connected. Raises as `join`."""
        return self._kept[self._rank(rank, connection)]

    def retain(self, matrices: Iterable[int]) -> None:
        """The ranks have ended: keep these matrices of them, and what clients have on loan."""
        wanted = set(matrices)
        for rank, link in self._links.items():
            lent = {loan.segment.number for loan in list(link.open.values())}
            link.retained(self._kept[rank].retain(wanted, lent))

    def chosen(self, value: object) -> list[int]:
        """The ranks that a request names; all, if it names none. Raises `Failure`."""
        if value is None:
            return list(self.ranks)
        if (
            isinstance(value, list)
            and 0 < len(value) <= len(self.ranks)
            and all(type(rank) is int and rank in self.ranks for rank in value)
            and len(set(value)) == len(value)
        ):
            return value
        known = f"{self.ranks.start} to {self.ranks.stop - 1}"
        words = f"'ranks' must name ranks of this node, {known}; got {reprlib.repr(value)}"
        raise Failure("TransferError", words)

    def lend(self, matrix: object, ranks: Sequence[int], *, write: bool) -> list[Loan]:
        """Borrow a matrix from ranks: all at once, or `Failure` with the first refusal."""
        numbers = dict(zip(ranks, self._numbers, strict=False))

        def request(link: RankLink) -> Body:
            number = numbers[link.rank]
            return {"matrix": matrix, "write": write, "loan": number, "again": False}

        def lent(link: RankLink, frame: Frame, deadline: float) -> Loan:
            body = frame.body
            number = numbers[link.rank]
            segment = self._kept[link.rank].segment(body["segment"])
            if segment is None:
                unused = {"loan": number, "written": 0, "tainted": False}
                link.send(Kind.UNMAP, unused, deadline)
                link.answer(Kind.UNMAP, unused, Kind.SYNC, deadline)
                raise full("has too many open files")
            shape, grid = tuple(body["shape"]), tuple(body["grid"])
            distribution = Distribution(body["layout"], shape, grid)
            dtype = np.dtype(body["dtype"])
            loan = Loan(link.rank, number, matrix, write, segment, distribution, dtype)
            link.open[number] = loan
            return loan

        loans, failure = self._exchange(ranks, Kind.MAP, request, Kind.MAP, lent)
        if failure is not None:
            with contextlib.suppress(Failure):
                self.give_back(loans)
            raise failure
        return loans

    def give_back(self, loans: Iterable[Loan], *, tainted: bool = False) -> None:
        """End loans, and report how many elements were written.

        `tainted`: another process may still write into the memory. Raises `Failure` if a rank is
        gone, after all others were told.
        """
        left = list(loans)
        failure: Failure | None = None
        while left:  # one loan of each rank at a time
            turn = {loan.rank: loan for loan in left}
            left = [loan for loan in left if turn[loan.rank] is not loan]

            def request(link: RankLink, turn: dict[int, Loan] = turn) -> Body:
                loan = turn[link.rank]
                return {"loan": loan.number, "written": loan.written, "tainted": tainted}

            def ended(
                link: RankLink, frame: Frame, deadline: float, turn: dict[int, Loan] = turn
            ) -> None:
                del link.open[turn[link.rank].number]

            _, lost = self._exchange(turn, Kind.UNMAP, request, Kind.SYNC, ended)
            failure = failure or lost
        if failure is not None:
            raise failure

    def _exchange(
        self,
        ranks: Iterable[int],
        kind: Kind,
        request: Callable[[RankLink], Body],
        reply: Kind,
        answered: Callable[[RankLink, Frame, float], T],
    ) -> tuple[list[T], Failure | None]:
        """Ask ranks, all at once: what follows from their answers, and the first failure."""
        found: list[T] = []
        failure: Failure | None = None
        with self._held(ranks) as (links, deadline):
            asked = []
            for link in links:
                try:
                    link.send(kind, request(link), deadline)
                    asked.append(link)
                except Failure as lost:
                    failure = failure or lost
            for link in asked:
                try:
                    frame = link.answer(kind, request(link), reply, deadline)
                    found.append(answered(link, frame, deadline))
                except Failure as refused:
                    failure = failure or refused
        return found, failure

    @contextlib.contextmanager
    def _held(self, ranks: Iterable[int]) -> Iterator[tuple[list[RankLink], float]]:
        """The links of ranks, for one request to each; the time by which all must have answered.

        A request waits for the ranks that it names, not for others that hold their interpreter.
        """
        with contextlib.ExitStack() as held:
            for rank in sorted(ranks):  # in one order: two requests never wait for each other
                held.enter_context(self._links[rank].lock)
            yield [self._links[rank] for rank in ranks], time.monotonic() + STALL_TIMEOUT_S


class NodeProof:
    """A file of this process that holds a random nonce."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(LOAN_NONCE_BYTES)
        self._fd = os.memfd_create("alchemist-node", os.MFD_CLOEXEC)
        os.write(self._fd, self.nonce)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"
