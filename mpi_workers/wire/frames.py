"""The wire format: frames of a fixed header, a typed map and raw bytes.

    magic "ALCH" | version u16 | kind u16 | bytes of map u32 | bytes of payload u64

All integers are big-endian. The map is msgpack with string keys; the payload is the raw bytes of
matrix elements. Frames are never unpickled. Sizes are checked against limits before memory is
allocated for them. A connection opens with the handshake of `mpi_workers.wire.handshake`.

`blocking.Connection` is the blocking end (ranks, clients), `acceptor.Acceptor` the listening side,
and `asynchronous.FrameProtocol` takes an authenticated connection over (proxies, the GroupManager).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack

from mpi_workers.failures import Failure

MAGIC = b"ALCH"
VERSION = 3  # of frames, maps and the order of elements in payloads (node_shares.py)
HEADER = struct.Struct("!4sHHIQ")

UNAUTHENTICATED_MAP_LIMIT = 4 << 10  # 4 KiB
MAP_LIMIT = 512 << 20  # 512 MiB: arguments and results of functions
FIRST_READ_BYTES = 256 << 10  # 256 KiB: memory for a map grows as bytes arrive, not as announced

Buffer = bytes | bytearray | memoryview
Body = dict[str, Any]


class Kind(IntEnum):
    """The kind of a frame; `mpi_workers/wire/README.md` lists sender, fields and answer of each."""

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
    CHALLENGE = 13
    PROOF = 14
    SAME_NODE = 15


_KINDS: dict[int, Kind] = {kind.value: kind for kind in Kind}


class WireError(Exception):
    """The bytes on a connection violate the protocol."""


class ConnectionLost(WireError):
    """The other end has closed the connection or cannot be reached any more."""


class Frame(NamedTuple):
    """A frame without its payload; `encoded` are its bytes, where it may be passed on."""

    kind: Kind
    body: Body
    payload_nbytes: int
    fds: tuple[int, ...] = ()
    encoded: bytes = b""

    def expected(self, kind: Kind) -> Frame:
        """This frame, if it is of that kind. Raises a REFUSED frame as `Failure`."""
        if self.kind == Kind.REFUSED:
            raise Failure.from_map(self.body)
        if self.kind != kind:
            raise WireError(f"expected {kind.name}, got {self.kind.name}")
        return self


class FrameBuffer(bytearray):
    """Bytes that have arrived: a stream of frames without payloads."""

    def next(self) -> Frame | None:
        """Take the next frame, or None until it is complete. Raises `WireError`."""
        if len(self) < HEADER.size:
            return None
        kind, map_nbytes, payload_nbytes = decode_header(self, MAP_LIMIT)
        if payload_nbytes:
            raise WireError(f"a {kind.name} must not have a payload here")
        end = HEADER.size + map_nbytes
        if len(self) < end:
            return None
        encoded = bytes(memoryview(self)[:end])
        body = decode_body(memoryview(encoded)[HEADER.size :])
        del self[:end]
        return Frame(kind, body, 0, encoded=encoded)


# Python has the bytes of a file name that is not UTF-8 as such characters (PEP 383).
LONE_SURROGATES = "surrogatepass"


def _pack_special(value: object) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(1, struct.pack("!dd", value.real, value.imag))
    raise TypeError(f"cannot send a {type(value).__name__} in a frame's map")


def _unpack_special(code: int, data: bytes) -> complex:
    if code == 1 and len(data) == 16:
        return complex(*struct.unpack("!dd", data))
    raise WireError(f"unknown extension type {code} in a frame's map")


def encode(kind: Kind, body: Body | None = None, payload_nbytes: int = 0) -> bytes:
    """Header and map of a frame; the payload's bytes follow on the socket.

    Raises
    ------
    Failure
        TransferError, if the map is too large for any receiver.
    TypeError, OverflowError
        If msgpack cannot represent a value. The connection stays usable in both cases.
    """
    packed: bytes = pack(body) if body else b""
    if len(packed) > MAP_LIMIT:
        raise Failure(
            "TransferError",
            f"a {kind.name} of {len(packed)} bytes is over the limit of {MAP_LIMIT}: send large "
            "arrays with send_matrix, and return them as a DistMatrix",
        )
    return HEADER.pack(MAGIC, VERSION, kind, len(packed), payload_nbytes) + packed


def pack(body: Body) -> bytes:
    """The bytes of a map."""
    packed: bytes = msgpack.packb(body, default=_pack_special, unicode_errors=LONE_SURROGATES)
    return packed


def decode_header(header: Buffer, map_limit: int) -> tuple[Kind, int, int]:
    """Kind, bytes of the map, bytes of the payload, from the beginning of a frame.

    Raises `WireError` on an invalid header.
    """
    magic, version, number, map_nbytes, payload_nbytes = HEADER.unpack_from(header)
    if magic != MAGIC:
        raise WireError("not an Alchemist frame")
    if version != VERSION:
        raise WireError(
            f"the protocol version is {VERSION} here and {version} on the other side: "
            "install the same alchemist-on-ray on both sides"
        )
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"unknown kind of frame {number}")
    if map_nbytes > map_limit:
        raise WireError(f"a map of {map_nbytes} bytes is over the limit of {map_limit}")
    return kind, map_nbytes, payload_nbytes


def decode_body(packed: Buffer) -> Body:
    """The map of a frame. Raises `WireError` if it is not a map with string keys."""
    if not packed:
        return {}
    try:
        body = msgpack.unpackb(
            packed, ext_hook=_unpack_special, strict_map_key=True, unicode_errors=LONE_SURROGATES
        )
    except WireError:
        raise
    except Exception as error:  # msgpack raises a dozen types on malformed input
        raise WireError(f"malformed map in a frame: {type(error).__name__}") from None
    if not isinstance(body, dict) or bytes in map(type, body):  # other keys are refused above
        raise WireError("the map of a frame must have string keys")
    return body
