"""Definitions for both ends of a connection to a gateway: addresses, versions, sizes, tokens.

A token is ``alch_<id>_<secret>``. The gateway stores a verifier of the secret, not the secret: a
copy of the file of tokens does not allow a login (the scheme is that of SCRAM, RFC 5802, with
scrypt, RFC 7914).

    connecting side                          gateway
    HELLO      id, nonce, protocols  ->
                                     <-      CHALLENGE  nonce, salt, protocol, proof of the gateway
    PROOF      proof, fields         ->
                                     <-      WELCOME    or REFUSED with the reason

The proofs cover the gateway's TLS certificate as each side sees it, so that both detect a man in
the middle with a certificate of his own, also where the gateway's is self-signed.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from alchemist_ray.errors import AuthError, SessionError
from mpi_workers.failures import Failure
from mpi_workers.matrix.node_shares import Region
from mpi_workers.wire.frames import Body
from mpi_workers.wire.handshake import ConnectingSide, bytes_of

PORT = 24960  # the port in the paper's listing
SCHEME = "alchemist"
OLDEST_PROTOCOL, PROTOCOL = 1, 1  # versions of what follows the handshake that this side speaks
RESUME_S = 75.0  # how long a client that lost its connection keeps its matrices and its gang
# 32 MiB: the part of a matrix in one frame. Smaller ones cost more: the nodes map memory for each.
CHUNK_NBYTES = 32 << 20
MIN_LINES = 64  # fewest rows of a chunk (columns, if Fortran-ordered), if there are that many
WINDOW = 4  # chunks that are sent before the first is acknowledged
MAX_STREAMS = 4  # data connections of one transfer
CLIENT_MAP_LIMIT = 16 << 20  # 16 MiB: largest map of a client that may not run code of its own
FINGERPRINT = re.compile(r"([0-9A-Fa-f]{2}:?){31}[0-9A-Fa-f]{2}")
# What clients learn of a `GangAddress`, without secrets and addresses of the cluster.
DESCRIBED = ("gang", "session", "epoch", "first_epoch", "incarnation", "shared", "idle_timeout_s")
SCOPES = ("call", "run_code", "files", "admin")


@dataclass(frozen=True, slots=True)
class GatewayAddress:
    """The address of a gateway: ``alchemist://host:port?option=value&...``.

    Attributes
    ----------
    host : str
    port : int
    tls : bool
        Off only for a gateway on this machine.
    fingerprint : str
        SHA-256 of the gateway's certificate, in hexadecimal. Empty: the token proves the gateway.
    cafile : str
        Certificates of authorities that must have signed the gateway's. Empty: none has to.
    streams : int
        Data connections of one transfer.
    """

    host: str
    port: int = PORT
    tls: bool = True
    fingerprint: str = ""
    cafile: str = ""
    streams: int = 2

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{SCHEME}://{host}:{self.port}" + ("" if self.tls else "?tls=off")

    @classmethod
    def parse(cls, text: str) -> GatewayAddress:
        """Raises `SessionError` if it is not the address of a gateway."""
        try:
            parts = urlsplit(text)
            host, port = parts.hostname, parts.port or PORT
        except ValueError as error:
            raise SessionError(f"{text!r} is not the address of a gateway: {error}") from None
        if parts.scheme != SCHEME or not host or parts.path.strip("/"):
            raise SessionError(
                f"{text!r} is not the address of a gateway, which has the form "
                "alchemist://host:port"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        return cls(host, port, **_checked(options, host, text))


def _checked(options: Mapping[str, str], host: str, text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in options.items():
        match key, value:
            case "tls", "on" | "off":
                found["tls"] = value == "on"
            case "streams", ("1" | "2" | "3" | "4"):
                found["streams"] = int(value)
            case "fingerprint", _ if FINGERPRINT.fullmatch(value):
                found["fingerprint"] = value.lower().replace(":", "")
            case "cafile", _ if value:
                found["cafile"] = value
            case (("fingerprint" | "cafile"), _):  # e.g. of a variable that is not set
                wanted = "a file" if key == "cafile" else "64 hexadecimal digits"
                raise SessionError(f"{text!r}: {key} must be {wanted}; got {value!r}")
            case _:
                raise SessionError(
                    f"{text!r}: unknown option {key}={value}; options are tls=on|off, streams=1 to "
                    f"{MAX_STREAMS}, fingerprint=..., cafile=..."
                )
    if found.get("tls") is False and not is_loopback(host):
        raise SessionError(f"{text!r}: without TLS only a gateway on this machine can be used")
    return found


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def chunks(
    region: Region,
    itemsize: int,
    order: str,
    limit_nbytes: int | None = None,
    min_lines: int = MIN_LINES,
) -> Iterator[Region]:
    """Cut a region into parts of at most `limit_nbytes`, contiguous in the given order.

    A part has whole rows ("C") or columns ("F") where `min_lines` of them fit. Default of the
    limit: `CHUNK_NBYTES`.
    """
    limit_nbytes = limit_nbytes or CHUNK_NBYTES
    rows, cols = (region.row0, region.row1), (region.col0, region.col1)
    lines, length = (rows, cols) if order == "C" else (cols, rows)
    width = max(1, min(length[1] - length[0], limit_nbytes // (itemsize * min_lines)))
    height = max(1, limit_nbytes // (itemsize * width))
    for first in range(lines[0], lines[1], height):
        last = min(first + height, lines[1])
        for start in range(length[0], length[1], width):
            stop = min(start + width, length[1])
            if order == "C":
                yield Region(first, last, start, stop)
            else:
                yield Region(start, stop, first, last)


# --- tokens and their proofs ---

PREFIX = "alch"
ID_BYTES, SECRET_BYTES, SALT_BYTES = 6, 32, 16
COST = {"n": 1 << 14, "r": 8, "p": 1}  # of scrypt: 16 MiB and some 50 ms, once per process
CONTEXT = b"alchemist-on-ray gateway "


@dataclass(frozen=True, slots=True)
class Verifier:
    """The data with which a gateway checks a secret."""

    salt: bytes
    stored_key: bytes
    gateway_key: bytes


def new_token() -> tuple[str, str, Verifier]:
    """A token: its text, its id, and its verifier."""
    ident, secret = secrets.token_hex(ID_BYTES), secrets.token_hex(SECRET_BYTES)
    return f"{PREFIX}_{ident}_{secret}", ident, verifier_of(secret, secrets.token_bytes(SALT_BYTES))


def parts_of(token: str) -> tuple[str, str]:
    """Id and secret of a token. Raises `AuthError`, without the token in its message."""
    parts = token.strip().split("_")
    if len(parts) != 3 or parts[0] != PREFIX or not all(parts):
        raise AuthError(
            f"this is not a token of a gateway, which begins with {PREFIX}_: give token=... or set "
            "ALCHEMIST_TOKEN to the one that `alchemist token create` printed"
        )
    return parts[1], parts[2]


def verifier_of(secret: str, salt: bytes) -> Verifier:
    """The data that a gateway stores of a secret."""
    client_key, gateway_key = _keys(secret, salt)
    return Verifier(salt, hashlib.sha256(client_key).digest(), gateway_key)


@lru_cache(maxsize=16)
def _keys(secret: str, salt: bytes) -> tuple[bytes, bytes]:
    root = hashlib.scrypt(secret.encode(), salt=salt, dklen=32, **COST)
    return hmac.digest(root, b"client", "sha256"), hmac.digest(root, b"gateway", "sha256")


def _proof(key: bytes, side: bytes, nonces: bytes, binding: bytes, fields: bytes = b"") -> bytes:
    return hmac.digest(key, CONTEXT + side + nonces + binding + fields, "sha256")


def gateway_proof(verifier: Verifier, nonces: bytes, binding: bytes) -> bytes:
    """The gateway's proof for its CHALLENGE. `binding`: digest of its certificate, or empty."""
    return _proof(verifier.gateway_key, b"gateway", nonces, binding)


def is_proved(
    verifier: Verifier, nonces: bytes, binding: bytes, proof: bytes, fields: bytes
) -> bool:
    """Whether a PROOF shows that its sender knows the secret."""
    mask = _proof(verifier.stored_key, b"client", nonces, binding, fields)
    if len(proof) != len(mask):
        return False
    client_key = bytes(a ^ b for a, b in zip(proof, mask, strict=True))
    return hmac.compare_digest(hashlib.sha256(client_key).digest(), verifier.stored_key)


class ClientSide(ConnectingSide):
    """The client's side of one handshake.

    Parameters
    ----------
    token : str
    fields : dict
        What the gateway learns once this side is authenticated.
    protocols : (int, int)
        Oldest and newest version that this side speaks.

    Attributes
    ----------
    binding : bytes
        SHA-256 of the certificate that this side has seen; empty without TLS.

    Raises
    ------
    AuthError
        If it is no token.
    """

    def __init__(self, token: str, fields: Body, protocols: tuple[int, int]) -> None:
        self._ident, secret = parts_of(token)
        super().__init__(secret, fields)
        self._protocols = protocols
        self.binding = b""

    def hello(self) -> Body:
        return {**super().hello(), "id": self._ident, "protocols": list(self._protocols)}

    def _proof_for(self, challenge: Body, nonces: bytes) -> bytes:
        client_key, gateway_key = _keys(self._token, bytes_of(challenge, "salt"))
        expected = _proof(gateway_key, b"gateway", nonces, self.binding)
        if not hmac.compare_digest(bytes_of(challenge, "proof"), expected):
            raise Failure(
                "AuthError",
                "the process at this address does not know the token, or another process is "
                "between it and this one: check address and token, and that nothing on the way "
                "ends TLS",
            )
        mask = _proof(
            hashlib.sha256(client_key).digest(), b"client", nonces, self.binding, self._fields
        )
        return bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
