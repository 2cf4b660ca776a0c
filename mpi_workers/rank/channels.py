"""Channels: a running call exchanges fields with a running call of another gang.

A field lies in memory of the ranks that send it, which those of the other gang read: through shared
memory on the same node, else by the streams of every transfer, from the data endpoint. Messages
between the ranks only say that a field is there, or was taken; each rank has a connection to each
rank of the other gang (`mpi_workers.data.meetings`). So a send waits only if the other side has not
taken the last fields, and nothing is sent while the ranks compute.

A view is the end of such a channel that has no other end: the last two fields lie in memory, each
with the number of the frame that a rank has written, and a program reads them when it likes.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from mpi_workers.data.description import (
    DataEndpoints,
    NodeAddress,
    TransferTarget,
    view_ids,
    view_parts,
)
from mpi_workers.data.meetings import ROLE
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader
from mpi_workers.failures import Failure, Interrupted, text_of
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import RankPart
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, LocalIndices
from mpi_workers.matrix.node_shares import Region
from mpi_workers.matrix.redistribution import redistribute
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Kind, WireError, encode

if TYPE_CHECKING:
    from mpi_workers.rank.gang_view import GangView

WATCH_MS = 20  # between looks whether the call is over
LOST = (
    "it was lost in its call: a rank was killed or has crashed, and ranks are started again, or "
    "its node or the network to it was lost. Call both sides again"
)
BEGIN, TAKEN = (encode(Kind.EVENT, {name: True}) for name in ("begin", "taken"))


class _Peer:
    """A rank of the other gang."""

    def __init__(self, rank: int, connection: Connection, *, begun: bool) -> None:
        self.rank = rank
        self.begun = begun
        self.fields: deque[Body] = deque()  # that were not taken
        self.taken = 0
        self.ended = ""  # why
        self._connection = connection
        self.fd = connection.sock.fileno()
        if connection.buffered:  # came with the welcome, and no poll shows it
            self.read()

    def read(self) -> None:
        """Read what has arrived."""
        try:
            while True:
                match self._connection.recv().body:
                    case {"field": _} as told:
                        self.fields.append(told)
                    case {"taken": _}:
                        self.taken += 1
                    case {"end": why}:
                        self.ended = why
                    case {"begin": _}:
                        self.begun = True
                if not self._connection.buffered:
                    return
        except (WireError, OSError):
            self.ended = self.ended or LOST

    def tell(self, frame: bytes) -> None:
        try:
            self._connection.write(frame)
        except WireError:
            self.read()  # what it has said before

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True)
class _Source:
    """A field's place in the other gang; `parts`: of its ranks, None if they are read by streams.

    `copy`: by the target's distribution, what copies it there.
    """

    target: TransferTarget
    array_shape: tuple[int, ...]
    parts: list[RankPart] | None
    copy: dict[Distribution, Callable[[DistMatrix], object]] = field(default_factory=dict)


class Channel:
    """One end of a channel, on one rank. `Context.channel` makes it; methods are collective.

    Attributes
    ----------
    name : str
    """

    def __init__(self, gang: GangView, name: str, about: Body, idents: Iterator[int]) -> None:
        self.name = name
        self._gang = gang
        self._idents = idents
        self._other = about["other"]
        self._most: int = about["fields"]
        self._sent = 0
        # The memory of fields, by shape, dtype and layout; used in turns, the last one last.
        self._rings: defaultdict[Any, deque[tuple[int, DistMatrix]]] = defaultdict(deque)
        self._sources: dict[int, _Source] = {}
        self._peers: list[_Peer] = []
        self._poll = select.poll()
        theirs = _endpoints(about["theirs"])
        self._nodes = NodeConnections(theirs, watch=self._look)
        self._ours = about["ours"]
        try:
            self._meet(about, theirs)
            near = all(self._nodes.connection(n).near for n in range(len(theirs.nodes)))
            self._near = all(gang.own_comm.allgather(near)) if gang.size > 1 else near
        except BaseException as error:
            self.close(_why(error))
            raise

    def send(self, A: DistMatrix) -> None:
        """Send a field: a copy of the matrix as it is now.

        Waits while the other side has not taken the last `fields` fields (of `couple`).

        Raises
        ------
        Failure
            ChannelError, if the call of the other side has ended, or its gang was lost.
            LayoutError for a sparse matrix. ResourceError, if there is no memory for a copy.
        """
        if of_layout(A.layout) is not None:
            raise Failure("LayoutError", f"channel {self.name!r} sends dense matrices only")
        self._wait(lambda peer: self._sent - peer.taken < self._most)
        ring = self._rings[A.distribution, A.dtype, A.array_shape]
        frame: Body = {}
        if len(ring) == self._most:
            ring.rotate(-1)  # the field in the first one was taken
        else:
            ident = next(self._idents)
            copy = _copy_of(self._gang, A)
            self._gang.storage.put(ident, copy, sealed=True)
            ring.append((ident, copy))
            frame = {
                "shape": list(A.array_shape), "stored": list(A.shape), "layout": A.layout,
                "dtype": A.dtype.str, "grid": list(A.grid),
            }  # fmt: skip
        ident, copy = ring[-1]
        np.copyto(copy.stored, A.stored)
        self._sent += 1
        told = encode(Kind.EVENT, {"field": ident, **frame})
        for peer in self._peers:
            peer.tell(told)

    def receive(self, like: DistMatrix | None = None, out: DistMatrix | None = None) -> DistMatrix:
        """Receive the next field, in the order in which they were sent; waits for it.

        Parameters
        ----------
        like : DistMatrix, optional
            A matrix of its shape and dtype, whose layout a new matrix gets. Default: the layout in
            which it was sent.
        out : DistMatrix, optional
            A matrix to write into instead.

        Raises
        ------
        Failure
            ChannelError as `send`, once no field of that call is left; ShapeError, DtypeError.
        """
        self._wait(lambda peer: bool(peer.fields))
        try:
            source = self._source(self._peers[0].fields[0])
        except (Failure, WireError, OSError):
            self._look(1)  # the other side says that it ends before it frees its fields
            if reasons := [peer.ended for peer in self._peers if peer.ended]:
                raise self._over(reasons) from None
            raise
        kind = source.target.dtype
        given = out if out is not None else like
        if given is not None and (given.array_shape, given.dtype) != (source.array_shape, kind):
            raise Failure(
                "ShapeError" if given.array_shape != source.array_shape else "DtypeError",
                f"channel {self.name!r}: gang {self._other} has sent a field of shape "
                f"{source.array_shape} and dtype {kind}, which a matrix of shape "
                f"{given.array_shape} and dtype {given.dtype} cannot have",
            )
        if out is None:
            layout = source.target.distribution.layout if like is None else like.layout
            out = self._gang.new(source.array_shape, kind, layout, zero=False)
        copy = source.copy.get(out.distribution)
        if copy is None:
            copy = source.copy[out.distribution] = self._planned(source, out)
        copy(out)
        for peer in self._peers:
            peer.fields.popleft()
            peer.tell(TAKEN)
        return out

    def finish(self) -> None:
        """Wait until what was sent was taken, or the other side has ended."""
        self._wait(lambda peer: bool(peer.ended) or peer.taken == self._sent)

    def close(self, why: str) -> None:
        """End it, and tell the other side why."""
        with contextlib.suppress(Failure, Interrupted):
            self._look()  # unread bytes would reset the connection, and lose what it says
        for peer in self._peers:
            peer.tell(encode(Kind.EVENT, {"end": why}))
            peer.close()
        self._nodes.close()
        for ring in self._rings.values():
            for ident, _ in ring:
                self._gang.storage.free(ident)

    # --- meeting ---

    def _meet(self, about: Body, theirs: DataEndpoints) -> None:
        """Connect to all ranks of the other gang, when their call is there too."""
        fields = {"role": ROLE, "channel": about["key"]}
        try:
            if about["waits"]:
                place = sockets.reachable_addresses(theirs.nodes[0].addresses)[0]
                # Its end is the loss of the other gang, until its ranks are connected. That of
                # elements would not do: a peer may be busy for longer before it counts as lost.
                with connect(place, theirs.token, {"role": "data"})[0] as alive:
                    self._accept(alive, fields)
            else:
                for rank in range(theirs.nodes[-1].first + theirs.nodes[-1].count):
                    addresses = theirs.nodes[theirs.node_of(rank)].addresses
                    place = sockets.reachable_addresses(addresses)[0]
                    calling = {**fields, "rank": rank, "caller": self._gang.rank}
                    self._add(_Peer(rank, connect(place, theirs.token, calling)[0], begun=False))
        except (WireError, OSError, IndexError) as error:
            raise self._over([f"it cannot be reached ({error})"]) from error
        self._wait(lambda peer: peer.begun)

    def _accept(self, alive: Connection, fields: Body) -> None:
        ours = _endpoints(self._ours)
        place = sockets.reachable_addresses(ours.nodes[ours.node_of(self._gang.rank)].addresses)[0]
        waiting = {**fields, "rank": self._gang.rank, "caller": -1}
        here, _ = connect(place, ours.token, waiting)
        callers: list[int] = []
        fds: list[int] = []
        news = select.poll()
        for connection in (here, alive):
            news.register(connection.sock, select.POLLIN)
        with here:
            here.send(Kind.EVENT)  # it takes descriptors from now on
            while len(self._peers) < sum(node.count for node in self._nodes.endpoints.nodes):
                self._gang.check()
                if not here.buffered:
                    ready = [fd for fd, _ in news.poll(WATCH_MS)]
                    if alive.sock.fileno() in ready:
                        raise self._over([LOST])
                    if not ready:
                        continue
                frame = here.recv()
                callers.append(frame.body["caller"])
                fds += frame.fds  # they may come with the frame before theirs
                while callers and fds:
                    sock = socket.socket(fileno=fds.pop(0))
                    sockets.tune(sock)  # the loss of a node must be noticed soon
                    self._add(_Peer(callers.pop(0), Connection(sock), begun=True))
        for peer in self._peers:
            peer.tell(BEGIN)

    def _add(self, peer: _Peer) -> None:
        self._peers.append(peer)
        self._poll.register(peer.fd, select.POLLIN)

    # --- waiting ---

    def _wait(self, ready: Callable[[_Peer], bool]) -> None:
        """Wait until all ranks of the other side are ready, or one of the others has ended."""
        while late := [peer for peer in self._peers if not ready(peer)]:
            self._gang.check()
            if any(peer.ended for peer in late):
                raise self._over([peer.ended for peer in late if peer.ended])
            self._look(WATCH_MS)

    def _look(self, timeout_ms: int = 0) -> None:
        """Read what has arrived; of a stream that waits: raise if the call or the other is over."""
        by_fd = {peer.fd: peer for peer in self._peers}
        for fd, _ in self._poll.poll(timeout_ms):
            by_fd[fd].read()
            if by_fd[fd].ended:
                self._poll.unregister(fd)
        if not timeout_ms:
            self._gang.check()
            if any(peer.ended == LOST for peer in self._peers):
                raise self._over([LOST])

    def _over(self, reasons: Sequence[str]) -> Failure:
        # An exception is the cause of what other ranks say.
        why = max(reasons, key=lambda why: why.startswith("its call has failed"))
        return Failure(
            "ChannelError", f"channel {self.name!r} to gang {self._other} has ended: {why}"
        )

    # --- elements ---

    def _source(self, told: Body) -> _Source:
        ident = told["field"]
        if ident not in self._sources:
            distribution = Distribution(told["layout"], tuple(told["stored"]), tuple(told["grid"]))
            target = TransferTarget(ident, distribution, np.dtype(told["dtype"]))
            parts = self._mapped(target) if self._near else None
            self._sources[ident] = _Source(target, tuple(told["shape"]), parts)
        return self._sources[ident]

    def _mapped(self, target: TransferTarget) -> list[RankPart]:
        """The parts of the other gang's ranks, one of each copy, in this process's memory."""
        m, n = target.distribution.shape
        ranks = sorted(group[0] for group in target.distribution.holders(0, m, 0, n))
        found: list[RankPart] = []
        for node, its in itertools.groupby(ranks, self._nodes.endpoints.node_of):
            connection = self._nodes.connection(node)
            found += connection.map(target, list(its), write=False, populate=True)
        return found

    def _planned(self, source: _Source, like: DistMatrix) -> Callable[[DistMatrix], object]:
        """The function that copies a field to the parts of matrices of this distribution."""
        m, n = like.shape
        if source.parts is None:
            return lambda out: self._stream(source, out)
        indices = LocalIndices(like.rows, like.cols)
        for part in source.parts:
            if part.local_indices == indices:
                there = part.local
                return lambda out: np.copyto(out.stored, there)
        parts = source.parts
        return lambda out: copy_kernels.copy_between(
            parts, [RankPart(out.rank, indices, out.stored)], Region(0, m, 0, n)
        )

    def _stream(self, source: _Source, out: DistMatrix) -> None:
        """Each rank reads adjacent rows or columns from the other nodes; then they exchange."""
        m, n = out.shape
        layout = "VC_STAR:BLOCK" if m >= n else "STAR_VC:BLOCK"
        strip = Distribution(layout, out.shape, self._gang.grid)
        part = out
        if out.layout != layout:
            part = self._gang.storage.new(strip, out.dtype, out.array_shape)
        if part.stored.size:
            row, col = part.rows[0], part.cols[0]
            region = Region(row, row + len(part.rows), col, col + len(part.cols))
            with MatrixReader(self._nodes, source.target, region=region) as reader:
                reader.read_block(part.stored, (row, col))
        if part is not out:
            redistribute(part, out, self._gang.own_comm)


class _View:
    """A field that programs may look at: its last two frames."""

    def __init__(self, gang: GangView, name: str, A: DistMatrix) -> None:
        self.about = A.distribution, A.dtype, A.array_shape
        self._gang = gang
        self._idents = view_ids(name)
        facts, stamps = (
            gang.storage.new(distribution, np.dtype(kind))
            for distribution, kind in view_parts(gang.grid)
        )
        self.frames = [_copy_of(gang, A) for _ in range(2)]
        self._stamps = stamps.stored
        self._count = 0
        self._stamps[...] = -1
        if facts.stored.size:
            raw = msgpack.packb([list(A.array_shape), list(A.shape), A.dtype.str, A.layout])
            facts.stored[:, 0] = np.frombuffer(raw.ljust(len(facts.stored), b"\0"), np.uint8)
        for ident, matrix in zip(self._idents, (facts, stamps, *self.frames), strict=True):
            gang.storage.put(ident, matrix, sealed=True)

    def show(self, A: DistMatrix) -> None:
        np.copyto(self.frames[self._count % 2].stored, A.stored)
        self._stamps[...] = self._count
        self._count += 1

    def close(self) -> None:
        for ident in self._idents:
            self._gang.storage.free(ident)


class Channels:
    """The channels and views of the call under way.

    Parameters
    ----------
    gang : GangView
    """

    def __init__(self, gang: GangView) -> None:
        self._gang = gang
        self.begin(0, {})

    def begin(self, number: int, coupled: Body) -> None:
        """A call begins, with these couplings of its gang."""
        self._coupled = coupled
        self._open: dict[str, Channel] = {}
        self._views: dict[str, _View] = {}
        self._idents = itertools.count(-(number << 20), -1)  # the same on all ranks

    def channel(self, name: str) -> Channel:
        """See `Context.channel`."""
        if name not in self._coupled:
            known = ", ".join(map(repr, self._coupled)) or "none"
            raise Failure(
                "ChannelError",
                f"this gang has no channel {name!r} (it has {known}): couple(a, b, {name!r}) in "
                "the program, before both calls",
            )
        if name not in self._open:
            about = self._coupled[name]
            self._open[name] = Channel(self._gang, name, about, self._idents)
        return self._open[name]

    def show(self, name: str, A: DistMatrix) -> None:
        """See `Context.show`."""
        view = self._views.get(name)
        if view is None or view.about != (A.distribution, A.dtype, A.array_shape):
            if view is not None:
                view.close()
            view = self._views[name] = _View(self._gang, name, A)
        view.show(A)

    def finish(self) -> None:
        """The call has returned on this rank: wait until its fields were taken."""
        for channel in self._open.values():
            channel.finish()

    def close(self, error: BaseException | None) -> None:
        """The call has ended."""
        for part in self._views.values():
            part.close()
        for channel in self._open.values():
            channel.close(_why(error))
        self._open, self._views = {}, {}


def _why(error: BaseException | None) -> str:
    if error is None:
        return "its call has returned"
    if isinstance(error, Interrupted):
        return "its call was cancelled, or has failed on another rank"
    return f"its call has failed: {type(error).__name__}: {text_of(error)[:1000]}"


def _copy_of(gang: GangView, A: DistMatrix) -> DistMatrix:
    return gang.storage.new(A.distribution, A.dtype, A.array_shape)


def _endpoints(about: Body) -> DataEndpoints:
    nodes = (NodeAddress(first, count, tuple(where)) for first, count, where in about["nodes"])
    return DataEndpoints(about["token"], tuple(nodes))
