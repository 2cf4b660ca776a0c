"""``alchemist gateway`` and ``alchemist token``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from alchemist_ray.gateway.protocol import PORT, SCOPES
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import CLUSTER, DAYS, Token, TokenFile
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.subcommands import add_options, add_subcommand, positive
from mpi_workers.matrix.sizes import parse_nbytes

TOKENS = "file of tokens (default: ~/.config/alchemist/tokens.json)"
GATEWAY = (
    ("--host", "0.0.0.0", "address to listen on (default: all)"),
    ("--port", PORT, "port to listen on (default: %(default)s)"),
    ("--certfile", str, "certificate (default: self-signed, generated once)"),
    ("--keyfile", str, "private key of the certificate"),
    ("--tokens", str, TOKENS),
    ("--audit", str, "audit log (default: ~/.config/alchemist/gateway/audit.log)"),
    ("--no-tls", False, "do not encrypt; only with --host 127.0.0.1"),
    ("--stop", False, "end the running gateway"),
    ("--status", False, "show the running gateway"),
)


def _days(text: str) -> float | None:
    return None if text == "never" else positive(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


CREATE: tuple[tuple[Any, ...], ...] = (
    ("--scopes", _names, f"comma-separated, of {', '.join(SCOPES)} (default: call)",
     {"default": ["call"]}),
    ("--groups", _names, "comma-separated: members change each other's named gangs; "
     f"{CLUSTER!r}: also those that were started inside the cluster", {"default": []}),
    ("--days", _days, f"days until it expires, or never ({DAYS:g})", {"default": DAYS}),
    ("--ranks", int, "ranks of all gangs of the user at a time; of several tokens of a user the "
     "smallest number counts, as for --gangs and --bytes"),
    ("--gangs", int, "gangs of the user at a time"),
    ("--bytes BYTES nbytes", _nbytes,
     "bytes of all matrices of the user, e.g. 100G (10^9) or 100Gi (2^30)"),
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist gateway`` or ``alchemist token``. Returns 0."""
    parser = argparse.ArgumentParser(
        prog=f"alchemist {argv[0]}",
        description="Start the gateway of this machine's Ray cluster, for clients without Ray."
        if argv[0] == "gateway"
        else "Create, list and revoke tokens of the gateway's users.",
    )
    if argv[0] == "gateway":
        add_options(parser, GATEWAY)
        _gateway(parser.parse_args(argv[1:]))
        return 0
    add_options(parser, [("--tokens", str, TOKENS)])
    commands = parser.add_subparsers(dest="command", required=True)
    create = add_subcommand(commands, "create", "print a new token; only its verifier is stored")
    create.add_argument("user", help="name in the audit log and in the catalogue of gangs")
    add_options(create, CREATE)
    add_subcommand(commands, "list", "list the tokens, without their secrets")
    revoke = add_subcommand(commands, "revoke", "make a token invalid at once")
    revoke.add_argument("id", help="id of the token, as in `alchemist token list`")
    _token(parser.parse_args(argv[1:]))
    return 0


def _gateway(asked: argparse.Namespace) -> None:
    join_ray(None, start=False)
    if asked.stop:
        print("the gateway has ended" if actor.stop() else "no gateway runs")
        return
    if asked.status:
        found = actor.find()
        print("no gateway runs" if found is None else actor.as_text(found))
        return
    files = {name: getattr(asked, name) for name in actor.FILES}
    started = actor.serve(asked.host, asked.port, tls=not asked.no_tls, **files)
    print(actor.as_text(started))
    print(f"Accepting connections on {asked.host}:{started.port}")


def _token(asked: argparse.Namespace) -> None:
    file = TokenFile(asked.tokens)
    if asked.command == "create":
        names = ("groups", "days", "ranks", "gangs", "nbytes")
        options = {name: getattr(asked, name) for name in names}
        print(file.create(asked.user, asked.scopes, **options))
    elif asked.command == "revoke":
        token = file.revoke(asked.id)
        print(f"token {token.id} of {token.user} is revoked")
    else:
        for token in file.list():
            print(_line(token))


def _line(token: Token) -> str:
    expires = "never"
    if token.expires is not None:
        expires = time.strftime("%Y-%m-%d", time.gmtime(token.expires))
    groups = ",".join(token.groups) or None
    quotas = {"groups": groups, "ranks": token.ranks, "gangs": token.gangs, "bytes": token.nbytes}
    limits = " ".join(f"{key}={value}" for key, value in quotas.items() if value is not None)
    state = "expired" if token.expired else "expires"
    return f"{token.id}  {token.user:<16} {','.join(token.scopes):<28} {state} {expires}  {limits}"
