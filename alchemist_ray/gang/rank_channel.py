"""Straight lines from this process to a gang's ranks, for a routine that stays there and serves.

A command passes the GroupManager and the proxies, there and back. Where one call follows
another (the steps of a simulation), a routine may serve instead: it is one command, under way for
as long as it is wanted, and takes its orders from a line to this process. How it ends is
the command's affair as ever: a rank that dies or raises ends it, and who waits is told.
"""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from alchemist_ray.errors import AlchemistError, CallTimeoutError, GroupFailedError, from_failure
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.runtime.network import address_towards
from mpi_workers.failures import Failure
from mpi_workers.node.cleanup import PrivateFolder
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind

RANKS = 64  # more are told node by node, by commands
NEWS_S = 35.0  # until a command that lost a rank has ended: as long as others may be stuck in MPI
LEAVE_S = 5.0
POLL_INTERVAL_S = 0.05

Serve = Callable[[list[str], str], Any]


class _Command:
    """The command under way, waited for by a thread."""

    def __init__(self, serve: Serve, addresses: list[str], token: str) -> None:
        self.over = threading.Event()
        self.error: BaseException | None = None
        threading.Thread(target=self._run, args=(serve, addresses, token), daemon=True).start()

    def _run(self, serve: Serve, addresses: list[str], token: str) -> None:
        try:
            serve(addresses, token)
        except BaseException as error:
            self.error = error
        finally:
            self.over.set()


class RankChannel:
    """Lines to all ranks of a gang. For one thread.

    Parameters
    ----------
    serve : callable(addresses, token)
        Calls the routine that serves, and waits for its end. Each rank dials one of the
        addresses.
    cancel : callable()
        Cancels that call.
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
        self._cancel = cancel
        self._asked = 0
        self._lines: list[Connection] = []
        self._news = select.poll()
        token = secrets.token_hex(32)
        folder = PrivateFolder(f"lines-{uuid.uuid4().hex[:10]}")
        listeners = [sockets.listen_unix(folder.socket("line"))]
        try:
            workers = gang_address.workers
            if not all(any(map(sockets.reachable_here, w["addresses"])) for w in workers):
                listeners.append(sockets.listen_tcp(_own_address(workers)))
            addresses = [address for _, address in listeners]
            self._command = _Command(serve, addresses, token)
            self._accept([sock for sock, _ in listeners], len(workers), token, timeout_s)
        except BaseException:
            self._give_up()
            raise
        finally:
            for sock, _ in listeners:
                sock.close()
            folder.remove()

    def _give_up(self) -> None:
        """End the command, which holds this process's link to the gang for as long as it lasts."""
        self.hang_up()
        command = getattr(self, "_command", None)
        if command is not None and not command.over.is_set():
            self._cancel()
            if not command.over.wait(LEAVE_S):
                raise GroupFailedError("the gang does not answer: its ranks are stuck")

    def _accept(
        self, listeners: Sequence[socket.socket], size: int, token: str, timeout_s: float
    ) -> None:
        """Wait for a line from every rank, with an eye on the command."""
        found: dict[int, Connection] = {}
        deadline = time.monotonic() + timeout_s
        with contextlib.closing(Acceptor(listeners, token, {})) as acceptor:
            while len(found) < size:
                if self._command.over.is_set():
                    raise self._ended()
                if time.monotonic() > deadline:
                    raise CallTimeoutError(
                        f"{size - len(found)} of {size} ranks did not call back in "
                        f"{timeout_s:g} s: can their nodes connect to this one?"
                    )
                for connection, fields in acceptor.poll(POLL_INTERVAL_S):
                    found[fields["rank"]] = connection
        self._lines = [found[rank] for rank in sorted(found)]
        for line in self._lines:
            self._news.register(line.sock, select.POLLIN)

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
            for line in self._lines:
                line.write(order)
            return self._answer(time.monotonic() + timeout_s, timeout_s)
        except AlchemistError:  # the answer; a timeout is an OSError as well
            raise
        except (frames.WireError, OSError):
            raise self._lost() from None
        except KeyboardInterrupt:  # the ranks leave the order, and with it the routine
            self._cancel()
            self.hang_up()
            raise

    def _answer(self, deadline: float, timeout_s: float) -> Any:
        first = self._lines[0]
        while True:
            if not first.buffered:
                left = max(0.0, deadline - time.monotonic())
                news = self._news.poll(left * 1e3)
                if not news:
                    raise CallTimeoutError(f"no answer in {timeout_s:g} s")
                if all(fd != first.sock.fileno() for fd, _ in news):
                    raise self._lost()  # other ranks only ever hang up
            answer = first.recv().body
            if answer["n"] != self._asked:
                continue  # to an order whose wait was broken off
            if "refused" in answer:
                raise from_failure(Failure.from_map(answer["refused"]))
            return answer["value"]

    def _lost(self) -> BaseException:
        """A line broke: the command has failed, or is about to."""
        self.hang_up()
        self._command.over.wait(NEWS_S)
        return self._ended()

    def _ended(self) -> BaseException:
        if self._command.error is not None:
            return self._command.error
        return GroupFailedError(
            "the ranks have hung up" if self._command.over.is_set() else "the ranks are stuck",
            cause="line lost",
        )

    def cancel(self) -> None:
        """Cancel the routine, from any thread: a wait for an answer ends with its error."""
        self._cancel()

    def hang_up(self) -> None:
        """Close the lines; the ranks leave the routine when they are back from their order."""
        lines, self._lines = self._lines, []
        for line in lines:
            line.close()

    def close(self) -> bool:
        """Hang up and wait for the routine's end; whether it came in a few seconds."""
        self.hang_up()
        return self._command.over.wait(LEAVE_S)


def open_rank_channel(
    serve: Serve, cancel: Callable[[], None], gang_address: GangAddress, timeout_s: float
) -> RankChannel | None:
    """Lines to all ranks of a gang; None where there are too many, or they cannot reach us.

    Raises
    ------
    GroupFailedError
        If the gang is lost.
    """
    if len(gang_address.workers) > RANKS:
        return None
    try:
        return RankChannel(serve, cancel, gang_address, timeout_s)
    except GroupFailedError:
        raise
    except (AlchemistError, OSError):
        return None


def _own_address(workers: Sequence[dict[str, Any]]) -> str:
    """This machine's address on the way to the ranks."""
    hosts = (
        address.removeprefix("tcp:").rpartition(":")[0]
        for worker in workers
        for address in worker["addresses"]
        if address.startswith("tcp:")
    )
    return address_towards(next(hosts))
