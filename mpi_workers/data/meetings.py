"""How ranks of two gangs get a connection for a channel, at a data endpoint of one of them.

1. A rank of the endpoint's node waits, through its Unix socket.
2. Ranks of the other gang call it, through that or TCP; they may come first.
3. The endpoint passes each caller's socket to the rank, and has no part in what follows.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Any

from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind

ROLE = "channel"  # of such a connection
READY_S = 60.0


class Meetings:
    """The ends of channels that wait for their other end. Thread-safe; no thread waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Any, Connection] = {}  # by channel and rank
        self._calling: dict[Any, dict[int, Connection]] = {}  # and by the caller's rank

    def join(self, connection: Connection, fields: Body) -> None:
        """A rank of this node waits for callers, or a rank of another gang calls one.

        Raises
        ------
        Failure
            If it does not say which.
        WireError, TimeoutError
            If a rank that waits does not take descriptors yet, `READY_S` later.
        """
        match fields:
            case {"channel": str(channel), "rank": int(rank), "caller": int(caller)}:
                where = channel, rank
            case _:
                raise Failure("AuthError", "a channel has a name, a rank and its caller")
        if caller < 0 and not connection.unix:
            raise Failure("AuthError", "a rank waits for callers on its own node")
        if caller < 0:
            connection.recv(READY_S)
        with self._lock:
            self._forget_gone()
            if caller < 0:
                self._waiting[where] = connection
            else:
                self._calling.setdefault(where, {})[caller] = connection
            if (rank_here := self._waiting.get(where)) is not None:
                for number, calling in self._calling.pop(where, {}).items():
                    self._pass_on(rank_here, number, calling)

    @staticmethod
    def _pass_on(rank: Connection, number: int, calling: Connection) -> None:
        with contextlib.suppress(frames.WireError, OSError):  # the rank is gone, and so is this end
            rank.send(Kind.EVENT, {"caller": number}, fds=[calling.sock.fileno()])
        calling.close()

    def _forget_gone(self) -> None:
        for where, waiting in list(self._waiting.items()):
            if _hung_up(waiting.sock):
                self._waiting.pop(where).close()
        for callers in self._calling.values():
            for number, calling in list(callers.items()):
                if _hung_up(calling.sock):
                    callers.pop(number).close()


def _hung_up(sock: socket.socket) -> bool:
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    return bool(poller.poll(0))
