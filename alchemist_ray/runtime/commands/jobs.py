"""A command on its way through the dispatcher: who waits for it, and what its ranks print."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from alchemist_ray.gang.progress import as_text
from alchemist_ray.observe.events import command_name
from alchemist_ray.runtime.commands.handlers import NO_HOLDER
from alchemist_ray.runtime.launch.nodes import CONTINUES, Round
from mpi_workers.failures import Failure
from mpi_workers.node.output_lines import STDERR, Line, dropped_note
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body, Kind

BACKLOG_NBYTES = 8 << 20  # 8 MiB that a process has not read yet; further lines are dropped


def log(lines: Iterable[Line]) -> None:
    """Write output that no call waits for to this process's log, which Ray shows to the user."""
    sys.stdout.write(as_text(lines))
    sys.stdout.flush()


class Relay:
    """A command's output, passed on to the client that waits for the command."""

    def __init__(self, client: FrameProtocol, ident: int) -> None:
        self._client = client
        self._ident = ident
        self._dropped: dict[int, int] = {}  # bytes, by rank

    def pass_on(self, lines: list[Line]) -> None:
        """Send lines, or drop them while the client is far behind with reading."""
        transport = self._client.transport
        if transport is not None and transport.get_write_buffer_size() > BACKLOG_NBYTES:
            for rank, _, text in lines:
                self._dropped[rank] = self._dropped.get(rank, 0) + len(text) + 1
            return
        self.end()
        self._send(lines)

    def end(self) -> None:
        """Say what was dropped."""
        if self._dropped:
            dropped, self._dropped = self._dropped, {}
            self._send([dropped_note(rank, nbytes) for rank, nbytes in sorted(dropped.items())])

    def _send(self, lines: list[Line]) -> None:
        self._client.send(Kind.EVENT, {"id": self._ident, "output": lines})


# What a handler raises if a field of its command has a wrong type or value.
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(slots=True, eq=False)
class Job:
    """A command and who waits for its answer: a connection, a future of the actor, or neither.

    A process that does not wait for an answer sends its command without a number (`ident`).
    `first_round` is the number of the first round that can belong to it, `cancelled` why it
    is no longer wanted, `losses` how often ranks were lost while it ran, `internal` whether the
    GroupManager sends it.
    """

    body: Body
    holder: str = NO_HOLDER
    connection: FrameProtocol | None = None
    ident: Any = None
    future: asyncio.Future[Body] | None = None
    relay: Relay | None = None
    timer: asyncio.TimerHandle | None = None
    first_round: int = 0
    cancelled: Failure | None = None
    answered: bool = False
    losses: int = 0
    internal: bool = False
    since: float = field(default_factory=time.monotonic)

    def answer(self, result: Body | Failure) -> None:
        """Send the result or the failure to the waiting client. Only the first call counts."""
        if self.answered:
            return
        self.answered = True
        if self.timer is not None:
            self.timer.cancel()
        if self.relay is not None:
            self.relay.end()
        if self.connection is not None:
            self._reply(self.connection, result)
        elif self.future is not None and not self.future.done():
            if isinstance(result, Failure):
                self.future.set_exception(result)
                self.future.exception()  # seen: the caller may have gone
            else:
                self.future.set_result(result)

    def _reply(self, connection: FrameProtocol, result: Body | Failure) -> None:
        if self.ident is None:
            return  # the process does not wait for an answer, and would not read it
        key, value = "result", result
        if isinstance(result, Failure):
            key, value = "error", result.to_map()
        try:
            connection.send(Kind.REPLY, {"id": self.ident, key: value})
        except (Failure, TypeError, ValueError, OverflowError) as error:  # it fits no frame
            op = self.body.get("op")
            failure = Failure("TransferError", f"the answer to {op!r} cannot be sent: {error}")
            connection.send(Kind.REPLY, {"id": self.ident, "error": failure.to_map()})

    def notice(self, text: str) -> None:
        """Show a line to the process that waits for the answer."""
        if self.relay is not None and not self.answered:
            self.relay.pass_on([(-1, STDERR, text)])

    @property
    def own(self) -> bool:
        """Whether the dispatcher itself wants it, so that nothing waits for its answer."""
        return self.connection is None and self.future is None

    @property
    def name(self) -> str:
        """The running command, for users: ``linalg.svd``, or the name of a function or command."""
        return command_name(self.body)

    def described(self, state: str) -> Body:
        """The call for the catalogue."""
        caller = self.connection.peer.where if self.connection is not None else ""
        age_s = time.monotonic() - self.since
        return {"name": self.name, "state": state, "caller": caller, "age_s": age_s}

    def malformed(self, error: Exception) -> Failure:
        """The failure of a command whose fields are wrong."""
        return Failure("GroupError", f"malformed command {self.body.get('op')!r}: {error!r}")


def calls_of(active: Job | None, queue: Iterable[Job], left: Round | None) -> list[Body]:
    """The calls of a gang for the catalogue.

    Parameters
    ----------
    active : Job, optional
        The command that runs. Those of the dispatcher itself are not shown.
    queue : iterable of Job
        Those that wait for it.
    left : Round, optional
        A call that is over for its caller, and that ranks are still in. The active command waits
        for it.
    """
    calls = [] if left is None else [left.described()]
    if active is not None and not active.own:
        calls.append(active.described("running" if left is None else "queued"))
    return calls + [job.described("queued") for job in queue]


def late(limit_s: float) -> Failure:
    """The failure of a command that has exceeded its time limit."""
    return Failure(
        "CallTimeoutError",
        f"the call did not end in {limit_s:g} s (timeout_s) and was cancelled{CONTINUES}",
    )
