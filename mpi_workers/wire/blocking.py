"""The blocking end of the wire: frames over a socket, for ranks and clients."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence

from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.frames import (
    HEADER,
    Body,
    Buffer,
    ConnectionLost,
    Frame,
    Kind,
    WireError,
    decode_body,
    decode_header,
    encode,
    token_matches,
)
from mpi_workers.wire.sockets import CONNECT_TIMEOUT_S, dial

LINGER_S = 1.0  # how long one who is refused may take to notice


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
        self, sock: socket.socket, *, map_limit: int = frames.MAP_LIMIT, take_fds: bool = False
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
            try:
                sent = socket.send_fds(self.sock, [head], list(fds))
            except OSError as error:
                raise _broken(error) from error
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
                if not self.sock.recv(frames.READ_BYTES):
                    return

    def has_news(self) -> bool:
        """Whether the other end has sent something, or is gone."""
        poller = select.poll()
        poller.register(self.sock, select.POLLIN)
        return bool(self._buffer) or bool(poller.poll(0))

    @property
    def buffered(self) -> bool:
        """Whether something that was sent is here already: a poll of the socket cannot see it."""
        return bool(self._buffer)

    def begin(self, kind: Kind, body: Body, payload_nbytes: int) -> None:
        """Send the head of a frame whose payload is given to `write` piece by piece."""
        self.write(encode(kind, body, payload_nbytes))

    def write(self, raw: Buffer) -> None:
        """Send bytes of a payload. Raises `ConnectionLost`."""
        try:
            self.sock.sendall(raw)
        except OSError as error:
            raise _broken(error) from error

    def recv(self, timeout_s: float | None = None) -> Frame:
        """Receive the next frame's header and map; its payload must be read next.

        Raises `ConnectionLost`, `WireError` on malformed bytes, `TimeoutError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if deadline is None and self.sock.gettimeout() is not None:  # setting it is a system call
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
            except OSError as error:
                if _is_late(error):
                    raise
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
            want = min(max(nbytes - len(self._buffer), 512), frames.READ_BYTES)
            try:
                if self._take_fds:
                    data, fds, _flags, _addr = socket.recv_fds(self.sock, want, 4)
                    self._fds.extend(fds)
                else:
                    data = self.sock.recv(want)
            except OSError as error:
                if _is_late(error):
                    raise
                raise ConnectionLost(f"the connection broke: {error}") from error
            if not data:
                raise ConnectionLost("the other end closed the connection")
            self._buffer += data


def _is_late(error: OSError) -> bool:
    """Whether our own time limit is over: the kernel's, ETIMEDOUT, is a `TimeoutError` as well."""
    return isinstance(error, TimeoutError) and error.errno is None


def _broken(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"the connection broke while sending: {error}")


def connect(
    address: str,
    token: str,
    hello: Body,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    take_fds: bool = True,
) -> tuple[Connection, Body]:
    """Dial `address`, say HELLO with `token`, and return the connection and the WELCOME.

    `take_fds`: see `Connection`; a connection that needs none is quicker without.

    Raises
    ------
    Failure
        If the other side refuses (wrong token, wrong version).
    OSError, WireError
        If it cannot be reached or does not speak the protocol in time.
    """
    connection = Connection(dial(address, timeout_s), take_fds=take_fds)
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
    connection.map_limit = frames.STRANGER_MAP_LIMIT
    try:
        frame = connection.recv(frames.HELLO_TIMEOUT_S)
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
    connection.map_limit = frames.MAP_LIMIT
    connection.sock.settimeout(None)
    connection.send(Kind.WELCOME, welcome)
    return frame.body
