"""The listening side for processes without an event loop, and the limit on strangers.

One thread authenticates all peers: a peer that has not proved that it knows the token costs a
socket and at most 4 KiB, and no thread. There are at most `MAX_STRANGERS` of them; a newcomer
displaces the oldest of the source that has most. A flood from one host displaces itself.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar, cast

from mpi_workers.failures import Failure
from mpi_workers.wire import handshake, sockets
from mpi_workers.wire.blocking import LINGER_S, Connection
from mpi_workers.wire.frames import (
    MAP_LIMIT,
    UNAUTHENTICATED_MAP_LIMIT,
    Body,
    ConnectionLost,
    FrameBuffer,
    Kind,
    WireError,
    encode,
)
from mpi_workers.wire.handshake import ListeningSide

MAX_STRANGERS = 128
ACCEPTS_AT_ONCE = 16  # then those that are connected get their turn
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL_S = 0.05  # pause when there are no file descriptors left, and no stranger's to take


class Stranger(Protocol):
    """A peer that is not authenticated yet."""

    source: str

    def drop(self) -> None:
        """Close its connection."""


T = TypeVar("T", bound=Stranger)


class Strangers(Generic[T]):
    """The peers of a process's listeners that are not authenticated, at most `limit` of them."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._members: dict[T, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._members))

    def __contains__(self, stranger: object) -> bool:
        return stranger in self._members

    def add(self, stranger: T) -> None:
        self._members[stranger] = None
        if len(self._members) > self._limit:
            self.displace()

    def discard(self, stranger: T) -> None:
        self._members.pop(stranger, None)

    def displace(self) -> bool:
        """Drop the oldest of the source that has most; returns whether there was one."""
        if not self._members:
            return False
        ((source, _count),) = Counter(member.source for member in self._members).most_common(1)
        oldest = next(member for member in self._members if member.source == source)
        del self._members[oldest]
        oldest.drop()
        return True


AuthenticatedPeer = tuple[Connection, Body]  # its fields, once it has proved that it is one


class _Handshake:
    """A connection until its peer is authenticated or gone."""

    def __init__(self, sock: socket.socket, token: str, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._side = ListeningSide(token)
        self._buffer = FrameBuffer(UNAUTHENTICATED_MAP_LIMIT)
        self.sock = sock
        self.source = source_of(sock.getpeername())
        self.deadline = time.monotonic() + handshake.TIMEOUT_S
        self.refused = False
        sock.setblocking(False)
        selector.register(sock, selectors.EVENT_READ, self)

    def drop(self) -> None:
        with contextlib.suppress(KeyError, ValueError):  # handed over, or closed
            self._selector.unregister(self.sock)
        self.sock.close()

    def refuse(self, failure: Failure) -> None:
        """Send the reason, then wait for the peer to close: see `Connection.refuse`."""
        self.refused = True
        self.deadline = time.monotonic() + LINGER_S
        self._buffer.clear()
        self.sock.send(encode(Kind.REFUSED, failure.to_map()))
        self.sock.shutdown(socket.SHUT_WR)

    def advance(self) -> Body | None:
        """Take the bytes that have arrived; returns the fields of a peer that is authenticated.

        Raises `WireError` if it must be refused, `OSError` or `EOFError` if it is gone.
        """
        try:
            data = self.sock.recv(UNAUTHENTICATED_MAP_LIMIT)
        except BlockingIOError:
            return None
        if not data:
            raise EOFError
        if self.refused:
            return None
        self._buffer.feed(data)
        while self._side.fields is None and (frame := self._buffer.pop()) is not None:
            challenge = self._side.receive(frame)
            if challenge is not None:
                self.sock.send(encode(Kind.CHALLENGE, challenge))
        return self._side.fields

    def connection(self) -> Connection:
        """The connection, to be used by the owner of the acceptor from now on."""
        self._selector.unregister(self.sock)
        self.sock.setblocking(True)
        return Connection(self.sock, map_limit=MAP_LIMIT, received=self._buffer.clear())


class Acceptor:
    """Accepts and authenticates the peers of listening sockets. For one thread.

    Parameters
    ----------
    listeners : sequence of socket
        Closed with this object.
    token : str
        The secret that peers must know.
    welcome : dict
        What authenticated peers are told.
    keepalive : KeepAlive
        For accepted connections.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        welcome: Body,
        *,
        keepalive: sockets.KeepAlive = sockets.CONTROL,
    ) -> None:
        self._listeners = listeners
        self._token = token
        self._welcome = encode(Kind.WELCOME, welcome)
        self._keepalive = keepalive
        self._selector = selectors.DefaultSelector()
        self._strangers: Strangers[_Handshake] = Strangers()
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening, and drop peers that are not authenticated."""
        for stranger in self._strangers:
            stranger.drop()
        for listener in self._listeners:
            listener.close()
        self._selector.close()

    def poll(self, timeout_s: float | None = None) -> list[AuthenticatedPeer]:
        """Wait for peers; returns those that became authenticated.

        Parameters
        ----------
        timeout_s : float, optional
            Return after this time at the latest. None: at the next event.

        Raises
        ------
        OSError
            If a listening socket was shut down.
        """
        now = time.monotonic()
        limits = [stranger.deadline - now for stranger in self._strangers]
        if timeout_s is not None:
            limits.append(timeout_s)
        ready = self._selector.select(max(0.0, min(limits)) if limits else None)
        peers = []
        for key, _ in ready:
            if key.data is None:
                self._accept(cast(socket.socket, key.fileobj))
            elif key.data in self._strangers and (peer := self._advance(key.data)) is not None:
                peers.append(peer)
        self._expire()
        return peers

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ECONNABORTED:
                    continue
                if error.errno not in FULL:
                    raise
                if not self._strangers.displace():
                    time.sleep(FULL_S)
                return
            try:
                sockets.check_peer(sock)
                sockets.tune(sock, self._keepalive)
                self._strangers.add(_Handshake(sock, self._token, self._selector))
            except OSError:  # another user's, or gone already
                sock.close()

    def _advance(self, stranger: _Handshake) -> AuthenticatedPeer | None:
        try:
            fields = stranger.advance()
            if fields is None:
                return None
            connection = stranger.connection()
            self._strangers.discard(stranger)
            connection.write(self._welcome)
            return connection, fields
        except (ConnectionLost, EOFError, OSError):
            self._drop(stranger)
        except WireError as error:
            self._refuse(stranger, error)
        return None

    def _refuse(self, stranger: _Handshake, error: Exception) -> None:
        try:
            stranger.refuse(handshake.refusal(error))
        except OSError:
            self._drop(stranger)

    def _expire(self) -> None:
        now = time.monotonic()
        for stranger in self._strangers:
            if stranger.deadline <= now:
                if stranger.refused:
                    self._drop(stranger)
                else:
                    self._refuse(stranger, TimeoutError("the handshake timed out"))

    def _drop(self, stranger: _Handshake) -> None:
        self._strangers.discard(stranger)
        stranger.drop()


def source_of(peername: object) -> str:
    """The source that the connections of one host share: its address; of this node, its user."""
    return str(peername[0]) if isinstance(peername, tuple) and peername else "this node"
