"""Tokens, and how both sides of a connection prove that they know one.

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
import secrets
from dataclasses import dataclass
from functools import lru_cache

from alchemist_ray.errors import AuthError
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import UNAUTHENTICATED_MAP_LIMIT, Body, Frame, Kind, WireError, pack
from mpi_workers.wire.handshake import MESSAGE_LIMIT

PREFIX = "alch"
ID_BYTES, SECRET_BYTES, NONCE_BYTES, SALT_BYTES = 6, 32, 32, 16
COST = {"n": 1 << 14, "r": 8, "p": 1}  # of scrypt: 16 MiB and some 50 ms, once per process
TIMED_OUT = "HandshakeTimeout"  # kind of the refusal of a handshake that took too long
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


def field_of(body: Body, name: str) -> bytes:
    """A field of the handshake. Raises `WireError`."""
    value = body.get(name)
    if not isinstance(value, bytes) or not len(value) <= UNAUTHENTICATED_MAP_LIMIT:
        raise WireError(f"malformed handshake: no valid {name!r}")
    return value


class ClientSide:
    """The client's side of one handshake.

    Parameters
    ----------
    token : str
    fields : dict
        What the gateway learns once this side is authenticated.
    protocols : (int, int)
        Oldest and newest version that this side speaks.
    binding : bytes
        SHA-256 of the certificate that this side has seen; empty without TLS.
    """

    def __init__(
        self, token: str, fields: Body, protocols: tuple[int, int], binding: bytes
    ) -> None:
        self._ident, self._secret = parts_of(token)
        self._fields = pack(fields)
        self._protocols = protocols
        self._binding = binding
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        if len(self._fields) > UNAUTHENTICATED_MAP_LIMIT - 128:
            raise Failure("TransferError", "too many fields for a handshake")

    def hello(self) -> Body:
        """The map of the HELLO."""
        return {"id": self._ident, "nonce": self._nonce, "protocols": list(self._protocols)}

    def prove(self, frame: Frame) -> Body:
        """Verify the gateway's CHALLENGE; the map of the PROOF.

        Raises
        ------
        Failure
            AuthError, if the gateway refuses, or does not know the token. `TIMED_OUT`.
        WireError
            If it violates the protocol.
        """
        if frame.kind == Kind.REFUSED:  # by an unknown process: its words are only shown
            timed_out = frame.body.get("kind") == TIMED_OUT
            words = str(frame.body.get("message", ""))[:MESSAGE_LIMIT]
            raise Failure(TIMED_OUT if timed_out else "AuthError", words)
        if frame.kind != Kind.CHALLENGE:
            raise WireError(f"expected CHALLENGE, got {frame.kind.name}")
        salt, nonce, proof = (field_of(frame.body, name) for name in ("salt", "nonce", "proof"))
        nonces = self._nonce + nonce
        client_key, gateway_key = _keys(self._secret, salt)
        expected = _proof(gateway_key, b"gateway", nonces, self._binding)
        if not hmac.compare_digest(proof, expected):
            raise Failure(
                "AuthError",
                "the process at this address does not know the token, or another process is "
                "between it and this one: check address and token, and that nothing on the way "
                "ends TLS",
            )
        mask = _proof(
            hashlib.sha256(client_key).digest(), b"client", nonces, self._binding, self._fields
        )
        mine = bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
        return {"proof": mine, "fields": self._fields}
