"""Link: one client's connection on the gateway's event loop, from accept to its end.

asyncio's own TLS cannot give a connection away, and connections for data are served by threads.
So the loop only watches the socket, and an `ssl.SSLSocket` encrypts.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from alchemist_ray.errors import AlchemistError, failure_of
from alchemist_ray.gateway import protocol
from alchemist_ray.gateway.protocol import (
    MAP_LIMIT,
    NONCE_BYTES,
    OLDEST_PROTOCOL,
    PROTOCOL,
    Verifier,
    field_of,
)
from alchemist_ray.gateway.secure_socket import WAITS
from alchemist_ray.gateway.server.access import Identity, Token, TokenFile
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire import frames, handshake
from mpi_workers.wire.acceptor import Strangers, source_of
from mpi_workers.wire.frames import (
    UNAUTHENTICATED_MAP_LIMIT,
    Body,
    Frame,
    FrameBuffer,
    Kind,
    WireError,
    decode_body,
    encode,
)

READ_BYTES = 64 << 10  # 64 KiB
READS = 16  # of one client before others get their turn
BACKLOG_NBYTES = 32 << 20  # 32 MiB that a client does not read: then it is dropped
LINGER_S = 1.0  # time for a refused peer to read the reason
CLOSE_TIMEOUT_S = 5.0  # for a peer to read what is queued


class Owner(Protocol):
    """The gateway as a link uses it."""

    tokens: TokenFile
    strangers: Strangers[Link]

    def admitted(self, link: Link, fields: Body) -> None:
        """A client is authenticated. Raises `Failure` to refuse it."""

    def refused(self, link: Link, failure: Failure) -> None:
        """A peer was not admitted: for the audit log and the metrics."""


class Link:
    """A connection. All methods run on the event loop.

    Attributes
    ----------
    token : Token or None
        Of the client, once it is authenticated.
    source : str
        Its address.
    on_frame : callable(Frame)
        Called for every frame of an authenticated client.
    on_drained : callable()
        Called when nothing is queued any more.
    on_lost : callable()
        Called once when the connection of an authenticated client is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        identity: Identity | None,
        owner: Owner,
    ) -> None:
        self._loop = loop
        self._owner = owner
        self.source = source_of(sock.getpeername())
        sock.setblocking(False)
        self._sock: socket.socket = sock
        self._binding = b""
        if identity is not None:
            context = identity.look().context
            self._sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._binding = identity.digest
        self._fd = self._sock.fileno()
        self._secured = identity is None
        self._buffer = FrameBuffer(UNAUTHENTICATED_MAP_LIMIT)
        self._out = bytearray()
        self._closed = self._closing = self._paused = self._writing = False
        self._timer: asyncio.TimerHandle | None = loop.call_later(
            handshake.TIMEOUT_S,
            self.refuse,
            Failure(protocol.TIMED_OUT, "refused: the handshake timed out"),
        )
        self._ident = ""
        self._verifier: Verifier | None = None
        self._nonces = b""
        self.token: Token | None = None
        self.on_frame: Callable[[Frame], None] = self._handshake
        self.on_lost: Callable[[], None] = lambda: None
        self.on_drained: Callable[[], None] = lambda: None
        loop.add_reader(self._fd, self._readable)

    # --- in ---

    def _readable(self) -> None:
        try:
            if not self._secured and isinstance(self._sock, ssl.SSLSocket):
                self._sock.do_handshake()
                self._secured = True
            for _ in range(READS):
                data = self._sock.recv(READ_BYTES)
                if not data:
                    self.drop()
                    return
                if self._closing:
                    continue  # of a refused peer, until it closes
                self._buffer.feed(data)
                self._deliver()
                if self._closed or self._paused:
                    return
        except ssl.SSLWantWriteError:
            self._watch_writable()
        except WAITS:
            pass
        except (OSError, ValueError) as error:
            if not self._secured and isinstance(error, ssl.SSLError):  # the client's reason, too
                words = f"the TLS handshake failed: {error.reason or error}"
                self._owner.refused(self, Failure("AuthError", words))
            self.drop()

    def _deliver(self) -> None:
        try:
            while not self._closing and not self._closed:
                frame = self._buffer.pop()
                if frame is None:
                    return
                self.on_frame(frame)
        except WireError as error:
            self._refuse(str(error))
        except (Failure, AlchemistError) as error:
            self.refuse(failure_of(error, "frame"))
        except Exception as error:  # a client that waits for an answer learns of any
            self._refuse(f"malformed frame: {error!r}")

    def pause(self) -> None:
        """Read no more, until `resume`."""
        if not self._paused and not self._closed:
            self._paused = True
            self._loop.remove_reader(self._fd)

    def resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self._loop.add_reader(self._fd, self._readable)

    # --- the handshake: see `protocol` ---

    def _handshake(self, frame: Frame) -> None:
        if not self._nonces:
            self._challenge(frame)
            return
        if frame.kind != Kind.PROOF or self._verifier is None:
            raise WireError("the answer to a CHALLENGE must be a PROOF")
        proof, fields = field_of(frame.body, "proof"), field_of(frame.body, "fields")
        if not protocol.is_proved(self._verifier, self._nonces, self._binding, proof, fields):
            raise WireError(
                "the token is wrong, or another process is between the client and this gateway"
            )
        self.token = self._owner.tokens.check(self._ident)
        self._owner.strangers.discard(self)
        self._stop_timer()
        self._buffer.map_limit = frames.MAP_LIMIT if self.token.allows("run_code") else MAP_LIMIT
        self._owner.admitted(self, decode_body(fields))

    def _challenge(self, frame: Frame) -> None:
        if frame.kind != Kind.HELLO:
            raise WireError("a connection must open with HELLO")
        oldest, newest = frame.body["protocols"]
        if newest < OLDEST_PROTOCOL or oldest > PROTOCOL:
            raise WireError(
                f"this gateway (alchemist-on-ray {__version__}) supports protocol versions "
                f"{OLDEST_PROTOCOL} to {PROTOCOL}, the client {oldest} to {newest}: install "
                f"alchemist-client {__version__}"
            )
        self._ident = str(frame.body["id"])[:64]
        found = self._owner.tokens.find(self._ident)
        if found is None:
            raise WireError("unknown token: it was revoked or belongs to another gateway")
        nonce = field_of(frame.body, "nonce")
        if len(nonce) != NONCE_BYTES:
            raise WireError("malformed handshake: no valid 'nonce'")
        self._verifier = found[1]
        mine = secrets.token_bytes(NONCE_BYTES)
        self._nonces = nonce + mine
        proof = protocol.gateway_proof(self._verifier, self._nonces, self._binding)
        self.send(
            Kind.CHALLENGE,
            {
                "nonce": mine,
                "salt": self._verifier.salt,
                "protocol": min(newest, PROTOCOL),
                "proof": proof,
            },
        )

    # --- out ---

    @property
    def closed(self) -> bool:
        """Whether the connection is gone."""
        return self._closed

    @property
    def backlog_nbytes(self) -> int:
        """Bytes that the client has not read."""
        return len(self._out)

    def send(self, kind: Kind, body: Body | None = None) -> None:
        """Queue a frame; dropped without an error if the connection has been refused or is gone."""
        if self._closed or self._closing:
            return
        data = encode(kind, body)
        self._out += data
        if len(self._out) > BACKLOG_NBYTES + len(data):
            self.drop()
        elif not self._writing:
            self._flush()

    def _flush(self) -> None:
        try:
            while self._out:
                with memoryview(self._out) as view:
                    taken = self._sock.send(view[: READ_BYTES * READS])
                del self._out[:taken]
        except WAITS:
            self._watch_writable()
            return
        except (OSError, ValueError):
            self.drop()
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._fd)
        self.on_drained()

    def _watch_writable(self) -> None:
        if not self._writing and not self._closed:
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        if not self._secured:
            self._writing = False
            self._loop.remove_writer(self._fd)
            self._readable()
        else:
            self._flush()

    # --- the end ---

    def _refuse(self, why: str) -> None:
        kind = "AuthError" if self.token is None else "TransferError"
        self.refuse(Failure(kind, f"refused: {why}"))

    def refuse(self, failure: Failure) -> None:
        """Send the reason, then close."""
        if self._closing or self._closed:
            return
        if self.token is None:
            self._owner.refused(self, failure)
        if not self._secured:
            self.drop()
            return
        self.send(Kind.REFUSED, failure.to_map())
        self._closing = True
        self._stop_timer()
        self.resume()
        limit_s = LINGER_S if self.token is None else CLOSE_TIMEOUT_S
        self._timer = self._loop.call_later(limit_s, self.drop)
        with contextlib.suppress(OSError):
            if not self._out:
                socket.socket.shutdown(self._sock, socket.SHUT_WR)

    def drop(self) -> None:
        """Close the connection now."""
        if self._closed:
            return
        self._closed = True
        self._stop_timer()
        self._owner.strangers.discard(self)
        self._unwatch()
        self._sock.close()
        if self.token is not None:
            self.on_lost()

    def _unwatch(self) -> None:
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def give_away(self) -> tuple[socket.socket, bytes]:
        """The socket, and bytes that were read from it before."""
        self._unwatch()
        self._closed = True  # for the loop
        return self._sock, self._buffer.clear()
