"""TlsSocket: TLS over a socket, with several records for each system call.

`ssl.SSLSocket` makes two system calls for each record of 16 KiB that it receives, and one for each
that it sends, which is a third of a receiver's time.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from typing import Any

LARGE_STEP_NBYTES = 256 << 10  # 256 KiB of a stream in a system call
SMALL_STEP_NBYTES = 32 << 10  # 32 KiB: for connections that carry small frames


class TlsSocket(socket.socket):
    """A connected socket whose bytes are encrypted. One thread at a time.

    It blocks, or not, as the socket that it replaces. Where it would have to wait without blocking,
    it raises `SSLWantReadError` or `SSLWantWriteError`.

    Parameters
    ----------
    sock : socket
        Connected TCP; it is closed, and its connection is this object's.
    context : SSLContext
    server_hostname : str, optional
        The name of the other end, for the side that connects. None: this side was connected to.
    step_nbytes : int
        Bytes that a system call moves at most.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_hostname: str | None = None,
        step_nbytes: int = SMALL_STEP_NBYTES,
    ) -> None:
        timeout_s = sock.gettimeout()
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.settimeout(timeout_s)
        self.step_nbytes = step_nbytes
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname is None, server_hostname
        )
        self._unsent = memoryview(b"")

    def do_handshake(self) -> None:
        """Shake hands, or go on with it. Raises `SSLError`."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.flush()
                self._receive()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self.flush()  # the alert, which says why
                raise
            else:
                self.flush()
                return

    @property
    def has_received(self) -> bool:
        """Whether bytes were received that have not been read: the kernel does not know of them."""
        return self.tls.pending() > 0 or self._incoming.pending > 0

    # --- in ---

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        while True:
            try:
                return self.tls.read(nbytes)
            except ssl.SSLWantReadError:
                self._receive()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return b""

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive the bytes that are there, of several records; wait for the first."""
        view = memoryview(buffer)
        most = nbytes or len(view)
        ready = 0
        while ready < most:
            try:
                got = int(self.tls.read(most - ready, view[ready:]))
            except ssl.SSLWantReadError:
                if ready:
                    return ready
                self._receive()
                continue
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return ready
            if not got:
                return ready
            ready += got
        return ready

    def _receive(self) -> None:
        try:
            data = super().recv(self.step_nbytes)
        except BlockingIOError:
            raise ssl.SSLWantReadError from None
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    # --- out ---

    def send(self, data: Any, flags: int = 0) -> int:
        """Take bytes; how many. A socket that does not block may keep them until the next call.

        A call without bytes raises `SSLWantWriteError` until all are sent.
        """
        self.flush()
        taken = self._encrypt(memoryview(data).cast("B"))
        with contextlib.suppress(ssl.SSLWantWriteError):
            self.flush()
        return taken

    def sendall(self, data: Any, flags: int = 0) -> None:
        view = memoryview(data).cast("B")
        while view:
            view = view[self._encrypt(view) :]
            self.flush()

    def _encrypt(self, view: memoryview) -> int:
        done = 0
        most = min(len(view), self.step_nbytes)
        while done < most:
            done += self.tls.write(view[done:most])
        return done

    def flush(self) -> None:
        """Send what is encrypted."""
        while self._unsent or self._outgoing.pending:
            if not self._unsent:
                self._unsent = memoryview(self._outgoing.read())
            try:
                sent = super().send(self._unsent)
            except BlockingIOError:
                raise ssl.SSLWantWriteError from None
            self._unsent = self._unsent[sent:]
