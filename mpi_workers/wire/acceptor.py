"""The listening side of all connections, and the limit on strangers.

A thread for each peer authenticates it. Then that thread serves it, or an event loop does
(`asynchronous.listen`).

A peer that has not proved that it knows the token is a stranger. It costs a socket and, once it has
said something, a thread, for `handshake.TIMEOUT_S` at most. There are at most `MAX_STRANGERS`; a
newcomer displaces the oldest of the source that has most. A flood from one host displaces itself.
Many peers that come at the same time displace each other, too: a displaced peer connects again
(`blocking.persist`), and a listener has a place for each peer that it expects.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Generic, Self, TypeVar, cast

from mpi_workers.failures import Failure
from mpi_workers.wire import handshake, sockets
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import (
    MAP_LIMIT,
    UNAUTHENTICATED_MAP_LIMIT,
    Body,
    ConnectionLost,
    Kind,
    WireError,
)
from mpi_workers.wire.handshake import ListeningSide

MAX_STRANGERS = 128
ACCEPTS_AT_ONCE = 16  # then those that are connected get their turn


class AcceptedPeer:
    """A stranger at an `Acceptor`.

    Attributes
    ----------
    sock : socket
        Who authenticates it may replace it by one with TLS.
    silent : bool
        Whether it has said nothing yet: it has no thread.
    """

    def __init__(
        self, sock: socket.socket, selector: selectors.BaseSelector, strangers: Strangers
    ) -> None:
        self.sock = sock
        self._strangers = strangers
        self.source = source_of(sock.getpeername())
        self.silent = True
        self._selector = selector
        self._deadline = time.monotonic() + handshake.TIMEOUT_S
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def left_s(self) -> float:
        """The rest of the time for the handshake, in seconds."""
        return max(0.0, self._deadline - time.monotonic())

    def proved(self) -> None:
        """It is no stranger any more. Raises `ConnectionLost` if it was displaced just before.

        To be called before it is welcome: later, it would not connect again.
        """
        if not self._strangers.discard(self):
            raise ConnectionLost("too many others have connected")

    def drop(self) -> None:
        """End its connection."""
        if self.silent:
            self.spoken()
            self.sock.close()
        else:
            sockets.hang_up(self.sock)  # its thread closes it

    def spoken(self) -> None:
        """It gets a thread, or is closed: the acceptor does not wait for it any more."""
        self.silent = False
        self._selector.unregister(self.sock)


class Strangers:
    """The peers of a process's listeners that are not authenticated, at most `limit` of them."""

    def __init__(self, limit: int = MAX_STRANGERS) -> None:
        self._limit = limit
        self._members: dict[AcceptedPeer, None] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[AcceptedPeer]:
        return iter(list(self._members))

    def add(self, stranger: AcceptedPeer) -> None:
        self._members[stranger] = None
        if len(self._members) > self._limit:
            self.displace()

    def discard(self, stranger: AcceptedPeer) -> bool:
        """Remove one; whether it was there, and not displaced."""
        return self._members.pop(stranger, self) is None

    def displace(self) -> None:
        """Drop the oldest of the source that has most, if there is one."""
        members = list(self._members)
        if not members:
            return
        ((source, _count),) = Counter(member.source for member in members).most_common(1)
        oldest = next(member for member in members if member.source == source)
        if self.discard(oldest):  # else its own thread was faster: it has proved
            oldest.drop()


AuthenticatedPeer = tuple[Connection, Body]  # its fields, once it has proved that it is one


def authenticate(peer: AcceptedPeer, token: str, welcome: Body | None = None) -> AuthenticatedPeer:
    """Authenticate a peer that must know the token; tell it `welcome`, or why it is refused.

    Without `welcome`, the caller sends the WELCOME.

    Raises `WireError`, `OSError`.
    """
    connection = Connection(peer.sock, map_limit=UNAUTHENTICATED_MAP_LIMIT)
    side = ListeningSide(token)
    try:
        connection.send(Kind.CHALLENGE, side.receive(connection.recv(peer.left_s)))
        side.receive(connection.recv(peer.left_s))
        peer.proved()
    except ConnectionLost:
        raise
    except (WireError, TimeoutError) as error:
        late = isinstance(error, TimeoutError)
        connection.refuse(handshake.refusal("the handshake timed out" if late else error))
        raise
    connection.map_limit = MAP_LIMIT
    connection.sock.settimeout(None)
    if welcome is not None:
        connection.send(Kind.WELCOME, welcome)
    return connection, side.fields or {}


P = TypeVar("P")


@dataclass(eq=False)
class Acceptor(Generic[P]):
    """Accepts peers on listening sockets. A thread for each authenticates and serves it.

    Attributes
    ----------
    listeners : sequence of socket
        Closed with this object.
    authenticate : callable(AcceptedPeer) -> P
        Raises `Failure`, `WireError` or `OSError` for a peer that it has refused, or that is gone.
    serve : callable(P)
        Serves a peer, with whatever `authenticate` has returned. It owns the connection.
    keepalive : KeepAlive
        For accepted connections.
    expected : int
        Peers that are known to come, perhaps all at once.
    strangers : Strangers
        The peers that are not authenticated yet.
    """

    listeners: Sequence[socket.socket]
    authenticate: Callable[[AcceptedPeer], P]
    serve: Callable[[P], object]
    _: KW_ONLY
    keepalive: sockets.KeepAlive = sockets.CONTROL
    expected: int = 0
    strangers: Strangers = field(init=False)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.strangers = Strangers(MAX_STRANGERS + self.expected)
        self._closing, self._closed = socket.socketpair()
        for listener in self.listeners:
            listener.setblocking(False)
        for sock in (*self.listeners, self._closed):
            self._selector.register(sock, selectors.EVENT_READ)

    def start(self) -> Self:
        """Run in a thread."""
        self._thread = threading.Thread(target=self.run, name="alchemist-accept", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop listening, and drop peers that are not authenticated."""
        self._closing.close()
        if self._thread is not None:
            self._thread.join()

    def run(self) -> None:
        """Accept peers until `close`."""
        try:
            while not self._turn():
                pass
        finally:
            for sock in (*self.listeners, self._closed):
                sock.close()
            for stranger in self.strangers:
                stranger.drop()
            self._selector.close()

    def _turn(self) -> bool:
        """Wait for what happens next; whether that was `close`."""
        waiting = [peer for peer in self.strangers if peer.silent]
        for key, _ in self._selector.select(min((p.left_s for p in waiting), default=None)):
            if key.fileobj is self._closed:
                return True
            if key.data is None:
                self._accept(cast(socket.socket, key.fileobj))
            elif key.data.silent:  # else it was displaced just now
                self._start(key.data)
        for peer in waiting:
            if peer.silent and not peer.left_s:
                self._start(peer)  # its thread finds that it is too late, and tells it
        return False

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in sockets.EXHAUSTED:
                    self.strangers.displace()  # its thread closes it
                sockets.keep_listening(error)
                return
            try:
                sockets.check_peer(sock)
                sockets.tune(sock, self.keepalive)
                self.strangers.add(AcceptedPeer(sock, self._selector, self.strangers))
            except OSError:  # another user's, or gone already
                sock.close()

    def _start(self, peer: AcceptedPeer) -> None:
        peer.spoken()
        try:
            threading.Thread(target=self._meet, args=(peer,), daemon=True).start()
        except RuntimeError:  # there are too many threads
            self.strangers.discard(peer)
            peer.sock.close()

    def _meet(self, peer: AcceptedPeer) -> None:
        try:
            known = self.authenticate(peer)
        except (Failure, WireError, OSError):
            peer.sock.close()
            return
        finally:
            self.strangers.discard(peer)
        self.serve(known)


def source_of(peername: object) -> str:
    """The source that the connections of one host share: its address; of this node, its user."""
    if not (isinstance(peername, tuple) and peername):
        return "this node"
    return str(peername[0]).removeprefix("::ffff:")  # IPv4, on a socket for both
