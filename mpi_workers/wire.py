"""The one wire format: frames of a fixed header, a small typed map and raw bytes.

    magic "ALCH" | version u16 | kind u16 | bytes of map u32 | bytes of payload u64

The map is msgpack with string keys; the payload is the raw bytes of matrix
elements. Nothing on a socket is ever unpickled. A connection opens with HELLO
(the version in the header, the gang's token in the map), answered by WELCOME
or by REFUSED with the reason. Sizes are checked against limits before any
memory is taken for them.

`Connection` is the blocking end (ranks, clients); `FrameProtocol` the asyncio
end (proxies, the GroupManager).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, cast

import msgpack

from mpi_workers.failures import Failure

MAGIC = b"ALCH"
VERSION = 1
HEADER = struct.Struct("!4sHHIQ")

STRANGER_MAP_LIMIT = 4 << 10  # 4 KiB: what an unauthenticated peer may make us read
MAP_LIMIT = 64 << 20  # 64 MiB: a table of a hundred thousand ranks
READ_BYTES = 256 << 10  # 256 KiB: memory for a map is taken as it arrives, not as it is announced
HELLO_TIMEOUT_S = 5.0
LINGER_S = 1.0  # how long one who is refused may take to notice
CONNECT_TIMEOUT_S = 10.0

Buffer = bytes | bytearray | memoryview
Body = dict[str, Any]


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    COMMAND = 4
    REPLY = 5
    EVENT = 6
    PUT = 7
    GET = 8
    DATA = 9
    MAP = 10
    UNMAP = 11
    SYNC = 12


class WireError(Exception):
    """The bytes on a connection are not what the protocol allows."""


class ConnectionLost(WireError):
    """The other end is gone."""


class Frame(NamedTuple):
    kind: Kind
    body: Body
    payload_nbytes: int
    fds: tuple[int, ...] = ()


def _pack_special(value: object) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(1, struct.pack("!dd", value.real, value.imag))
    raise TypeError(f"cannot send a {type(value).__name__} in a frame's map")


def _unpack_special(code: int, data: bytes) -> complex:
    if code == 1 and len(data) == 16:
        return complex(*struct.unpack("!dd", data))
    raise WireError(f"unknown value type {code} in a frame's map")


def encode(kind: Kind, body: Body | None = None, payload_nbytes: int = 0) -> bytes:
    """Header and map of a frame; the payload's bytes follow it on the socket.

    Raises `Failure` if the map is too large for any receiver, `TypeError` or
    `OverflowError` on what msgpack cannot carry; the connection stays usable.
    """
    packed: bytes = msgpack.packb(body, default=_pack_special) if body else b""
    if len(packed) > MAP_LIMIT:
        raise Failure(
            "TransferError",
            f"a {kind.name} of {len(packed)} bytes is over the limit of {MAP_LIMIT}: "
            "send what is large as a matrix",
        )
    return HEADER.pack(MAGIC, VERSION, kind, len(packed), payload_nbytes) + packed


def decode_header(header: Buffer, map_limit: int) -> tuple[Kind, int, int]:
    """Kind, bytes of map, bytes of payload. Raises `WireError` on anything off."""
    magic, version, kind, map_nbytes, payload_nbytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError("not an Alchemist frame")
    if version != VERSION:
        raise WireError(
            f"protocol version {version} meets version {VERSION}: "
            "install the same alchemist-on-ray on both sides"
        )
    try:
        kind = Kind(kind)
    except ValueError:
        raise WireError(f"unknown kind of frame {kind}") from None
    if map_nbytes > map_limit:
        raise WireError(f"a map of {map_nbytes} bytes is over the limit of {map_limit}")
    return kind, map_nbytes, payload_nbytes


def decode_body(packed: Buffer) -> Body:
    """The map of a frame. Raises `WireError` if it is not a map with string keys."""
    if not packed:
        return {}
    try:
        body = msgpack.unpackb(packed, ext_hook=_unpack_special, strict_map_key=True)
    except WireError:
        raise
    except Exception as error:  # msgpack raises a dozen types on malformed input
        raise WireError(f"malformed map in a frame: {type(error).__name__}") from None
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise WireError("the map of a frame must have string keys")
    return body


def token_matches(body: Body, token: str) -> bool:
    """Compare a HELLO's token with ours, in time that does not depend on it."""
    given = body.get("token")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())


# --- addresses and sockets ------------------------------------------------------------


def tune(sock: socket.socket) -> None:
    """No delay, and keepalive that notices a cut link in about 6 s."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 6000)  # ms


def listen_tcp(host: str) -> tuple[socket.socket, str]:
    """Listen on a free port of `host`; returns the socket and its address ``tcp:host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family, backlog=1024)
    return sock, f"tcp:{host}:{sock.getsockname()[1]}"


def listen_unix(path: str) -> tuple[socket.socket, str]:
    """Listen on a Unix socket; returns the socket and its address ``unix:path``."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
        sock.listen(1024)
    except BaseException:
        sock.close()
        raise
    return sock, f"unix:{path}"


def dial(address: str, timeout_s: float = CONNECT_TIMEOUT_S) -> socket.socket:
    """A connected socket to ``unix:path`` or ``tcp:host:port``. Raises `OSError`."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            sock.connect(rest)
        except BaseException:
            sock.close()
            raise
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout=timeout_s)
        tune(sock)
    else:
        raise ValueError(f"not an address: {address!r}")
    sock.settimeout(None)
    return sock


def reachable_here(address: str) -> bool:
    """Whether a ``unix:path`` address is on this machine (in this mount namespace)."""
    return address.startswith("unix:") and os.path.exists(address[5:])


# --- the blocking end -----------------------------------------------------------------


class Connection:
    """Frames over a blocking socket. Not thread-safe: one thread at a time per direction.

    Parameters
    ----------
    sock : socket
        Connected; closed with this object.
    map_limit : int
        Largest map in bytes that `recv` takes.
    take_fds : bool
        Whether to take file descriptors that come with frames (Unix sockets
        only). Where not, the kernel drops what a peer passes.
    """

    def __init__(
        self, sock: socket.socket, *, map_limit: int = MAP_LIMIT, take_fds: bool = False
    ) -> None:
        self.sock = sock
        self.map_limit = map_limit
        self.unix = sock.family == socket.AF_UNIX
        self._take_fds = take_fds and self.unix
        self._buffer = bytearray()
        self._fds: list[int] = []

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def hang_up(self) -> None:
        """End the connection under any thread that waits for it; `close` is still to be called."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def send(
        self,
        kind: Kind,
        body: Body | None = None,
        payload: Buffer | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Send one frame.

        Raises `ConnectionLost`, also when the socket's time limit is over: a frame
        that was sent in part cannot be taken up again.
        """
        raw = memoryview(payload).cast("B") if payload is not None else memoryview(b"")
        head = encode(kind, body, raw.nbytes)
        if fds:
            with _sending():
                sent = socket.send_fds(self.sock, [head], list(fds))
            head = head[sent:]
        if raw.nbytes < 1 << 14:  # one segment for a small payload
            self.write(b"".join((head, raw)))
        else:
            self.write(head)
            self.write(raw)

    def refuse(self, failure: Failure) -> None:
        """Say why nothing more is taken on this connection; it is to be closed next.

        Reads on for a moment: closing on unread bytes would reset the connection,
        and the reason would be lost on its way.
        """
        with contextlib.suppress(WireError, OSError):
            self.send(Kind.REFUSED, failure.to_map())
            self.sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + LINGER_S
            while (left := deadline - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.sock.recv(READ_BYTES):
                    return

    def has_news(self) -> bool:
        """Whether the other end has sent something, or is gone."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return bool(self._buffer) or bool(poller.poll(0))

    def begin(self, kind: Kind, body: Body, payload_nbytes: int) -> None:
        """Send the head of a frame whose payload is given to `write` piece by piece."""
        self.write(encode(kind, body, payload_nbytes))

    def write(self, raw: Buffer) -> None:
        """Send bytes of a payload. Raises `ConnectionLost`."""
        with _sending():
            self.sock.sendall(raw)

    def recv(self, timeout_s: float | None = None) -> Frame:
        """Receive the next frame's header and map; its payload must be read next.

        Raises `ConnectionLost`, `WireError` on malformed bytes, `TimeoutError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if deadline is None:
            self.sock.settimeout(None)
        self._fill(HEADER.size, deadline)
        kind, map_nbytes, payload_nbytes = decode_header(
            self._buffer[: HEADER.size], self.map_limit
        )
        end = HEADER.size + map_nbytes
        self._fill(end, deadline)
        body = decode_body(memoryview(self._buffer)[HEADER.size : end].tobytes())
        del self._buffer[:end]
        fds, self._fds = tuple(self._fds), []
        return Frame(kind, body, payload_nbytes, fds)

    def expect(self, kind: Kind, timeout_s: float | None = None) -> Frame:
        """Receive a frame of this kind. A REFUSED frame is raised as `Failure`."""
        frame = self.recv(timeout_s)
        if frame.kind == Kind.REFUSED:
            raise Failure.from_map(frame.body)
        if frame.kind != kind:
            raise WireError(f"expected {kind.name}, got {frame.kind.name}")
        return frame

    def read_into(self, view: memoryview) -> None:
        """Read payload bytes until `view` (contiguous bytes) is full."""
        ready = min(len(self._buffer), len(view))
        view[:ready] = self._buffer[:ready]
        del self._buffer[:ready]
        while ready < len(view):
            try:
                got = self.sock.recv_into(view[ready:])
            except TimeoutError:
                raise
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
            if not got:
                raise ConnectionLost("the other end closed the connection in a payload")
            ready += got

    def _fill(self, nbytes: int, deadline: float | None) -> None:
        while len(self._buffer) < nbytes:
            if deadline is not None:  # for the whole frame: a peer that trickles must not hold us
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                self.sock.settimeout(left)
            # A frame is wanted whole, the payload after it is better read in place.
            want = min(max(nbytes - len(self._buffer), 512), READ_BYTES)
            try:
                if self._take_fds:
                    data, fds, _flags, _addr = socket.recv_fds(self.sock, want, 4)
                    self._fds.extend(fds)
                else:
                    data = self.sock.recv(want)
            except TimeoutError:
                raise
            except OSError as error:
                raise ConnectionLost(f"the connection broke: {error}") from error
            if not data:
                raise ConnectionLost("the other end closed the connection")
            self._buffer += data


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectionLost(f"the connection broke while sending: {error}") from error


def connect(
    address: str, token: str, hello: Body, *, timeout_s: float = CONNECT_TIMEOUT_S
) -> tuple[Connection, Body]:
    """Dial `address`, say HELLO with `token`, and return the connection and the WELCOME.

    Raises
    ------
    Failure
        If the other side refuses (wrong token, wrong version).
    OSError, WireError
        If it cannot be reached or does not speak the protocol in time.
    """
    connection = Connection(dial(address, timeout_s), take_fds=True)
    try:
        connection.send(Kind.HELLO, {**hello, "token": token})
        welcome = connection.expect(Kind.WELCOME, timeout_s).body
        connection.sock.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return connection, welcome


def greet(connection: Connection, token: str, welcome: Body) -> Body:
    """The listening side of `connect`: check the HELLO and answer it.

    Returns the HELLO's map. Raises `WireError` after a REFUSED has been sent.
    """
    connection.map_limit = STRANGER_MAP_LIMIT
    try:
        frame = connection.recv(HELLO_TIMEOUT_S)
        if frame.kind != Kind.HELLO or frame.payload_nbytes:
            raise WireError("a connection must open with HELLO")
        if not token_matches(frame.body, token):
            raise WireError("the token is not this gang's")
    except ConnectionLost:
        raise
    except (WireError, TimeoutError) as error:
        refusal = Failure("AuthError", f"refused: {error or 'no HELLO in time'}")
        connection.refuse(refusal)
        raise WireError(str(error)) from error
    connection.map_limit = MAP_LIMIT
    connection.sock.settimeout(None)
    connection.send(Kind.WELCOME, welcome)
    return frame.body


# --- the asyncio end ------------------------------------------------------------------


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
            self._deadline = loop.call_later(HELLO_TIMEOUT_S, self._refuse, "no HELLO in time")

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
            asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while len(self._buffer) >= HEADER.size and not self.closing:
                limit = MAP_LIMIT if self._known else STRANGER_MAP_LIMIT
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
