"""Memory that a data endpoint shares with a client on its node that cannot use the Unix socket.

A JVM (Java 8 has no Unix sockets) opens the memory by its path below ``/proc``. It finds the nonce
there if it is on the same node and may read this process's files; else it streams. Payloads pass
through the memory, and their frames through the socket. The memory has no other name, so that it
is freed when both processes have ended.
"""

from __future__ import annotations

import fcntl
import os
import secrets

from mpi_workers.failures import Failure
from mpi_workers.matrix.mapping import SharedMapping
from mpi_workers.wire.frames import Body, Kind, WireError

MAX_BYTES = 64 << 20  # 64 MiB
NONCE_BYTES = 16


class SharedArea:
    """The memory of one client. Raises `OSError` if it cannot be allocated."""

    def __init__(self, nbytes: object) -> None:
        if type(nbytes) is not int or not NONCE_BYTES <= nbytes <= MAX_BYTES:
            raise Failure(
                "TransferError", f"{nbytes!r:.30} bytes cannot be shared; the limit is {MAX_BYTES}"
            )
        self.fd = os.memfd_create("alchemist-client", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # or a SIGBUS later
            # The client can write, but not remove pages.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._memory = SharedMapping(self.fd, nbytes).array().data
            self.nonce = secrets.token_bytes(NONCE_BYTES)
            self._memory[:NONCE_BYTES] = self.nonce
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        os.close(self.fd)

    def payload(self, nbytes: object) -> Payload:
        """The first `nbytes`, as the payload of a frame. Raises `WireError`."""
        if type(nbytes) is not int or not 0 <= nbytes <= len(self._memory):
            raise WireError(f"a payload of {nbytes!r:.30} bytes is outside of the shared memory")
        return Payload(self._memory[:nbytes])


class Payload:
    """A payload in memory, with the methods of a connection that `streams` calls."""

    def __init__(self, memory: memoryview) -> None:
        self._rest = memory
        self.nbytes = len(memory)

    def read_into(self, view: memoryview) -> None:
        view[:] = self._next(len(view))

    def write(self, raw: memoryview) -> None:
        self._next(len(raw))[:] = raw

    def begin(self, kind: Kind, body: Body, payload_nbytes: int) -> None:
        """The frame is sent when its payload is complete."""

    def readable(self, timeout_s: float | None = 0.0) -> bool:
        return False

    def _next(self, nbytes: int) -> memoryview:
        if nbytes > len(self._rest):
            raise WireError(f"the payload of {self.nbytes} bytes is too short")
        found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return found
