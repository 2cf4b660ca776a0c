"""The dispatcher: a gang's commands, one at a time, and the processes that send them.

It runs on the GroupManager's event loop. Commands arrive through a socket or through a method
of the actor. Each sender has a queue of its own, and the queues are served in turn. What a
command does is in `handlers`, how it reaches the nodes in `nodes`. A command can be
cancelled: by its sender, by its time limit, or with the Ray task that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from alchemist_ray.background import in_task, unless
from alchemist_ray.errors import AlchemistError, failure_of, to_failure
from alchemist_ray.runtime.commands import checkpoints
from alchemist_ray.runtime.commands.attached_processes import AttachedProcess, AttachedProcesses
from alchemist_ray.runtime.commands.call_store import CallStore
from alchemist_ray.runtime.commands.gang_measures import GangMeasures
from alchemist_ray.runtime.commands.handlers import NO_HOLDER, Commands, Work
from alchemist_ray.runtime.commands.jobs import HELD_S, Changes, Job, JobQueue, calls_of, late, log
from alchemist_ray.runtime.commands.matrix_records import LOSSES, CommandLog
from alchemist_ray.runtime.commands.nodes import Nodes, recovered_words
from mpi_workers.deadlines import STUCK_S
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import COMMANDS, Turn, checked
from mpi_workers.protocol.proxy_messages import STDERR, Line
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer
from mpi_workers.wire.asynchronous import FrameProtocol, listen
from mpi_workers.wire.frames import Body, Frame, Kind

QUEUE_LIMIT = 100_000
SENDING_LIMIT_S = 60.0  # for which a resize waits for matrices that are being sent
NOTICE_S = 1.0  # a caller that waits longer is told so
WORK_NOTICE_S = 3.0  # that its own command takes (`Command.notice`)
LOST_NOTICE = "ranks were lost: waiting until they are started again"
BUSY_NOTICE = (
    "waiting for ranks that are still in a call that failed or was cancelled (up to {}, then the "
    "ranks are started again)"
)
RENEWED = (
    "The ranks are started again with all matrices ({}); what libraries keep in the ranks' "
    "processes{}, and variables of %%mpi, are lost"
)
REBUILT = " (but states that save_state gives, which are rebuilt)"
CANCELLED = "the call was cancelled"
LOSS_FACTS = ("rank", "cause", "hostname", "happened")  # that its error has, too
WAITING = ("wait", "workers")  # fields of a ping that is answered when there are ranks


class NodePeer(NamedTuple):
    """A peer that is the proxy of a node, of some incarnation."""

    nodes: Nodes
    number: int


class DispatcherOwner(Protocol):
    """The owner of a dispatcher, which starts ranks and ends them."""

    def ranks_lost(self, error: AlchemistError) -> None:
        """Ranks are lost, and their memory is not. Commands wait for `go_on` or `give_up`."""

    def nodes_lost(self, error: AlchemistError) -> bool:
        """The ranks are lost with their memory; whether others are started: commands wait."""

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        """See `NodesOwner`."""

    def orphaned(self) -> None:
        """The process of the gang's owner is gone without a goodbye."""


class Dispatcher:
    """The commands of one gang, over all its incarnations. Owns its nodes (`NodesOwner`).

    Parameters
    ----------
    owner : DispatcherOwner
    lease_grace_s : float
        How long a process that is lost keeps its matrices.
    stuck_timeout_s : float
        See `Nodes`.
    recovers : bool
        Whether commands are logged, to be repeated.
    detached : bool
        Whether the gang outlives its programs, so that calls can be submitted to it.
    measures : GangMeasures, optional
        Where ended commands are counted.

    Attributes
    ----------
    nodes : Nodes
        Of the current incarnation; before the first one, without nodes.
    failure : AlchemistError or None
        The error that ended the gang.
    loss : AlchemistError or None
        The last loss of ranks or nodes.
    """

    def __init__(
        self,
        owner: DispatcherOwner,
        *,
        lease_grace_s: float = 0.0,
        stuck_timeout_s: float = STUCK_S,
        recovers: bool = False,
        detached: bool = False,
        measures: GangMeasures | None = None,
    ) -> None:
        self._stuck_timeout_s = stuck_timeout_s
        self.nodes = self.new_nodes(0, 0)
        self.failure: AlchemistError | None = None
        self._measures = measures or GangMeasures()
        self._processes = AttachedProcesses(lease_grace_s, lambda ident: self.commands.lost(ident))
        log = CommandLog(enabled=recovers)
        self.commands = Commands(
            self.nodes, self._soon, self._processes.users, log, checkpoints.write
        )
        self._store = CallStore(self.commands, self._enqueue, self._end_early, detached=detached)
        self._owner = owner
        self._connections: set[FrameProtocol] = set()
        self._queue = JobQueue(lambda holder: bool(self.commands.being_sent(holder)))
        self._active: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self._changes = Changes()
        self._tasks: set[asyncio.Task[None]] = set()
        self._there = asyncio.Event()  # not while ranks are lost and others are being started
        self._there.set()
        self.loss: AlchemistError | None = None
        self._restored = ""
        self._pings: list[Job] = []

    # --- incarnations ---

    def new_nodes(self, count: int, size: int) -> Nodes:
        """The nodes of a further incarnation; see `use`."""
        return Nodes(count, size, self, self._stuck_timeout_s)

    def listen(
        self, token: str, nodes: Nodes, host: str, unix_path: str
    ) -> tuple[Acceptor[AuthenticatedPeer], tuple[str, str]]:
        """Open the sockets of an incarnation, for this node and for others; their addresses.

        Accepted connections outlive the sockets.
        """
        tcp, tcp_address = sockets.listen_tcp(host)
        unix, unix_address = sockets.listen_unix(unix_path)
        joined = partial(self._on_hello, nodes)
        handlers = joined, self._on_frame, self._on_lost
        acceptor = listen([unix, tcp], token, *handlers, expected=nodes.count)
        return acceptor, (unix_address, tcp_address)

    def use(self, nodes: Nodes) -> None:
        """Run commands on another incarnation from now on."""
        self.nodes.dead = None
        nodes.dead = self.commands.dead
        self.nodes = self.commands.nodes = nodes

    # --- connections ---

    def _on_hello(self, nodes: Nodes, protocol: FrameProtocol, body: Body) -> Body:
        if body.get("role") == "proxy":
            nodes.joined(body["node"], protocol)
            protocol.peer = NodePeer(nodes, body["node"])
        else:
            protocol.peer = self._processes.joined(body)
            protocol.paced = True
            self._connections.add(protocol)
            self.used()
        return {"version": frames.VERSION}

    def _on_lost(self, protocol: FrameProtocol) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            self._connections.discard(protocol)
            self._queue.drop(protocol)
            if self._active is not None and self._active.connection is protocol:
                self._end_early(self._active, "the caller has disconnected")
            self._processes.disconnected(peer)
            if peer.owner and not self.nodes.closed:
                self._owner.orphaned()
        elif isinstance(peer, NodePeer):
            peer.nodes.node_ended(peer.number)

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            if frame.kind == Kind.COMMAND:
                self.used()
                ident = frame.body.pop("id", None)
                self._accept(Job(frame.body, peer.ident, protocol, ident, peer.where))
            return
        try:
            peer.nodes.receive(peer.number, frame)
        except Failure as failure:  # of ours: the proxy must not be refused for it
            text = f"a message for the gang could not be sent: {failure.message}"
            log([(-1, STDERR, text)])

    def refusal(self, nodes: Nodes) -> Failure | None:
        """See `NodesOwner`. Rounds that start ranks or restore matrices belong to no command."""
        if nodes is not self.nodes or not self._there.is_set() or self._active is None:
            return None
        return self._active.cancelled

    def show_progress(self, seq: int, fraction: float, text: str) -> None:
        """See `NodesOwner`: for the process that waits for the routine."""
        if self._active is not None and seq >= self._active.first_round:
            self._active.show(fraction=fraction, text=text)

    def show_output(self, seq: int, lines: list[Line]) -> None:
        """Lines that ranks have printed: to the process that waits for them, else to the log."""
        job = self._active
        if job is None or seq < job.first_round or job.connection is None:
            log(lines)
        elif job.body.get("output", True):
            job.show_output(lines)

    # --- commands about a connection; `Turn.CONNECTION` ---

    def _goodbye(self, job: Job, connection: FrameProtocol) -> None:
        connection.peer.owner = False
        self._processes.ended(connection.peer)
        connection.close()

    def _session(self, job: Job, connection: FrameProtocol) -> None:
        connection.peer.session = True

    def _version(self, job: Job, connection: FrameProtocol) -> None:
        self._changes.tell(job, self.commands.matrices.get(job.body["matrix"]))

    def _cancel_calls(self, job: Job, connection: FrameProtocol) -> None:
        everyone = job.body.get("all")
        job.answer({"cancelled": self.cancel_calls(None if everyone else job.holder)})

    def _status(self, job: Job, connection: FrameProtocol) -> None:
        in_task(self._with_waits(job), self._tasks)

    async def _with_waits(self, job: Job) -> None:
        """Answer with the gang's status, and in which MPI calls the ranks of its call wait."""
        waits = await self.nodes.waits_in() if self.nodes.busy else {}
        status = self.status()
        for call in status["calls"][:1]:
            if call["state"] != "queued":
                call["waits_in"] = waits
        job.answer(status)

    def _cancel(self, job: Job, connection: FrameProtocol) -> None:
        for call in (self._active, *self._queue):
            if call and call.connection is connection and call.ident == job.body["call"]:
                self._end_early(call, CANCELLED)
                return

    # --- commands come in ---

    async def submit(self, body: Body, holder: str = NO_HOLDER, work: Work | None = None) -> Body:
        """Run a command that came through Ray, or `work` of the gang. Raises `Failure`."""
        self.used()
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        job = Job(body, holder, future=future, work=work)
        self._accept(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._end_early(job, CANCELLED)
            raise

    @contextlib.asynccontextmanager
    async def resize_turn(self) -> AsyncIterator[asyncio.Future[Body]]:
        """Wait for a resize's turn (see `JobQueue`). No command runs until the block has ended.

        Yields a future that fails when the resize is cancelled. Raises `Failure` if its turn does
        not come.
        """
        self.used()
        loop = asyncio.get_running_loop()
        cancelled: asyncio.Future[Body] = loop.create_future()
        come, over = asyncio.Event(), asyncio.Event()
        body = {"op": "resize", "matrices": self.commands.matrices}
        job = Job(body, future=cancelled, work=partial(_hold_turn, come, over))
        self._accept(job)
        loop.call_later(HELD_S, self._next)
        job.timer = loop.call_later(SENDING_LIMIT_S, self._still_sending, job)
        try:
            await unless(come.wait(), cancelled)
            yield cancelled
        except BaseException:
            self._end_early(job, CANCELLED)
            raise
        finally:
            over.set()

    def _accept(self, job: Job) -> None:
        op = job.body.get("op")
        try:
            turn = Turn.QUEUED if job.work is not None else checked(job.body).turn
            if turn is Turn.CONNECTION:
                getattr(self, f"_{op}")(job, job.connection)
            elif self.failure is not None:
                job.answer(_not_begun(self.failure))
            elif turn is Turn.STORE:
                getattr(self._store, str(op))(job)
            elif turn is Turn.QUEUED:
                self._enqueue(job)
            elif not self._there.is_set() and op == "ping" and any(map(job.body.get, WAITING)):
                self._pings.append(job)
            else:
                job.answer(getattr(self.commands, str(op))(job.body, job.holder))
        except Exception as error:  # whatever it is, the sender waits for an answer
            job.answer(failure_of(error, f"command {op!r}"))

    def _enqueue(self, job: Job) -> None:
        if len(self._queue) >= QUEUE_LIMIT:
            raise Failure("GroupError", f"{QUEUE_LIMIT} commands are queued: send fewer")
        if not job.body.get("own_turn"):
            self._limit(job)
        first = self._queue.add(job)
        self._next()
        if first and job is not self._active:
            asyncio.get_running_loop().call_later(NOTICE_S, self._tell_waiting, job)

    def _limit(self, job: Job) -> None:
        if (limit_s := job.body.get("timeout_s")) is not None and job.timer is None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(limit_s, self._end_early, job, late(limit_s))

    def _tell_waiting(self, job: Job) -> None:
        """Tell a process that its command still waits for one of another process."""
        active = self._active
        if job.answered or active is None or active.connection is job.connection:
            return  # that process knows of its own command, or `_noticed` has told it
        if not self._there.is_set():
            job.notice(LOST_NOTICE)
        elif self.nodes.lingering() is not None:
            job.notice(BUSY_NOTICE.format(self.nodes.limit))
        else:
            about = active.described("running")
            caller = f" of {about['caller']}" * bool(about["caller"])
            job.notice(f"waiting for {active.name}{caller}, sent {about['age_s']:.0f} s ago")

    def _soon(self, op: str, work: Work) -> None:
        """Do something of our own before all commands that wait."""
        self._queue.add(Job({"op": op}, work=work))
        if self.failure is None and not self.nodes.closed:
            self._next()

    # --- commands run ---

    def _next(self) -> None:
        """Start the next command, if none runs."""
        if self._active is not None or not self._there.is_set():
            return
        job = self._queue.next()
        if job is not None:
            self._active = job
            self._task = asyncio.get_running_loop().create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        job.began = begun = time.monotonic()
        first = self.commands.next_id
        result = await self._attempt(job)
        while result is None:
            result = await self._after_loss(job) or await self._attempt(job)
        if self._active is job:
            self._active = None
        if job.cancelled is not None and job.work is None:  # no one gets what it has made
            made = range(first, self.commands.next_id)
            self.commands.drop(*(ident for ident in made if ident in self.commands.matrices))
        job.answer(job.cancelled or result)
        self.used()
        # Later: transports write when this turn of the loop ends, and the caller waits for that.
        asyncio.get_running_loop().call_soon(self._measures.ended, job, begun, result)
        self._next()

    async def _attempt(self, job: Job) -> Body | Failure | None:
        """Run a command; None if ranks were lost meanwhile, and others are being started."""
        job.first_round = self.nodes.last_round + 1
        changes = object()
        try:
            if self.nodes.busy:  # ranks are still in the call before
                await self._noticed(job, self.nodes.idle(), BUSY_NOTICE.format(self.nodes.limit))
            changes = self._changes.begin(self.commands.changed(job.body))
            if job.cancelled is not None:
                return job.cancelled
            self._limit(job)
            self.nodes.stuck_timeout_s = job.body.get("stuck_timeout_s", self._stuck_timeout_s)
            if job.work is not None:
                await job.work()
                return {}
            handler: Callable[[Body, str], Awaitable[Body]]
            handler = getattr(self.commands, job.body["op"])
            work = handler(job.body, job.holder)
            if notice := COMMANDS[job.body["op"]].notice:
                work = self._noticed(job, work, notice.format_map(job.body), WORK_NOTICE_S)
            return await work
        except Exception as error:  # whatever it is, the next command runs
            job.begun = self.nodes.last_round >= job.first_round
            if not self._there.is_set():
                if isinstance(error, AlchemistError):
                    return None
                self.commands.leave_undefined(job.body)  # it has failed, and has cost the ranks
            elif error is self.nodes.lost and job.work is None and not job.asked_for_ranks:
                job.asked_for_ranks = True
                self.ranks_lost(self.nodes, self.nodes.lost)
                return None
            return failure_of(error, f"command {job.body['op']!r}")
        finally:
            if self.nodes.busy:  # ranks that are still in it go on changing its matrices
                in_task(self._end_changes(changes, job.body), self._tasks)
            else:
                self._changes.end(changes)

    async def _end_changes(self, changes: object, body: Body) -> None:
        nodes = self.nodes
        await nodes.idle()
        if nodes.lost is not None:
            self.commands.leave_undefined(body)
        self._changes.end(changes)

    async def _after_loss(self, job: Job) -> Failure | None:
        """The error of a command that was lost with ranks; None: run it once more.

        If the nodes are there, it does not wait for the ranks.
        """
        if not job.begun:
            await self._noticed(job, self._there.wait(), LOST_NOTICE)
            return None if self.failure is None else _not_begun(self.failure)
        job.losses += 1
        kept = self.nodes.failure is None
        changed = self.commands.leave_undefined(job.body) if kept else []
        repeatable = self.commands.libraries.repeatable(job.body)
        rebuilt = self.commands.log.enabled and changed
        if rebuilt or (repeatable and not changed) or not kept:
            await self._noticed(job, self._there.wait(), LOST_NOTICE)
        undefined = [record.name for record in changed if record.undefined]
        repeatable = repeatable and not undefined
        if self.failure is not None:
            return to_failure(self.failure)
        if job.losses < LOSSES and repeatable:
            return None
        assert self.loss is not None
        states = REBUILT * self.commands.log.enabled
        matrices = len(self.commands.matrices)
        restored = RENEWED.format(matrices, states) if kept else self._restored
        words = recovered_words(job.name, job.losses, restored, self.loss, undefined)
        facts = {key: self.loss.facts[key] for key in LOSS_FACTS if key in self.loss.facts}
        return Failure("GroupRecoveredError", words, **facts)

    async def _noticed(
        self, job: Job, wait: Awaitable[Any], text: str, after_s: float = NOTICE_S
    ) -> Any:
        """Wait; tell the caller if that takes long."""
        notice = asyncio.get_running_loop().call_later(after_s, job.notice, text)
        try:
            return await wait
        finally:
            notice.cancel()

    def _end_early(self, job: Job, why: Failure | str) -> None:
        """End a command early: it is dropped, or the ranks leave it and the gang continues."""
        if job.answered:
            return
        failure = Failure("CancelledError", why) if isinstance(why, str) else why
        if job is not self._active:
            self._queue.remove(job)
            job.answer(failure)
            self._next()  # others may have waited for it
        elif not self.nodes.cancel(job.first_round, failure):
            job.cancelled = failure  # the ranks have nothing of it that they could leave
            job.answer(failure)

    def _still_sending(self, resize: Job) -> None:
        """A resize has waited long enough for matrices that are being sent."""
        if resize is self._active or resize.answered:
            return
        if names := ", ".join(record.name for record in self.commands.being_sent()):
            words = f"{names} did not arrive in {SENDING_LIMIT_S:.0f} s: resize when it is there"
            self._end_early(resize, Failure("GroupError", words))
        else:  # it waits for a call
            loop = asyncio.get_running_loop()
            resize.timer = loop.call_later(SENDING_LIMIT_S, self._still_sending, resize)

    def cancel_calls(self, holder: str | None = None) -> int:
        """Cancel the calls of one process, or all; their number."""
        chosen = [
            job
            for job in (*self._queue, self._active)  # else the next one would start first
            if job is not None and not job.own and holder in (None, job.holder)
        ]
        for job in chosen:
            self._end_early(job, CANCELLED)
        return len(chosen)

    # --- about the gang ---

    @property
    def idle_s(self) -> float:
        """Seconds since the last command, 0 while one runs or a matrix is being sent."""
        busy = self._active or not self._there.is_set() or self.commands.being_sent()
        return 0.0 if busy else time.monotonic() - self._used

    def used(self) -> None:
        """The gang is used."""
        self._used = time.monotonic()

    def status(self) -> Body:
        """Activity and matrices of the gang, for the catalogue."""
        records = self.commands.matrices.values()
        return {
            "last_used": time.time() - self.idle_s,
            "processes": [process.where for process in self._processes.connected()],
            "calls": calls_of(self._active, self._queue, self.nodes.lingering()),
            "ended_calls": self._store.ended(),
            "matrices": sum(record.sealed for record in records),
            "nbytes": self.commands.nbytes,
            "libraries": list(self.commands.libraries),
        }

    # --- lost ranks, and the end ---

    def ranks_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        """See `NodesOwner`."""
        if nodes is not self.nodes:
            nodes.fail(error)  # of a start or a resize, which reports it
            return
        self._there.clear()
        self.loss = error
        self._owner.ranks_lost(error)

    def nodes_lost(self, nodes: Nodes, error: AlchemistError) -> None:
        """See `NodesOwner`."""
        if nodes is not self.nodes:
            return  # its start reports it, or it has been replaced
        self.loss = error
        if self._owner.nodes_lost(error):
            self._there.clear()
        else:
            self.give_up(error)

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        """See `NodesOwner`."""
        return self._owner.node_leaving(nodes, error)

    def tell_move(self, move: Body) -> None:
        """Tell attached processes how to reach the ranks; see `GangConnection.move_to`."""
        for connection in list(self._connections):
            connection.send(Kind.EVENT, {"moved": move})

    def go_on(self, restored: str) -> None:
        """Ranks are there again; `restored`: the words for callers of commands that were lost."""
        self._restored = restored
        self.used()
        self._recovering_is_over()
        self._next()

    def give_up(self, error: AlchemistError) -> None:
        """The gang is lost: all callers get the error."""
        self.failure = error
        self._recovering_is_over()
        for job in self._queue.clear():
            job.answer(_not_begun(error))

    def _recovering_is_over(self) -> None:
        self._there.set()
        pings, self._pings = self._pings, []
        for job in pings:
            self._accept(job)

    def close(self, error: AlchemistError) -> None:
        """Close every socket; every caller that still waits gets `error`."""
        self.nodes.close(error)
        self.give_up(error)
        if self._active is not None:
            self._active.answer(to_failure(error))
        if self._task is not None:
            self._task.cancel()
        for connection in list(self._connections):
            connection.send(Kind.REFUSED, to_failure(error).to_map())
            connection.close()


async def _hold_turn(come: asyncio.Event, over: asyncio.Event) -> None:
    """The work of a command whose turn is another task's, from `come` until `over`."""
    come.set()
    await over.wait()


def _not_begun(error: AlchemistError) -> Failure:
    """The answer to a command that was waiting when the gang was lost: an `Executor` repeats it."""
    failure = to_failure(error)
    failure.facts = {**failure.facts, "begun": False}
    return failure
