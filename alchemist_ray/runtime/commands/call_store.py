"""CallStore: calls that outlive the process that submits them, and their results.

For the dispatcher it is a sender of commands like a connection: it gets their answers, and what
they print, for the processes that ask later. The store is in the GroupManager's memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from alchemist_ray.arguments import MAX_SECONDS
from alchemist_ray.attached.info import user_of
from alchemist_ray.runtime.commands.handlers import Commands
from alchemist_ray.runtime.commands.jobs import Job
from mpi_workers.failures import Failure
from mpi_workers.matrix.sizes import readable
from mpi_workers.protocol.commands import checked, matrices_of
from mpi_workers.protocol.proxy_messages import STDERR, Line
from mpi_workers.wire.frames import Body, Kind, pack

STORE_NBYTES = 256 << 20  # 256 MiB: commands that wait, results and output of a gang
OUTPUT_NBYTES = 64 << 10  # 64 KiB: the last part of what a call has printed
# Of each call until it is over: its output and its result. Larger results of functions stay on the
# ranks (`functions.submitted`).
RESERVED_NBYTES = 2 * OUTPUT_NBYTES
WATCH_S = 20.0  # for which a process waits for the end of a call, before it asks again
CUT = (-1, STDERR, "... earlier lines are in `alchemist logs` ...")


@dataclass(slots=True, eq=False)
class StoredCall:
    """A submitted call.

    Attributes
    ----------
    job : Job or None
        Until it is over.
    keep_s : float
        Seconds for which the result is kept.
    nbytes : int
        Bytes that it takes in the store.
    about : dict
        Its description for users, once it is over.
    reply : dict
        Its result or error, once it is over.
    """

    job: Job | None
    keep_s: float
    nbytes: int
    about: Body = field(default_factory=dict)
    reply: Body = field(default_factory=dict)
    progress: list[Any] = field(default_factory=list)
    _lines: deque[Line] = field(default_factory=deque)
    _printed: int = 0  # bytes of them
    _cut: bool = False

    def described(self) -> Body:
        """It for users."""
        if self.job is None:
            return self.about
        return self.job.described("queued" if self.job.began is None else "running")

    def show(self, event: Body) -> None:
        """Keep progress, or lines: the last ones."""
        if "output" not in event:
            self.progress = [event["fraction"], event["text"]]
            return
        for rank, stream, text in event["output"]:
            text = text[-OUTPUT_NBYTES:]
            self._lines.append((rank, stream, text))
            self._printed += len(text) + 1
        while self._printed > OUTPUT_NBYTES:
            self._printed -= len(self._lines.popleft()[2]) + 1
            self._cut = True

    @property
    def output(self) -> list[Line]:
        return [CUT] * self._cut + list(self._lines)


class CallStore:
    """The submitted calls of one gang, over all its incarnations.

    A method with the name of a command carries it out and answers.

    Parameters
    ----------
    commands : Commands
        Have the matrices that calls take and make, which are leased to the ids of the calls.
    enqueue : callable(job)
    end_early : callable(job, why)
        Cancels a call.
    detached : bool
        Whether the gang outlives its programs.
    """

    transport: asyncio.Transport | None = None  # see `Sender`

    def __init__(
        self,
        commands: Commands,
        enqueue: Callable[[Job], None],
        end_early: Callable[[Job, str], None],
        *,
        detached: bool,
    ) -> None:
        self._commands = commands
        self._enqueue = enqueue
        self._end_early = end_early
        self._detached = detached
        self._calls: dict[str, StoredCall] = {}
        self._nbytes = 0
        self._watching: list[Job] = []

    # --- what processes ask for ---

    def submit(self, job: Job) -> None:
        """Queue a call; one that comes again is known."""
        ident, command = str(job.body["call"]), job.body["command"]
        if ident not in self._calls:
            self._check(command, job.body["keep_s"])
            nbytes = len(pack(command)) + RESERVED_NBYTES
            if self._nbytes + nbytes > STORE_NBYTES:
                raise Failure(
                    "ResourceError",
                    f"the submitted calls of this gang take {readable(self._nbytes)}, and another "
                    f"one would exceed the limit of {readable(STORE_NBYTES)}: forget() those whose "
                    "results you have, or submit it later",
                )
            command = {**command, "own_turn": True}
            if "quota_nbytes" in job.body:
                command["quota_nbytes"] = job.body["quota_nbytes"]
            its = Job(command, ident, self, ident, caller=job.caller)
            self._enqueue(its)
            self._calls[ident] = StoredCall(its, job.body["keep_s"], nbytes)
            self._nbytes += nbytes
            self._commands.hold({"matrices": matrices_of(command)}, ident)
        job.answer({})

    def _check(self, command: Any, keep_s: Any) -> None:
        if not self._detached:
            raise Failure(
                "SessionError",
                "this gang ends with its program, and its calls with it: submit() is for a gang "
                "that stays (AlchemistSession(..., name=..., lifetime='detached'))",
            )
        if not (isinstance(command, dict) and command.get("op") in ("call", "run")):
            raise Failure("GroupError", "only calls of routines and functions can be submitted")
        checked(command)
        if not (isinstance(keep_s, int | float) and 0 < keep_s <= MAX_SECONDS):
            raise Failure("BadArgumentError", f"keep_s={keep_s!r}: it must be greater than 0")

    def submitted(self, job: Job) -> None:
        """All calls; `running`: when one of these is over, or after a while."""
        watched = [self._calls.get(ident) for ident in job.body.get("running", ())]
        if not watched or any(call is None or call.job is None for call in watched):
            self._tell(job)
        else:
            self._watching = [other for other in self._watching if not other.answered] + [job]
            job.timer = asyncio.get_running_loop().call_later(WATCH_S, self._tell, job)

    def _tell(self, job: Job) -> None:
        job.answer({"calls": [call.described() for call in self._calls.values()]})

    def call_state(self, job: Job) -> None:
        """A call, its progress, and the last lines that it has printed."""
        call = self._known(job)
        told = {"call": call.described(), "progress": call.progress, "output": call.output}
        job.answer(told)

    def call_result(self, job: Job) -> None:
        """The answer to a call that is over. The process that asks holds its matrices."""
        call = self._known(job)
        if call.job is not None:
            raise Failure("GroupError", f"call {job.body['call']} is not over yet")
        if "error" in call.reply:
            raise Failure.from_map(call.reply["error"])
        records = self._commands.matrices.values()
        held = [record.id for record in records if job.body["call"] in record.holders]
        self._commands.hold({"matrices": held}, job.holder)
        job.answer(call.reply["result"])

    def cancel_call(self, job: Job) -> None:
        """Cancel a call, if it is not over."""
        if (its := self._known(job).job) is not None:
            self._end_early(its, "the call was cancelled")
        job.answer({})

    def forget_call(self, job: Job) -> None:
        """Free the result of a call, with its matrices."""
        ident = job.body["call"]
        if ident in self._calls:
            if self._calls[ident].job is not None:
                raise Failure("GroupError", f"call {ident} is not over yet: cancel() it first")
            self._forget(ident)
        job.answer({})

    def _known(self, job: Job) -> StoredCall:
        try:
            return self._calls[job.body["call"]]
        except KeyError:
            raise Failure(
                "GroupError",
                f"this gang has no submitted call {job.body['call']}: it was forgotten, or its "
                "result was kept for its time (keep_s of submit)",
            ) from None

    def ended(self) -> dict[str, dict[str, int]]:
        """How many calls are over, by user and state."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for call in self._calls.values():
            if call.job is None:
                counts[user_of(call.about["caller"])][call.about["state"]] += 1
        return {user: dict(states) for user, states in counts.items()}

    # --- what the dispatcher tells its senders ---

    def send(self, kind: Kind, body: Body) -> None:
        """See `Sender`."""
        call = self._calls[body["id"]]
        if kind is Kind.EVENT:
            call.show(body)
        else:
            self._over(body["id"], call, {key: body[key] for key in body if key != "id"})

    def _over(self, ident: str, call: StoredCall, reply: Body) -> None:
        job, call.job = call.job, None
        assert job is not None
        self._nbytes -= call.nbytes
        nbytes = len(pack(reply)) + OUTPUT_NBYTES
        if self._nbytes + nbytes > STORE_NBYTES and nbytes > RESERVED_NBYTES:
            words = (
                f"the result of {job.name} has {readable(nbytes)}, which exceeds the limit of all "
                f"submitted calls, {readable(STORE_NBYTES)}: return a matrix, or write a file"
            )
            reply = {"error": Failure("ResourceError", words).to_map()}
            self._commands.lost(ident)
            nbytes = len(pack(reply)) + OUTPUT_NBYTES
        call.reply, call.nbytes = reply, nbytes
        self._nbytes += nbytes
        kind = reply.get("error", {}).get("kind")
        state = {None: "done", "CancelledError": "cancelled"}.get(kind, "failed")
        call.about = job.described(state)
        self._commands.release({"matrices": matrices_of(job.body)}, ident)
        asyncio.get_running_loop().call_later(call.keep_s, self._forget, ident)
        watching, self._watching = self._watching, []
        for each in watching:
            self._tell(each)

    def _forget(self, ident: str) -> None:
        call = self._calls.pop(ident, None)
        if call is not None:
            self._nbytes -= call.nbytes
            self._commands.lost(ident)
