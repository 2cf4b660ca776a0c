"""The asyncio end of a connection: frames over a transport, for proxies and the GroupManager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from mpi_workers.failures import Failure
from mpi_workers.wire import handshake, sockets
from mpi_workers.wire.acceptor import Strangers, source_of
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import (
    MAP_LIMIT,
    UNAUTHENTICATED_MAP_LIMIT,
    Body,
    Frame,
    FrameBuffer,
    Kind,
    WireError,
    encode,
)
from mpi_workers.wire.handshake import ListeningSide

CLOSE_TIMEOUT_S = 5.0  # for a peer to read what is queued


class FrameProtocol(asyncio.Protocol):
    """Frames without payloads over an asyncio transport.

    Parameters
    ----------
    on_frame : callable(protocol, Frame)
        Called for every frame after the handshake. A `Failure` or `WireError` that it raises
        refuses the frame and closes the connection.
    on_lost : callable(protocol)
        Called once when an authenticated connection is gone.
    received : bytes, optional
        What the peer has sent after its handshake. None: the handshake comes first.

    Attributes
    ----------
    peer : object
        For the owner: its record of the other end.
    paced : bool
        Whether frames of a peer wait while it does not read those that were sent to it.
    """

    paced = False

    def __init__(
        self,
        on_frame: Callable[[FrameProtocol, Frame], None],
        on_lost: Callable[[FrameProtocol], None],
        received: bytes | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._authenticated = received is not None
        self._buffer = FrameBuffer(MAP_LIMIT if self._authenticated else UNAUTHENTICATED_MAP_LIMIT)
        self._buffer.feed(received or b"")
        self._deadline: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.peer: Any = None

    def _handshake(self, frame: Frame) -> None:
        """Take a frame of the handshake; calls `_authenticate` after the last one."""
        raise NotImplementedError

    def _authenticate(self) -> None:
        self._authenticated = True
        self._buffer.map_limit = MAP_LIMIT
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            try:
                sockets.check_peer(sock)
                sockets.tune(sock)
            except OSError:  # another user's, or gone already
                self.transport.abort()
                return
        if self._authenticated:
            self.data_received(b"")
            return
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(
            handshake.TIMEOUT_S, self._refuse, "the handshake timed out"
        )

    @property
    def closing(self) -> bool:
        """Whether this connection is closed or about to be."""
        return self.transport is None or self.transport.is_closing()

    def send(self, kind: Kind, body: Body | None = None) -> None:
        """Queue a frame; dropped without an error if the connection is gone (see `on_lost`)."""
        self.send_encoded(encode(kind, body))

    def send_encoded(self, data: bytes) -> None:
        """Queue a frame that is encoded already: the same bytes for many peers."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection after sending what is queued, at the latest in a few seconds."""
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():  # the peer may never read it
            asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._buffer.feed(data)
        try:
            while not self.closing and (frame := self._buffer.pop()) is not None:
                if self._authenticated:
                    self._on_frame(self, frame)
                else:
                    self._handshake(frame)
        except WireError as error:
            self._refuse(str(error))
        except Failure as failure:
            self._refuse_as(failure)
        except (KeyError, TypeError, ValueError) as error:  # fields missing or of a wrong type
            self._refuse(f"malformed frame: {error!r}")

    def pause_writing(self) -> None:
        if self.paced and self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.paced and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def _refuse(self, why: str) -> None:
        kind = "TransferError" if self._authenticated else "AuthError"
        self._refuse_as(Failure(kind, f"refused: {why}"))

    def _refuse_as(self, failure: Failure) -> None:
        self.send(Kind.REFUSED, failure.to_map())
        self._buffer.clear()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._authenticated:
            self._on_lost(self)


class ListeningProtocol(FrameProtocol):
    """The listening side. See `protocol_factory`."""

    def __init__(
        self,
        on_frame: Callable[[FrameProtocol, Frame], None],
        on_lost: Callable[[FrameProtocol], None],
        token: str,
        on_hello: Callable[[FrameProtocol, Body], Body],
        strangers: Strangers[ListeningProtocol],
    ) -> None:
        super().__init__(on_frame, on_lost)
        self._side = ListeningSide(token)
        self._on_hello = on_hello
        self._strangers = strangers
        self.source = ""

    def drop(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.source = source_of(transport.get_extra_info("peername"))
        if not self.closing:
            self._strangers.add(self)

    def _handshake(self, frame: Frame) -> None:
        challenge = self._side.receive(frame)
        if challenge is not None:
            self.send(Kind.CHALLENGE, challenge)
            return
        self._strangers.discard(self)
        try:
            welcome = self._on_hello(self, self._side.fields or {})
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"malformed fields: {type(error).__name__}: {error}") from None
        if self.closing:
            return
        self._authenticate()
        self.send(Kind.WELCOME, welcome)

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.discard(self)
        super().connection_lost(exc)


def protocol_factory(
    on_frame: Callable[[FrameProtocol, Frame], None],
    on_lost: Callable[[FrameProtocol], None],
    token: str,
    on_hello: Callable[[FrameProtocol, Body], Body],
) -> Callable[[], FrameProtocol]:
    """A factory of listening `FrameProtocol`s for `loop.create_server`.

    All servers with this factory together have at most `MAX_STRANGERS` unauthenticated peers.

    Parameters
    ----------
    on_frame, on_lost : callable
        See `FrameProtocol`.
    token : str
        The secret that peers must know.
    on_hello : callable(protocol, fields) -> body
        Called with the fields of a peer that is authenticated; returns the WELCOME. Raises
        `Failure` to refuse this peer. Fields that are missing or of the wrong type (`KeyError`,
        `TypeError`, `ValueError`) refuse it too.
    """
    strangers: Strangers[ListeningProtocol] = Strangers()
    return lambda: ListeningProtocol(on_frame, on_lost, token, on_hello, strangers)


async def open_connection(
    address: str,
    token: str,
    fields: Body,
    on_frame: Callable[[FrameProtocol, Frame], None],
    on_lost: Callable[[FrameProtocol], None],
) -> FrameProtocol:
    """Connect as `blocking.connect` does, which holds up the event loop until the WELCOME.

    Parameters
    ----------
    address, token, fields
        See `blocking.connect`; also for what is raised.
    on_frame, on_lost : callable
        See `FrameProtocol`.
    """
    connection, _ = connect(address, token, fields, take_fds=False)
    connection.sock.setblocking(False)
    protocol = FrameProtocol(on_frame, on_lost, received=connection.rest())
    await asyncio.get_running_loop().create_connection(lambda: protocol, sock=connection.sock)
    return protocol
