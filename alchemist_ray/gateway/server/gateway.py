"""Gateway: listens for thin clients, and executes their requests in the Ray cluster.

Connections and commands are on one event loop, in a thread of its own. What waits for Ray or for a
gang runs in threads. A thread also serves each connection for data.
"""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import sys
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import uvloop

from alchemist_ray.errors import SessionError, failure_of
from alchemist_ray.gang.registry import ADDRESS_VARIABLE
from alchemist_ray.gateway.protocol import is_loopback
from alchemist_ray.gateway.server import access
from alchemist_ray.gateway.server.access import Audit, Token, TokenFile
from alchemist_ray.gateway.server.certificates import Identity, certificate
from alchemist_ray.gateway.server.gangs import HostedGang, LongWaits, SessionCommands
from alchemist_ray.gateway.server.link import Link
from alchemist_ray.gateway.server.relay import Client
from alchemist_ray.observe import metrics
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire import sockets
from mpi_workers.wire.acceptor import ACCEPTS_AT_ONCE, Strangers
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
        self._links: dict[Link, str] = {}  # user
        self._users: set[str] = set()  # with an attached client, when last measured
        self._data_links: Counter[str] = Counter()  # by user
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
        of_user = sum(user == token.user for user in self._links.values())
        if len(self._links) >= MAX_LINKS or of_user >= MAX_LINKS_OF_USER:
            raise Failure(
                "ResourceError",
                f"too many connections: {token.user} has {of_user} (limit {MAX_LINKS_OF_USER}), "
                f"all users have {len(self._links)} (limit {MAX_LINKS})",
            )
        if not token.allows("call"):
            raise Failure("AuthError", "the token lacks the scope 'call'")
        self._links[link] = token.user
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
        self._links.pop(link, None)

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
        of_user, of_all = self._data_links[token.user], self._data_links.total()
        if of_user >= MAX_DATA_LINKS_OF_USER or of_all >= MAX_DATA_LINKS:
            raise Failure(
                "ResourceError",
                f"too many connections transfer data: {of_user} of {token.user} (limit "
                f"{MAX_DATA_LINKS_OF_USER}), {of_all} of all users (limit {MAX_DATA_LINKS}). Try "
                "again later",
            )
        self._data_links[token.user] += 1
        link.send(Kind.WELCOME, {"version": __version__})
        sock, received = link.give_away()

        def serve() -> None:
            try:
                gang.transfers.serve(sock, received, partial(self._check_transfer, token, gang))
            finally:
                self._loop.call_soon_threadsafe(self._data_gone, link, token.user)

        threading.Thread(target=serve, name="alchemist-gateway-data", daemon=True).start()

    def _data_gone(self, link: Link, user: str) -> None:
        self._data_links -= Counter([user])
        self._links.pop(link, None)

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
