"""Client: a process that is attached to a gang through the gateway, and its commands.

The gateway has a connection to the dispatcher for each client. It stays when the client's own is
lost, for `GRACE_S`, so that the client's matrices stay. Ids of commands are replaced, so that
late answers to a lost connection are not taken for answers to the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from alchemist_ray.errors import failure_of
from alchemist_ray.gateway.protocol import GRACE_S
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import Audit, Token, TokenFile, bounded
from alchemist_ray.gateway.server.gangs import HostedGang, Quotas
from alchemist_ray.gateway.server.link import Link
from alchemist_ray.observe import metrics
from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.asynchronous import ConnectingProtocol, FrameProtocol
from mpi_workers.wire.commands import COMMANDS
from mpi_workers.wire.frames import Body, Frame, Kind, WireError

QUEUED_NBYTES = 4 << 20  # 4 MiB for a client that reads slowly: then the dispatcher waits
CONNECT_TIMEOUT_S = 10.0
PENDING = 10_000  # commands of a client without an answer


class Service(Protocol):
    """The gateway as a client's commands use it."""

    audit: Audit
    tokens: TokenFile
    quotas: Quotas

    def client_gone(self, client: Client) -> None:
        """The grace of a client is over, or it has said goodbye."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A command that the gang has not answered.

    `ident` is the client's number of it, `answered` is called when it is over.
    """

    ident: int
    facts: Body
    answered: Callable[[], None]
    begun: float = field(default_factory=time.monotonic)


class Client:
    """See the module. All methods run on the event loop.

    Attributes
    ----------
    ident : str
        Of the process; it reconnects with the same one.
    """

    def __init__(self, ident: str, token: Token, gang: HostedGang, service: Service) -> None:
        self.ident = ident
        self.token = token
        self.gang = gang
        self._service = service
        self._link: Link | None = None
        self._upstream: _Upstream | None = None
        self.ready = asyncio.Event()
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # by our id
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = False

    async def connect(self, where: str) -> None:
        """Open the connection to the dispatcher. Raises `Failure`, `OSError`, `WireError`."""
        address = self.gang.connection.address
        fields = {"role": "client", "owner": False, "session": True, "process": self.ident,
                  "where": where}  # fmt: skip
        loop = asyncio.get_running_loop()
        made = partial(_Upstream, self, address.token, fields)
        for place in sockets.reachable_addresses(address.addresses):
            scheme, _, rest = place.partition(":")
            if scheme == "unix":
                path = rest.partition(":")[2]
                _, upstream = await loop.create_unix_connection(made, path)
            else:
                host, _, port = rest.rpartition(":")
                _, upstream = await loop.create_connection(made, host, int(port))
            await asyncio.wait_for(upstream.welcome, CONNECT_TIMEOUT_S)
            self._upstream = upstream
            self.ready.set()
            return
        raise Failure("GroupFailedError", f"no address of gang {self.gang.name} can be reached")

    @property
    def connected(self) -> bool:
        return self._link is not None

    def attach(self, link: Link) -> None:
        """The client's connection, the first one or after a loss."""
        old, self._link = self._link, None
        if old is not None:
            old.on_lost = lambda: None
            old.drop()
            self._forget_calls()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._link = link
        link.on_frame = self._from_client
        link.on_lost = lambda: self._lost(link)
        link.on_drained = self._drained

    # --- from the client ---

    def _from_client(self, frame: Frame) -> None:
        if frame.kind != Kind.COMMAND:
            raise WireError(f"a gateway does not accept {frame.kind.name} here")
        body = frame.body
        ident, op = body.get("id"), body.get("op")
        if ident is not None and type(ident) is not int:
            raise WireError("the number of a command must be an integer")
        try:
            self._service.tokens.check(self.token.id)
            own = self.gang.user == self.token.user
            changes = access.may_change(self.token, self.gang.user, self._service.tokens)
            access.check(self.token, body, own=own, changes=changes)
            if len(self._calls) + len(self._tasks) >= PENDING:
                raise Failure("GroupError", f"{PENDING} commands wait for an answer: send fewer")
        except Failure as failure:
            self._refused(body, failure)
            self._reply(ident, failure)
            return
        limited = self._service.tokens.quotas(self.token.user).nbytes is not None
        if limited and op in ("create", "call", "run", "redistribute"):
            if ident is None:
                raise WireError(f"{op!r} must have a number")
            self._start(self._within_quota(ident, body))
        else:
            self._forward(ident, body)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _within_quota(self, ident: int, body: Body) -> None:
        link = self._link
        try:
            answered = await self._service.quotas.reserve(self.token, body)
        except Exception as error:
            failure = failure_of(error, f"command {body['op']!r}")
            self._refused(body, failure)
            if link is self._link:
                self._reply(ident, failure)
            return
        if link is self._link:
            self._forward(ident, body, answered)
        else:
            answered()

    def _forward(
        self, ident: int | None, body: Body, answered: Callable[[], None] = lambda: None
    ) -> None:
        op = body["op"]
        if self._upstream is None:
            answered()
            return
        if op in ("seal", "free"):
            self.gang.transfers.forget([body.get("matrix"), *body.get("matrices", ())])
        if op == "cancel":
            theirs = body.get("call")
            found = [ours for ours, call in self._calls.items() if call.ident == theirs]
            if not found:
                return
            body["call"] = found[0]
        if ident is not None:
            body["id"] = number = next(self._ids)
            self._calls[number] = _Call(ident, _facts(body), answered)
        self._upstream.send(Kind.COMMAND, body)
        if op == "goodbye":
            self.end()

    def _reply(self, ident: int | None, result: Body | Failure) -> None:
        if self._link is None or ident is None:
            return
        answer: Body = {"id": ident, "result": result}
        if isinstance(result, Failure):
            answer = {"id": ident, "error": result.to_map()}
        self._link.send(Kind.REPLY, answer)

    def hold(self, waiting: bool) -> None:
        """The dispatcher does not read: the client waits, too."""
        if self._link is not None:
            (self._link.pause if waiting else self._link.resume)()

    # --- from the dispatcher ---

    def from_gang(self, frame: Frame) -> None:
        """Pass an answer or an event on to the client."""
        if frame.kind == Kind.REFUSED:
            if self._link is not None:
                self._link.refuse(Failure.from_map(frame.body))
            return
        body = frame.body
        if "renewed" in body:
            self.gang.renewed(body["renewed"])
            self.tell_renewal()
            return
        call = self._calls.get(body.get("id", 0))
        if call is None:
            return  # of a connection that the client has lost
        if frame.kind == Kind.REPLY:
            del self._calls[body["id"]]
            outcome = body["error"]["kind"] if "error" in body else None
            call.answered()
            self._log(call.facts, time.monotonic() - call.begun, outcome)
        if self._link is not None:
            body["id"] = call.ident
            self._link.send(frame.kind, body)
            if self._link is not None and self._link.backlog_nbytes > QUEUED_NBYTES:
                self._read_upstream(False)

    def tell_renewal(self) -> None:
        """Tell the client of the gang's ranks, if it has others now than at its start."""
        if self._link is not None and self.gang.renewal is not None:
            self._link.send(Kind.EVENT, {"renewed": self.gang.renewal})

    def _drained(self) -> None:
        self._read_upstream(True)

    def _read_upstream(self, reading: bool) -> None:
        if self._upstream is not None and not self._upstream.closing:
            transport = self._upstream.transport
            if transport is not None and reading != transport.is_reading():
                (transport.resume_reading if reading else transport.pause_reading)()

    def gang_lost(self) -> None:
        """The dispatcher has closed the connection."""
        self._upstream = None
        if self._link is not None:
            self._link.refuse(Failure("GroupFailedError", f"gang {self.gang.name} has ended"))
        self.end()

    # --- the end ---

    def _lost(self, link: Link) -> None:
        """The client's connection is gone; it may come back."""
        if link is not self._link:
            return
        self._link = None
        self._forget_calls()
        self._read_upstream(True)
        if not self._gone:
            self._service.audit.write(
                "lost", user=self.token.user, gang=self.gang.name, process=self.ident
            )
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(GRACE_S, self.end)

    def _forget_calls(self) -> None:
        """Cancel what the client waited for, and end the locks of its fetches."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.answered()
        if self._upstream is not None:
            self._upstream.send(Kind.COMMAND, {"op": "end_reads"})
            if calls:
                self._upstream.send(Kind.COMMAND, {"op": "cancel_calls"})

    def end(self) -> None:
        """The client has left, or did not come back: its leases end."""
        if self._gone:
            return
        self._gone = True
        self._forget_calls()
        if self._timer is not None:
            self._timer.cancel()
        if self._upstream is not None:
            self._upstream.send(Kind.COMMAND, {"op": "goodbye"})
            self._upstream.close()
        self._service.client_gone(self)

    def _refused(self, body: Body, failure: Failure) -> None:
        metrics.count("alchemist_gateway_refusals_total", ("command", failure.kind))
        self._log(body, 0.0, failure.kind)

    def _log(self, facts: Body, seconds: float, outcome: str | None) -> None:
        command = COMMANDS.get(facts.get("op", ""))
        if command is not None and command.audited:
            self._service.audit.write(
                "call", user=self.token.user, token=self.token.id, gang=self.gang.name,
                seconds=round(seconds, 6), error=outcome, **_facts(facts),
            )  # fmt: skip


def _facts(body: Body) -> Body:
    """The entry of a command in the audit log, without values."""
    logged = ("op", "library", "routine", "path", "shape", "name")
    kept: Body = {key: bounded(body[key]) for key in logged if key in body}
    if isinstance(body.get("task"), dict):
        kept["name"] = bounded(body["task"].get("name"))
    return kept


class _Upstream(ConnectingProtocol):
    """The gateway's connection to the dispatcher for one client."""

    def __init__(self, client: Client, token: str, fields: Body) -> None:
        super().__init__(self._frame, self._gone, token, fields)
        self._client = client

    def _frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        self._client.from_gang(frame)

    def _gone(self, protocol: FrameProtocol) -> None:
        self._client.gang_lost()

    def pause_writing(self) -> None:
        self._client.hold(True)

    def resume_writing(self) -> None:
        self._client.hold(False)
