"""A rank's end of the line to the process that steps the simulation."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, ConnectionLost, Kind, WireError

if TYPE_CHECKING:
    from ali.interface import Context

POLL_INTERVAL_MS = 1000  # between looks whether the call has failed elsewhere: next to no work
DIAL_S = 5.0


class Line:
    """Orders from the client, one after the other; rank 0 answers.

    Parameters
    ----------
    ctx : Context
        Of the routine that serves.
    addresses : list of str
        Where the client listens: a Unix socket of its node, a TCP port.
    token : str
        What it wants to hear.

    Raises
    ------
    Failure
        TransferError, if it cannot be reached.
    """

    def __init__(self, ctx: Context, addresses: list[str], token: str) -> None:
        self._ctx = ctx
        near = [a for a in addresses if sockets.reachable_here(a)]
        far = [a for a in addresses if a.startswith("tcp:")]
        try:
            self._connection: Connection = connect(
                (near + far)[0], token, {"rank": ctx.rank}, timeout_s=DIAL_S, take_fds=False
            )[0]
        except (OSError, WireError, Failure, IndexError) as error:
            raise Failure(
                "TransferError", f"rank {ctx.rank} cannot reach its client at {addresses}: {error}"
            ) from None
        self._news = select.poll()
        self._news.register(self._connection.sock, select.POLLIN)

    def next(self) -> Body | None:
        """The next order; None: the client has hung up. Raises `Interrupted`."""
        try:
            while not (self._connection.buffered or self._news.poll(POLL_INTERVAL_MS)):
                self._ctx.check()
            frame = self._connection.recv()
        except (ConnectionLost, WireError):
            return None
        return frame.body if frame.kind == Kind.COMMAND else None

    def answer(self, order: Body, **told: Any) -> None:
        """Rank 0 tells what came of it; whether the client is still there shows next."""
        if self._ctx.rank == 0:
            try:
                self._connection.send(Kind.REPLY, {"n": order["n"], **told})
            except WireError:
                return

    def close(self) -> None:
        self._connection.close()
