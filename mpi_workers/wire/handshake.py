"""Mutual authentication of two processes that share a token, without I/O.

    connecting side                          listening side
    HELLO      nonce                 ->
                                     <-      CHALLENGE  nonce, proof of the listening side
    PROOF      proof, fields         ->
                                     <-      WELCOME    or REFUSED with the reason

A proof is an HMAC-SHA256 over protocol context, side, both nonces and the connecting side's
fields. The token never crosses a connection. Each side proves that it knows the token before it
gets any data, and the fields (role, rank, ...) are decoded only after their proof is verified.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from mpi_workers.failures import Failure
from mpi_workers.wire.frames import (
    UNAUTHENTICATED_MAP_LIMIT,
    VERSION,
    Body,
    Frame,
    Kind,
    WireError,
    decode_body,
    pack,
)

TIMEOUT_S = 5.0  # from the connection to the end of the handshake
NONCE_BYTES = 32
CONTEXT = b"alchemist-on-ray wire %d " % VERSION
MESSAGE_LIMIT = 500  # characters shown of a refusal by a peer that has proved nothing


def _proof(side: bytes, token: str, nonces: bytes, fields: bytes = b"") -> bytes:
    # The digest of the token is the key: HMAC pads short keys with zeros.
    key = hashlib.sha256(token.encode()).digest()
    return hmac.digest(key, CONTEXT + side + nonces + fields, "sha256")


def bytes_of(body: Body, name: str, length: int | None = None) -> bytes:
    """A field of a handshake. Raises `WireError`."""
    value = body.get(name)
    if not isinstance(value, bytes) or (length is not None and len(value) != length):
        raise WireError(f"malformed handshake: no valid {name!r}")
    return value


def refusal(why: object) -> Failure:
    """The AuthError for a peer that has failed the handshake."""
    return Failure("AuthError", f"refused: {why}")


class ListeningSide:
    """The listening side of one handshake.

    Attributes
    ----------
    fields : dict, optional
        The connecting side's fields; None until it is authenticated.
    """

    def __init__(self, token: str) -> None:
        if not token:
            raise ValueError("a listener needs a token")
        self._token = token
        self._nonces = b""
        self.fields: Body | None = None

    def receive(self, frame: Frame) -> Body | None:
        """Take a frame; returns the CHALLENGE to send, or None if the peer is authenticated.

        Raises `WireError` if the peer must be refused.
        """
        if frame.payload_nbytes:
            raise WireError(f"a {frame.kind.name} must not have a payload here")
        if not self._nonces:
            if frame.kind != Kind.HELLO:
                raise WireError("a connection must open with HELLO")
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._nonces = bytes_of(frame.body, "nonce", NONCE_BYTES) + nonce
            return {"nonce": nonce, "proof": _proof(b"listening", self._token, self._nonces)}
        if frame.kind != Kind.PROOF:
            raise WireError("the answer to a CHALLENGE must be a PROOF")
        fields = bytes_of(frame.body, "fields")
        expected = _proof(b"connecting", self._token, self._nonces, fields)
        if not hmac.compare_digest(bytes_of(frame.body, "proof"), expected):
            raise WireError("the token is not this gang's")
        self.fields = decode_body(fields)
        return None


class ConnectingSide:
    """The connecting side of one handshake.

    Parameters
    ----------
    token : str
        The shared secret.
    fields : dict
        What the listening side learns about this one (role, rank, ...), once authenticated.
    """

    def __init__(self, token: str, fields: Body) -> None:
        self._token = token
        self._fields = pack(fields)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        if len(self._fields) > UNAUTHENTICATED_MAP_LIMIT - 128:
            raise Failure(
                "TransferError", f"{len(self._fields)} bytes of fields are too many for a handshake"
            )

    def hello(self) -> Body:
        """The map of the HELLO."""
        return {"nonce": self._nonce}

    def prove(self, frame: Frame) -> Body:
        """Verify the listening side's CHALLENGE; returns the map of the PROOF.

        Raises
        ------
        Failure
            AuthError, if the listening side refuses, or does not know the token.
        WireError
            If it violates the protocol.
        """
        if frame.kind == Kind.REFUSED:  # by an unknown process: its words are only shown
            raise Failure("AuthError", str(frame.body.get("message", ""))[:MESSAGE_LIMIT])
        if frame.kind != Kind.CHALLENGE or frame.payload_nbytes:
            raise WireError(f"expected CHALLENGE, got {frame.kind.name}")
        nonces = self._nonce + bytes_of(frame.body, "nonce", NONCE_BYTES)
        return {"proof": self._proof_for(frame.body, nonces), "fields": self._fields}

    def _proof_for(self, challenge: Body, nonces: bytes) -> bytes:
        """Verify the proof in a CHALLENGE; returns that of this side."""
        expected = _proof(b"listening", self._token, nonces)
        if not hmac.compare_digest(bytes_of(challenge, "proof"), expected):
            raise Failure(
                "AuthError",
                "the listening process does not have the same token: it belongs to another gang, "
                "or is not Alchemist's",
            )
        return _proof(b"connecting", self._token, nonces, self._fields)
