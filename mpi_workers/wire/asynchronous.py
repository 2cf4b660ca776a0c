"""The asyncio end of the wire: frames over a transport, for proxies and the GroupManager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.frames import (
    HEADER,
    Body,
    Frame,
    Kind,
    WireError,
    decode_body,
    decode_header,
    encode,
    token_matches,
)
from mpi_workers.wire.sockets import tune


class FrameProtocol(asyncio.Protocol):
    """Frames without payloads over an asyncio transport.

    Parameters
    ----------
    on_frame : callable(protocol, Frame)
        Called for every frame after the handshake. A `Failure` or `WireError`
        raised by it refuses the frame and closes the connection.
    on_lost : callable(protocol)
        Called once when the connection is gone; on the listening side only if
        the handshake had been passed.
    token : str, optional
        Given on the listening side: the first frame must be a HELLO with it.
    on_hello : callable(protocol, body) -> body, optional
        Listening side: called with the HELLO, returns the WELCOME. Raises
        `Failure` to refuse this peer; a HELLO whose fields are missing or of
        the wrong type (`KeyError`, `TypeError`, `ValueError`) is refused too.
    """

    def __init__(
        self,
        on_frame: Callable[[FrameProtocol, Frame], None],
        on_lost: Callable[[FrameProtocol], None],
        token: str | None = None,
        on_hello: Callable[[FrameProtocol, Body], Body] | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._token = token
        self._on_hello = on_hello
        self._known = token is None
        self._buffer = bytearray()
        self._deadline: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport | None = None
        self.peer: Any = None  # whatever the owner wants to remember of the other end

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            tune(sock)
        if not self._known:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(
                frames.HELLO_TIMEOUT_S, self._refuse, "no HELLO in time"
            )

    @property
    def closing(self) -> bool:
        """Whether nothing more is sent or taken on this connection."""
        return self.transport is None or self.transport.is_closing()

    def send(self, kind: Kind, body: Body | None = None) -> None:
        """Queue a frame; silently dropped when the connection is gone (`on_lost` tells)."""
        data = encode(kind, body)
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection when what is queued has been sent, or cannot be in time."""
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.close()
        if self.transport.get_write_buffer_size():  # a peer that does not read must not hold us
            asyncio.get_running_loop().call_later(frames.HELLO_TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= HEADER.size and not self.closing:
                limit = frames.MAP_LIMIT if self._known else frames.STRANGER_MAP_LIMIT
                kind, map_nbytes, payload_nbytes = decode_header(self._buffer[: HEADER.size], limit)
                if payload_nbytes:
                    raise WireError("no payload is allowed on a control connection")
                end = HEADER.size + map_nbytes
                if len(self._buffer) < end:
                    return
                body = decode_body(memoryview(self._buffer)[HEADER.size : end].tobytes())
                del self._buffer[:end]
                if self._known:
                    self._on_frame(self, Frame(kind, body, 0))
                else:
                    self._handshake(kind, body)
        except WireError as error:
            self._refuse(str(error))
        except Failure as failure:
            self._refuse_as(failure)
        except (KeyError, TypeError, ValueError) as error:  # fields missing or of a wrong type
            self._refuse(f"malformed frame: {error!r}")

    def _handshake(self, kind: Kind, body: Body) -> None:
        if kind != Kind.HELLO:
            raise WireError("a connection must open with HELLO")
        if self._token is None or not token_matches(body, self._token):
            raise WireError("the token is not this gang's")
        try:
            welcome = self._on_hello(self, body) if self._on_hello else {}
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"malformed HELLO: {type(error).__name__}: {error}") from None
        if self.closing:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._known = True
        self.send(Kind.WELCOME, welcome)

    def _refuse(self, why: str) -> None:
        kind = "TransferError" if self._known else "AuthError"
        self._refuse_as(Failure(kind, f"refused: {why}"))

    def _refuse_as(self, failure: Failure) -> None:
        self.send(Kind.REFUSED, failure.to_map())
        self._buffer.clear()
        self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._known:
            self._on_lost(self)
