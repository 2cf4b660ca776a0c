"""The dispatcher: a gang's commands, in order, out to its nodes and back.

It lives on the GroupManager's event loop. Commands come through two doors, a
socket and a Ray actor method, and wait in one queue: a gang does one thing at a
time. Each goes to the proxies, one message per node, and comes back as one
combined reply per node (`nodes.py`). Here is also kept what the gang holds:
matrices with their provenance, and libraries.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from alchemist_ray.errors import AlchemistError, to_failure
from alchemist_ray.nodes import Nodes, Round, worst
from mpi_workers import sockets, wire
from mpi_workers.failures import Failure
from mpi_workers.protocol import FrameProtocol
from mpi_workers.wire import Body, Frame, Kind

QUEUE_LIMIT = 100_000


@dataclass(slots=True)
class Job:
    """A command and who waits for its answer: a socket client, or a future of the Ray door."""

    body: Body
    client: FrameProtocol | None = None
    ident: Any = None
    future: asyncio.Future[Body] | None = None

    def answer(self, result: Body | Failure) -> None:
        if self.client is not None:
            key = "error" if isinstance(result, Failure) else "result"
            told = result.to_map() if isinstance(result, Failure) else result
            self.client.send(Kind.REPLY, {"id": self.ident, key: told})
        elif self.future is not None and not self.future.done():
            if isinstance(result, Failure):
                self.future.set_exception(result)
            else:
                self.future.set_result(result)


@dataclass(slots=True)
class Record:
    """A matrix of the gang: what it is and where it came from."""

    id: int
    name: str
    shape: tuple[int, int]
    dtype: str
    layout: str
    sealed: bool
    source: dict[str, Any]

    def about(self) -> Body:
        return {
            "matrix": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
            "source": self.source,
        }


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
        self.nodes = Nodes(nodes, size, self._lost, self._progress)
        self._token = token
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self._clients: set[FrameProtocol] = set()
        self._servers: list[asyncio.Server] = []
        self._ids = 0
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.matrices: dict[int, Record] = {}
        self.libraries: dict[str, Body] = {}
        self.addresses: list[str] = []

    async def listen(self, host: str, unix_path: str) -> None:
        """Open the gang's two sockets: for other nodes, and for this one."""
        loop = asyncio.get_running_loop()
        for sock, address in (sockets.listen_unix(unix_path), sockets.listen_tcp(host)):
            self.addresses.append(address)
            self._servers.append(await self._serve(loop, sock))

    async def _serve(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> asyncio.Server:
        def protocol() -> FrameProtocol:
            return FrameProtocol(self._on_frame, self._on_lost, self._token, self._on_hello)

        if sock.family == socket.AF_UNIX:
            return await loop.create_unix_server(protocol, sock=sock)
        return await loop.create_server(protocol, sock=sock)

    # --- who connects ---

    def _on_hello(self, protocol: FrameProtocol, body: Body) -> Body:
        if body.get("role") == "proxy":
            self.nodes.joined(body["node"], protocol)
            protocol.peer = ("proxy", body["node"])
        else:
            protocol.peer = ("client", body.get("owner") is True)
            self._clients.add(protocol)
        return {"version": wire.VERSION}

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

    # --- the two doors ---

    def _from_client(self, protocol: FrameProtocol, body: Body) -> None:
        ident = body.pop("id", None)
        if body.get("op") == "goodbye":
            protocol.peer = ("client", False)
            protocol.close()
            return
        self._accept(Job(body, protocol, ident))

    async def submit(self, body: Body) -> Body:
        """Run a command that came through Ray. Raises the tree's errors."""
        future: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        self._accept(Job(body, future=future))
        return await future

    def _accept(self, job: Job) -> None:
        op = job.body.get("op", "")
        if self.nodes.failure is not None:
            job.answer(to_failure(self.nodes.failure))
        elif (quick := _QUICK.get(op)) is not None:
            job.answer(quick(self, job.body))
        elif len(self._queue) >= QUEUE_LIMIT:
            words = f"{QUEUE_LIMIT} commands are waiting: wait for some"
            job.answer(Failure("GroupError", words))
        else:
            self._queue.append(job)
            self._next()

    def _next(self) -> None:
        """Begin the next command, if none is under way."""
        while self._active is None and self._queue:
            job = self._active = self._queue.popleft()
            if job.body.get("op") == "call" and not self.nodes.busy:
                self._guarded(job, self._begin_call)  # the quick way: no task is made
            else:
                task = asyncio.get_running_loop().create_task(self._run(job))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def _finish(self, job: Job, result: Body | Failure) -> None:
        if self._active is job:
            self._active = None
        job.answer(result)
        self._next()

    def _guarded(self, job: Job, begin: Callable[[Job], None]) -> None:
        try:
            begin(job)
        except Failure as failure:
            self._finish(job, failure)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._finish(job, _malformed(job, error))

    async def _run(self, job: Job) -> None:
        """A command that takes several rounds, or has to wait for stragglers."""
        try:
            if job.body.get("op") == "call":
                await self.nodes.drained()
                if self.nodes.failure is not None:
                    raise self.nodes.failure
                self._guarded(job, self._begin_call)
                return
            handler = _QUEUED.get(job.body.get("op", ""))
            if handler is None:
                raise Failure("GroupError", f"unknown command {job.body.get('op')!r}")
            result: Body | Failure = await handler(self, job.body)
        except Failure as failure:
            result = failure
        except AlchemistError as error:
            result = to_failure(error)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            result = _malformed(job, error)
        self._finish(job, result)

    # --- commands: each takes the client's map and returns the reply's ---

    async def _create(self, body: Body) -> Body:
        fields = {"shape": body["shape"], "dtype": body["dtype"], "layout": body["layout"]}
        await self.nodes.round("reserve", **fields)
        ident = self._new_id()
        try:
            await self.nodes.round("create", matrix=ident, **fields)
        except Failure:
            await self.nodes.round("free", matrices=[ident])
            raise
        self._record(
            ident, body.get("name"), fields, {"kind": "sent", **body.get("source", {})}, False
        )
        return {"matrix": ident}

    async def _seal(self, body: Body) -> Body:
        record = self._known(body["matrix"])
        await self.nodes.round("seal", matrix=record.id)
        record.sealed = True
        return record.about()

    async def _free(self, body: Body) -> Body:
        known = [ident for ident in body["matrices"] if self.matrices.pop(ident, None)]
        if known:
            await self.nodes.round("free", matrices=known)
        return {"freed": len(known)}

    async def _redistribute(self, body: Body) -> Body:
        source = self._known(body["source"])
        fields = {"shape": list(source.shape), "dtype": source.dtype, "layout": body["layout"]}
        await self.nodes.round("reserve", **fields)
        ident = self._new_id()
        await self._results(
            [ident],
            self.nodes.round(
                "redistribute",
                collective=True,
                source=source.id,
                matrix=ident,
                layout=body["layout"],
            ),
        )
        origin = {"kind": "layout", "of": source.id}
        record = self._record(ident, body.get("name") or source.name, fields, origin, True)
        return record.about()

    async def _load(self, body: Body) -> Body:
        done = await self.nodes.round(
            "load", collective=True, library=body["library"], path=body.get("path")
        )
        described: Body = done.value
        self.libraries[body["library"]] = described
        return described

    def _begin_call(self, job: Job) -> None:
        body = job.body
        arguments = body["arguments"]
        for value in arguments.values():
            if isinstance(value, dict):
                self._known(value["matrix"])
        ids = [self._new_id() for _ in range(body["matrices"])]

        def then(under_way: Round, error: AlchemistError | None) -> None:
            if error is not None:
                self._finish(job, to_failure(error))
            elif under_way.errors:
                self.nodes.spoiled()
                failure = worst(under_way)
                if ids:
                    self._queue.appendleft(Job({"op": "discard", "matrices": ids}))
                self._finish(job, failure)
            else:
                self._keep_results(body, under_way)
                self._finish(job, {"values": under_way.value or []})

        self.nodes.begin(
            then,
            "call",
            collective=True,
            library=body["library"],
            routine=body["routine"],
            arguments=arguments,
            results=ids,
        )

    def _keep_results(self, body: Body, done: Round) -> None:
        if not done.matrices:
            return
        origin = {
            "kind": "routine",
            "library": body["library"],
            "routine": body["routine"],
            "arguments": body["arguments"],
        }
        for ident, m, n, dtype, layout in done.matrices:
            fields = {"shape": [m, n], "dtype": dtype, "layout": layout}
            self._record(ident, None, fields, origin, True)

    async def _discard(self, body: Body) -> Body:
        """Free what some ranks made in a call that failed on others."""
        await self.nodes.round("free", matrices=body["matrices"])
        return {}

    async def _results(self, ids: list[int], work: Awaitable[Round]) -> Round:
        """Wait for a round that makes matrices; if it fails, none of them stays."""
        try:
            return await work
        except Failure:
            if ids:
                await self.nodes.round("free", matrices=ids)
            raise

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _known(self, ident: Any) -> Record:
        record = self.matrices.get(ident)
        if record is None:
            raise Failure(
                "MatrixNotFoundError",
                f"matrix {ident} is not in this gang (any more): it was freed, or never was",
            )
        return record

    def _record(
        self, ident: int, name: str | None, fields: Body, source: Body, sealed: bool
    ) -> Record:
        m, n = fields["shape"]
        record = Record(
            ident, name or f"matrix{ident}", (m, n), fields["dtype"], fields["layout"], sealed,
            source,
        )  # fmt: skip
        self.matrices[ident] = record
        return record

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

    # --- answered at once, whatever the ranks are doing ---

    def _list_matrices(self, body: Body) -> Body:
        return {"matrices": [r.about() for r in self.matrices.values() if r.sealed]}

    def _list_libraries(self, body: Body) -> Body:
        return {"libraries": list(self.libraries.values())}

    def _list_workers(self, body: Body) -> Body:
        busy = "busy" if self.nodes.busy else "idle"
        return {
            "workers": [{**about, "status": busy} for _, about in sorted(self.nodes.ranks.items())]
        }


_QUICK: dict[str, Callable[[Dispatcher, Body], Body]] = {
    "list_matrices": Dispatcher._list_matrices,
    "list_libraries": Dispatcher._list_libraries,
    "list_workers": Dispatcher._list_workers,
}
_QUEUED: dict[str, Callable[[Dispatcher, Body], Awaitable[Body]]] = {
    "create": Dispatcher._create,
    "seal": Dispatcher._seal,
    "free": Dispatcher._free,
    "redistribute": Dispatcher._redistribute,
    "load": Dispatcher._load,
    "discard": Dispatcher._discard,
}


def _malformed(job: Job, error: Exception) -> Failure:
    return Failure("GroupError", f"malformed command {job.body.get('op')!r}: {error!r}")
