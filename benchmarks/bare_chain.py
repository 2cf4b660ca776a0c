"""A bare chain of sockets with the hops of an empty call: the least that such a call can take.

The caller, a process between, a second one, and leaves, as the GroupManager, the proxy and the
ranks of a gang on one node: blocking sockets, one fixed message, nothing else.

``python -m benchmarks.bare_chain RANKS TURNS [POLL_US [WORK_US ...]]``: with a third number all
processes poll their sockets for this many microseconds before they block; with four more the
caller, the two between and the leaves are busy that long for each message.
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
NO_WORK = (0.0, 0.0, 0.0, 0.0)


def work(seconds: float) -> None:
    """Keep the core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _received(sock: socket.socket, poll_s: float) -> bytes:
    until = time.perf_counter() + poll_s
    while time.perf_counter() < until:
        with suppress(BlockingIOError):
            return sock.recv(NBYTES, socket.MSG_DONTWAIT)
    return sock.recv(NBYTES)


def _forward(
    above: socket.socket, below: list[socket.socket], poll_s: float, work_s: float
) -> None:
    """Pass messages down to all, and one answer up when all have answered, until the end."""
    while message := _received(above, poll_s):
        work(work_s / 2)
        for sock in below:
            sock.sendall(message)
        for sock in below:
            _received(sock, poll_s)
        work(work_s / 2)
        above.sendall(message)


def _serve(
    above: socket.socket, widths: list[int], poll_s: float, works_s: tuple[float, ...]
) -> None:
    """One level of the chain in this process; the levels below it in children."""
    below = []
    for _ in range(widths[0] if widths else 0):
        here, there = socket.socketpair()
        if os.fork() == 0:
            here.close()
            _serve(there, widths[1:], poll_s, works_s[1:])
            os._exit(0)
        there.close()
        below.append(here)
    _forward(above, below, poll_s, works_s[0])


@contextmanager
def chain(
    ranks: int, poll_s: float = 0.0, works_s: tuple[float, ...] = NO_WORK
) -> Iterator[socket.socket]:
    """The caller's end of a chain: a message that is sent to it comes back through all hops."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, [1, ranks], poll_s, works_s[1:])
        os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def main(
    ranks: int, turns: int, poll_s: float = 0.0, works_s: tuple[float, ...] = NO_WORK
) -> float:
    """The p50 of some turns, in seconds."""
    times, message = [], bytes(NBYTES)
    with chain(ranks, poll_s, works_s) as sock:
        for _ in range(turns):
            begin = time.perf_counter()
            work(works_s[0] / 2)
            sock.sendall(message)
            _received(sock, poll_s)
            work(works_s[0] / 2)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    poll_s, *works_s = [float(us) * 1e-6 for us in sys.argv[3:]] or [0.0]
    print(main(int(sys.argv[1]), int(sys.argv[2]), poll_s, tuple(works_s) or NO_WORK))
