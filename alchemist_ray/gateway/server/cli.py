"""``alchemist gateway`` and ``alchemist token``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from alchemist_ray.errors import AlchemistError
from alchemist_ray.gateway.protocol import PORT, SCOPES
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.tokens import Token, TokenFile
from alchemist_ray.runtime.ray_cluster import join_ray

UNITS = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist gateway`` or ``alchemist token``. Returns 0, or 1 for an error."""
    parser = _gateway_parser() if argv[0] == "gateway" else _token_parser()
    asked = parser.parse_args(argv[1:])
    try:
        if argv[0] == "gateway":
            _gateway(asked)
        else:
            _token(asked)
    except AlchemistError as error:
        sys.stderr.write(f"alchemist: {type(error).__name__}: {error}\n")
        return 1
    return 0


def _gateway_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist gateway",
        description="Start the gateway of the Ray cluster of this machine, for clients without Ray",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}")
    parser.add_argument("--certfile", help="certificate (default: self-signed, generated once)")
    parser.add_argument("--keyfile", help="private key of the certificate")
    parser.add_argument(
        "--tokens", help="file of tokens (default: ~/.config/alchemist/tokens.json)"
    )
    parser.add_argument(
        "--audit", help="audit log (default: ~/.config/alchemist/gateway/audit.log)"
    )
    parser.add_argument("--no-tls", action="store_true", help="only with --host 127.0.0.1")
    parser.add_argument("--stop", action="store_true", help="end the gateway")
    parser.add_argument("--status", action="store_true", help="show the gateway that runs")
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


def _token_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist token", description="Tokens of the users of a gateway"
    )
    parser.add_argument(
        "--tokens", help="file of tokens (default: ~/.config/alchemist/tokens.json)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="print a new token; it is stored nowhere")
    create.add_argument("user", help="name in the audit log and in the catalogue of gangs")
    create.add_argument(
        "--scopes", default="call", help=f"comma-separated, of {', '.join(SCOPES)} (default: call)"
    )
    create.add_argument("--days", type=float, help="days until it expires (default: never)")
    create.add_argument("--ranks", type=int, help="ranks of all gangs of the user at a time")
    create.add_argument("--gangs", type=int, help="gangs of the user at a time")
    create.add_argument("--bytes", type=_size, help="bytes of all matrices of the user, e.g. 100G")
    commands.add_parser("list", help="show all tokens, without their secrets")
    revoke = commands.add_parser("revoke", help="make a token invalid at once")
    revoke.add_argument("id", help="as shown by `alchemist token list`")
    return parser


def _size(text: str) -> int:
    unit = UNITS.get(text[-1:].upper())
    try:
        return int(float(text[:-1]) * unit) if unit else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 500M or 100G") from None


def _token(asked: argparse.Namespace) -> None:
    file = TokenFile(asked.tokens)
    if asked.command == "create":
        print(
            file.create(
                asked.user,
                [scope.strip() for scope in asked.scopes.split(",")],
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
    quotas = {"ranks": token.ranks, "gangs": token.gangs, "bytes": token.nbytes}
    limits = " ".join(f"{key}={value}" for key, value in quotas.items() if value is not None)
    state = "expired" if token.expired else "expires"
    return f"{token.id}  {token.user:<16} {','.join(token.scopes):<28} {state} {expires}  {limits}"
