"""Commands on their way through the dispatcher: jobs, their queue, and what they change."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from alchemist_ray.attached.progress import as_text
from alchemist_ray.runtime.commands.handlers import NO_HOLDER
from alchemist_ray.runtime.commands.matrix_records import Record
from alchemist_ray.runtime.commands.nodes import Round
from mpi_workers.failures import Failure
from mpi_workers.node.rank_output import dropped_note
from mpi_workers.protocol.commands import command_name
from mpi_workers.protocol.proxy_messages import STDERR, Line
from mpi_workers.wire.frames import Body, Kind

HELD_S = 2.0  # for which a resize holds up matrices that would be sent
BACKLOG_NBYTES = 8 << 20  # 8 MiB that a process has not read yet; further lines are dropped


def log(lines: Iterable[Line]) -> None:
    """Write output that no call waits for to this process's log, which Ray shows to the user."""
    sys.stdout.write(as_text(lines))
    sys.stdout.flush()


class Sender(Protocol):
    """Where a command comes from, and its answer goes: a connection, or the store of calls.

    Attributes
    ----------
    transport : asyncio.Transport or None
    """

    transport: asyncio.Transport | None

    def send(self, kind: Kind, body: Body) -> None:
        """Take an answer, or an event of a command under way."""


@dataclass(slots=True, eq=False)
class Job:
    """A command and who waits for its answer: a sender, a future of the actor, or neither.

    Attributes
    ----------
    caller : str
        The process that wants it, for users: ``user@host (pid 123)``.
    began : float or None
        When its turn came, as `since`.
    ident : object
        The number of the command at its sender; None: the process does not wait for an answer.
    work : callable, optional
        What the GroupManager itself does in a turn among the commands.
    first_round : int
        The number of the first round that can belong to it.
    begun : bool
        Whether ranks have got something of it, when they were lost.
    cancelled : Failure or None
        Why it is no longer wanted.
    losses : int
        How often ranks were lost while it ran.
    asked_for_ranks : bool
        Whether ranks were started for it, on a gang that had none.
    """

    body: Body
    holder: str = NO_HOLDER
    connection: Sender | None = None
    ident: Any = None
    caller: str = ""
    future: asyncio.Future[Body] | None = None
    work: Callable[[], Awaitable[Any]] | None = None
    timer: asyncio.TimerHandle | None = None
    first_round: int = 0
    begun: bool = False
    cancelled: Failure | None = None
    answered: bool = False
    losses: int = 0
    asked_for_ranks: bool = False
    since: float = field(default_factory=time.monotonic)
    began: float | None = None
    _dropped: dict[int, int] = field(default_factory=dict)  # bytes of output, by rank

    def answer(self, result: Body | Failure) -> None:
        """Send the result or the failure to the waiting client. Only the first call counts."""
        if self.answered:
            return
        if self.timer is not None:
            self.timer.cancel()
        self._show_dropped()
        self.answered = True
        if self.connection is not None:
            self._reply(self.connection, result)
        elif self.future is not None and not self.future.done():
            if isinstance(result, Failure):
                self.future.set_exception(result)
                self.future.exception()  # seen: the caller may have gone
            else:
                self.future.set_result(result)

    def _reply(self, connection: Sender, result: Body | Failure) -> None:
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

    def show(self, **event: Any) -> None:
        """Send progress, or lines of output, to the process that waits for the answer."""
        if self.connection is not None and not self.answered:
            self.connection.send(Kind.EVENT, {"id": self.ident, **event})

    def show_output(self, lines: list[Line]) -> None:
        """Send lines, or drop them while the process is far behind with reading."""
        transport = self.connection.transport if self.connection is not None else None
        if transport is not None and transport.get_write_buffer_size() > BACKLOG_NBYTES:
            for rank, _, text in lines:
                self._dropped[rank] = self._dropped.get(rank, 0) + len(text) + 1
            return
        self._show_dropped()
        self.show(output=lines)

    def _show_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, {}
            self.show(output=[dropped_note(rank, n) for rank, n in sorted(dropped.items())])

    def notice(self, text: str) -> None:
        """Show a line to the process that waits for the answer."""
        self.show_output([(-1, STDERR, text)])

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
        now = time.monotonic()
        return {
            "name": self.name,
            "state": state,
            "caller": self.caller,
            "age_s": now - self.since,
            "running_s": None if self.began is None else now - self.began,
            "id": self.ident if isinstance(self.ident, str) else "",
            "label": self.body.get("label", ""),
        }


def calls_of(active: Job | None, queue: Iterable[Job], lingering: Round | None) -> list[Body]:
    """The calls of a gang for the catalogue, without those of the dispatcher itself.

    Parameters
    ----------
    active : Job, optional
        The command that runs.
    queue : iterable of Job
        Those that wait for it.
    lingering : Round, optional
        A call that is over for its caller, and that ranks are still in. The active command waits
        for it.
    """
    calls = [] if lingering is None else [lingering.described()]
    if active is not None and not active.own:
        calls.append(active.described("running" if lingering is None else "queued"))
    return calls + [job.described("queued") for job in queue if not job.own]


def late(limit_s: float) -> Failure:
    """The failure of a command that has exceeded its time limit."""
    return Failure(
        "CallTimeoutError",
        f"the call did not end in {limit_s:g} s (timeout_s) and was cancelled",
    )


class JobQueue:
    """Waiting commands. Work of the GroupManager comes first, then the senders in turn.

    A resize waits until no matrix is being sent. So that this moment comes, further matrices wait
    for `HELD_S`; not those of a process that is sending, because its stream may need them.

    Parameters
    ----------
    sending : callable(holder) -> bool
        Whether a process is sending a matrix; None: whether any is.
    """

    def __init__(self, sending: Callable[[str | None], bool]) -> None:
        self._sending = sending
        self._urgent: list[Job] = []
        self._by_sender: OrderedDict[Sender | None, deque[Job]] = OrderedDict()

    def __len__(self) -> int:
        """Commands of senders that wait."""
        return sum(map(len, self._by_sender.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain(self._urgent, *self._by_sender.values())

    def add(self, job: Job) -> bool:
        """Queue a command; whether it is the first one of its sender that waits."""
        if job.work is not None:
            self._urgent.append(job)
            return False
        waiting = self._by_sender.setdefault(job.connection, deque())
        waiting.append(job)
        return len(waiting) == 1

    def next(self) -> Job | None:
        """Take the next command that may run."""
        held = False
        for job in self._urgent:
            if job.body["op"] != "resize" or not self._sending(None):
                self._urgent.remove(job)
                return job
            held = time.monotonic() - job.since < HELD_S
        for sender, queue in self._by_sender.items():
            for job in queue:
                if not held or job.body["op"] != "create" or self._sending(job.holder):
                    self._by_sender.move_to_end(sender)  # the others come first
                    self.remove(job)
                    return job
        return None

    def remove(self, job: Job) -> None:
        """Take a command out, if it waits."""
        with contextlib.suppress(ValueError, KeyError):
            if job.work is not None:
                self._urgent.remove(job)
                return
            self._by_sender[job.connection].remove(job)
            if not self._by_sender[job.connection]:
                del self._by_sender[job.connection]

    def drop(self, sender: Sender) -> None:
        """Forget the commands of a sender that is gone."""
        self._by_sender.pop(sender, None)

    def clear(self) -> list[Job]:
        """Take all commands out."""
        waiting = list(self)
        self._urgent.clear()
        self._by_sender.clear()
        return waiting


class Changes:
    """The matrices that the command under way may change.

    Fetches go directly to the ranks beside the commands. A fetch asks for the version of its matrix
    before and after, and is repeated if that has been raised. No command waits for a fetch.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._waiting: list[tuple[Job, Record]] = []

    def begin(self, records: Iterable[Record]) -> object:
        """A command begins, and ranks have left the one before; returns what `end` takes."""
        self.end(self._records)
        self._records = list(records)
        self._raise()
        return self._records

    def end(self, command: object) -> None:
        """A command has ended on all ranks. It may have been ended by the next one."""
        if command is not self._records:
            return
        self._raise()
        self._records = []
        waiting, self._waiting = self._waiting, []
        for job, record in waiting:
            self.tell(job, record)

    def _raise(self) -> None:
        for record in self._records:
            record.changes += 1

    def tell(self, job: Job, record: Record | None) -> None:
        """Answer with the version of a matrix, when no command changes it; 0: it is not known."""
        if record is not None and record in self._records:
            self._waiting.append((job, record))
        elif record is not None and record.undefined:
            job.answer(Failure("MatrixError", record.undefined))
        else:
            job.answer({"version": 0 if record is None else record.changes})
