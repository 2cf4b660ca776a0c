"""Link: one client's connection at the gateway, once its token is proved."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading

from alchemist_ray.errors import AlchemistError, failure_of
from alchemist_ray.gateway import protocol
from alchemist_ray.gateway.protocol import CLIENT_MAP_LIMIT, OLDEST_PROTOCOL, PROTOCOL
from alchemist_ray.gateway.secure_socket import SharedConnection, SharedSocket
from alchemist_ray.gateway.server.access import Token, TokenFile
from alchemist_ray.version import __version__
from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.acceptor import AcceptedPeer
from mpi_workers.wire.frames import Body, ConnectionLost, Frame, Kind, WireError, decode_body
from mpi_workers.wire.handshake import NONCE_BYTES, bytes_of

SEND_TIMEOUT_S = 60.0  # for a client to read: then it is dropped
CLOSE_TIMEOUT_S = 5.0  # for a client to read why its connection ends


class Link:
    """An authenticated connection. One thread receives, any may send.

    Attributes
    ----------
    connection : SharedConnection
    token : Token
    fields : dict
        What the client has told of itself.
    source : str
        Its address.
    over : Event
        Set when no thread receives any more.
    """

    def __init__(
        self, connection: SharedConnection, token: Token, fields: Body, source: str
    ) -> None:
        self.connection = connection
        self.token = token
        self.fields = fields
        self.source = source
        self.over = threading.Event()
        self._sending = threading.Lock()

    @property
    def ident(self) -> str:
        """The client's process, which connects again with the same one."""
        return f"{self.token.user}:{str(self.fields.get('process'))[:64]}"

    @property
    def where(self) -> str:
        """The client's description of its process."""
        return str(self.fields.get("where", ""))[:200]

    def send(self, kind: Kind, body: Body) -> None:
        """Send a frame. Raises `WireError`."""
        with self._sending:
            self.connection.send(kind, body)

    def recv(self) -> Frame:
        """The next command of the client. Raises `WireError`."""
        frame = self.connection.recv()
        if frame.kind != Kind.COMMAND or frame.payload_nbytes:
            raise WireError(f"a gateway does not accept {frame.kind.name} here")
        return frame

    def refuse(self, failure: Failure) -> None:
        """Send the reason why the connection ends, while another thread receives; hang up."""
        with contextlib.suppress(WireError, OSError):
            self.send(Kind.REFUSED, failure.to_map())
            self.connection.sock.shutdown(socket.SHUT_WR)
            self.over.wait(CLOSE_TIMEOUT_S)
        self.connection.hang_up()


def authenticate(peer: AcceptedPeer, binding: bytes, tokens: TokenFile) -> Link:
    """The handshake of `gateway.protocol` with a client.

    Parameters
    ----------
    peer : AcceptedPeer
        After the handshake of TLS.
    binding : bytes
        Digest of the gateway's certificate; empty without TLS.
    tokens : TokenFile

    Raises
    ------
    Failure
        If the client was refused.
    WireError, OSError
        If it is gone, or too slow.
    """
    connection = SharedConnection(SharedSocket(peer.sock, send_timeout_s=SEND_TIMEOUT_S))
    try:
        token, fields = _handshake(peer, connection, binding, tokens)
    except (ConnectionLost, TimeoutError):
        raise  # a client whose connection is only dropped tries again
    except Exception as error:  # a client that waits for an answer learns of any
        failure = _refusal(error)
        connection.refuse(failure)
        raise failure from None
    peer.proved()
    connection.map_limit = frames.MAP_LIMIT if token.allows("run_code") else CLIENT_MAP_LIMIT
    return Link(connection, token, fields, peer.source)


def _refusal(error: Exception) -> Failure:
    match error:
        case WireError():
            return Failure("AuthError", f"refused: {error}")
        case Failure() | AlchemistError():
            return failure_of(error, "handshake")
        case _:
            return Failure("AuthError", f"refused: malformed frame: {error!r}")


def _handshake(
    peer: AcceptedPeer, connection: SharedConnection, binding: bytes, tokens: TokenFile
) -> tuple[Token, Body]:
    hello = connection.recv(peer.left_s)
    if hello.kind != Kind.HELLO:
        raise WireError("a connection must open with HELLO")
    oldest, newest = hello.body["protocols"]
    if newest < OLDEST_PROTOCOL or oldest > PROTOCOL:
        raise WireError(
            f"this gateway (alchemist-on-ray {__version__}) supports protocol versions "
            f"{OLDEST_PROTOCOL} to {PROTOCOL}, the client {oldest} to {newest}: install "
            f"alchemist-client {__version__}"
        )
    ident = str(hello.body["id"])[:64]
    found = tokens.find(ident)
    if found is None:
        raise WireError("unknown token: it was revoked or belongs to another gateway")
    _, verifier = found
    mine = secrets.token_bytes(NONCE_BYTES)
    nonces = bytes_of(hello.body, "nonce", NONCE_BYTES) + mine
    challenge = {
        "nonce": mine,
        "salt": verifier.salt,
        "protocol": min(newest, PROTOCOL),
        "proof": protocol.gateway_proof(verifier, nonces, binding),
    }
    connection.send(Kind.CHALLENGE, challenge)
    answer = connection.recv(peer.left_s)
    if answer.kind != Kind.PROOF:
        raise WireError("the answer to a CHALLENGE must be a PROOF")
    proof, fields = bytes_of(answer.body, "proof"), bytes_of(answer.body, "fields")
    if not protocol.is_proved(verifier, nonces, binding, proof, fields):
        raise WireError(
            "the token is wrong, or another process is between the client and this gateway"
        )
    return tokens.check(ident), decode_body(fields)
