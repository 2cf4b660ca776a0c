"""A client's connection to a gateway: frames over TLS (`ssl`), for one thread or for several."""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

from alchemist_ray.gateway.protocol import OLDEST_PROTOCOL, PROTOCOL, ClientSide, GatewayAddress
from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import DROPPED, Connection, introduce, persist
from mpi_workers.wire.frames import Body

ATTEMPTS_S = 15.0  # for attempts to connect to begin
READ_BYTES = 64 << 10  # 64 KiB: several records of TLS
TURN_NBYTES = 1 << 20  # 1 MiB that a thread receives at once, if they are there
T = TypeVar("T")
WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError)
UNHEARD = (ssl.SSLEOFError, ssl.SSLZeroReturnError)  # nothing listens behind a port that does


class SharedSocket:
    """A socket that one thread may read while others write, with or without TLS.

    OpenSSL allows one call at a time on a connection. Each call here is short, because the socket
    does not block; threads wait for the kernel without the lock.

    Parameters
    ----------
    sock : socket
        Connected; after the handshake of TLS.
    send_timeout_s : float, optional
        For the other end to accept bytes. Default: that of `settimeout`.
    """

    def __init__(self, sock: socket.socket, send_timeout_s: float | None = None) -> None:
        self._sock = sock
        self._lock: threading.Lock | threading.Semaphore = threading.Lock()
        self._ahead = b""  # read, for `readable`
        self._timeout_s: float | None = None
        self._send_timeout_s = send_timeout_s
        self.family = sock.family
        sock.setblocking(False)

    def use_alone(self, turns: threading.Semaphore) -> None:
        """One thread uses it from now on; `turns`: how many such threads may work at a time."""
        self._lock = turns
        self._send_timeout_s = None

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def gettimeout(self) -> float | None:
        return self._timeout_s

    def fileno(self) -> int:
        return self._sock.fileno()

    def close(self) -> None:
        self._sock.close()

    def shutdown(self, how: int) -> None:
        """End the connection for all threads; TLS is not closed in good order."""
        socket.socket.shutdown(self._sock, how)

    def readable(self, timeout_s: float | None) -> bool:
        """Whether there are decrypted bytes, or the end, within `timeout_s`."""
        if self._ahead:
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            try:
                with self._lock:
                    self._ahead = self._sock.recv(READ_BYTES)
                return True
            except WAITS:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self._wait(left, writing=False):
                    return False
            except OSError:
                return True  # `recv` raises it

    def recv(self, nbytes: int) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:nbytes], self._ahead[nbytes:]
            return data
        return self._until_done(partial(self._sock.recv, nbytes), "send")

    def recv_into(self, view: memoryview) -> int:
        if self._ahead:
            data = self.recv(len(view))
            view[: len(data)] = data
            return len(data)

        def receive() -> int:
            ready = 0
            try:
                while ready < min(len(view), TURN_NBYTES):
                    got = self._sock.recv_into(view[ready:])
                    if not got:
                        break
                    ready += got
            except WAITS:
                if not ready:
                    raise
            return ready

        return self._until_done(receive, "send")

    def sendall(self, raw: Any) -> None:
        """Callers send one after the other: OpenSSL continues with the bytes that it refused."""
        view = memoryview(raw).cast("B")
        while view:
            view = view[self._until_done(partial(self._sock.send, view), "accept") :]

    def _until_done(self, call: Callable[[], T], peer: str) -> T:
        """Make a call again, each time that the peer can send or accept, until it succeeds."""
        while True:
            try:
                with self._lock:
                    return call()
            except WAITS:
                sending = peer == "accept"
                limit_s = (sending and self._send_timeout_s) or self._timeout_s
                if not self._wait(limit_s, writing=sending):
                    words = f"timed out: the other end did not {peer} data in {limit_s} s"
                    raise TimeoutError(words) from None

    def _wait(self, timeout_s: float | None, *, writing: bool) -> bool:
        fd = self._sock.fileno()
        if fd < 0:
            return True  # closed by another thread: the next call fails
        if not hasattr(select, "poll"):
            lists = ([], [fd]) if writing else ([fd], [])
            return any(select.select(*lists, [], timeout_s))
        poller = select.poll()
        poller.register(fd, select.POLLOUT if writing else select.POLLIN)
        return bool(poller.poll(None if timeout_s is None else 1000 * timeout_s))


class SharedConnection(Connection):
    """Frames over a `SharedSocket`: one thread receives while others send."""

    def __init__(self, sock: SharedSocket) -> None:
        super().__init__(cast("socket.socket", sock), map_limit=frames.UNAUTHENTICATED_MAP_LIMIT)
        self.shared = sock

    def readable(self, timeout_s: float | None = 0.0) -> bool:
        return self.buffered or self.shared.readable(timeout_s)


def connect(
    address: GatewayAddress, token: str, fields: Body, *, shared: bool = True
) -> tuple[Connection, Body]:
    """Connect to a gateway, authenticate in both directions; the connection and the WELCOME.

    Parameters
    ----------
    address : GatewayAddress
    token : str
    fields : dict
        What the gateway learns of this process.
    shared : bool
        Whether several threads use the connection at the same time. Otherwise it is for data, and
        an end that does not answer is given up later.

    Raises
    ------
    Failure
        AuthError: the gateway refuses, does not know the token, or speaks no version that this
        side does. What else the gateway refuses.
    OSError, WireError
        If it cannot be reached, or violates the protocol.

    Notes
    -----
    A gateway to which too many connect at once drops some of them: then this tries again.
    """

    def attempt() -> tuple[Connection, Body]:
        side = ClientSide(token, fields, (OLDEST_PROTOCOL, PROTOCOL))
        sock, side.binding = _secured(address, sockets.CONTROL if shared else sockets.DATA)
        connection = (
            SharedConnection(SharedSocket(sock))
            if shared
            else Connection(sock, map_limit=frames.UNAUTHENTICATED_MAP_LIMIT)
        )
        return connection, introduce(connection, side, sockets.CONNECT_TIMEOUT_S)

    return persist(attempt, ATTEMPTS_S, (*DROPPED, TimeoutError, ssl.SSLEOFError))


def _secured(address: GatewayAddress, keepalive: sockets.KeepAlive) -> tuple[socket.socket, bytes]:
    """A connected socket, and the digest of the certificate at its other end."""
    host = address.host
    context = _context(address) if address.tls else None
    try:
        raw = socket.create_connection((host, address.port), timeout=sockets.CONNECT_TIMEOUT_S)
    except TimeoutError as error:  # another attempt would take as long
        raise OSError(f"no answer in {sockets.CONNECT_TIMEOUT_S:g} s") from error
    try:
        sockets.tune(raw, keepalive)
        if context is None:
            return raw, b""
        sock = context.wrap_socket(raw, server_hostname=host)
    except BaseException as error:
        raw.close()
        if not isinstance(error, ssl.SSLError) or isinstance(error, UNHEARD):
            raise
        reason = str(error.reason or error)
        if isinstance(error, ssl.SSLCertVerificationError):
            reason += f", {error.verify_message}"
        raise Failure(
            "AuthError",
            f"the TLS handshake with {address} failed: {reason}. Is a gateway at this address, and "
            "is its certificate valid?",
        ) from None
    seen = hashlib.sha256(sock.getpeercert(binary_form=True) or b"")
    wanted = address.fingerprint
    if wanted and not hmac.compare_digest(seen.hexdigest(), wanted):
        sock.close()
        raise Failure(
            "AuthError",
            f"the certificate of {address} has the fingerprint {seen.hexdigest()}, not {wanted}: "
            "ask the operator for the present one; another process may pose as the gateway",
        )
    return sock, seen.digest()


def _context(address: GatewayAddress) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if address.cafile:
        try:
            context.load_verify_locations(address.cafile)
        except OSError as error:
            words = f"cafile={address.cafile} of {address} has no usable certificates: {error}"
            raise Failure("AuthError", words) from None
    else:  # the proof of the token covers the certificate: see `gateway.protocol`
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
