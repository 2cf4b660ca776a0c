"""Addresses (``unix:path``, ``tcp:host:port``) and the sockets behind them."""

from __future__ import annotations

import os
import socket

CONNECT_TIMEOUT_S = 10.0


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
