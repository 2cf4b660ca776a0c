"""Gateway: listens for thin clients, and executes their requests in the Ray cluster.

A thread serves each connection, and waits for the answers of Ray and of gangs.

Each attached process has a `Client`, with a connection of its own to the dispatcher. When the
process's connection to the gateway is lost, that one ends with it. The dispatcher keeps its
leases for `RESUME_S`, so that the process can come back, with a new `Client` under the same id.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from alchemist_ray.attached.registry import ADDRESS_VARIABLE
from alchemist_ray.errors import SessionError, failure_of
from alchemist_ray.gateway.protocol import RESUME_S, is_loopback
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import (
    Audit,
    Identity,
    Token,
    TokenFile,
    bounded,
    certificate,
)
from alchemist_ray.gateway.server.gangs import HostedGang, SessionCommands, UserLimit, later
from alchemist_ray.gateway.server.link import SEND_TIMEOUT_S, Link, authenticate
from alchemist_ray.measures import metrics
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import COMMANDS
from mpi_workers.wire import sockets
from mpi_workers.wire.acceptor import AcceptedPeer, Acceptor
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, ConnectionLost, Frame, Kind, WireError

MAX_LINKS = 4096  # authenticated connections, a thread each
MAX_LINKS_OF_USER = 1024
MAX_DATA_LINKS, MAX_DATA_LINKS_OF_USER = 256, 64  # 4 MiB each
MAX_WAITS, MAX_WAITS_OF_USER = 1024, 256  # for gangs that are started, resized or attached to
REFUSALS = ("AuthError", "ResourceError")  # of commands, for the metrics
LOGGED_REFUSALS, LOGGED_S = 300, 60.0  # of strangers, in the audit log; in this time
MIN_TIMEOUT_S = 1e-3  # for sockets, 0 means not to wait at all


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
        listener = _listen(host, port)
        self.port: int = listener.getsockname()[1]
        self._links: set[Link] = set()
        self.link_limit = UserLimit(MAX_LINKS_OF_USER, MAX_LINKS, "too many connections")
        full = "too many connections transfer data"
        self._data_limit = UserLimit(MAX_DATA_LINKS_OF_USER, MAX_DATA_LINKS, full)
        full = "too many gangs are being started, resized or attached to"
        self._wait_limit = UserLimit(MAX_WAITS_OF_USER, MAX_WAITS, full)
        self._users: set[str] = set()  # with an attached client, when last measured
        self._refusals, self._refusals_until = 0, 0.0
        self._refusing = threading.Lock()
        self.sessions = SessionCommands(self.tokens)
        self.quotas = self.sessions.quotas
        self._closed = False
        self.audit.write("start", host=host, port=self.port, tls=tls, version=__version__)
        self.acceptor = Acceptor([listener], self._authenticate, self._serve).start()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hexadecimal; empty without TLS."""
        return "" if self._identity is None else self._identity.look()[1].hex()

    @property
    def expires(self) -> str:
        """When the certificate expires; empty without TLS."""
        if self._identity is None:
            return ""
        _, _, end = self._identity.look()
        return f"{end:%Y-%m-%d}" + " (expired)" * (end < datetime.datetime.now(datetime.UTC))

    def _not_renewed(self, why: str) -> None:
        self.audit.write("certificate", why=why)
        sys.stderr.write(f"alchemist gateway: the certificate is not read again: {why}\n")

    def measure(self) -> None:
        """Note what metrics show of now. Ray forgets a gauge that is not set again."""
        attached = Counter(client.user for client in self.sessions.clients())
        for user in self._users | set(attached):
            metrics.gauge("alchemist_gateway_sessions", attached[user], (metrics.bounded(user),))
        self._users = set(attached)

    def close(self) -> None:
        """Stop listening, end the gangs of clients, and hang up."""
        if self._closed:
            return
        self._closed = True
        self.acceptor.close()
        for link in list(self._links):
            link.connection.hang_up()
        self.sessions.close()
        self._tell_omitted()
        self.audit.close()

    # --- connections ---

    def _authenticate(self, peer: AcceptedPeer) -> Link:
        try:
            binding = b""
            if self._identity is not None:
                context, binding, _ = self._identity.look()
                peer.sock = sock = context.wrap_socket(
                    peer.sock, server_side=True, do_handshake_on_connect=False
                )
                sock.settimeout(peer.left_s or MIN_TIMEOUT_S)
                sock.do_handshake()
            return authenticate(peer, binding, self.tokens)
        except (Failure, ssl.SSLError, TimeoutError) as error:
            self._refused(peer, error)
            raise
        except ValueError as error:  # of `ssl`
            raise OSError(str(error)) from None

    def _refused(self, peer: AcceptedPeer, error: Exception) -> None:
        kind, why = "AuthError", "the handshake timed out"
        if isinstance(error, Failure):
            kind, why = error.kind, error.message
        elif isinstance(error, ssl.SSLError):  # the client's reason, too
            why = f"the TLS handshake failed: {error.reason or error}"
        metrics.count("alchemist_gateway_refusals_total", ("connection", kind))
        with self._refusing:
            now = time.monotonic()
            if now > self._refusals_until:
                self._tell_omitted()
                self._refusals, self._refusals_until = 0, now + LOGGED_S
            self._refusals += 1
            if self._refusals <= LOGGED_REFUSALS:  # else strangers could fill the disk
                self.audit.write("refused", source=peer.source, why=why)

    def _tell_omitted(self) -> None:
        if self._refusals > LOGGED_REFUSALS:
            self.audit.write("refused", omitted=self._refusals - LOGGED_REFUSALS)

    def _serve(self, link: Link) -> None:
        """Serve a client until its connection ends; what it must not do ends it."""
        self._links.add(link)
        try:
            if not link.token.allows("call"):
                raise Failure("AuthError", "the token lacks the scope 'call'")
            with self.link_limit.one_of(link.token.user):
                match link.fields.get("role"):
                    case "session":
                        self._serve_session(link)
                    case "client":
                        self._serve_client(link)
                    case "data":
                        self._serve_data(link)
                    case role:
                        raise Failure("TransferError", f"unknown role {role!r}")
        except (ConnectionLost, OSError):
            pass  # the client is gone
        except WireError as error:
            link.connection.refuse(Failure("TransferError", f"refused: {error}"))
        except Exception as error:  # a client that waits for an answer learns of any
            link.connection.refuse(failure_of(error, "request of a connection"))
        finally:
            self._links.discard(link)
            link.connection.close()

    # --- what sessions ask for ---

    def _serve_session(self, link: Link) -> None:
        token = link.token
        self.audit.write(
            "session", user=token.user, token=token.id, source=link.source, where=link.where
        )
        link.send(Kind.WELCOME, {"version": __version__, "scopes": list(token.scopes)})
        while True:
            self._command(link, link.recv().body)

    def _command(self, link: Link, body: Body) -> None:
        if type(body.get("id")) is not int:
            raise WireError("a command of a session must have a number")
        token = link.token
        result: Body
        try:
            self.tokens.check(token.id)
            with self._wait_limit.one_of(token.user):
                result = {"result": self.sessions.carry_out(token, body)}
        except (KeyError, TypeError, ValueError) as error:
            words = f"{type(error).__name__}: {error}"
            result = {"error": Failure("BadArgumentError", words).to_map()}
        except Exception as error:
            result = {"error": failure_of(error, f"command {body.get('op')!r}").to_map()}
        kind = result.get("error", {}).get("kind")
        if kind in REFUSALS:
            metrics.count("alchemist_gateway_refusals_total", ("command", kind))
        self.audit.write(
            str(body.get("op")), user=token.user, token=token.id, source=link.source,
            gang=body.get("name") or body.get("gang"), error=kind,
        )  # fmt: skip
        link.send(Kind.REPLY, {"id": body["id"], **result})

    # --- attached processes ---

    def _serve_client(self, link: Link) -> None:
        with self._wait_limit.one_of(link.token.user):
            gang = self.sessions.find(link.token, str(link.fields["gang"]))
        client = Client(link, gang, self)
        before = self.sessions.joined(gang, client)
        if before is not None:
            before.drop()
        try:
            client.serve()
        finally:
            client.end()
            if client.goodbye:
                self._gone(client)
            elif not self._closed:
                self.audit.write("lost", user=client.user, gang=gang.name, process=link.ident)
                later(RESUME_S, self._gone, client)

    def _gone(self, client: Client) -> None:
        """A process has said goodbye, or did not come back in time."""
        if self.sessions.disconnected(client.gang, client):
            self.audit.write("left", user=client.user, gang=client.gang.name, process=client.ident)

    # --- transfers ---

    def _serve_data(self, link: Link) -> None:
        token = link.token
        gang = self.sessions.gang_of(token, link.fields.get("gang"))
        if link.ident not in gang.clients:
            raise Failure(
                "AuthError",
                f"this process is not attached to gang {gang.name}: call AlchemistSession.attach",
            )
        with self._data_limit.one_of(token.user):
            link.send(Kind.WELCOME, {"version": __version__})
            gang.transfers.serve(link.connection, partial(self._check_transfer, token, gang))

    def _check_transfer(self, token: Token, gang: HostedGang, kind: Kind) -> None:
        self.tokens.check(token.id)
        if kind != Kind.GET and not access.may_change(token, gang.user, self.tokens):
            raise Failure("AuthError", access.READ_ONLY)


def _listen(host: str, port: int) -> socket.socket:
    """Listen on an address; ``::``: on all, those of IPv4 too, where there is IPv6."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = False
    if host == "::":
        both = socket.has_dualstack_ipv6()
        host, family = (host, family) if both else ("0.0.0.0", socket.AF_INET)
    try:
        return socket.create_server(
            (host, port), family=family, backlog=sockets.BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        raise SessionError(f"a gateway cannot listen on {host}:{port}: {error}") from None


# --- one attached process ---

PENDING = 10_000  # commands of a client without an answer


@dataclass(slots=True)
class _Call:
    """A command that the gang has not answered.

    Attributes
    ----------
    answered : callable()
        Called when it is over.
    wanted : bool
        Whether it has not been cancelled.
    """

    facts: Body
    answered: Callable[[], None] = lambda: None
    wanted: bool = True
    begun: float = field(default_factory=time.monotonic)


class Client:
    """A process that is attached to a gang, as long as its connection lasts.

    The thread of the connection passes on what the client says, another one what the gang says.

    Attributes
    ----------
    ident : str
        Of the process; it reconnects with the same one.
    goodbye : bool
        Whether it has said so.
    """

    def __init__(self, link: Link, gang: HostedGang, gateway: Gateway) -> None:
        self.ident = link.ident
        self.token = link.token
        self.user = link.token.user
        self.gang = gang
        self.goodbye = False
        self.link = link
        self._gateway = gateway
        self._upstream: Connection | None = None
        self._sending = threading.Lock()  # to the gang
        self._calls: dict[int, _Call] = {}
        self._reader = threading.Thread(target=self._read_gang, daemon=True)

    def serve(self) -> None:
        """Pass on all commands of the client. Raises `Failure`, `OSError`, `WireError`."""
        try:
            self._upstream = self._connected()
        except (OSError, WireError, Failure):  # it may be there again, at another address
            self.gang.connection.ping(wait=True)
            self._upstream = self._connected()
        self.link.send(Kind.WELCOME, {"version": __version__})
        self._tell_move()
        self._reader.start()
        while not self.goodbye:
            self._from_client(self.link.recv().body)

    def _connected(self) -> Connection:
        """A connection to the dispatcher."""
        address = self.gang.connection.address
        link = self.link
        fields = {
            "role": "client", "owner": False, "session": True, "process": self.ident,
            "where": f"{link.where} as {self.user} from {link.source}", "grace_s": RESUME_S,
        }  # fmt: skip
        places = sockets.reachable_addresses(address.addresses)
        if not places:
            raise Failure("GroupFailedError", f"no address of gang {self.gang.name} can be reached")
        try:
            return connect(places[0], address.token, fields, take_fds=False)[0]
        except (OSError, WireError) as error:
            words = f"the gang cannot be reached: {error}"
            raise Failure("GroupFailedError", words) from None

    def drop(self) -> None:
        """The process has another connection."""
        self.link.connection.hang_up()
        self.end()

    def end(self) -> None:
        """End the connection to the dispatcher, which cancels what the process waits for."""
        self.link.over.set()
        if self._upstream is not None:
            self._upstream.hang_up()
            if self._reader.ident is not None:
                self._reader.join(SEND_TIMEOUT_S)  # it may wait for the client to read
            self._upstream.close()
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.answered()

    # --- from the client ---

    def _from_client(self, body: Body) -> None:
        ident, op = body.get("id"), body.get("op")
        if ident is not None and type(ident) is not int:
            raise WireError("the number of a command must be an integer")
        tokens = self._gateway.tokens
        try:
            tokens.check(self.token.id)
            changes = access.may_change(self.token, self.gang.user, tokens)
            access.check(self.token, body, own=self.gang.user == self.user, changes=changes)
            self._gateway.sessions.couple(self.token, self.gang, body)
            if len(self._calls) >= PENDING:
                raise Failure("GroupError", f"{PENDING} commands wait for an answer: send fewer")
        except Failure as failure:
            self._refuse(body, failure)
            return
        if op in (
            "cancel",
            "cancel_calls",
        ):  # the gang does not know of calls that wait for a quota
            for number, call in self._calls.copy().items():
                call.wanted &= op == "cancel" and number != body.get("call")
        call = _Call(_facts(body))
        if ident is not None:
            self._calls[ident] = call
        if (
            not COMMANDS[str(op)].makes or tokens.quota(self.user, "nbytes") is None
        ):  # the quota is in a file
            self._forward(body, call)
        elif ident is None:
            raise WireError(f"{op!r} must have a number")
        else:  # other commands go on: it may depend on what is created now whether this one fits
            threading.Thread(target=self._within_quota, args=(call, body), daemon=True).start()

    def _within_quota(self, call: _Call, body: Body) -> None:
        try:
            call.answered = self._gateway.quotas.reserve(self.token, self.gang, body)
            self._forward(body, call)
        except Exception as error:
            self._calls.pop(body["id"], None)
            call.answered()
            self._refuse(body, failure_of(error, f"command {body['op']!r}"))
        if self.link.over.is_set():  # `end` has perhaps not seen the reservation
            call.answered()

    def _forward(self, body: Body, call: _Call) -> None:
        """Send a command to the gang. Raises `Failure` if it was cancelled."""
        if body["op"] in ("seal", "free"):
            self.gang.transfers.forget([body.get("matrix"), *body.get("matrices", ())])
        if body["op"] == "goodbye":
            self.goodbye = True
        if self._upstream is not None:
            with self._sending, contextlib.suppress(WireError):  # the other thread finds it lost
                if not call.wanted:
                    raise Failure("CancelledError", "the call was cancelled before it began")
                self._upstream.send(Kind.COMMAND, body)

    def _refuse(self, body: Body, failure: Failure) -> None:
        metrics.count("alchemist_gateway_refusals_total", ("command", failure.kind))
        self._log(body, 0.0, failure.kind)
        if "id" in body:
            with contextlib.suppress(WireError):
                self.link.send(Kind.REPLY, {"id": body["id"], "error": failure.to_map()})

    # --- from the dispatcher ---

    def _read_gang(self) -> None:
        """Pass on all that the gang says, until one of the two is gone."""
        assert self._upstream is not None
        failure = Failure("GroupFailedError", f"gang {self.gang.name} has ended")
        try:
            while True:
                frame = self._upstream.recv()
                if frame.kind == Kind.REFUSED:
                    failure = Failure.from_map(frame.body)
                    break
                self._from_gang(frame)
        except (WireError, OSError):
            pass
        if not (self.goodbye or self.link.over.is_set()):
            self.link.refuse(failure)

    def _from_gang(self, frame: Frame) -> None:
        body = frame.body
        if "moved" in body:
            self.gang.moved(body["moved"])
            self._tell_move()
            return
        call = self._calls.get(body.get("id", 0))
        if call is not None and frame.kind == Kind.REPLY:
            self._calls.pop(body["id"], None)
            call.answered()
            outcome = body["error"]["kind"] if "error" in body else None
            self._log(call.facts, time.monotonic() - call.begun, outcome)
        self.link.send(frame.kind, body)

    def _tell_move(self) -> None:
        """Tell the client of the gang's ranks, if it has others now than at its start."""
        if self.gang.move is not None:
            self.link.send(Kind.EVENT, {"moved": self.gang.move})

    def _log(self, facts: Body, seconds: float, outcome: str | None) -> None:
        command = COMMANDS.get(facts.get("op", ""))
        if command is not None and command.audited:
            self._gateway.audit.write(
                "call", user=self.user, token=self.token.id, gang=self.gang.name,
                seconds=round(seconds, 6), error=outcome, **_facts(facts),
            )  # fmt: skip


def _facts(body: Body) -> Body:
    """The entry of a command in the audit log, without values."""
    if isinstance(body.get("command"), dict):  # of a call that is submitted
        body = {**body["command"], "op": body["op"]}
    logged = ("op", "library", "routine", "path", "shape", "name")
    kept: Body = {key: bounded(body[key]) for key in logged if key in body}
    if isinstance(body.get("task"), dict):
        kept["name"] = bounded(body["task"].get("name"))
    return kept
