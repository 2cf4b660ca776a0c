"""A bare chain of sockets with the hops of an empty call: the least that such a call can take.

The caller, a process between, a second one, and leaves, as the GroupManager, the proxy and the
ranks of a gang on one node: blocking sockets, one fixed message, nothing else.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

NBYTES = 160  # about as much as an empty call


def _forward(above: socket.socket, below: list[socket.socket]) -> None:
    """Pass messages down to all, and one answer up when all have answered, until the end."""
    while message := above.recv(NBYTES):
        for sock in below:
            sock.sendall(message)
        for sock in below:
            sock.recv(NBYTES)
        above.sendall(message)


def _serve(above: socket.socket, widths: list[int]) -> None:
    """One level of the chain in this process; the levels below it in children."""
    below = []
    for _ in range(widths[0] if widths else 0):
        here, there = socket.socketpair()
        if os.fork() == 0:
            here.close()
            _serve(there, widths[1:])
            os._exit(0)
        there.close()
        below.append(here)
    _forward(above, below)


@contextmanager
def chain(ranks: int) -> Iterator[socket.socket]:
    """The caller's end of a chain: a message that is sent to it comes back through all hops."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve(theirs, [1, ranks])
        os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def main(ranks: int, turns: int) -> float:
    """The p50 of some turns, in seconds."""
    times, message = [], bytes(NBYTES)
    with chain(ranks) as sock:
        for _ in range(turns):
            begin = time.perf_counter()
            sock.sendall(message)
            sock.recv(NBYTES)
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
