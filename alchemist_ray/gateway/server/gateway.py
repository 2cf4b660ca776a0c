"""Gateway: listens for thin clients, and executes their requests in the Ray cluster.

Connections and commands are on one event loop, in a thread of its own. What waits for Ray or for a
gang runs in threads. A thread also serves each connection for data.

Of each attached process the gateway has a `Client`, with a connection to the dispatcher. It stays
when the client's own is lost, for `GRACE_S`, so that the client's matrices stay. Ids of commands
are replaced, so that late answers to a lost connection are not taken for answers to the next one.
"""

from __future__ import annotations

import asyncio
import datetime
import itertools
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import uvloop

from alchemist_ray.errors import SessionError, failure_of
from alchemist_ray.gang.registry import ADDRESS_VARIABLE
from alchemist_ray.gateway.protocol import GRACE_S, is_loopback
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import (
    Audit,
    Identity,
    Token,
    TokenFile,
    bounded,
    certificate,
)
from alchemist_ray.gateway.server.gangs import HostedGang, LongWaits, SessionCommands, UserLimit
from alchemist_ray.gateway.server.link import Link
from alchemist_ray.observe import metrics
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.acceptor import ACCEPTS_AT_ONCE, Strangers
from mpi_workers.wire.asynchronous import ConnectingProtocol, FrameProtocol
from mpi_workers.wire.commands import COMMANDS
from mpi_workers.wire.frames import Body, Frame, Kind, WireError

MAX_LINKS = 4096  # authenticated connections
MAX_LINKS_OF_USER = 1024
MAX_DATA_LINKS, MAX_DATA_LINKS_OF_USER = 256, 64  # a thread and 4 MiB each
MAX_ASKED = 100  # commands of a session's connection without an answer
WAIT_TIMEOUT_S = 10.0  # for a client's connection to its gang, and for the end of the gateway
REFUSALS = ("AuthError", "ResourceError")  # of commands, for the metrics
LOGGED_REFUSALS, LOGGED_S = 300, 60.0  # of strangers, in the audit log; in this time
ACCEPT_PAUSE_S = 0.05  # when there are no file descriptors left


class Gateway:
    """See the module.

    Parameters
    ----------
    host, port
        Where to listen; port 0 chooses one.
    tls : bool
        Off only on a loopback address.
    certfile, keyfile : str, optional
        Default: a certificate that is generated once.
    tokens, audit : str, optional
        Paths; see `TokenFile` and `Audit`.

    Raises
    ------
    SessionError
        If it cannot listen there.
    AuthError
        If the certificate cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        tls: bool = True,
        certfile: str | None = None,
        keyfile: str | None = None,
        tokens: str | None = None,
        audit: str | None = None,
    ) -> None:
        if not tls and not is_loopback(host):
            raise SessionError(f"without TLS a gateway listens on loopback only, not on {host}")
        os.environ.pop(ADDRESS_VARIABLE, None)  # the gangs of a gateway are in its Ray cluster
        self.tokens = TokenFile(tokens)
        self.audit = Audit(audit)
        self._identity: Identity | None = None
        if tls:
            self._identity = Identity(*certificate(certfile, keyfile), self._not_renewed)
        self.strangers: Strangers[Link] = Strangers()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (host, port), family=family, backlog=sockets.BACKLOG
            )
        except OSError as error:
            raise SessionError(f"a gateway cannot listen on {host}:{port}: {error}") from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._clients: dict[str, Client] = {}
        self._links: set[Link] = set()
        self.link_limit = UserLimit(MAX_LINKS_OF_USER, MAX_LINKS, "too many connections")
        full = "too many connections transfer data"
        self._data_limit = UserLimit(MAX_DATA_LINKS_OF_USER, MAX_DATA_LINKS, full)
        self._users: set[str] = set()  # with an attached client, when last measured
        self._asked: Counter[Link] = Counter()
        self._refusals, self._refusals_until = 0, 0.0
        self._waits = LongWaits()
        self._sessions = SessionCommands(self._waits, self.tokens)
        self.quotas = self._sessions.quotas
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = uvloop.new_event_loop()
        self._loop.call_soon(self._loop.add_reader, self._listener.fileno(), self._accept)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="alchemist-gateway", daemon=True
        )
        self._thread.start()
        self.audit.write("start", host=host, port=self.port, tls=tls, version=__version__)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal; empty without TLS."""
        return "" if self._identity is None else self._identity.look().digest.hex()

    @property
    def expires(self) -> str:
        """When the certificate expires; empty without TLS."""
        if self._identity is None:
            return ""
        end = self._identity.look().expires
        return f"{end:%Y-%m-%d}" + " (expired)" * (end < datetime.datetime.now(datetime.UTC))

    def _not_renewed(self, why: str) -> None:
        self.audit.write("certificate", why=why)
        sys.stderr.write(f"alchemist gateway: the certificate is not read again: {why}\n")

    def measure(self) -> None:
        """Note what metrics show of now. Ray forgets a gauge that is not set again."""
        attached = Counter(client.token.user for client in list(self._clients.values()))
        for user in self._users | set(attached):
            metrics.gauge("alchemist_gateway_sessions", attached[user], (metrics.bounded(user),))
        self._users = set(attached)

    def close(self) -> None:
        """Stop listening, end the gangs of clients, and hang up."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(WAIT_TIMEOUT_S)
        self._sessions.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_TIMEOUT_S)
        self._loop.close()
        self._waits.close()
        self._tell_omitted()
        self.audit.close()

    async def _close(self) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for link in (*self.strangers, *self._links):
            link.drop()

    # --- connections ---

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:
                if not self.strangers.displace():
                    self._loop.remove_reader(self._listener.fileno())
                    self._loop.call_later(
                        ACCEPT_PAUSE_S, self._loop.add_reader, self._listener.fileno(), self._accept
                    )
                return
            try:
                sockets.tune(sock)
                self.strangers.add(Link(self._loop, sock, self._identity, self))
            except OSError:
                sock.close()

    def refused(self, link: Link, failure: Failure) -> None:
        metrics.count("alchemist_gateway_refusals_total", ("connection", failure.kind))
        now = time.monotonic()
        if now > self._refusals_until:
            self._tell_omitted()
            self._refusals, self._refusals_until = 0, now + LOGGED_S
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:  # else strangers could fill the disk
            self.audit.write("refused", source=link.source, why=failure.message)

    def _tell_omitted(self) -> None:
        if self._refusals > LOGGED_REFUSALS:
            self.audit.write("refused", omitted=self._refusals - LOGGED_REFUSALS)

    def admitted(self, link: Link, fields: Body) -> None:
        token = link.token
        assert token is not None
        if not token.allows("call"):
            raise Failure("AuthError", "the token lacks the scope 'call'")
        self.link_limit.take(token.user)
        self._links.add(link)
        link.on_lost = lambda: self._link_lost(link)
        link.on_frame = _early
        match fields.get("role"):
            case "session":
                self.audit.write(
                    "session", user=token.user, token=token.id, source=link.source,
                    where=str(fields.get("where", ""))[:200],
                )  # fmt: skip
                link.on_frame = lambda frame: self._command(link, frame)
                link.send(Kind.WELCOME, {"version": __version__, "scopes": list(token.scopes)})
            case "client":
                self._run(self._attach(link, token, fields), link)
            case "data":
                self._serve_data(link, token, fields)
            case role:
                raise Failure("TransferError", f"unknown role {role!r}")

    def _link_lost(self, link: Link) -> None:
        if link in self._links and link.token is not None:
            self._links.remove(link)
            self.link_limit.give_back(link.token.user)

    def _run(self, work: Any, link: Link) -> None:
        """Run a coroutine; its error refuses the link."""

        async def guarded() -> None:
            try:
                await work
            except (OSError, WireError) as error:
                link.refuse(Failure("GroupFailedError", f"the gang cannot be reached: {error}"))
            except Exception as error:
                link.refuse(failure_of(error, "request of a connection"))

        task = self._loop.create_task(guarded())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- attached clients ---

    async def _attach(self, link: Link, token: Token, fields: Body) -> None:
        gang = await self._sessions.find(token, str(fields["gang"]))
        ident = f"{token.user}:{str(fields['process'])[:64]}"
        key = f"{gang.name}/{ident}"
        client = self._clients.get(key)
        if client is None:
            where = f"{str(fields.get('where', ''))[:200]} as {token.user} from {link.source}"
            client = self._clients[key] = Client(ident, token, gang, self)
            gang.clients.add(client)
            try:
                try:
                    await client.connect(where)
                except (OSError, WireError, Failure):  # it may be there again, at another address
                    await self._waits.run(token.user, partial(gang.connection.ping, wait=True))
                    await client.connect(where)
            except BaseException:
                self._clients.pop(key, None)
                gang.clients.discard(client)
                raise
        await asyncio.wait_for(client.ready.wait(), WAIT_TIMEOUT_S)
        client.token = token

        def lost() -> None:
            self._link_lost(link)
            left()

        client.attach(link)
        left, link.on_lost = link.on_lost, lost
        if link.closed:  # while the gang was being reached
            lost()
        link.send(Kind.WELCOME, {"version": __version__})
        client.tell_renewal()

    def client_gone(self, client: Client) -> None:
        """The grace of a client is over, or it has said goodbye."""
        gang = client.gang
        self._clients.pop(f"{gang.name}/{client.ident}", None)
        gang.clients.discard(client)
        self.audit.write("left", user=client.token.user, gang=gang.name, process=client.ident)
        if not gang.clients or gang.owner == client.ident:
            self._sessions.release(gang)

    def _serve_data(self, link: Link, token: Token, fields: Body) -> None:
        gang = self._sessions.gang_of(token, fields.get("gang"))
        ident = f"{token.user}:{str(fields.get('process'))[:64]}"
        if all(client.ident != ident for client in gang.clients):
            raise Failure(
                "AuthError",
                f"this process is not attached to gang {gang.name}: call AlchemistSession.attach",
            )
        self._data_limit.take(token.user)
        link.send(Kind.WELCOME, {"version": __version__})
        sock, received = link.give_away()

        def serve() -> None:
            try:
                gang.transfers.serve(sock, received, partial(self._check_transfer, token, gang))
            finally:
                self._loop.call_soon_threadsafe(self._data_gone, link, token.user)

        threading.Thread(target=serve, name="alchemist-gateway-data", daemon=True).start()

    def _data_gone(self, link: Link, user: str) -> None:
        self._data_limit.give_back(user)
        self._link_lost(link)

    # --- what sessions ask for ---

    def _command(self, link: Link, frame: Frame) -> None:
        token, body = link.token, frame.body
        assert token is not None
        if frame.kind != Kind.COMMAND or type(body.get("id")) is not int:
            raise WireError("a session must send commands only, each with a number")
        if self._asked[link] >= MAX_ASKED:
            words = f"{MAX_ASKED} commands wait for an answer: send fewer"
            raise Failure("ResourceError", words)
        self._asked[link] += 1

        async def answer() -> None:
            result: Body
            try:
                self.tokens.check(token.id)
                result = {"result": await self._sessions.carry_out(token, body)}
            except (KeyError, TypeError, ValueError) as error:
                words = f"{type(error).__name__}: {error}"
                result = {"error": Failure("BadArgumentError", words).to_map()}
            except Exception as error:
                result = {"error": failure_of(error, f"command {body.get('op')!r}").to_map()}
            finally:
                self._asked -= Counter([link])
            kind = result.get("error", {}).get("kind")
            if kind in REFUSALS:
                metrics.count("alchemist_gateway_refusals_total", ("command", kind))
            self.audit.write(
                str(body.get("op")), user=token.user, token=token.id, source=link.source,
                gang=body.get("name") or body.get("gang"), error=kind,
            )  # fmt: skip
            link.send(Kind.REPLY, {"id": body["id"], **result})

        self._run(answer(), link)

    def _check_transfer(self, token: Token, gang: HostedGang, kind: Kind) -> None:
        self.tokens.check(token.id)
        if kind != Kind.GET and not access.may_change(token, gang.user, self.tokens):
            raise Failure("AuthError", access.READ_ONLY)


def _early(frame: Frame) -> None:
    raise WireError("a client must not send frames before the WELCOME")


# --- one attached process ---

QUEUED_NBYTES = 4 << 20  # 4 MiB for a client that reads slowly: then the dispatcher waits
CONNECT_TIMEOUT_S = 10.0
PENDING = 10_000  # commands of a client without an answer


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
    """A process that is attached to a gang, and its commands. All methods run on the event loop.

    Attributes
    ----------
    ident : str
        Of the process; it reconnects with the same one.
    """

    def __init__(self, ident: str, token: Token, gang: HostedGang, gateway: Gateway) -> None:
        self.ident = ident
        self.token = token
        self.gang = gang
        self._gateway = gateway
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
        for place in sockets.reachable_addresses(address.addresses):
            sock = await asyncio.to_thread(sockets.dial, place, CONNECT_TIMEOUT_S)
            sock.setblocking(False)
            made = partial(_Upstream, self, address.token, fields)
            _, upstream = await asyncio.get_running_loop().create_connection(made, sock=sock)
            await asyncio.wait_for(upstream.welcome, CONNECT_TIMEOUT_S)
            self._upstream = upstream
            self.ready.set()
            return
        raise Failure("GroupFailedError", f"no address of gang {self.gang.name} can be reached")

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
            self._gateway.tokens.check(self.token.id)
            own = self.gang.user == self.token.user
            changes = access.may_change(self.token, self.gang.user, self._gateway.tokens)
            access.check(self.token, body, own=own, changes=changes)
            if len(self._calls) + len(self._tasks) >= PENDING:
                raise Failure("GroupError", f"{PENDING} commands wait for an answer: send fewer")
        except Failure as failure:
            self._refused(body, failure)
            self._reply(ident, failure)
            return
        makes = op in ("create", "call", "run", "redistribute")  # the quota is in a file
        if makes and self._gateway.tokens.quota(self.token.user, "nbytes") is not None:
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
            answered = await self._gateway.quotas.reserve(self.token, body)
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
            self._gateway.audit.write(
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
        self._gateway.client_gone(self)

    def _refused(self, body: Body, failure: Failure) -> None:
        metrics.count("alchemist_gateway_refusals_total", ("command", failure.kind))
        self._log(body, 0.0, failure.kind)

    def _log(self, facts: Body, seconds: float, outcome: str | None) -> None:
        command = COMMANDS.get(facts.get("op", ""))
        if command is not None and command.audited:
            self._gateway.audit.write(
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
