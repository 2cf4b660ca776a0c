"""``alchemist gateway`` and ``alchemist token``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from alchemist_ray.gateway.protocol import PORT, SCOPES
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import CLUSTER, DAYS, Token, TokenFile
from alchemist_ray.runtime.cluster.ray_cluster import join_ray
from alchemist_ray.subcommands import add_subcommand, positive
from mpi_workers.matrix.sizes import parse_nbytes


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist gateway`` or ``alchemist token``. Returns 0."""
    if argv[0] == "gateway":
        _gateway(_gateway_parser().parse_args(argv[1:]))
    else:
        _token(_token_parser().parse_args(argv[1:]))
    return 0


def _gateway_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist gateway",
        description="Start the gateway of this machine's Ray cluster, for clients without Ray.",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"port to listen on (default: {PORT})"
    )
    parser.add_argument("--certfile", help="certificate (default: self-signed, generated once)")
    parser.add_argument("--keyfile", help="private key of the certificate")
    parser.add_argument(
        "--tokens", help="file of tokens (default: ~/.config/alchemist/tokens.json)"
    )
    parser.add_argument(
        "--audit", help="audit log (default: ~/.config/alchemist/gateway/audit.log)"
    )
    parser.add_argument(
        "--no-tls", action="store_true", help="do not encrypt; only with --host 127.0.0.1"
    )
    parser.add_argument("--stop", action="store_true", help="end the running gateway")
    parser.add_argument("--status", action="store_true", help="show the running gateway")
    return parser


def _gateway(asked: argparse.Namespace) -> None:
    join_ray(None, start=False)
    if asked.stop:
        print("the gateway has ended" if actor.stop() else "no gateway runs")
        return
    if asked.status:
        found = actor.find()
        print("no gateway runs" if found is None else actor.as_text(found))
        return
    started = actor.serve(
        asked.host,
        asked.port,
        tls=not asked.no_tls,
        certfile=asked.certfile,
        keyfile=asked.keyfile,
        tokens=asked.tokens,
        audit=asked.audit,
    )
    print(actor.as_text(started))
    print(f"Accepting connections on {asked.host}:{started.port}")


def _token_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist token", description="Create, list and revoke tokens of the gateway's users."
    )
    parser.add_argument(
        "--tokens", help="file of tokens (default: ~/.config/alchemist/tokens.json)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = add_subcommand(commands, "create", "print a new token; only its verifier is stored")
    create.add_argument("user", help="name in the audit log and in the catalogue of gangs")
    create.add_argument(
        "--scopes", default="call", help=f"comma-separated, of {', '.join(SCOPES)} (default: call)"
    )
    create.add_argument(
        "--groups", default="", help="comma-separated: members change each other's named gangs; "
        f"{CLUSTER!r}: also those that were started inside the cluster"
    )  # fmt: skip
    create.add_argument(
        "--days", type=_days, default=DAYS, help=f"days until it expires, or never ({DAYS:g})"
    )
    create.add_argument(
        "--ranks", type=int,
        help="ranks of all gangs of the user at a time; of several tokens of a user the smallest "
        "number counts, as for --gangs and --bytes"
    )  # fmt: skip
    create.add_argument("--gangs", type=int, help="gangs of the user at a time")
    create.add_argument(
        "--bytes",
        type=_nbytes,
        help="bytes of all matrices of the user, e.g. 100G (10^9) or 100Gi (2^30)",
    )
    add_subcommand(commands, "list", "list the tokens, without their secrets")
    revoke = add_subcommand(commands, "revoke", "make a token invalid at once")
    revoke.add_argument("id", help="id of the token, as in `alchemist token list`")
    return parser


def _days(text: str) -> float | None:
    return None if text == "never" else positive(text)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _nbytes(text: str) -> int:
    try:
        return parse_nbytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _token(asked: argparse.Namespace) -> None:
    file = TokenFile(asked.tokens)
    if asked.command == "create":
        print(
            file.create(
                asked.user,
                _names(asked.scopes),
                groups=_names(asked.groups),
                days=asked.days,
                ranks=asked.ranks,
                gangs=asked.gangs,
                nbytes=asked.bytes,
            )
        )
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
