"""The one wire format: frames of a fixed header, a small typed map and raw bytes.

    magic "ALCH" | version u16 | kind u16 | bytes of map u32 | bytes of payload u64

The map is msgpack with string keys; the payload is the raw bytes of matrix
elements. Nothing on a socket is ever unpickled. A connection opens with HELLO
(the version in the header, the gang's token in the map), answered by WELCOME
or by REFUSED with the reason. Sizes are checked against limits before any
memory is taken for them.

This file is the format; `connection.Connection` is the blocking end (ranks,
clients), `protocol.FrameProtocol` the asyncio end (proxies, the GroupManager).
"""

from __future__ import annotations

import hmac
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

from mpi_workers.failures import Failure

MAGIC = b"ALCH"
VERSION = 1
HEADER = struct.Struct("!4sHHIQ")

STRANGER_MAP_LIMIT = 4 << 10  # 4 KiB: what an unauthenticated peer may make us read
MAP_LIMIT = 64 << 20  # 64 MiB: a table of a hundred thousand ranks
READ_BYTES = 256 << 10  # 256 KiB: memory for a map is taken as it arrives, not as it is announced
HELLO_TIMEOUT_S = 5.0

Buffer = bytes | bytearray | memoryview
Body = dict[str, Any]


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    COMMAND = 4
    REPLY = 5
    EVENT = 6
    PUT = 7
    GET = 8
    DATA = 9
    MAP = 10
    UNMAP = 11
    SYNC = 12


class WireError(Exception):
    """The bytes on a connection are not what the protocol allows."""


class ConnectionLost(WireError):
    """The other end is gone."""


class Frame(NamedTuple):
    kind: Kind
    body: Body
    payload_nbytes: int
    fds: tuple[int, ...] = ()


def _pack_special(value: object) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(1, struct.pack("!dd", value.real, value.imag))
    raise TypeError(f"cannot send a {type(value).__name__} in a frame's map")


def _unpack_special(code: int, data: bytes) -> complex:
    if code == 1 and len(data) == 16:
        return complex(*struct.unpack("!dd", data))
    raise WireError(f"unknown value type {code} in a frame's map")


def encode(kind: Kind, body: Body | None = None, payload_nbytes: int = 0) -> bytes:
    """Header and map of a frame; the payload's bytes follow it on the socket.

    Raises `Failure` if the map is too large for any receiver, `TypeError` or
    `OverflowError` on what msgpack cannot carry; the connection stays usable.
    """
    packed: bytes = msgpack.packb(body, default=_pack_special) if body else b""
    if len(packed) > MAP_LIMIT:
        raise Failure(
            "TransferError",
            f"a {kind.name} of {len(packed)} bytes is over the limit of {MAP_LIMIT}: "
            "send what is large as a matrix",
        )
    return HEADER.pack(MAGIC, VERSION, kind, len(packed), payload_nbytes) + packed


def decode_header(header: Buffer, map_limit: int) -> tuple[Kind, int, int]:
    """Kind, bytes of map, bytes of payload. Raises `WireError` on anything off."""
    magic, version, kind, map_nbytes, payload_nbytes = HEADER.unpack(header)
    if magic != MAGIC:
        raise WireError("not an Alchemist frame")
    if version != VERSION:
        raise WireError(
            f"protocol version {version} meets version {VERSION}: "
            "install the same alchemist-on-ray on both sides"
        )
    try:
        kind = Kind(kind)
    except ValueError:
        raise WireError(f"unknown kind of frame {kind}") from None
    if map_nbytes > map_limit:
        raise WireError(f"a map of {map_nbytes} bytes is over the limit of {map_limit}")
    return kind, map_nbytes, payload_nbytes


def decode_body(packed: Buffer) -> Body:
    """The map of a frame. Raises `WireError` if it is not a map with string keys."""
    if not packed:
        return {}
    try:
        body = msgpack.unpackb(packed, ext_hook=_unpack_special, strict_map_key=True)
    except WireError:
        raise
    except Exception as error:  # msgpack raises a dozen types on malformed input
        raise WireError(f"malformed map in a frame: {type(error).__name__}") from None
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise WireError("the map of a frame must have string keys")
    return body


def token_matches(body: Body, token: str) -> bool:
    """Compare a HELLO's token with ours, in time that does not depend on it."""
    given = body.get("token")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), token.encode())
