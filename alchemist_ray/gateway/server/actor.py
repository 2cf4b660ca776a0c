"""The gateway as an actor on the head of a Ray cluster: `serve`, `find` and `stop`.

Also ``alchemist gateway`` and ``alchemist token``.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from alchemist_ray.arguments import checked_address, checked_flag, checked_path
from alchemist_ray.cluster import published
from alchemist_ray.cluster.actors import NAMESPACE, ask
from alchemist_ray.cluster.driver import HEAD, start_actor
from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.errors import AlchemistError, AuthError, SessionError
from alchemist_ray.gateway.protocol import PORT, SCOPES, GatewayAddress, is_loopback
from alchemist_ray.gateway.server.access import AUDIT, CLUSTER, DAYS, FILE, Token, TokenFile
from alchemist_ray.gateway.server.gangs import SUFFIX
from alchemist_ray.gateway.server.gateway import Gateway
from alchemist_ray.measures import exporter
from alchemist_ray.ray_access import catalogue
from alchemist_ray.subcommands import add_options, add_subcommand, names, parser_of, positive
from mpi_workers.matrix.sizes import parse_nbytes

NAME = "alchemist-gateway"
FILES = ("certfile", "keyfile", "tokens", "audit")  # options that are paths
READY_TIMEOUT_S = 60.0
POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class GatewayInfo:
    """A gateway that listens.

    Attributes
    ----------
    host : str
        Address of the head of the Ray cluster; clients may need another name for it.
    port : int
    tls : bool
    fingerprint : str
        SHA-256 of its certificate, in hexadecimal.
    tokens, audit : str
        Paths of the file of tokens and of the audit log, on the head.
    expires : str
        When its certificate expires.
    """

    host: str
    port: int
    tls: bool
    fingerprint: str
    tokens: str
    audit: str
    expires: str = ""

    @property
    def address(self) -> str:
        """For ``AlchemistSession(address=...)``."""
        return str(GatewayAddress(self.host, self.port, self.tls))

    def stop(self) -> None:
        """End the gateway, with the private gangs of its clients."""
        stop()


class GatewayActor:
    """Actor: a `Gateway` in a process of its own. Ray starts it again if it dies."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._gateway: Gateway | None = None
        self._starting = threading.Lock()  # two clients may ask after a failed start
        with contextlib.suppress(AlchemistError):  # `about` raises it; Ray would print 60 lines
            self._started()

    def _started(self) -> Gateway:
        with self._starting:
            if self._gateway is not None:
                return self._gateway
            if (given := self._options["tokens"]) is not None and not Path(given).is_file():
                raise AuthError(
                    f"there is no file of tokens {given} on the head: `alchemist token --tokens "
                    f"{given} create USER` makes one"
                )
            self._gateway = Gateway(**self._options)
            exporter.start(self._gateway.measure)
            return self._gateway

    def about(self) -> GatewayInfo:
        """The gateway, for clients and operators; it is started again if its start failed."""
        its = self._started()
        host = self._options["host"]
        if host in ("0.0.0.0", "::"):
            host = ray.util.get_node_ip_address()
        files = str(its.tokens.path), str(its.audit.path)
        tls = self._options["tls"]
        return GatewayInfo(host, its.port, tls, its.fingerprint, *files, its.expires)

    def close(self) -> None:
        """End the gangs of clients, and stop listening."""
        if self._gateway is not None:
            self._gateway.close()


def serve(
    host: str = "::",
    port: int = PORT,
    *,
    tls: bool = True,
    certfile: str | None = None,
    keyfile: str | None = None,
    tokens: str | None = None,
    audit: str | None = None,
) -> GatewayInfo:
    """Start the gateway of the Ray cluster that this process is in, or find the one that runs.

    Parameters
    ----------
    host, port
        Where it listens on the head node; ``::``: on all addresses, of IPv4 and IPv6. Port 0
        chooses one.
    tls : bool
        Off only with ``host="127.0.0.1"``.
    certfile, keyfile : str, optional
        Files on the head, relative to the folder of this process. Default: a self-signed
        certificate, generated once.
    tokens, audit : str, optional
        Likewise; `tokens` must exist. Default: ``~/.config/alchemist/tokens.json`` and
        ``~/.config/alchemist/gateway/audit.log``.

    Returns
    -------
    GatewayInfo

    Raises
    ------
    SessionError
        If it cannot listen there, or another gateway of the cluster listens elsewhere.
    AuthError
        If the certificate cannot be used.
    """
    options: dict[str, Any] = {
        "host": host, "port": port, "tls": tls, "certfile": certfile, "keyfile": keyfile,
        "tokens": tokens, "audit": audit,
    }  # fmt: skip
    checked_address(host, port, least=0)
    checked_flag("tls", tls)
    for name in FILES:
        if options[name] is not None:  # its process has another working directory
            options[name] = str(checked_path(name, options[name]))
    if not tls and not is_loopback(host):
        raise SessionError(f"without TLS a gateway listens on loopback only, not on {host}")
    if (running := find()) is not None:
        same = all(options[n] in (None, getattr(running, n)) for n in ("tokens", "audit"))
        if port not in (0, running.port) or tls != running.tls or not same:
            raise SessionError(
                f"this cluster has a gateway at {running.address}, with the tokens "
                f"{running.tokens} and the audit log {running.audit}: "
                "`alchemist gateway --stop` ends it"
            )
        return running
    actor = start_actor(
        GatewayActor,
        options,
        name=NAME,
        lifetime="detached",
        max_restarts=0 if port == 0 else -1,  # clients could not know another port
        max_concurrency=8,
        resources={HEAD: 0.001},
        scheduling_strategy="DEFAULT",
    )
    try:
        return _about(actor)
    except (AlchemistError, RayActorError) as error:
        with contextlib.suppress(Exception):
            stop()
        raise SessionError(f"the gateway did not start: {error}") from None


def publish(gang: str) -> Path:
    """See `AlchemistSession.publish`."""
    running = find()
    path = published.path_of(gang).with_suffix(".tokens")
    if running is None:
        path.unlink(missing_ok=True)  # of an earlier job
    tokens = TokenFile(path if running is None else running.tokens)
    token = tokens.create(getpass.getuser(), ("call", "run_code", "files"), days=None)
    info = running or serve(port=0, tokens=str(path))
    return published.publish(gang, info.address, token)


def find() -> GatewayInfo | None:
    """The gateway of the Ray cluster that this process is in, or None."""
    actor = _find()
    return None if actor is None else _about(actor)


def stop() -> bool:
    """End the gateway; whether there was one. Private gangs of its clients end with it."""
    actor = _find()
    if actor is None:
        return False
    with contextlib.suppress(Exception):  # it is ended in any case
        ray.get(actor.close.remote(), timeout=READY_TIMEOUT_S)
    ray.kill(actor)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while _find() is not None:
        if time.monotonic() > deadline:
            raise SessionError(
                f"Ray has not ended the gateway in {READY_TIMEOUT_S:.0f} s: try again, or restart "
                "Ray on its node"
            )
        time.sleep(POLL_INTERVAL_S)
    return True


def _find() -> ActorHandle | None:
    try:
        return ray.get_actor(NAME, namespace=NAMESPACE)
    except ValueError:
        return None


def _about(actor: ActorHandle) -> GatewayInfo:
    info: GatewayInfo = ask(actor.about.remote(), READY_TIMEOUT_S)
    return info


# --- the command line ---


TOKENS = f"file of tokens (default: {FILE})"
GATEWAY = (
    ("--host", "::", "address to listen on (default: all, of IPv4 and IPv6)"),
    ("--port", PORT, "port to listen on (default: %(default)s)"),
    ("--certfile", str, "certificate (default: self-signed, generated once)"),
    ("--keyfile", str, "private key of the certificate"),
    ("--tokens", str, TOKENS),
    ("--audit", str, f"audit log (default: {AUDIT})"),
    ("--no-tls", False, "do not encrypt; only with --host 127.0.0.1"),
    ("--stop", False, "end the running gateway"),
    ("--status", False, "show the running gateway"),
)


def _days(text: str) -> float | None:
    return None if text == "never" else positive(text)


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


CREATE: tuple[tuple[Any, ...], ...] = (
    ("--scopes", names, f"comma-separated, of {', '.join(SCOPES)} (default: call)",
     {"default": ["call"]}),
    ("--groups", names, "comma-separated: members change each other's named gangs; "
     f"{CLUSTER!r}: also those that were started inside the cluster", {"default": []}),
    ("--days", _days, f"days until it expires, or never ({DAYS:g})", {"default": DAYS}),
    ("--ranks", int, "ranks of all gangs of the user at a time; of several tokens of a user the "
     "smallest number counts, as for --gangs and --bytes"),
    ("--gangs", int, "gangs of the user at a time"),
    ("--bytes BYTES nbytes", _nbytes,
     "bytes of all matrices of the user, e.g. 100G (10^9) or 100Gi (2^30)"),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist gateway`` or ``alchemist token``. Returns the exit code."""
    if argv[0] == "gateway":
        about = "Start the gateway of this machine's Ray cluster, for clients without Ray."
        return _gateway(parser_of("alchemist gateway", about, GATEWAY).parse_args(argv[1:]))
    about = "Create, list and revoke tokens of the gateway's users."
    parser = parser_of("alchemist token", about, [("--tokens", str, TOKENS)])
    commands = parser.add_subparsers(dest="command", required=True)
    create = add_subcommand(commands, "create", "print a new token; only its verifier is stored")
    create.add_argument("user", help="name in the audit log and in the catalogue of gangs")
    add_options(create, CREATE)
    add_subcommand(commands, "list", "list the tokens, without their secrets")
    revoke = add_subcommand(commands, "revoke", "make a token invalid at once")
    revoke.add_argument("id", help="id of the token, as in `alchemist token list`")
    add_options(revoke, [("--stop-gangs", False, "end the gangs of its user, also detached ones")])
    _token(parser.parse_args(argv[1:]))
    return 0


def _as_text(info: GatewayInfo) -> str:
    lines = [f"{key:<12} {value}" for key, value in asdict(info).items() if value != ""]
    return "\n".join([f"address      {info.address}", *lines[3:]])


def _gateway(asked: argparse.Namespace) -> int:
    join_ray(None, start=False)
    if asked.stop:
        print("the gateway has ended" if stop() else "no gateway runs")
        return 0
    if asked.status:
        running = find()
        print("no gateway runs" if running is None else _as_text(running))
        return int(running is None)
    files = {name: getattr(asked, name) for name in FILES}
    started = serve(asked.host, asked.port, tls=not asked.no_tls, **files)
    print(_as_text(started))
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    print(f"Accepting connections on {host}:{started.port}")
    return 0


def _token(asked: argparse.Namespace) -> None:
    file = TokenFile(asked.tokens)
    if asked.command == "create":
        given = ("groups", "days", "ranks", "gangs", "nbytes")
        options = {name: getattr(asked, name) for name in given}
        print(file.create(asked.user, asked.scopes, **options))
    elif asked.command == "revoke":
        token = file.revoke(asked.id)
        print(f"token {token.id} of {token.user} is revoked")
        if asked.stop_gangs:
            _stop_gangs(token.user)
    else:
        for token in file.list():
            print(_line(token))


def _stop_gangs(user: str) -> None:
    """End the gangs that a user has started through a gateway of this machine's Ray cluster."""
    join_ray(None, start=False)
    for gang in catalogue.list_gangs():
        if gang.owner.startswith(f"{user}@") and gang.owner.endswith(SUFFIX):
            catalogue.stop(gang.name)
            print(f"gang {gang.name} has ended")


def _line(token: Token) -> str:
    expires = "never"
    if token.expires is not None:
        expires = time.strftime("%Y-%m-%d", time.gmtime(token.expires))
    groups = ",".join(token.groups) or None
    quotas = {"groups": groups, "ranks": token.ranks, "gangs": token.gangs, "bytes": token.nbytes}
    limits = " ".join(f"{key}={value}" for key, value in quotas.items() if value is not None)
    state = "expired" if token.expired else "expires"
    return f"{token.id}  {token.user:<16} {','.join(token.scopes):<28} {state} {expires}  {limits}"
