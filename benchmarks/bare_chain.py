"""A bare chain of sockets with the hops of an empty call: the least that such a call can take.

The caller, a process between, a second one, and leaves, as the GroupManager, the proxy and the
ranks of a gang on one node: blocking sockets, one fixed message, nothing else.

``python -m benchmarks.bare_chain RANKS TURNS [POLL_US]``: with a third number all processes poll
their sockets for this many microseconds before they block.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

NBYTES = 160  # about as much as an empty call


def _received(sock: socket.socket, poll_s: float) -> bytes:
    until = time.perf_counter() + poll_s
    while time.perf_counter() < until:
        with suppress(BlockingIOError):
            return sock.recv(NBYTES, socket.MSG_DONTWAIT)
    return sock.recv(NBYTES)


def _forward(above: socket.socket, below: list[socket.socket], poll_s: float) -> None:
    """Pass messages down to all, and one answer up when all have answered, until the end."""
    while message := _received(above, poll_s):
        for sock in below:
            sock.sendall(message)
        for sock in below:
            _received(sock, poll_s)
        above.sendall(message)


def _serve(above: socket.socket, widths: list[int], poll_s: float) -> None:
    """One level of the chain in this process; the levels below it in children."""
    below = []
    for _ in range(widths[0] if widths else 0):
        here, there = socket.socketpair()
        if os.fork() == 0:
            here.close()
            _serve(there, widths[1:], poll_s)
            os._exit(0)
        there.close()
        below.append(here)
    _forward(above, below, poll_s)


@contextmanager
def chain(ranks: int, poll_s: float = 0.0) -> Iterator[socket.socket]:
    """The caller's end of a chain: a message that is sent to it comes back through all hops."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, [1, ranks], poll_s)
        os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def main(ranks: int, turns: int, poll_s: float = 0.0) -> float:
    """The p50 of some turns, in seconds."""
    times, message = [], bytes(NBYTES)
    with chain(ranks, poll_s) as sock:
        for _ in range(turns):
            begin = time.perf_counter()
            sock.sendall(message)
            _received(sock, poll_s)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2]), float((*sys.argv, 0)[3]) * 1e-6))
