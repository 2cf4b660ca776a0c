"""Loans: how ranks lend the memory of their matrices to the data endpoint of their node.

Each rank keeps one connection to the endpoint (`RankMemory`, a thread beside its main thread). MAP
asks for a matrix and begins a loan: the memory is not recycled before UNMAP ends it. The rank
counts the elements that UNMAP reports as written. Memory that a lost process may still write is
never used again.

The endpoint (`NodeMemory`) borrows for its clients. A JVM (Java 8 has no Unix sockets) maps the
ranks' memory by its path below ``/proc``. On another node, or in another container, the path may
exist and be another file: a client first reads the nonce from a file of the endpoint (`NodeProof`).
The file has no name, and ends with the process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import reprlib
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpi_workers.deadlines import STALL_TIMEOUT_S
from mpi_workers.failures import Failure
from mpi_workers.matrix.copy_kernels import RankPart
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.mapping import SharedMapping
from mpi_workers.matrix.storage import Entry, Storage
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Frame, Kind

# Segments of a rank that stay mapped for the next transfer. Those that the rank has released since
# hold no pages (`Segment.release` in `matrix.memory`).
MAX_SEGMENTS = 16
NONCE_BYTES = 16

T = TypeVar("T")

# --- a rank lends ---


class RankMemory:
    """Lends a rank's storage to the data endpoint of its node.

    Parameters
    ----------
    storage : Storage
        The matrices.
    token : str
        The gang's secret.
    endpoint : str
        Address of the endpoint: a Unix socket.

    Raises
    ------
    Failure, OSError, WireError
        If the endpoint cannot be reached.
    """

    def __init__(self, storage: Storage, token: str, endpoint: str) -> None:
        fields = {"role": "rank", "rank": storage.rank}
        self._connection, _ = connect(endpoint, token, fields, take_fds=False)
        self._storage = storage
        # With whether it may be written. The entry keeps its block from being recycled.
        self._loans: dict[int, tuple[Entry, bool]] = {}
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            while True:
                frame = self._connection.recv()
                try:
                    if frame.kind == Kind.MAP:
                        self._map(frame.body)
                    else:
                        self._unmap(frame.body)
                except Failure as failure:
                    self._connection.send(Kind.REFUSED, failure.to_map())
        except (frames.WireError, OSError):
            pass  # the endpoint is gone: the gang ends
        finally:
            for entry, write in self._loans.values():
                if write:
                    entry.matrix.block.taint()
            self._loans.clear()
            self._connection.close()

    def _map(self, body: Body) -> None:
        entry = self._storage.entry(body["matrix"])
        if body["write"] and entry.sealed:
            raise Failure(
                "TransferError", f"matrix {body['matrix']} is complete and accepts no more data"
            )
        if not body["write"]:
            self._storage.sealed(body["matrix"])
        matrix = entry.matrix
        segment = matrix.block.segment
        reply = {
            "segment": segment.id,
            "nbytes": segment.nbytes,
            "shape": list(matrix.shape),
            "layout": matrix.layout,
            "grid": list(matrix.grid),
            "dtype": matrix.dtype.name,
        }
        self._loans[body["loan"]] = entry, body["write"]
        self._connection.send(Kind.MAP, reply, fds=[segment.fd])

    def _unmap(self, body: Body) -> None:
        """End a loan; `tainted`: a process that is lost may still write."""
        entry, write = self._loans.pop(body["loan"])
        if body["tainted"] and write:
            entry.matrix.block.taint()
        self._storage.count(entry, body["written"])
        del entry  # before the reply: a free may follow it
        self._connection.send(Kind.SYNC)


# --- the endpoint borrows ---


class Segment:
    """A rank's memory: its descriptor, and its mapping once a stream needs it."""

    def __init__(self, number: int, fd: int, nbytes: int) -> None:
        self.number = number
        self.fd = fd
        self.nbytes = nbytes
        self._mapping: SharedMapping | None = None

    def array(self) -> NDArray[np.uint8]:
        if self._mapping is None:
            self._mapping = SharedMapping(self.fd, self.nbytes)
        return self._mapping.array()

    def __del__(self) -> None:
        os.close(self.fd)


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
    """The connection of one rank, which has dialled the endpoint."""

    def __init__(self, rank: int, connection: Connection) -> None:
        connection.take_fds = True
        self.rank = rank
        self.connection = connection
        self.segments: dict[int, Segment] = {}  # by number, oldest use first
        self.lock = threading.Lock()  # one request at a time

    @contextlib.contextmanager
    def attributed(self) -> Iterator[None]:
        """Connection errors within the context become a `Failure`: the rank is gone."""
        try:
            yield
        except (frames.WireError, OSError) as error:
            self.connection.hang_up()  # an answer that comes later belongs to no request
            words = f"the transfer with rank {self.rank} failed: {error}"
            raise Failure("TransferError", words, rank=self.rank) from error

    def take(self, frame: Frame) -> Segment | None:
        """The segment that a MAP describes; None if this process has too many open files."""
        number = frame.body["segment"]
        segment = self.segments.pop(number, None)
        if segment is not None:
            for fd in frame.fds:
                os.close(fd)
        elif frame.fds:
            segment = Segment(number, frame.fds[0], frame.body["nbytes"])
        else:
            return None
        self.segments[number] = segment
        while len(self.segments) > MAX_SEGMENTS:
            self.segments.pop(next(iter(self.segments)))
        return segment


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
        self._links: dict[int, RankLink] = {}
        self._joining = threading.Lock()
        self._numbers = itertools.count(1)

    def join(self, rank: object, connection: Connection) -> int:
        """A rank has connected; its number. Raises `Failure` if none of that is expected."""
        if type(rank) is not int or rank not in self.ranks or not connection.unix:
            raise Failure("AuthError", f"no rank {reprlib.repr(rank)} is expected here")
        with self._joining:
            if rank in self._links:
                raise Failure("AuthError", f"rank {rank} is connected already")
            self._links[rank] = RankLink(rank, connection)
        return rank

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
            return {"matrix": matrix, "write": write, "loan": numbers[link.rank]}

        def lent(link: RankLink, frame: Frame) -> Loan:
            body, segment = frame.body, link.take(frame)
            if segment is None:
                with link.attributed():
                    unused = {"loan": numbers[link.rank], "written": 0, "tainted": False}
                    link.connection.send(Kind.UNMAP, unused)
                    link.connection.expect(Kind.SYNC, STALL_TIMEOUT_S)
                raise full("has too many open files")
            shape, grid = tuple(body["shape"]), tuple(body["grid"])
            distribution = Distribution(body["layout"], shape, grid)
            dtype = np.dtype(body["dtype"])
            return Loan(link.rank, numbers[link.rank], write, segment, distribution, dtype)

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

            _, lost = self._exchange(turn, Kind.UNMAP, request, Kind.SYNC, lambda *_: None)
            failure = failure or lost
        if failure is not None:
            raise failure

    def _exchange(
        self,
        ranks: Iterable[int],
        kind: Kind,
        request: Callable[[RankLink], Body],
        reply: Kind,
        answered: Callable[[RankLink, Frame], T],
    ) -> tuple[list[T], Failure | None]:
        """Ask ranks, all at once: what follows from their answers, and the first failure."""
        found: list[T] = []
        failure: Failure | None = None
        with self._held(ranks) as (links, deadline):
            asked = []
            for link in links:
                try:
                    with link.attributed():
                        link.connection.send(kind, request(link))
                    asked.append(link)
                except Failure as lost:
                    failure = failure or lost
            for link in asked:
                left = max(0.001, deadline - time.monotonic())
                try:
                    with link.attributed():
                        frame = link.connection.expect(reply, left)
                    found.append(answered(link, frame))
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
                link = self._links.get(rank)
                if link is None:
                    words = f"rank {rank} has not connected to its data endpoint"
                    raise Failure("TransferError", words)
                held.enter_context(link.lock)
            yield [self._links[rank] for rank in ranks], time.monotonic() + STALL_TIMEOUT_S


class NodeProof:
    """A file of this process that holds a random nonce."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._fd = os.memfd_create("alchemist-node", os.MFD_CLOEXEC)
        os.write(self._fd, self.nonce)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"
