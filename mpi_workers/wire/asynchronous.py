"""The asyncio end of a connection: frames over a transport, for proxies and the GroupManager."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from mpi_workers.failures import Failure
from mpi_workers.wire import handshake
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer, authenticate
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Frame, FrameBuffer, Kind, WireError, encode

CLOSE_TIMEOUT_S = 5.0  # for a peer to read what is queued


class FrameProtocol(asyncio.Protocol):
    """Frames without payloads over an asyncio transport, after the handshake.

    Parameters
    ----------
    on_frame : callable(protocol, Frame)
        Called for every frame. A `Failure` or `WireError` that it raises
        refuses the frame and closes the connection.
    on_lost : callable(protocol)
        Called once when the connection is gone.
    received : bytes
        What the peer has sent after its handshake.

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
        received: bytes,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = FrameBuffer(received)
        self._begun = False
        self.transport: asyncio.Transport | None = None
        self.peer: Any = None

    def begin(self) -> None:
        """Deliver frames from now on, first those that have arrived."""
        self._begun = True
        self._deliver()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

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
        self._buffer += data
        if self._begun:
            self._deliver()

    def _deliver(self) -> None:
        try:
            while not self.closing and (frame := self._buffer.next()) is not None:
                self._on_frame(self, frame)
        except WireError as error:
            self.refuse(Failure("TransferError", f"refused: {error}"))
        except Failure as failure:
            self.refuse(failure)
        except (KeyError, TypeError, ValueError) as error:  # fields missing or of a wrong type
            self.refuse(Failure("TransferError", f"refused: malformed frame: {error!r}"))

    def pause_writing(self) -> None:
        if self.paced and self.transport is not None:
            self.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.paced and self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def refuse(self, failure: Failure) -> None:
        """Send the reason, then close the connection."""
        self.send(Kind.REFUSED, failure.to_map())
        self._buffer.clear()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._begun:
            self._on_lost(self)


async def _adopted(
    connection: Connection,
    on_frame: Callable[[FrameProtocol, Frame], None],
    on_lost: Callable[[FrameProtocol], None],
) -> FrameProtocol:
    """Let the event loop use an authenticated connection; frames wait for `begin`."""
    protocol = FrameProtocol(on_frame, on_lost, connection.rest())
    connection.sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: protocol, sock=connection.sock)
    return protocol


def listen(
    listeners: Sequence[socket.socket],
    token: str,
    on_hello: Callable[[FrameProtocol, Body], Body],
    on_frame: Callable[[FrameProtocol, Frame], None],
    on_lost: Callable[[FrameProtocol], None],
    expected: int = 0,
) -> Acceptor[AuthenticatedPeer]:
    """Accept peers, which the running event loop serves; connections outlive the acceptor.

    Parameters
    ----------
    listeners : sequence of socket
        Closed with the acceptor.
    token : str
        The secret that peers must know.
    on_hello : callable(protocol, fields) -> body
        Called with the fields of a peer that is authenticated; returns the WELCOME. Raises
        `Failure` to refuse this peer. Any other exception refuses it as one with malformed fields.
    on_frame, on_lost : callable
        See `FrameProtocol`.
    expected : int
        See `Acceptor`.
    """
    loop = asyncio.get_running_loop()

    async def admit(connection: Connection, fields: Body) -> None:
        protocol = await _adopted(connection, on_frame, on_lost)
        try:
            welcome = on_hello(protocol, fields)
        except Failure as failure:
            protocol.refuse(failure)
        except Exception as error:  # whatever it is, the peer waits for an answer
            why = f"malformed fields: {type(error).__name__}: {error}"
            protocol.refuse(handshake.refusal(why))
        else:
            if not protocol.closing:
                protocol.send(Kind.WELCOME, welcome)
                protocol.begin()

    def hand_over(peer: AuthenticatedPeer) -> None:
        work = admit(*peer)
        try:
            asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop has ended
            work.close()
            peer[0].close()

    known = partial(authenticate, token=token)
    return Acceptor(listeners, known, hand_over, expected=expected).start()


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
    protocol = await _adopted(connection, on_frame, on_lost)
    protocol.begin()
    return protocol
