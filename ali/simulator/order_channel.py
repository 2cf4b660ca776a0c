"""A rank's connection to the process that steps the simulation."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, ConnectionLost, Kind, WireError
from mpi_workers.wire.short_waits import ShortWait

if TYPE_CHECKING:
    from ali.interface import Context

POLL_INTERVAL_S = 1.0  # between checks whether the call has failed on another rank
DIAL_S = 5.0


class OrderChannel:
    """Receives orders from the client, one at a time; rank 0 answers.

    Parameters
    ----------
    ctx : Context
        Context of the routine that serves.
    addresses : list of str
        The client's listening addresses: a Unix socket of its node, a TCP port.
    token : str
        The client's secret.

    Raises
    ------
    Failure
        TransferError, if the client cannot be reached.
    """

    def __init__(self, ctx: Context, addresses: list[str], token: str) -> None:
        self._ctx = ctx
        try:
            self._connection: Connection = connect(
                sockets.reachable_addresses(addresses)[0],
                token,
                {"rank": ctx.rank},
                timeout_s=DIAL_S,
                take_fds=False,
            )[0]
        except (OSError, WireError, Failure, IndexError) as error:
            raise Failure(
                "TransferError", f"rank {ctx.rank} cannot reach its client at {addresses}: {error}"
            ) from None

        readable = select.poll()
        readable.register(self._connection.sock, select.POLLIN)
        self._wait = ShortWait(readable)

    def next(self) -> Body | None:
        """The next order; None if the client has disconnected. Raises `Interrupted`."""
        try:
            while not (self._connection.buffered or self._wait(1e3 * POLL_INTERVAL_S)):
                self._ctx.check()
            frame = self._connection.recv()
        except (ConnectionLost, WireError):
            return None
        return frame.body if frame.kind == Kind.COMMAND else None

    def answer(self, order: Body, **told: Any) -> None:
        """Send the result from rank 0. A lost client is noticed by the next `next`."""
        if self._ctx.rank == 0:
            try:
                self._connection.send(Kind.REPLY, {"n": order["n"], **told})
            except WireError:
                return

    def close(self) -> None:
        self._connection.close()
