"""The dispatcher: a gang's commands, in order, out to its nodes and back.

It lives on the GroupManager's event loop. Commands come through two doors, a
socket and a Ray actor method, and wait in one queue: a gang does one thing at a
time. Each goes to the proxies, one message per node, and comes back as one
combined reply per node. Here is also kept what the gang holds: matrices with
their provenance, libraries, ranks.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from alchemist_ray.errors import AlchemistError, GroupFailedError, LaunchError, to_failure
from mpi_workers import sockets, wire
from mpi_workers.failures import Failure
from mpi_workers.protocol import FrameProtocol
from mpi_workers.wire import Body, Frame, Kind

FIRST_ERROR_S = 0.25  # how long other ranks' errors are gathered after the first
DRAIN_S = 30.0  # how long ranks may take to come back from a call that failed elsewhere
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
class Round:
    """One message to all nodes, and what came back so far.

    `then` is called once: with None when all nodes have answered (or one has
    failed and the others take their time), or with what ended the gang.
    """

    then: Callable[[Round, AlchemistError | None], None]
    left: int
    told: bool = False
    errors: list[Body] = field(default_factory=list)
    failed: int = 0
    value: Any = None
    matrices: list[Any] | None = None

    def finish(self, error: AlchemistError | None = None) -> None:
        if not self.told:
            self.told = True
            self.then(self, error)


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
        self._size = size
        self._token = token
        self._on_failure = on_failure
        self._on_orphaned = on_orphaned
        self._nodes = nodes
        self._proxies: dict[int, FrameProtocol] = {}
        self._clients: set[FrameProtocol] = set()
        self._servers: list[asyncio.Server] = []
        self._rounds: dict[int, Round] = {}
        self._seq = 0
        self._ids = 0
        self._renew = False
        self._pmi_nodes = 0
        self._pmi_puts: dict[str, str] = {}
        self._queue: deque[Job] = deque()
        self._active: Job | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.ranks: dict[int, Body] = {}
        self.failure: AlchemistError | None = None
        self.closed = False
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.matrices: dict[int, Record] = {}
        self.libraries: dict[str, Body] = {}
        self.addresses: list[str] = []

    def not_connected(self) -> list[int]:
        """Nodes whose proxy has not reached us."""
        return [node for node in range(self._nodes) if node not in self._proxies]

    def not_ready(self) -> list[int]:
        """Nodes whose ranks have not all checked in."""
        ready = {about["node"] for about in self.ranks.values()}
        return [node for node in range(self._nodes) if node not in ready]

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
        if body.get("role") == "proxy" and body.get("node") not in self._proxies:
            protocol.peer = ("proxy", body["node"])
            self._proxies[body["node"]] = protocol
        else:
            protocol.peer = ("client", body.get("owner") is True)
            self._clients.add(protocol)
        return {"version": wire.VERSION}

    def _on_lost(self, protocol: FrameProtocol) -> None:
        if protocol.peer is None:
            return
        role, what = protocol.peer
        if role == "proxy":
            self._proxies.pop(what, None)
            hosts = [r["hostname"] for r in self.ranks.values() if r["node"] == what]
            where = hosts[0] if hosts else f"number {what}"
            self.fail(
                GroupFailedError(
                    f"node {where} is gone: its part of the gang was killed, or the network to it "
                    "was cut. The gang was ended on all nodes; request_workers() starts a new one",
                    node=what,
                    cause="node lost",
                )
            )
        else:
            self._clients.discard(protocol)
            if what and not self.closed:
                self._on_orphaned()

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        role, what = protocol.peer
        if role == "client":
            if frame.kind == Kind.COMMAND:
                self._from_client(protocol, frame.body)
        elif frame.kind == Kind.REPLY:
            self._from_node(frame.body)
        elif frame.kind == Kind.EVENT:
            self._event(what, frame.body)

    # --- what nodes say ---

    def _event(self, node: int, body: Body) -> None:
        match body["op"]:
            case "progress":
                if self._active is not None and self._active.client is not None:
                    told = {"fraction": body["fraction"], "text": body["text"]}
                    self._active.client.send(Kind.EVENT, {"id": self._active.ident, **told})
            case "rank_failed":
                self._rank_failed(node, body)
            case "rank_ended":
                self.fail(_ended(body, starting=not self.ready.done()))
            case "pmi_barrier":
                self._pmi_barrier(node, body["puts"])
            case "ready":
                self._node_ready(node, body["ranks"])

    def _node_ready(self, node: int, ranks: list[Body]) -> None:
        for about in ranks:
            self.ranks[about["rank"]] = {**about, "node": node}
            if about["size"] != self._size:
                self.fail(
                    LaunchError(
                        f"rank {about['rank']} on {about['hostname']} is in a world of "
                        f"{about['size']} ranks instead of {self._size}: the launcher and the MPI "
                        "library do not speak the same PMI"
                    )
                )
                return
        if len(self.ranks) == self._size and not self.ready.done():
            self.ready.set_result(None)

    def _pmi_barrier(self, node: int, puts: dict[str, str]) -> None:
        self._pmi_puts.update(puts)
        self._pmi_nodes += 1
        if self._pmi_nodes == self._nodes:
            puts, self._pmi_puts, self._pmi_nodes = self._pmi_puts, {}, 0
            self._tell_all({"op": "pmi_release", "puts": puts})

    def _rank_failed(self, node: int, body: Body) -> None:
        """A rank raised: let those who wait for it in MPI go, and the caller soon know."""
        seq = body["seq"]
        under_way = self._rounds.get(seq)
        for other, proxy in self._proxies.items():
            if other != node:
                proxy.send(Kind.COMMAND, {"op": "interrupt", "seq": seq})
        if under_way is not None and not under_way.told:
            asyncio.get_running_loop().call_later(FIRST_ERROR_S, self._tell_early, seq, body)

    def _tell_early(self, seq: int, body: Body) -> None:
        under_way = self._rounds.get(seq)
        if under_way is not None and not under_way.told:
            under_way.errors.append(body["error"])
            under_way.failed = max(1, under_way.failed)
            asyncio.get_running_loop().call_later(DRAIN_S, self._give_up, seq, body["error"])
            under_way.finish()

    def _give_up(self, seq: int, error: Body) -> None:
        """End the gang if a call that failed on one rank still holds others."""
        if seq in self._rounds:
            rank = error.get("facts", {}).get("rank")
            self.fail(
                GroupFailedError(
                    f"a call failed on rank {rank} and others did not come back from it in "
                    f"{DRAIN_S:.0f} s: they wait for it in MPI calls made by native code. The "
                    "gang was ended; request_workers() starts a new one",
                    rank=rank,
                    cause="ranks stuck in MPI",
                )
            )

    def _from_node(self, body: Body) -> None:
        under_way = self._rounds.get(body["seq"])
        if under_way is None:
            return
        under_way.left -= 1
        under_way.errors += body.get("errors", [])
        under_way.failed += body.get("failed", 0)
        if "value" in body:
            under_way.value = body["value"]
        if body.get("matrices"):
            under_way.matrices = body["matrices"]
        if under_way.left == 0:
            del self._rounds[body["seq"]]
            under_way.finish()

    def _tell_all(self, body: Body) -> None:
        for proxy in self._proxies.values():
            proxy.send(Kind.COMMAND, body)

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
        if self.failure is not None:
            job.answer(to_failure(self.failure))
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
            if job.body.get("op") == "call" and not self._rounds:
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
                await self._drained()
                if self.failure is not None:
                    raise self.failure
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

    # --- a round over all nodes ---

    def _begin(
        self,
        then: Callable[[Round, AlchemistError | None], None],
        op: str,
        *,
        collective: bool = False,
        **fields: Any,
    ) -> None:
        """Send one command to every rank; `then` is called when all have answered."""
        self._seq += 1
        body: Body = {"op": op, "seq": self._seq, **fields}
        if collective and self._renew:
            body["renew"] = True
            self._renew = False
        self._rounds[self._seq] = Round(then, len(self._proxies))
        self._tell_all(body)

    async def _round(self, op: str, *, collective: bool = False, **fields: Any) -> Round:
        """The same, to be awaited.

        Raises `Failure` if any rank failed, `GroupFailedError` if the gang is lost.
        """
        await self._drained()
        if self.failure is not None:
            raise self.failure
        future: asyncio.Future[Round] = asyncio.get_running_loop().create_future()

        def then(under_way: Round, error: AlchemistError | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
                future.exception()  # seen: whoever waited may have been cancelled
            else:
                future.set_result(under_way)

        self._begin(then, op, collective=collective, **fields)
        under_way = await future
        if under_way.errors:
            self._renew = self._renew or collective
            raise _worst(under_way)
        return under_way

    async def _drained(self) -> None:
        """Wait until every rank is back from a call that failed on another (see `_give_up`)."""
        while self._rounds and self.failure is None:
            await asyncio.sleep(0.005)

    # --- commands: each takes the client's map and returns the reply's ---

    async def _create(self, body: Body) -> Body:
        fields = {"shape": body["shape"], "dtype": body["dtype"], "layout": body["layout"]}
        await self._round("reserve", **fields)
        ident = self._new_id()
        try:
            await self._round("create", matrix=ident, **fields)
        except Failure:
            await self._round("free", matrices=[ident])
            raise
        self._record(
            ident, body.get("name"), fields, {"kind": "sent", **body.get("source", {})}, False
        )
        return {"matrix": ident}

    async def _seal(self, body: Body) -> Body:
        record = self._known(body["matrix"])
        await self._round("seal", matrix=record.id)
        record.sealed = True
        return record.about()

    async def _free(self, body: Body) -> Body:
        known = [ident for ident in body["matrices"] if self.matrices.pop(ident, None)]
        if known:
            await self._round("free", matrices=known)
        return {"freed": len(known)}

    async def _redistribute(self, body: Body) -> Body:
        source = self._known(body["source"])
        fields = {"shape": list(source.shape), "dtype": source.dtype, "layout": body["layout"]}
        await self._round("reserve", **fields)
        ident = self._new_id()
        await self._results(
            [ident],
            self._round(
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
        done = await self._round(
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
                self._renew = True
                failure = _worst(under_way)
                if ids:
                    self._queue.appendleft(Job({"op": "discard", "matrices": ids}))
                self._finish(job, failure)
            else:
                self._keep_results(body, under_way)
                self._finish(job, {"values": under_way.value or []})

        self._begin(
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
        await self._round("free", matrices=body["matrices"])
        return {}

    async def _results(self, ids: list[int], work: Awaitable[Round]) -> Round:
        """Wait for a round that makes matrices; if it fails, none of them stays."""
        try:
            return await work
        except Failure:
            if ids:
                await self._round("free", matrices=ids)
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

    def fail(self, error: AlchemistError) -> None:
        """The gang is lost: everyone who waits learns it, everything is let go."""
        if self.failure is not None or self.closed:
            return
        self.failure = error
        self._drop(error)
        self._on_failure(error)

    def _drop(self, error: AlchemistError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen: the launcher may have given up waiting
        rounds, self._rounds = list(self._rounds.values()), {}
        for under_way in rounds:
            under_way.finish(error)
        queued, self._queue = list(self._queue), deque()
        for job in queued:
            job.answer(to_failure(error))
        for proxy in list(self._proxies.values()):
            proxy.close()  # its ranks end with it

    async def shutdown(self, timeout_s: float) -> None:
        """End the gang in good order: libraries are closed, then ranks leave."""
        self.closed = True
        self._tell_all({"op": "shutdown"})
        deadline = time.monotonic() + timeout_s
        while self._proxies and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def close(self, error: AlchemistError) -> None:
        """Close every socket; whoever still waits gets `error`."""
        self.closed = True
        if self.failure is None:
            self.failure = error
        self._drop(error)
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
        busy = "busy" if self._rounds else "idle"
        return {"workers": [{**about, "status": busy} for _, about in sorted(self.ranks.items())]}


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


def _worst(under_way: Round) -> Failure:
    """The error to show of several ranks': the lowest rank's, and how many there were."""
    errors = sorted(under_way.errors, key=lambda e: e.get("facts", {}).get("rank", 0))
    failure = Failure.from_map(errors[0])
    others = max(under_way.failed, len(errors)) - 1
    if others > 0:
        failure.message += f" (and on {others} more rank{'s' if others > 1 else ''})"
    return failure


def _ended(body: Body, *, starting: bool) -> AlchemistError:
    kind = LaunchError if starting else GroupFailedError
    while_what = "while the gang was starting" if starting else "so the gang was ended on all nodes"
    tail = body.get("tail", "")
    said = f"\n--- last words of rank {body['rank']} ---\n{tail}" if tail else ""
    return kind(
        f"rank {body['rank']} (pid {body['pid']} on {body['hostname']}) {body['cause']}, "
        f"{while_what}. request_workers() starts a new one{said}",
        rank=body["rank"],
        cause=body["cause"],
        hostname=body["hostname"],
        tail=tail,
    )
