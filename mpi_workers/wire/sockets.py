"""Addresses (``unix:boot-id:path``, ``tcp:host:port``), and the sockets behind them."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import socket
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

CONNECT_TIMEOUT_S = 10.0
BACKLOG = 1024
UNIX = getattr(socket, "AF_UNIX", None)  # None where a thin client has none
CLOSED = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK)  # `accept`: the socket does not listen
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_S = 0.05  # pause when there are no file descriptors left
PATH_BYTES = 107  # of a Unix socket's address, without the zero
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class KeepAlive(NamedTuple):
    """When TCP gives up a peer that does not acknowledge.

    Attributes
    ----------
    idle_s, interval_s : int
        Seconds until the first probe, and between probes.
    probes : int
        Unanswered probes until the connection is lost.
    """

    idle_s: int
    interval_s: int
    probes: int

    @property
    def timeout_s(self) -> int:
        return self.idle_s + self.interval_s * self.probes


CONTROL = KeepAlive(2, 1, 4)  # 6 s: the loss of a node must be noticed soon
DATA = KeepAlive(60, 10, 6)  # 120 s: a peer may be suspended, swapped out or busy in native code


def tune(sock: socket.socket, keepalive: KeepAlive = CONTROL) -> None:
    """Send small frames at once, and lose a connection whose link is cut (TCP only)."""
    if sock.family == UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_USER_TIMEOUT"):  # a thin client may run elsewhere than on Linux
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive.idle_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive.interval_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, keepalive.probes)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * keepalive.timeout_s)


def hang_up(sock: socket.socket) -> None:
    """End a connection for all threads that use it; one with TLS is not closed in good order."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def keep_listening(error: OSError) -> None:
    """Let a listener go on after an error of `accept`.

    Linux also reports there what has happened to the connection that was to be accepted: that it
    was reset, a network that cannot be reached, a firewall. Others must not suffer from it.
    Pauses if the system has no resources for a connection. Raises the error if it is about the
    listener.
    """
    if error.errno in CLOSED:
        raise error
    if error.errno in EXHAUSTED:
        time.sleep(EXHAUSTED_S)


def listen_tcp(host: str) -> tuple[socket.socket, str]:
    """Listen on a free port of `host`; returns the socket and its address ``tcp:host:port``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    return sock, f"tcp:{host}:{sock.getsockname()[1]}"


def listen_unix(path: str) -> tuple[socket.socket, str]:
    """Listen on a Unix socket; returns the socket and its address ``unix:boot-id:path``.

    Parameters
    ----------
    path : str
        Absolute, in a folder of mode 0700 that belongs to this user.
    """
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as name:
            sock.bind(name)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, f"unix:{boot_id()}:{path}"


def dial(
    address: str, timeout_s: float = CONNECT_TIMEOUT_S, keepalive: KeepAlive = CONTROL
) -> socket.socket:
    """Connect to an address.

    Parameters
    ----------
    address, timeout_s, keepalive
        See `blocking.connect`.

    Raises
    ------
    OSError
        If it cannot be reached. PermissionError, if a Unix socket is not this user's;
        BlockingIOError, if too many wait at it.
    ValueError
        If it is not an address.
    """
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        path = _local_path(address)
        if path is None:
            raise FileNotFoundError(f"{address} is on another node")
        _check_owner(path)
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.settimeout(timeout_s)
            with _short(path) as name:
                sock.connect(name)
            check_peer(sock)
        except BaseException:
            sock.close()
            raise
    elif scheme == "tcp":
        host, _, port = rest.rpartition(":")
        sock = socket.create_connection((host, int(port)), timeout_s)
        tune(sock, keepalive)
    else:
        raise ValueError(f"not an address: {address!r}")
    sock.settimeout(None)
    return sock


@contextlib.contextmanager
def _short(path: str) -> Iterator[str]:
    """A name of a socket's path that fits into an address: TMPDIR may be long."""
    if len(os.fsencode(path)) <= PATH_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel knows them."""
    size = struct.calcsize("3i")
    options = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _gid = struct.unpack("3i", options)
    return pid, uid


def check_peer(sock: socket.socket) -> None:
    """Raise `PermissionError` if another user's process is at the other end of a Unix socket."""
    if sock.family != UNIX:
        return
    _, uid = peer(sock)
    if uid != os.geteuid():
        raise PermissionError(f"the process at the other end belongs to uid {uid}")


def reachable_here(address: str) -> bool:
    """Whether an address is a Unix socket of this node, in this mount namespace, of this user."""
    path = _local_path(address)
    if path is not None:
        with contextlib.suppress(OSError):
            _check_owner(path)
            return True
    return False


def reachable_addresses(addresses: Sequence[str]) -> list[str]:
    """The addresses to try, in order: Unix sockets that `reachable_here`, then TCP."""
    near = [address for address in addresses if reachable_here(address)]
    return near + [address for address in addresses if address.startswith("tcp:")]


@cache
def boot_id() -> str:
    """Identifies this machine and boot, the same in all of its containers."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:  # some sandboxes hide it
        return platform.node()


def _local_path(address: str) -> str | None:
    """The path in a Unix address of this node; None for any other address."""
    scheme, _, rest = address.partition(":")
    boot, _, path = rest.partition(":")
    return path if scheme == "unix" and boot == boot_id() else None


def _check_owner(path: str) -> None:
    """Raise `OSError` unless `path` is this user's socket in this user's private folder."""
    folder, found = os.lstat(os.path.dirname(path)), os.lstat(path)
    private = stat.S_ISDIR(folder.st_mode) and not stat.S_IMODE(folder.st_mode) & 0o077
    ours = folder.st_uid == found.st_uid == os.geteuid()
    if not (private and ours and stat.S_ISSOCK(found.st_mode)):
        raise PermissionError(
            f"{path} is not a socket of uid {os.geteuid()} in a folder of mode 0700"
        )
