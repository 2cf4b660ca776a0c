"""The dispatcher: a gang's commands, one at a time, and the processes that send them.

It runs on the GroupManager's event loop. Commands arrive through a socket or through a method
of the actor. Each sender has a queue of its own, and the queues are served in turn. What a
command does is in `handlers`, how it reaches the nodes in `launch.nodes`. A command can be
cancelled: by its sender, by its time limit, or with the Ray task that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.runtime.commands import effects
from alchemist_ray.runtime.commands.attached_processes import AttachedProcess, AttachedProcesses
from alchemist_ray.runtime.commands.handlers import NO_HOLDER, Commands
from alchemist_ray.runtime.commands.jobs import MALFORMED, Job, Relay, calls_of, late, log
from alchemist_ray.runtime.commands.matrix_records import LOSSES, MatrixLocks
from alchemist_ray.runtime.launch.gang_measures import GangMeasures
from alchemist_ray.runtime.launch.nodes import DRAIN_S, Nodes, recovered_words
from alchemist_ray.runtime.recovery.command_log import CommandLog
from mpi_workers.failures import Failure
from mpi_workers.node.output_lines import STDERR
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.asynchronous import FrameProtocol, protocol_factory
from mpi_workers.wire.commands import Turn, checked
from mpi_workers.wire.frames import Body, Frame, Kind


class NodePeer(NamedTuple):
    """A peer that is the proxy of a node, of some incarnation."""

    nodes: Nodes
    number: int


class Listeners:
    """Two sockets: for other nodes, and for this one. Accepted connections outlive them.

    Parameters
    ----------
    on_frame, on_lost, token, on_hello
        See `protocol_factory`.

    Attributes
    ----------
    addresses : list of str
    """

    def __init__(
        self,
        on_frame: Callable[[FrameProtocol, Frame], None],
        on_lost: Callable[[FrameProtocol], None],
        token: str,
        on_hello: Callable[[FrameProtocol, Body], Body],
    ) -> None:
        self._factory = protocol_factory(on_frame, on_lost, token, on_hello)
        self._servers: list[asyncio.Server] = []
        self.addresses: list[str] = []

    async def open(self, host: str, unix_path: str) -> None:
        """Listen at an address of this node, and at a path."""
        loop = asyncio.get_running_loop()
        for sock, address in (sockets.listen_unix(unix_path), sockets.listen_tcp(host)):
            self.addresses.append(address)
            self._servers.append(await self._serve(loop, sock))

    async def _serve(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> asyncio.Server:
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(self._factory, sock=sock, backlog=sockets.BACKLOG)
        return await loop.create_server(self._factory, sock=sock, backlog=sockets.BACKLOG)

    def close(self) -> None:
        """Accept no more connections."""
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()


class JobQueue:
    """Waiting commands. Those of the dispatcher itself are urgent: they come first.

    Parameters
    ----------
    sending : callable() -> bool
        Whether matrices are being sent. A resize waits for them, and further ones wait for it.
    """

    def __init__(self, sending: Callable[[], bool]) -> None:
        self._sending = sending
        self._resize: Job | None = None
        self._urgent: deque[Job] = deque()
        self._by_sender: OrderedDict[Any, deque[Job]] = OrderedDict()
        self._count = 0

    def __len__(self) -> int:
        """Commands of senders that wait."""
        return self._count

    def __iter__(self) -> Iterator[Job]:
        return (job for queue in self._by_sender.values() for job in queue)

    def add(self, job: Job, sender: Any) -> None:
        """Queue a command of a sender."""
        self._by_sender.setdefault(sender, deque()).append(job)
        self._count += 1
        if job.body["op"] == "resize":
            self._resize = job

    def add_urgent(self, job: Job) -> None:
        """Queue a command before all others."""
        self._urgent.append(job)

    def next(self) -> Job | None:
        """Take the next command that may run: urgent ones first, then sender by sender."""
        if self._urgent:
            return self._urgent.popleft()
        for sender, queue in self._by_sender.items():
            job = next(filter(self._may_run, queue), None)
            if job is not None:
                self._by_sender.move_to_end(sender)  # the others come first
                self._take(job, sender)
                return job
        return None

    def _may_run(self, job: Job) -> bool:
        if job is self._resize:
            return not self._sending()
        return self._resize is None or job.body["op"] != "create"

    def _take(self, job: Job, sender: Any) -> None:
        """Remove a command of a sender. Raises `ValueError` if it is not there."""
        queue = self._by_sender[sender]
        queue.remove(job)
        self._count -= 1
        if not queue:
            del self._by_sender[sender]
        if job is self._resize:
            self._resize = None

    def of(self, sender: Any) -> tuple[Job, ...]:
        """The waiting commands of a sender."""
        return tuple(self._by_sender.get(sender, ()))

    def remove(self, job: Job) -> None:
        """Take a command out, wherever it waits."""
        for sender in list(self._by_sender):
            with contextlib.suppress(ValueError):
                self._take(job, sender)

    def drop(self, sender: Any) -> None:
        """Forget the commands of a sender that is gone."""
        dropped = self._by_sender.pop(sender, deque())
        self._count -= len(dropped)
        if self._resize in dropped:
            self._resize = None  # else all further `create` would wait for it

    def clear(self) -> list[Job]:
        """Take all commands out; those of senders."""
        waiting = list(self)
        self._urgent.clear()
        self._by_sender.clear()
        self._count = 0
        self._resize = None
        return waiting


NOTICE_S = 1.0  # a caller that waits longer is told so
NOTICE = "ranks were lost: waiting until the gang is started again (max_failures)"


class Outage:
    """Whether a gang has its ranks, and the commands that wait for them.

    Attributes
    ----------
    recovering : bool
        Whether ranks were lost and others are being started.
    failure : AlchemistError or None
        The error that ended the gang.
    """

    def __init__(self) -> None:
        self.recovering = False
        self.failure: AlchemistError | None = None
        self._over = asyncio.Event()
        self._restored = ""
        self._pings: list[Job] = []

    def begin(self) -> None:
        """Ranks are lost, and others will be started."""
        self._over.clear()
        self.recovering = True

    def hold(self, job: Job) -> bool:
        """Keep a command that asks whether the gang is there, until it is; False if it is."""
        waits = self.recovering and job.body.get("op") == "ping" and job.body.get("wait")
        if waits:
            self._pings.append(job)
        return bool(waits)

    def end(self, restored: str) -> list[Job]:
        """The ranks are there again; the commands that were held."""
        self._restored = restored
        return self._finish()

    def give_up(self, error: AlchemistError) -> list[Job]:
        """There will be no ranks; the commands that were held."""
        self.failure = error
        return self._finish()

    def _finish(self) -> list[Job]:
        self.recovering = False
        self._over.set()
        pings, self._pings = self._pings, []
        return pings

    async def passed(self, job: Job) -> Failure | None:
        """Wait for ranks; None: there are some. Otherwise, what ended the gang."""
        loop = asyncio.get_running_loop()
        notice = loop.call_later(NOTICE_S, job.notice, NOTICE)
        await self._over.wait()
        notice.cancel()
        return None if self.failure is None else to_failure(self.failure)

    def lost(self, job: Job, *, repeatable: bool) -> Failure | None:
        """A command was lost with ranks; None: run it once more."""
        job.losses += 1
        if repeatable and job.losses < LOSSES:
            return None
        words = recovered_words(job.name, job.losses, self._restored)
        return Failure("GroupRecoveredError", words)


QUEUE_LIMIT = 100_000
BUSY_NOTICE = (
    "waiting for ranks that are still in a call that failed or was cancelled (up to "
    f"{DRAIN_S:.0f} s, then the gang is ended)"
)


class Dispatcher:
    """The commands of one gang, over all its incarnations.

    Parameters
    ----------
    on_failure : callable(error) -> bool
        Called when the ranks are lost. Whether others will be started: then commands wait for
        `resume` or `give_up`.
    on_orphaned : callable()
        Called when the owner's process is gone without a goodbye.
    lease_grace_s : float
        How long a process that is lost keeps its matrices.
    recovers : bool
        Whether commands are logged, to be repeated.
    measures : GangMeasures, optional
        Where ended commands are counted.

    Attributes
    ----------
    nodes : Nodes
        Of the current incarnation; before the first one, without nodes.
    """

    def __init__(
        self,
        on_failure: Callable[[AlchemistError], bool],
        on_orphaned: Callable[[], None],
        *,
        lease_grace_s: float = 0.0,
        recovers: bool = False,
        measures: GangMeasures | None = None,
    ) -> None:
        self.nodes = self.new_nodes(0, 0)
        self._measures = measures or GangMeasures()
        self._processes = AttachedProcesses(lease_grace_s, lambda ident: self.commands.lost(ident))
        log = CommandLog(enabled=recovers)
        self.commands = Commands(self.nodes, self._soon, self._processes.users, log)
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self._connections: set[FrameProtocol] = set()
        self._queue = JobQueue(
            lambda: not all(record.sealed for record in self.commands.matrices.values())
        )
        self._active: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self._locks = MatrixLocks()
        self._outage = Outage()

    # --- incarnations ---

    def new_nodes(self, count: int, size: int) -> Nodes:
        """The nodes of a further incarnation; see `use`."""
        nodes = Nodes(
            count, size, lambda error: self._lost(nodes, error), self._progress, self._output
        )
        return nodes

    def new_listeners(self, token: str, nodes: Nodes) -> Listeners:
        """The sockets of an incarnation."""
        joined = partial(self._on_hello, nodes)
        return Listeners(self._on_frame, self._on_lost, token, joined)

    def use(self, nodes: Nodes) -> None:
        """Run commands on another incarnation from now on."""
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
            self._used = time.monotonic()
        return {"version": frames.VERSION}

    def _on_lost(self, protocol: FrameProtocol) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            self._connections.discard(protocol)
            self._forget(protocol)
            self._locks.lost(protocol)
            self._processes.left(peer)
            if peer.owner and not self.nodes.closed:
                self._on_orphaned()
        elif isinstance(peer, NodePeer):
            peer.nodes.left(peer.number)

    def _forget(self, sender: FrameProtocol) -> None:
        """Drop the commands of a process that is gone; the one that runs is cancelled."""
        self._queue.drop(sender)
        if self._active is not None and self._active.connection is sender:
            self._end_early(self._active, Failure("CancelledError", "the caller has disconnected"))

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            if frame.kind == Kind.COMMAND:
                self._from_process(protocol, peer, frame.body)
            return
        try:
            peer.nodes.receive(peer.number, frame)
        except Failure as failure:  # of ours: the proxy must not be refused for it
            text = f"a message for the gang could not be sent: {failure.message}"
            log([(-1, STDERR, text)])

    def _progress(self, body: Body) -> None:
        if self._active is not None and self._active.connection is not None:
            shown = {"fraction": body["fraction"], "text": body["text"]}
            self._active.connection.send(Kind.EVENT, {"id": self._active.ident, **shown})

    def _output(self, body: Body) -> None:
        """Lines that ranks have printed: to the process that waits for them, else to the log."""
        job = self._active
        if job is None or body["seq"] < job.first_round or job.relay is None:
            log(body["lines"])
        elif job.body.get("output", True):
            job.relay.pass_on(body["lines"])

    # --- commands come in ---

    def _from_process(self, protocol: FrameProtocol, peer: AttachedProcess, body: Body) -> None:
        ident = body.pop("id", None)
        relay = Relay(protocol, ident)
        self._used = time.monotonic()
        self._accept(Job(body, peer.ident, protocol, ident, relay=relay), protocol)

    def _goodbye(self, job: Job, connection: FrameProtocol) -> None:
        connection.peer.owner = False
        self._processes.ended(connection.peer)
        connection.close()

    def _session(self, job: Job, connection: FrameProtocol) -> None:
        connection.peer.session = True

    def _begin_read(self, job: Job, connection: FrameProtocol) -> None:
        matrix = job.body["matrix"]
        self._locks.begin_read(connection, matrix, lambda read: job.answer({"read": read}))

    def _end_read(self, job: Job, connection: FrameProtocol) -> None:
        job.answer({"whole": self._locks.end_read(job.body["read"])})

    def _end_reads(self, job: Job, connection: FrameProtocol) -> None:
        self._locks.lost(connection)

    def _cancel_calls(self, job: Job, connection: FrameProtocol) -> None:
        everyone = job.body.get("all")
        job.answer({"cancelled": self.cancel_calls(None if everyone else job.holder)})

    def _status(self, job: Job, connection: FrameProtocol) -> None:
        job.answer(self.status())

    def _cancel(self, job: Job, connection: FrameProtocol) -> None:
        for call in (self._active, *self._queue.of(connection)):
            if call and call.connection is connection and call.ident == job.body["call"]:
                self._end_early(call, Failure("CancelledError", "the call was cancelled"))
                return

    async def submit(self, body: Body, holder: str = NO_HOLDER, *, internal: bool = False) -> Body:
        """Run a command that came through Ray, or of the GroupManager. Raises `Failure`."""
        self._used = time.monotonic()
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        job = Job(body, holder, future=future, internal=internal)
        self._accept(job, None)
        try:
            return await future
        except asyncio.CancelledError:
            self._end_early(job, Failure("CancelledError", "the call was cancelled"))
            raise

    def _accept(self, job: Job, sender: Any) -> None:
        try:
            command = checked(job.body, internal=job.internal)
            if command.turn is Turn.CONNECTION:
                getattr(self, f"_{job.body['op']}")(job, job.connection)
                return
            if self.failure is not None:
                job.answer(to_failure(self.failure))
                return
            if self._outage.hold(job):
                return
            if command.turn is Turn.AT_ONCE:
                handler = getattr(self.commands, job.body["op"])
                job.answer(handler(job.body, job.holder))
                return
        except Failure as failure:
            job.answer(failure)
            return
        except MALFORMED as error:
            job.answer(job.malformed(error))
            return
        if len(self._queue) >= QUEUE_LIMIT:
            job.answer(Failure("GroupError", f"{QUEUE_LIMIT} commands are queued: send fewer"))
            return
        if (limit_s := job.body.get("timeout_s")) is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(limit_s, self._end_early, job, late(limit_s))
        self._queue.add(job, sender)
        self._next()

    def _soon(self, body: Body) -> None:
        """Run a command of our own before all that wait."""
        self._queue.add_urgent(Job(body, internal=True))
        if self.failure is None and not self.nodes.closed:
            self._next()

    # --- commands run ---

    def _next(self) -> None:
        """Start the next command, if none runs: urgent ones first, then sender by sender."""
        if self._active is not None or self._outage.recovering:
            return
        job = self._queue.next()
        if job is None:
            return
        self._active = job
        self._task = asyncio.get_running_loop().create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        begun = time.monotonic()
        while (result := await self._attempt(job)) is None:
            if (result := await self._after_loss(job)) is not None:
                break
        if self._active is job:
            self._active = None
        if job.cancelled is not None and isinstance(result, dict) and "matrix" in result:
            self._soon({"op": "free", "matrices": [result["matrix"]]})
        job.answer(job.cancelled or result)
        self._used = time.monotonic()
        # Later: transports write when this turn of the loop ends, and the caller waits for that.
        asyncio.get_running_loop().call_soon(self._measures.ended, job, begun, result)
        self._next()

    async def _attempt(self, job: Job) -> Body | Failure | None:
        """Run a command; None if ranks were lost meanwhile, and others are being started."""
        job.first_round = self.nodes.last_round + 1
        try:
            await self._idle(job)
            if written := effects.written(self.commands.libraries, job.body):
                await self._locks.begin_write(written, lambda: job.cancelled is None)
            if job.cancelled is not None:
                return job.cancelled
            result: Body = await self.commands.handler(job.body["op"])(job.body, job.holder)
            return result
        except Failure as failure:
            return failure
        except AlchemistError as error:
            return None if self._outage.recovering else to_failure(error)
        except MALFORMED as error:
            return job.malformed(error)
        except Exception as error:  # such as OSError: the next command runs
            return Failure("GroupError", f"{job.name} failed: {error!r}")
        finally:
            self._locks.end_write()

    async def _after_loss(self, job: Job) -> Failure | None:
        """Wait until the gang is there again; None: run the command once more."""
        failure = await self._outage.passed(job)
        if failure is None:
            again = effects.repeatable(self.commands.libraries, job.body)
            failure = self._outage.lost(job, repeatable=again)
        return failure

    async def _idle(self, job: Job) -> None:
        """Wait until all ranks have left the call before; tell the caller if that takes long."""
        if not self.nodes.busy:
            return
        loop = asyncio.get_running_loop()
        notice = loop.call_later(NOTICE_S, job.notice, BUSY_NOTICE)
        try:
            await self.nodes.idle()
        finally:
            notice.cancel()

    def _end_early(self, job: Job, why: Failure) -> None:
        """End a command early: it is dropped, or the ranks leave it and the gang continues."""
        if job.answered:
            return
        if job is not self._active:
            self._queue.remove(job)
            job.answer(why)
            self._next()  # others may have waited for it
        elif not self.nodes.cancel(job.first_round, why):
            job.cancelled = why  # it runs nothing on the ranks that could be left
            self._locks.interrupt()
            job.answer(why)

    def cancel_calls(self, holder: str | None = None) -> int:
        """Cancel the calls of one process, or all; their number."""
        chosen = [
            job
            for job in (*self._queue, self._active)  # else the next one would start first
            if job is not None and not job.own and holder in (None, job.holder)
        ]
        for job in chosen:
            self._end_early(job, Failure("CancelledError", "the call was cancelled"))
        return len(chosen)

    # --- about the gang ---

    @property
    def idle_s(self) -> float:
        """Seconds since the last command, 0 while one runs."""
        busy = self._active is not None or self._outage.recovering
        return 0.0 if busy else time.monotonic() - self._used

    def used(self) -> None:
        """The gang is used without a command."""
        self._used = time.monotonic()

    def status(self) -> Body:
        """Activity and matrices of the gang, for the catalogue."""
        records = [record for record in self.commands.matrices.values() if record.sealed]
        return {
            "last_used": time.time() - self.idle_s,
            "processes": [process.where for process in self._processes.connected()],
            "calls": calls_of(self._active, self._queue, self.nodes.left_early()),
            "matrices": len(records),
            "nbytes": sum(record.nbytes for record in self.commands.matrices.values()),
            "libraries": list(self.commands.libraries),
        }

    # --- the end ---

    @property
    def failure(self) -> AlchemistError | None:
        """The error that ended the gang."""
        return self._outage.failure

    def _lost(self, nodes: Nodes, error: AlchemistError) -> None:
        if nodes is not self.nodes:
            return  # its start reports it, or it has been replaced
        if self._on_failure(error):
            self._outage.begin()
        else:
            self.give_up(error)

    def renew(self, renewed: Body) -> None:
        """Tell attached processes how to reach the ranks; see `GangConnection.renew`."""
        for connection in list(self._connections):
            connection.send(Kind.EVENT, {"renewed": renewed})

    def resume(self, restored: str) -> None:
        """Ranks are there again; `restored`: the words for callers of commands that were lost."""
        for job in self._outage.end(restored):
            self._accept(job, None)
        self._next()

    def give_up(self, error: AlchemistError) -> None:
        """The gang is lost: all callers get the error."""
        for job in (*self._outage.give_up(error), *self._queue.clear()):
            job.answer(to_failure(error))

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
