"""The dispatcher: a gang's commands, one at a time, and the processes that send them.

It runs on the GroupManager's event loop. Commands arrive through a socket or through a method
of the actor. Each sender has a queue of its own, and the queues are served in turn. What a
command does is in `commands.py`, how it reaches the nodes in `nodes.py`. A command can be
cancelled: by its sender, by its time limit, or with the Ray task that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.runtime import output_relay
from alchemist_ray.runtime.attached_processes import AttachedProcess, AttachedProcesses
from alchemist_ray.runtime.commands import NO_HOLDER, Commands, checked
from alchemist_ray.runtime.jobs import Job, late
from alchemist_ray.runtime.matrix_locks import MatrixLocks
from alchemist_ray.runtime.nodes import DRAIN_S, Nodes
from mpi_workers.failures import Failure
from mpi_workers.node.output_lines import STDERR
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.asynchronous import FrameProtocol, protocol_factory
from mpi_workers.wire.frames import Body, Frame, Kind

QUEUE_LIMIT = 100_000
NOTICE_S = 1.0  # a caller that waits longer for an earlier call is told so


class Dispatcher:
    """One incarnation of a gang.

    Parameters
    ----------
    nodes : int
        Proxies that will report.
    size : int
        Ranks.
    token : str
        The gang's secret.
    on_failure : callable(error)
        Called once when the gang is lost.
    on_orphaned : callable()
        Called when the owner's process is gone without a goodbye.
    lease_grace_s : float
        How long a process that is lost keeps its matrices.
    """

    def __init__(
        self,
        nodes: int,
        size: int,
        token: str,
        on_failure: Callable[[AlchemistError], None],
        on_orphaned: Callable[[], None],
        *,
        lease_grace_s: float = 0.0,
    ) -> None:
        self.nodes = Nodes(nodes, size, self._lost, self._progress, self._output)
        self._processes = AttachedProcesses(lease_grace_s, lambda ident: self.commands.lost(ident))
        self.commands = Commands(self.nodes, self._soon, self._processes.users)
        self._token = token
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self._connections: set[FrameProtocol] = set()
        self._servers: list[asyncio.Server] = []
        self._urgent: deque[Job] = deque()
        self._queues: OrderedDict[Any, deque[Job]] = OrderedDict()  # by sender
        self._waiting = 0
        self._active: Job | None = None
        self._task: asyncio.Task[None] | None = None
        self._used = time.monotonic()
        self._locks = MatrixLocks()
        self.addresses: list[str] = []

    async def listen(self, host: str, unix_path: str) -> None:
        """Open the gang's two sockets: for other nodes, and for this one."""
        loop = asyncio.get_running_loop()
        for sock, address in (sockets.listen_unix(unix_path), sockets.listen_tcp(host)):
            self.addresses.append(address)
            self._servers.append(await self._serve(loop, sock))

    async def _serve(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> asyncio.Server:
        factory = protocol_factory(self._on_frame, self._on_lost, self._token, self._on_hello)
        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(factory, sock=sock, backlog=sockets.BACKLOG)
        return await loop.create_server(factory, sock=sock, backlog=sockets.BACKLOG)

    # --- connections ---

    def _on_hello(self, protocol: FrameProtocol, body: Body) -> Body:
        if body.get("role") == "proxy":
            self.nodes.joined(body["node"], protocol)
            protocol.peer = body["node"]
        else:
            protocol.peer = self._processes.joined(body)
            self._connections.add(protocol)
            self._used = time.monotonic()
        return {"version": frames.VERSION}

    def _on_lost(self, protocol: FrameProtocol) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            self._connections.discard(protocol)
            self._forget(protocol)
            self._locks.lost(peer.ident)
            self._processes.left(peer)
            if peer.owner and not self.nodes.closed:
                self._on_orphaned()
        elif peer is not None:
            self.nodes.left(peer)

    def _forget(self, sender: FrameProtocol) -> None:
        """Drop the commands of a process that is gone; the one that runs is cancelled."""
        self._waiting -= len(self._queues.pop(sender, ()))
        if self._active is not None and self._active.connection is sender:
            self._cancel(self._active, Failure("CancelledError", "the caller has disconnected"))

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        peer = protocol.peer
        if isinstance(peer, AttachedProcess):
            if frame.kind == Kind.COMMAND:
                self._from_process(protocol, peer, frame.body)
            return
        try:
            self.nodes.receive(peer, frame)
        except Failure as failure:  # of ours: the proxy must not be refused for it
            self._log(f"a message for the gang could not be sent: {failure.message}")

    @staticmethod
    def _log(text: str) -> None:
        output_relay.log([(-1, STDERR, text)])

    def _progress(self, body: Body) -> None:
        if self._active is not None and self._active.connection is not None:
            shown = {"fraction": body["fraction"], "text": body["text"]}
            self._active.connection.send(Kind.EVENT, {"id": self._active.ident, **shown})

    def _output(self, body: Body) -> None:
        """Lines that ranks have printed: to the process that waits for them, else to the log."""
        job = self._active
        if job is None or body["seq"] < job.first_round or job.relay is None:
            output_relay.log(body["lines"])
        elif job.body.get("output", True):
            job.relay.pass_on(body["lines"])

    # --- commands come in ---

    def _from_process(self, protocol: FrameProtocol, peer: AttachedProcess, body: Body) -> None:
        ident = body.pop("id", None)
        self._used = time.monotonic()
        match body.get("op"):
            case "goodbye":
                peer.owner = False
                self._processes.ended(peer)
                protocol.close()
            case "session":
                peer.session = True
            case "begin_read":
                job = Job(body, connection=protocol, ident=ident)
                self._locks.begin_read(peer.ident, body["matrix"], lambda: job.answer({}))
            case "end_read":
                self._locks.end_read(peer.ident, body["matrix"])
            case "cancel_calls":
                count = self.cancel_calls(None if body.get("all") else peer.ident)
                Job(body, connection=protocol, ident=ident).answer({"cancelled": count})
            case "status":
                Job(body, connection=protocol, ident=ident).answer(self.status())
            case "cancel":
                for job in (self._active, *self._queues.get(protocol, ())):
                    if job and job.connection is protocol and job.ident == body.get("call"):
                        self._cancel(job, Failure("CancelledError", "the call was cancelled"))
                        break
            case _:
                relay = output_relay.Relay(protocol, ident)
                self._accept(Job(body, peer.ident, protocol, ident, relay=relay), protocol)

    async def submit(self, body: Body, holder: str = NO_HOLDER) -> Body:
        """Run a command that came through Ray. Raises `Failure`."""
        self._used = time.monotonic()
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        job = Job(body, holder, future=future)
        self._accept(job, None)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(job, Failure("CancelledError", "the call was cancelled"))
            raise

    def _accept(self, job: Job, sender: Any) -> None:
        if self.nodes.failure is not None:
            job.answer(to_failure(self.nodes.failure))
            return
        try:
            command = checked(job.body)
            if command.immediate is not None:
                job.answer(command.immediate(self.commands, job.body, job.holder))
                return
        except Failure as failure:
            job.answer(failure)
            return
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            job.answer(job.malformed(error))
            return
        if self._waiting >= QUEUE_LIMIT:
            words = f"{QUEUE_LIMIT} commands are waiting: wait until some have ended"
            job.answer(Failure("GroupError", words))
            return
        if (limit_s := job.body.get("timeout_s")) is not None:
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(limit_s, self._cancel, job, late(limit_s))
        self._queues.setdefault(sender, deque()).append(job)
        self._waiting += 1
        self._next()

    def _soon(self, body: Body) -> None:
        """Run a command of our own before all that wait."""
        self._urgent.append(Job(body))
        if self.nodes.failure is None and not self.nodes.closed:
            self._next()

    # --- commands run ---

    def _next(self) -> None:
        """Start the next command, if none runs: urgent ones first, then sender by sender."""
        if self._active is not None:
            return
        if self._urgent:
            job = self._urgent.popleft()
        elif self._queues:
            sender, queue = self._queues.popitem(last=False)
            job = queue.popleft()
            self._waiting -= 1
            if queue:
                self._queues[sender] = queue  # at the end: the others come first
        else:
            return
        self._active = job
        job.first_round = self.nodes.last_round + 1
        self._task = asyncio.get_running_loop().create_task(self._run(job))

    async def _run(self, job: Job) -> None:
        result: Body | Failure
        try:
            await self._idle(job)
            if written := self.commands.written(job.body):
                await self._locks.begin_write(written, lambda: job.cancelled is None)
            if job.cancelled is not None:
                raise job.cancelled
            handler = checked(job.body).queued
            assert handler is not None
            result = await handler(self.commands, job.body, job.holder)
        except Failure as failure:
            result = failure
        except AlchemistError as error:
            result = to_failure(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            result = job.malformed(error)
        self._locks.end_write()
        self._used = time.monotonic()
        if self._active is job:
            self._active = None
        if job.cancelled is not None and isinstance(result, dict) and "matrix" in result:
            self._soon({"op": "free", "matrices": [result["matrix"]]})
        job.answer(job.cancelled or result)
        self._next()

    async def _idle(self, job: Job) -> None:
        """Wait until all ranks have left the call before; tell the caller if that takes long."""
        if not self.nodes.busy:
            return
        loop = asyncio.get_running_loop()
        notice = loop.call_later(NOTICE_S, self._notice, job)
        try:
            await self.nodes.idle()
        finally:
            notice.cancel()

    @staticmethod
    def _notice(job: Job) -> None:
        text = (
            "waiting for ranks that are still in a call that failed or was cancelled (up to "
            f"{DRAIN_S:.0f} s, then the gang is ended)"
        )
        if job.relay is not None:
            job.relay.pass_on([(-1, STDERR, text)])

    def _cancel(self, job: Job, why: Failure) -> None:
        """End a command early: it is dropped, or the ranks leave it and the gang continues."""
        if job.answered:
            return
        if job is not self._active:
            for sender, queue in list(self._queues.items()):
                with contextlib.suppress(ValueError):
                    queue.remove(job)
                    self._waiting -= 1
                if not queue:
                    del self._queues[sender]
            job.answer(why)
        elif not self.nodes.cancel(job.first_round, why):
            job.cancelled = why  # it runs nothing on the ranks that could be left
            self._locks.interrupt()
            job.answer(why)

    def cancel_calls(self, holder: str | None = None) -> int:
        """Cancel the calls of one process, or all; their number."""
        queued = [job for queue in self._queues.values() for job in queue]
        chosen = [
            job
            for job in (*queued, self._active)  # else the next one would start first
            if job is not None and not job.own and holder in (None, job.holder)
        ]
        for job in chosen:
            self._cancel(job, Failure("CancelledError", "the call was cancelled"))
        return len(chosen)

    # --- about the gang ---

    @property
    def idle_s(self) -> float:
        """Seconds since the last command, 0 while one runs."""
        return 0.0 if self._active is not None else time.monotonic() - self._used

    def used(self) -> None:
        """The gang is used without a command."""
        self._used = time.monotonic()

    def status(self) -> Body:
        """Activity and matrices of the gang, for the catalogue."""
        queued = [job for queue in self._queues.values() for job in queue]
        calls = [job.described("queued") for job in queued]
        if self._active is not None:
            calls.insert(0, self._active.described("running"))
        records = [record for record in self.commands.matrices.values() if record.sealed]
        return {
            "last_used": time.time() - self.idle_s,
            "processes": [process.where for process in self._processes.connected()],
            "calls": calls,
            "matrices": len(records),
            "nbytes": sum(record.nbytes for record in records),
            "libraries": list(self.commands.libraries),
        }

    # --- the end ---

    def _lost(self, error: AlchemistError) -> None:
        self._answer_all(error)
        self._on_failure(error)

    def _answer_all(self, error: AlchemistError) -> None:
        waiting = [job for queue in self._queues.values() for job in queue]
        self._queues.clear()
        self._urgent.clear()
        self._waiting = 0
        for job in waiting:
            job.answer(to_failure(error))

    def close(self, error: AlchemistError) -> None:
        """Close every socket; every caller that still waits gets `error`."""
        self.nodes.close(error)
        self._answer_all(error)
        if self._active is not None:
            self._active.answer(to_failure(error))
        if self._task is not None:
            self._task.cancel()
        for connection in list(self._connections):
            connection.send(Kind.REFUSED, to_failure(error).to_map())
            connection.close()
        for server in self._servers:
            server.close()
