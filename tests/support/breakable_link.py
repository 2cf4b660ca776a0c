"""A link between clients and a port of this machine that can be cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time


class BreakableLink:
    """Passes bytes on between clients and a port of this machine, until it is cut."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.passed = 0
        self.pause_s = 0.0  # after each 256 KiB
        self.plugged = True
        self.swallows = False  # what the port answers
        self._clients: set[socket.socket | None] = set()
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.05):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                else:
                    self._pass_on(sock)

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        if not self.plugged:
            near.close()
            return
        far = socket.create_connection(self._target)
        with self._lock:
            self._clients.add(near)
            for one, other in ((near, far), (far, near)):
                self._pairs[one] = other
                self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, sock: socket.socket) -> None:
        with self._lock:
            other = self._pairs.get(sock)
        if other is None:
            return
        try:
            data = sock.recv(1 << 18)
            if not (self.swallows and other in self._clients):
                other.sendall(data)
            self.passed += len(data)
            time.sleep(self.pause_s * len(data) / (1 << 18))
        except OSError:
            data = b""
        if not data:
            self._close(sock)

    def _close(self, sock: socket.socket) -> None:
        with self._lock:
            for one in (sock, self._pairs.get(sock)):
                self._clients.discard(one)
                if one is not None and self._pairs.pop(one, None) is not None:
                    with contextlib.suppress(KeyError, ValueError):
                        self._selector.unregister(one)
                    one.close()

    def plug(self) -> None:
        """Let clients connect again."""
        self.plugged = True

    def cut(self) -> None:
        """Break all connections; see `plugged`."""
        with self._lock:
            socks = list(self._pairs)
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._over = True
        self._thread.join(5)
        self.cut()
        self._listener.close()
