"""The dispatcher: a gang's commands, in order, and the clients that send them.

It lives on the GroupManager's event loop. Commands come through two doors, a
socket and a Ray actor method, and wait in one queue: a gang does one thing at a
time. What each command does is in `commands.py`; how it reaches the nodes, one
message and one combined reply per node, in `nodes.py`. A command can be cancelled:
by its client, because its time is over, or with the Ray task that waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.runtime.commands import CALLS, QUICK, ROUNDS, Commands
from alchemist_ray.runtime.nodes import Nodes
from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.asynchronous import FrameProtocol, protocol_factory
from mpi_workers.wire.frames import Body, Frame, Kind

from alchemist_ray.runtime import output_relay

QUEUE_LIMIT = 100_000


@dataclass(slots=True, eq=False)
class Job:
    """A command and who waits for its answer: a socket client, or a future of the Ray door.

    `first_round` is the number of the first round that can be its own, `cancelled` why it
    is no longer wanted.
    """

    body: Body
    client: FrameProtocol | None = None
    ident: Any = None
    future: asyncio.Future[Body] | None = None
    relay: output_relay.Relay | None = None
    timer: asyncio.TimerHandle | None = None
    first_round: int = 0
    cancelled: Failure | None = None
    answered: bool = False

    def answer(self, result: Body | Failure) -> None:
        if self.answered:
            return
        self.answered = True
        if self.timer is not None:
            self.timer.cancel()
        if self.relay is not None:
            self.relay.end()
        if self.client is not None:
            key = "error" if isinstance(result, Failure) else "result"
            told = result.to_map() if isinstance(result, Failure) else result
            self.client.send(Kind.REPLY, {"id": self.ident, key: told})
        elif self.future is not None and not self.future.done():
            if isinstance(result, Failure):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


class Dispatcher:
    """One incarnation of a gang.

    Parameters
    ----------
    nodes : int
        How many proxies will report.
    size : int
        How many ranks.
    token : str
        The gang's secret.
    on_failure : callable(error)
        Called once when the gang is lost.
    on_orphaned : callable()
        Called when the session that owns the gang is gone without a goodbye.
    """

    def __init__(
        self,
        nodes: int,
        size: int,
        token: str,
        on_failure: Callable[[AlchemistError], None],
        on_orphaned: Callable[[], None],
    ) -> None:
        self.nodes = Nodes(nodes, size, self._lost, self._progress, self._output)
        self.commands = Commands(self.nodes, lambda body: self._queue.appendleft(Job(body)))
        self._token = token
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self._clients: set[FrameProtocol] = set()
        self._servers: list[asyncio.Server] = []
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._tasks: set[asyncio.Task[None]] = set()
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
            return await loop.create_unix_server(factory, sock=sock)
        return await loop.create_server(factory, sock=sock)

    # --- who connects ---

    def _on_hello(self, protocol: FrameProtocol, body: Body) -> Body:
        if body.get("role") == "proxy":
            self.nodes.joined(body["node"], protocol)
            protocol.peer = ("proxy", body["node"])
        else:
            protocol.peer = ("client", body.get("owner") is True)
            self._clients.add(protocol)
        return {"version": frames.VERSION}

    def _on_lost(self, protocol: FrameProtocol) -> None:
        if protocol.peer is None:
            return
        role, what = protocol.peer
        if role == "proxy":
            self.nodes.left(what)
            return
        self._clients.discard(protocol)
        if what and not self.nodes.closed:
            self._on_orphaned()

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        role, what = protocol.peer
        if role == "proxy":
            self.nodes.receive(what, frame)
        elif frame.kind == Kind.COMMAND:
            self._from_client(protocol, frame.body)

    def _progress(self, body: Body) -> None:
        if self._active is not None and self._active.client is not None:
            told = {"fraction": body["fraction"], "text": body["text"]}
            self._active.client.send(Kind.EVENT, {"id": self._active.ident, **told})

    def _output(self, body: Body) -> None:
        """Lines that ranks have printed: to who waits for them, else into the log."""
        job = self._active
        if job is None or body["seq"] < job.first_round or job.relay is None:
            output_relay.log(body["lines"])
        elif job.body.get("output", True):
            job.relay.pass_on(body["lines"])

    # --- the two doors ---

    def _from_client(self, protocol: FrameProtocol, body: Body) -> None:
        ident = body.pop("id", None)
        match body.get("op"):
            case "goodbye":
                protocol.peer = ("client", False)
                protocol.close()
            case "cancel":
                for job in (self._active, *self._queue):
                    if job and job.client is protocol and job.ident == body["call"]:
                        self._cancel(job, Failure("CancelledError", "the call was cancelled"))
                        break
            case _:
                relay = output_relay.Relay(protocol, ident)
                self._accept(Job(body, protocol, ident, relay=relay))

    async def submit(self, body: Body) -> Body:
        """Run a command that came through Ray. Raises the tree's errors."""
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        job = Job(body, future=future)
        self._accept(job)
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(job, Failure("CancelledError", "the call was cancelled"))
            raise

    def _accept(self, job: Job) -> None:
        op = job.body.get("op", "")
        if self.nodes.failure is not None:
            job.answer(to_failure(self.nodes.failure))
        elif (quick := QUICK.get(op)) is not None:
            self._guarded(job, lambda: job.answer(quick(self.commands, job.body)))
        elif len(self._queue) >= QUEUE_LIMIT:
            words = f"{QUEUE_LIMIT} commands are waiting: wait for some"
            job.answer(Failure("GroupError", words))
        else:
            if (limit_s := job.body.get("timeout_s")) is not None:
                loop = asyncio.get_running_loop()
                job.timer = loop.call_later(limit_s, self._cancel, job, _late(limit_s))
            self._queue.append(job)
            self._next()

    def _next(self) -> None:
        """Begin the next command, if none is under way."""
        while self._active is None and self._queue:
            job = self._active = self._queue.popleft()
            job.first_round = self.nodes.last_round + 1
            if job.body.get("op") in CALLS and not self.nodes.busy:
                self._begin(job)  # the quick way: no task is made
            else:
                task = asyncio.get_running_loop().create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _finish(self, job: Job, result: Body | Failure) -> None:
        if self._active is job:
            self._active = None
        if job.cancelled is not None and isinstance(result, dict) and "matrix" in result:
            self._queue.appendleft(Job({"op": "free", "matrices": [result["matrix"]]}))
        job.answer(job.cancelled or result)
        self._next()

    def _begin(self, job: Job) -> None:
        begin = CALLS[job.body["op"]]
        self._guarded(
            job, lambda: begin(self.commands, job.body, lambda result: self._finish(job, result))
        )

    def _guarded(self, job: Job, work: Callable[[], None]) -> None:
        try:
            work()
        except Failure as failure:
            self._finish(job, failure)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._finish(job, _malformed(job, error))

    async def _run(self, job: Job) -> None:
        """A command that takes several rounds, or has to wait for stragglers."""
        op = job.body.get("op", "")
        try:
            if op in CALLS:
                await self.nodes.drained()
                if self.nodes.failure is not None:
                    raise self.nodes.failure
                if job.cancelled is not None:
                    raise job.cancelled
                self._begin(job)
                return
            handler = ROUNDS.get(op)
            if handler is None:
                raise Failure("GroupError", f"unknown command {op!r}")
            result: Body | Failure = await handler(self.commands, job.body)
        except Failure as failure:
            result = failure
        except AlchemistError as error:
            result = to_failure(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            result = _malformed(job, error)
        self._finish(job, result)

    def _cancel(self, job: Job, why: Failure) -> None:
        """End a command early: it is dropped, or the ranks leave it and the gang goes on."""
        if job.answered:
            return
        if job is not self._active:
            with contextlib.suppress(ValueError):
                self._queue.remove(job)
            job.answer(why)
        elif not self.nodes.cancel(job.first_round, why):
            job.cancelled = why  # it has nothing on the ranks that could be left
            job.answer(why)

    # --- the end ---

    def _lost(self, error: AlchemistError) -> None:
        self._answer_all(error)
        self._on_failure(error)

    def _answer_all(self, error: AlchemistError) -> None:
        queued, self._queue = list(self._queue), deque()
        for job in queued:
            job.answer(to_failure(error))

    def close(self, error: AlchemistError) -> None:
        """Close every socket; whoever still waits gets `error`."""
        self.nodes.close(error)
        self._answer_all(error)
        for client in list(self._clients):
            client.close()
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()


def _late(limit_s: float) -> Failure:
    return Failure(
        "CallTimeoutError",
        f"the call did not end in {limit_s:g} s (timeout_s) and was cancelled; the gang goes on",
    )


def _malformed(job: Job, error: Exception) -> Failure:
    return Failure("GroupError", f"malformed command {job.body.get('op')!r}: {error!r}")
