"""Keeping: the memory of a rank outlives its process, because the data endpoint has it, too.

A rank tells the endpoint of its node of each segment that it makes or returns to the system, on a
connection of its own (`RankKeeper`); the endpoint does not answer. With the segments it has the
rank's table (`mpi_workers.matrix.table`). When the process has ended, also by a crash, all that it
has sent is read first. The next process of the rank asks for what the table names.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix import memory
from mpi_workers.matrix.mapping import SharedMapping
from mpi_workers.matrix.table import rows
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import MAX_FDS, Connection, connect
from mpi_workers.wire.frames import Body, Kind

ROLE = "keeper"  # of a rank's connection for this
RETAIN = "retain"  # of a proxy's connection
RETAIN_S = 5.0  # for the endpoint to answer the proxy, which does nothing else meanwhile
TABLE_NUMBER = 0  # stands for the table among the numbers of segments
# Segments of a rank that stay mapped in the endpoint for the next transfer.
MAX_MAPPED = 16
ARRIVAL_S = 10.0  # for a segment that was sent before a process asks for it
SPARE_FDS = 256  # of the endpoint's, for clients
DESCRIPTORS_S = 60.0  # the endpoint may still read what the process before has sent


class RankKeeper:
    """A rank's end: has the endpoint keep segments.

    Parameters
    ----------
    rank : int
    token : str
        The gang's secret.
    endpoint : str
        Address of the endpoint: a Unix socket.
    ranks : int
        Ranks of the node, which share the endpoint's limit on open files.
    """

    def __init__(self, rank: int, token: str, endpoint: str, ranks: int = 1) -> None:
        self._connection, _ = connect(endpoint, token, {"role": ROLE, "rank": rank})
        os.register_at_fork(after_in_child=self._connection.close)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = max(1, hard - SPARE_FDS) // ranks
        self._kept = 0
        self._lock = threading.Lock()

    def keep(self, segment: memory.Segment) -> None:
        """Have the endpoint keep a segment. Raises `Failure` (ResourceError)."""
        with self._lock:
            if self._kept >= self._most:
                raise Failure(
                    "ResourceError",
                    f"this rank has {self._kept} parts of matrices in memory, as many as the limit "
                    "on open files of this node allows for a rank: free handles, or raise the hard "
                    "limit (ulimit -Hn) before Ray starts",
                )
            self._kept += 1
            self._tell("keep", segment.fd, segment=segment.id)

    def drop(self, number: int) -> None:
        """The pages of a segment were returned to the system."""
        with self._lock:
            self._kept -= 1
            self._tell("drop", segment=number)

    def _tell(self, op: str, fd: int = -1, **fields: Any) -> None:
        if fd >= 0:
            fields["inode"] = os.fstat(fd).st_ino
        fds = [fd] if fd >= 0 else []
        with contextlib.suppress(frames.WireError):  # the endpoint has ended: its proxy notices
            self._connection.send(Kind.EVENT, {"op": op, **fields}, fds=fds)

    def keep_table(self, fd: int, first: int = 0, kept: Iterable[int] = ()) -> None:
        """Have the endpoint keep this table from now on.

        `first`: it drops the segments below this number, but for those in `kept`.
        """
        with self._lock:
            kept = list(kept)
            self._kept += len(kept)
            self._tell("table", fd, first=first, kept=kept)

    def held(self, numbers: Sequence[int]) -> dict[int, int]:
        """New descriptors of segments that the endpoint keeps, by number.

        Raises
        ------
        WireError, OSError
            If it has ended.
        """
        found: dict[int, int] = {}
        with self._lock:
            for begin in range(0, len(numbers), MAX_FDS):
                some = list(numbers[begin : begin + MAX_FDS])
                self._connection.send(Kind.COMMAND, {"op": "held", "numbers": some})
                frame = self._connection.expect(Kind.REPLY, DESCRIPTORS_S)
                found.update(zip(frame.body["numbers"], frame.fds, strict=False))
        return found


def retain(endpoint: str, token: str, matrices: Sequence[int]) -> None:
    """Have the endpoint keep the memory of these matrices alone: the ranks have ended.

    Other memory (results of the failed call, idle memory) goes back to the system.
    """
    # An endpoint that has ended is noticed by its proxy, and the next ranks drop the same.
    with contextlib.suppress(frames.WireError, OSError, Failure):
        connection, _ = connect(endpoint, token, {"role": RETAIN})
        with connection:
            connection.send(Kind.COMMAND, {"matrices": list(matrices)})
            connection.expect(Kind.REPLY, RETAIN_S)


class Segment:
    """A rank's memory in the endpoint: a descriptor, and a mapping once a stream needs it."""

    def __init__(self, number: int, fd: int) -> None:
        self.number = number
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size
        self._mapping: SharedMapping | None = None

    def array(self) -> NDArray[np.uint8]:
        mapping = self._mapping
        if mapping is None:
            mapping = self._mapping = SharedMapping(self.fd, self.nbytes)
        return mapping.array()

    def release(self) -> None:
        """Return the pages to the system, also those that other processes still map."""
        SharedMapping(self.fd, self.nbytes).advise(mmap.MADV_REMOVE)

    def unmap(self) -> None:
        """End the mapping with the last array of it."""
        self._mapping = None

    def __del__(self) -> None:
        os.close(self.fd)


class KeptMemory:
    """The endpoint's end: the segments and the table of one rank, over all its processes."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._mapped: dict[int, Segment] = {}  # oldest use first
        self._changed = threading.Condition()
        self._serving = threading.Lock()

    def serve(self, connection: Connection) -> None:
        """Keep what a process of the rank sends, until it has ended."""
        connection.take_fds = True
        fds: list[int] = []  # a descriptor may come with the frame before its own
        # The process before it has ended, and all that it has sent has been read.
        with self._serving, connection:
            try:
                while True:
                    frame = connection.recv()
                    fds.extend(frame.fds)
                    self._handle(connection, frame.body, fds)
            except (frames.WireError, OSError):
                pass
            for fd in fds:
                os.close(fd)

    def _handle(self, connection: Connection, body: Body, fds: list[int]) -> None:
        match body:
            case {"op": "keep", "segment": int(number), "inode": int(inode)}:
                self._keep(number, fds, inode)
            case {"op": "drop", "segment": int(number)}:
                self._drop([number])
            case {"op": "table", "first": int(first), "kept": list(kept), "inode": int(inode)}:
                self._keep(TABLE_NUMBER, fds, inode)
                wanted = {TABLE_NUMBER, *kept}
                self._drop([n for n in self._segments if n < first and n not in wanted])
            case {"op": "held", "numbers": list(numbers)}:
                found = [n for n in numbers if n in self._segments]
                held = [self._segments[number].fd for number in found]
                connection.send(Kind.REPLY, {"numbers": found}, fds=held)

    def retain(self, matrices: Collection[int], lent: Collection[int]) -> Segment | None:
        """Keep the segments of these matrices, and those in `lent`; the rank's table, if any."""
        if not self._serving.acquire(timeout=RETAIN_S):
            return None  # there is a process again
        try:  # the process has ended, and all that it has sent has been read
            table = self._segments.get(TABLE_NUMBER)
            if table is not None:
                named = (r.about["segment"] for r in rows(table.fd) if r.ident in matrices)
                unused = self._segments.keys() - {TABLE_NUMBER, *lent, *named}
                for number in unused:
                    with contextlib.suppress(OSError):
                        self._segments[number].release()
                self._drop(unused)
            return table
        finally:
            self._serving.release()

    def _keep(self, number: int, fds: list[int], inode: int) -> None:
        """Keep the file with this inode; the kernel drops a descriptor that is one too many."""
        while fds:
            segment = Segment(number, fds.pop(0))
            if os.fstat(segment.fd).st_ino == inode:
                with self._changed:
                    self._segments[number] = segment
                    self._changed.notify_all()
                return

    def _drop(self, numbers: Iterable[int]) -> None:
        with self._changed:
            for number in numbers:
                self._segments.pop(number, None)
                self._mapped.pop(number, None)

    def segment(self, number: int) -> Segment | None:
        """A segment that the rank has sent; None if it does not arrive: too many open files."""
        deadline = time.monotonic() + ARRIVAL_S
        with self._changed:
            while (found := self._segments.get(number)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    return None
            self._mapped.pop(number, None)
            self._mapped[number] = found
            while len(self._mapped) > MAX_MAPPED:
                self._mapped.pop(next(iter(self._mapped))).unmap()
            return found
