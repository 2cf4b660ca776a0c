"""Rank channels: direct connections from this process to a gang's ranks, for a serving routine.

A command passes the GroupManager and the proxies, there and back. For many small calls in a row
(the steps of a simulation) a routine can serve instead: it is one long command, and each rank
takes its orders over a connection to this process. It ends as any command does: a rank that dies
or raises ends it, and the caller gets the error.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.background import in_thread
from alchemist_ray.errors import (
    NEXT_GANG,
    AlchemistError,
    CallTimeoutError,
    GroupFailedError,
    GroupRecoveredError,
    from_failure,
)
from alchemist_ray.network import address_towards
from mpi_workers.data.description import NodeAddress
from mpi_workers.deadlines import LOST_COMMAND_S
from mpi_workers.failures import Failure
from mpi_workers.node.cleanup import PrivateFolder
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer, authenticate
from mpi_workers.wire.blocking import Connection, ShortWait
from mpi_workers.wire.frames import Body, Kind

RANKS = 64  # larger gangs are called by commands, node by node
LEAVE_TIMEOUT_S = 5.0  # for the routine to end after the channel was closed
POLL_INTERVAL_S = 0.05

Serve = Callable[[list[str], str], Any]


class RankChannel:
    """Connections to all ranks of a gang. For one thread.

    Parameters
    ----------
    serve : callable(addresses, token)
        Calls the routine that serves, and waits for its end. Each rank dials one of the
        addresses.
    cancel : callable()
        Cancels that call, from any thread: a wait for an answer ends with its error.
    gang_address : GangAddress
        The gang.
    timeout_s : float
        For all ranks to call.

    Raises
    ------
    AlchemistError
        What ended the routine; GroupFailedError; CallTimeoutError, if ranks did not call in time.
    """

    def __init__(
        self, serve: Serve, cancel: Callable[[], None], gang_address: GangAddress, timeout_s: float
    ) -> None:
        self.cancel = cancel
        self._stuck_timeout_s = gang_address.stuck_timeout_s
        self._asked = 0
        self._connections: list[Connection] = []
        self._readable = select.poll()
        self._wait = ShortWait(self._readable)
        token = secrets.token_hex(32)
        folder = PrivateFolder(f"channel-{uuid.uuid4().hex[:10]}")
        listeners = [sockets.listen_unix(folder.socket("channel"))]
        try:
            nodes = gang_address.nodes
            if not all(any(map(sockets.reachable_here, node.addresses)) for node in nodes):
                listeners.append(sockets.listen_tcp(_own_address(nodes)))
            addresses = [address for _, address in listeners]
            self._command = in_thread(partial(serve, addresses, token))
            self._accept([sock for sock, _ in listeners], gang_address.size, token, timeout_s)
        except BaseException:
            self._give_up()
            raise
        finally:
            for sock, _ in listeners:
                sock.close()
            folder.remove()

    def _give_up(self) -> None:
        """End the command, which would keep the ranks busy."""
        self.hang_up()
        command = getattr(self, "_command", None)
        if command is not None and not command.done():
            self.cancel()
            if not wait([command], LEAVE_TIMEOUT_S).done:
                raise GroupFailedError(
                    f"the gang does not answer: its ranks are stuck. {NEXT_GANG}"
                )

    def _accept(
        self, listeners: Sequence[socket.socket], size: int, token: str, timeout_s: float
    ) -> None:
        """Wait for a connection from every rank, or for the end of the command."""
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + timeout_s
        peers: SimpleQueue[AuthenticatedPeer] = SimpleQueue()
        known = partial(authenticate, token=token, welcome={})
        with contextlib.closing(Acceptor(listeners, known, peers.put).start()):
            while len(found) < size:
                if self._command.done():
                    raise self._ended()
                if time.monotonic() > deadline:
                    raise CallTimeoutError(
                        f"{size - len(found)} of {size} ranks did not connect to this "
                        f"process within {timeout_s:g} s: check that their nodes can reach this one"
                    )
                with contextlib.suppress(Empty):
                    connection, fields = peers.get(timeout=POLL_INTERVAL_S)
                    found[fields["rank"]] = connection
        self._connections = [found[rank] for rank in sorted(found)]
        for connection in self._connections:
            self._readable.register(connection.sock, select.POLLIN)

    def ask(self, body: Body, timeout_s: float) -> Any:
        """Give all ranks an order and wait for rank 0's answer.

        Raises
        ------
        CallTimeoutError
            If none came in time; the ranks may still be at it.
        AlchemistError
            What the routine refuses; what ended it (its lines are closed then).
        """
        self._asked += 1
        order = frames.encode(Kind.COMMAND, {**body, "n": self._asked})
        try:
            for connection in self._connections:
                connection.write(order)
            return self._answer(time.monotonic() + timeout_s, timeout_s)
        except AlchemistError:  # the answer: a CallTimeoutError is an OSError as well
            raise
        except (frames.WireError, OSError):
            raise self._lost() from None
        except BaseException:  # Ctrl-C, or another signal's handler: the ranks leave the routine
            self.cancel()
            self.hang_up()
            raise

    def _answer(self, deadline: float, timeout_s: float) -> Any:
        first = self._connections[0]
        while True:
            if not first.buffered:
                left = max(0.0, deadline - time.monotonic())
                news = self._wait(left * 1e3)
                if not news:
                    raise CallTimeoutError(f"the ranks did not answer in {timeout_s:g} s")
                if all(fd != first.sock.fileno() for fd, _ in news):
                    raise self._lost()  # other ranks never send anything
            answer = first.recv().body
            if answer["n"] != self._asked:
                continue  # of an earlier order that timed out
            if "refused" in answer:
                raise from_failure(Failure.from_map(answer["refused"]))
            return answer["value"]

    def _lost(self) -> BaseException:
        """A connection broke: the command has failed, or is about to."""
        self.hang_up()
        wait([self._command], self._stuck_timeout_s + LOST_COMMAND_S)
        return self._ended()

    def _ended(self) -> BaseException:
        over = self._command.done()
        if over and (error := self._command.exception()) is not None:
            return error
        return GroupFailedError(
            "the ranks disconnected" if over else "the ranks are stuck", cause="rank channel lost"
        )

    @property
    def serving(self) -> bool:
        """Whether the ranks take orders: an error of an order can end the routine."""
        return bool(self._connections)

    def hang_up(self) -> None:
        """Close the connections; each rank leaves the routine after its current order."""
        connections, self._connections = self._connections, []
        for connection in connections:
            connection.close()

    def close(self) -> bool:
        """Close the channel and wait some seconds for the routine; whether it ended."""
        self.hang_up()
        return bool(wait([self._command], LEAVE_TIMEOUT_S).done)


def open_rank_channel(
    serve: Serve, cancel: Callable[[], None], gang_address: GangAddress, timeout_s: float
) -> RankChannel | None:
    """A channel to all ranks of a gang; None for large gangs, or if ranks cannot connect here.

    Raises
    ------
    GroupFailedError
        If the gang is lost.
    """
    if gang_address.size > RANKS:
        return None
    try:
        return RankChannel(serve, cancel, gang_address, timeout_s)
    except (GroupFailedError, GroupRecoveredError):
        raise
    except (AlchemistError, OSError):
        return None


def _own_address(nodes: Sequence[NodeAddress]) -> str:
    """This machine's address on the way to the ranks."""
    hosts = (
        address.removeprefix("tcp:").rpartition(":")[0]
        for node in nodes
        for address in node.addresses
        if address.startswith("tcp:")
    )
    return address_towards(next(hosts))
