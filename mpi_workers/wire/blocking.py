"""The blocking end of a connection: frames over a socket, for ranks and clients; short waits."""

from __future__ import annotations

import array
import contextlib
import os
import random
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

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
)
from mpi_workers.wire.handshake import ConnectingSide
from mpi_workers.wire.sockets import CONNECT_TIMEOUT_S, CONTROL, UNIX, KeepAlive, dial

LINGER_S = 1.0  # time for a refused peer to read the reason
MAX_FDS = 128  # file descriptors with one frame; the kernel's limit is 253
SPIN_S = 50e-6
MOST_SKIPPED = 512  # waits
T = TypeVar("T")


class Connection:
    """Frames over a blocking socket. Not thread-safe: one thread at a time per direction.

    Parameters
    ----------
    sock : socket
        Connected; closed with this object.
    map_limit : int
        Largest map in bytes that `recv` accepts.
    take_fds : bool
        Whether to receive file descriptors that come with frames (Unix sockets only).
        Otherwise the kernel drops descriptors that a peer passes.
    """

    def __init__(
        self, sock: socket.socket, *, map_limit: int = frames.MAP_LIMIT, take_fds: bool = False
    ) -> None:
        self.sock = sock
        self.map_limit = map_limit
        self.unix = sock.family == UNIX
        self.take_fds = take_fds and self.unix
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._poll: select.poll | None = None

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
        """End the connection for a thread that waits on it; `close` must still be called."""
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

        Raises `ConnectionLost`, also after the socket's timeout: a partly sent frame cannot be
        resumed.
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
        """Send the reason why this connection ends; the caller closes it next.

        Reads on for up to `LINGER_S`: closing a socket with unread bytes resets the connection,
        and the peer would lose the reason.
        """
        with contextlib.suppress(WireError, OSError):
            self.send(Kind.REFUSED, failure.to_map())
            self.sock.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + LINGER_S
            while (left := deadline - time.monotonic()) > 0:
                self.sock.settimeout(left)
                if not self.sock.recv(frames.FIRST_READ_BYTES):
                    return

    @property
    def buffered(self) -> bool:
        """Whether received bytes wait in this object: a poll of the socket does not see them."""
        return bool(self._buffer)

    def rest(self) -> bytes:
        """The received bytes that wait in this object; another one reads from here on."""
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest

    def readable(self, timeout_s: float | None = 0.0) -> bool:
        """Whether there are bytes to read, or the end, within `timeout_s` (None: wait)."""
        if self._buffer:
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.sock, select.POLLIN)
        return bool(self._poll.poll(None if timeout_s is None else 1000 * timeout_s))

    def begin(self, kind: Kind, body: Body, payload_nbytes: int) -> None:
        """Send the header and map of a frame whose payload follows through `write`."""
        self.write(encode(kind, body, payload_nbytes))

    def write(self, raw: Buffer) -> None:
        """Send bytes of a payload. Raises `ConnectionLost`."""
        try:
            self.sock.sendall(raw)
        except OSError as error:
            raise _broken(error) from error

    def recv(self, timeout_s: float | None = None) -> Frame:
        """Receive the next frame's header and map; the caller reads its payload next.

        Raises `ConnectionLost`, `WireError` on malformed bytes, `TimeoutError`.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if deadline is None and self.sock.gettimeout() is not None:  # setting it is a system call
            self.sock.settimeout(None)
        try:
            self._fill(HEADER.size, deadline)
            kind, map_nbytes, payload_nbytes = decode_header(self._buffer, self.map_limit)
            end = HEADER.size + map_nbytes
            self._fill(end, deadline)
        except TimeoutError:
            raise TimeoutError(f"timed out: no frame from the other end in {timeout_s} s") from None
        body = decode_body(memoryview(self._buffer)[HEADER.size : end].tobytes())
        del self._buffer[:end]
        fds, self._fds = tuple(self._fds), []
        return Frame(kind, body, payload_nbytes, fds)

    def expect(self, kind: Kind, timeout_s: float | None = None) -> Frame:
        """Receive a frame of this kind. Raises a REFUSED frame as `Failure`."""
        return self.recv(timeout_s).expected(kind)

    def read_into(self, view: memoryview) -> None:
        """Read payload bytes until `view` (contiguous bytes) is full."""
        ready = min(len(self._buffer), len(view))
        view[:ready] = self._buffer[:ready]
        del self._buffer[:ready]
        while ready < len(view):
            try:
                got = self.sock.recv_into(view[ready:])
            except OSError as error:
                if _is_own_timeout(error):
                    raise
                raise ConnectionLost(f"the connection broke: {error}") from error
            if not got:
                raise ConnectionLost("the other end closed the connection in a payload")
            ready += got

    def _fill(self, nbytes: int, deadline: float | None) -> None:
        while len(self._buffer) < nbytes:
            if deadline is not None:  # of the whole frame, not of a read: a peer may send slowly
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("timed out")
                self.sock.settimeout(left)
            # Read small frames whole, but leave the payload to be read in place.
            want = min(max(nbytes - len(self._buffer), 512), frames.FIRST_READ_BYTES)
            try:
                data = self._recv_with_fds(want) if self.take_fds else self.sock.recv(want)
            except OSError as error:
                if _is_own_timeout(error):
                    raise
                raise ConnectionLost(f"the connection broke: {error}") from error
            if not data:
                raise ConnectionLost("the other end closed the connection")
            self._buffer += data

    def _recv_with_fds(self, want: int) -> bytes:
        # Not socket.recv_fds: it ignores its flags.
        fds = array.array("i")
        data, ancillary, _flags, _address = self.sock.recvmsg(
            want, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        self._fds.extend(fds)
        return data


class ShortWait:
    """A wait that polls for `SPIN_S` before it sleeps, while that pays.

    For a peer that answers within microseconds: sleeping and waking take longer than that.

    After a wait that was longer it sleeps at once for some waits, twice as many each time: on busy
    cores, or for slow peers, it polls in one of 512 waits.

    Parameters
    ----------
    poll : select.poll
        Its descriptors are waited for.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll.poll
        self._left = 0  # waits without polling
        self._skipped = 1

    def __call__(self, timeout_ms: float | None) -> list[tuple[int, int]]:
        """As ``select.poll.poll``."""
        poll = self._poll
        if self._left:
            self._left -= 1
            return poll(timeout_ms)
        end = time.perf_counter() + SPIN_S
        while not (news := poll(0)) and time.perf_counter() < end:
            pass
        if news and time.perf_counter() < end + SPIN_S:  # else another process had the core
            self._skipped = 1
            return news
        self._left = self._skipped
        self._skipped = min(2 * self._skipped, MOST_SKIPPED)
        return news or poll(timeout_ms)


def _is_own_timeout(error: OSError) -> bool:
    """Whether our own time limit has passed: the kernel's ETIMEDOUT is a `TimeoutError` too."""
    return isinstance(error, TimeoutError) and error.errno is None


def _broken(error: OSError) -> ConnectionLost:
    return ConnectionLost(f"the connection broke while sending: {error}")


def connect(
    address: str,
    token: str,
    fields: Body,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    take_fds: bool = True,
    keepalive: KeepAlive = CONTROL,
) -> tuple[Connection, Body]:
    """Dial `address`, authenticate in both directions, and return the connection and the WELCOME.

    Parameters
    ----------
    address : str
        See `mpi_workers.wire.sockets`.
    token : str
        The gang's secret.
    fields : dict
        What the listening side learns about this process.
    timeout_s : float
        For the connection, and for each answer; for further attempts to begin, see `persist`.
    take_fds : bool
        See `Connection`. A connection without descriptors is faster.
    keepalive : KeepAlive
        When TCP gives the peer up.

    Raises
    ------
    Failure
        If the other side refuses (AuthError: wrong token, wrong version), or does not have
        the token itself.
    OSError, WireError
        If it cannot be reached, belongs to another user, or violates the protocol.
    """

    def attempt() -> tuple[Connection, Body]:
        sock = dial(address, timeout_s, keepalive)
        connection = Connection(sock, map_limit=frames.UNAUTHENTICATED_MAP_LIMIT)
        return connection, introduce(connection, ConnectingSide(token, fields), timeout_s)

    connection, welcome = persist(attempt, timeout_s)
    connection.take_fds = take_fds and connection.unix
    return connection, welcome


DROPPED = (ConnectionLost, ConnectionError, BlockingIOError)  # by a listener to which many connect
RETRY_S, MAX_RETRY_S = 0.01, 0.5  # longest pause before the second attempt, and before any


def persist(
    attempt: Callable[[], T], timeout_s: float, dropped: tuple[type[Exception], ...] = DROPPED
) -> T:
    """Attempt to connect, again if too many others have done so at the same time.

    A full listener drops newcomers, or strangers (`acceptor`). Attempts begin within `timeout_s`,
    after pauses that are random, so that not all come back at once, and grow.

    Raises the last error; at once that nothing listens, or any that is not `dropped`.
    """
    deadline, longest_s = time.monotonic() + timeout_s, RETRY_S
    while True:
        try:
            return attempt()
        except dropped as error:
            pause_s = random.uniform(0, longest_s)
            late = time.monotonic() + pause_s > deadline
            if late or isinstance(error, ConnectionRefusedError):
                raise
        time.sleep(pause_s)
        longest_s = min(2 * longest_s, MAX_RETRY_S)


def introduce(connection: Connection, side: ConnectingSide, timeout_s: float) -> Body:
    """The connecting side's handshake; returns the WELCOME. Closes the connection if it fails.

    `timeout_s`: for each answer. Raises as `connect`.
    """
    try:
        connection.send(Kind.HELLO, side.hello())
        connection.send(Kind.PROOF, side.prove(connection.recv(timeout_s)))
        connection.map_limit = frames.MAP_LIMIT
        welcome = connection.expect(Kind.WELCOME, timeout_s).body
        connection.sock.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return welcome
