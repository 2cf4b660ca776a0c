"""Frames that no door may take: of no protocol, from strangers, from peers that ask wrongly."""

from __future__ import annotations

from typing import Any

import msgpack

from mpi_workers.matrix.layout import Distribution
from mpi_workers.wire import frames
from mpi_workers.wire.frames import Kind
from tests.support import ranks

SPREAD = Distribution("CIRC_CIRC", (20, 30), (1, 1))
WHOLE, WAITING = 1, 2  # a matrix that is sealed, and one that waits for its elements
ALL = [0, 20, 0, 30]
NBYTES = 20 * 30 * 8
WAIT_S = 3.0
HELLO = {"token": ranks.TOKEN, "role": "test"}
DOORS = ("unix", "tcp", "control")
MAX_PEERS = 50


def header(
    kind: int = Kind.GET,
    nbytes: int = 0,
    payload: int = 0,
    version: int = 1,
    magic: bytes = b"ALCH",
) -> bytes:
    return frames.HEADER.pack(magic, version, kind, nbytes, payload)


def framed(kind: int, packed: bytes, payload: bytes = b"", claimed: int | None = None) -> bytes:
    size = len(payload) if claimed is None else claimed
    return header(kind, len(packed), size) + packed + payload


def frame(kind: int, payload: bytes = b"", claimed: int | None = None, **body: Any) -> bytes:
    return framed(kind, msgpack.packb(body), payload, claimed)


# Not of the protocol at all: refused on every door, with or without a handshake.
MALFORMED = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1000),
    "another magic": header(magic=b"ALCI"),
    "a later version": header(version=2),
    "version zero": header(version=0),
    "kind zero": header(0),
    "an unknown kind": header(13),
    "the last kind": header((1 << 16) - 1),
    "a map of 4 GiB": header(nbytes=(1 << 32) - 1),
    "a map over the limit": header(nbytes=frames.MAP_LIMIT + 1),
    "a map that is a list": framed(Kind.HELLO, msgpack.packb([1, 2])),
    "a map that is a number": framed(Kind.HELLO, msgpack.packb(7)),
    "a map with keys of bytes": framed(Kind.HELLO, msgpack.packb({b"token": 1})),
    "a map with keys of numbers": framed(Kind.HELLO, msgpack.packb({1: 1})),
    "no msgpack": framed(Kind.HELLO, b"\xc1" * 10),
    "too little msgpack": framed(Kind.HELLO, msgpack.packb({"a": 1})[:-1]),
    "too much msgpack": framed(Kind.HELLO, msgpack.packb({"a": 1}) + b"\x01"),
    "a string that is not UTF-8": framed(Kind.HELLO, b"\x81\xa1a\xa2\xff\xfe"),
    "an unknown extension": framed(Kind.HELLO, msgpack.packb({"a": msgpack.ExtType(5, b"x")})),
    "half a complex number": framed(Kind.HELLO, msgpack.packb({"a": msgpack.ExtType(1, b"x" * 8)})),
    "a bottomless list": framed(Kind.HELLO, b"\x81\xa1a" + b"\x91" * 4000),
    "a list that claims 4 billion items": framed(Kind.HELLO, b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    "lists that each claim what is left": framed(Kind.HELLO, b"\x81\xa1a" + b"\xdc\x0f\x00" * 1200),
    "a payload on a HELLO": frame(Kind.HELLO, b"x" * 10, **HELLO),
    "a payload of 16 EiB": frame(Kind.GET, claimed=(1 << 64) - 1, matrix=WHOLE, region=ALL),
}

# Refused to strangers alone.
STRANGE = {
    "no HELLO": frame(Kind.GET, matrix=WHOLE, region=ALL),
    "no token": frame(Kind.HELLO),
    "another token": frame(Kind.HELLO, token="x" * len(ranks.TOKEN)),
    "an empty token": frame(Kind.HELLO, token=""),
    "a token of bytes": frame(Kind.HELLO, token=ranks.TOKEN.encode()),
    "a token in a list": frame(Kind.HELLO, token=[ranks.TOKEN]),
    "no token but true": frame(Kind.HELLO, token=True),
    "a WELCOME": frame(Kind.WELCOME, token=ranks.TOKEN),
    "a map over a stranger's limit": frame(Kind.HELLO, token=ranks.TOKEN, more="x" * 4096),
    "a map announced over a stranger's limit": header(Kind.HELLO, nbytes=4097),
    "a PUT": frame(Kind.PUT, bytes(NBYTES), matrix=WAITING, region=ALL),
}

NO_IDS: list[Any] = [
    *(None, True, False, -1, 0, 99, 1 << 63, -(1 << 63), 1.0, float("nan"), "1", b"1", ""),
    *([], [WHOLE], {}, {"a": 1}, [[[]]], "x" * 100_000, [1] * 100_000),
]
NO_REGIONS: list[Any] = [
    *(None, True, 7, "0, 1, 0, 1", b"\0\0\0\0", {}, {"row0": 0}, [], [0, 1], [0, 1, 0, 1, 0]),
    *([0, 1, 0, True], [False, 1, 0, 1], [0, 1.0, 0, 1], [None] * 4, ["0"] * 4, [[0]] * 4),
    *([-1, 1, 0, 1], [1, 0, 0, 1], [0, 21, 0, 30], [0, 20, 0, 31], [0, 1, 5, 4], [20, 21, 0, 1]),
    *([0, 1 << 63, 0, 1], [0, 1, -(1 << 63), 1], [1 << 63] * 4, [0] * 100_000, ["x" * 10_000] * 4),
]
NO_LISTS: list[Any] = [
    *(7, "abc", {"a": 1}, [True], ["1"], [None], [1.5], [[1]], [{}], list(range(5000))),
    *([1 << 40, "x" * 10_000], None),
]

# From a peer that has the token, to a rank.
WRONG: dict[str, bytes] = {
    **{f"GET of matrix {no!r:.20}": frame(Kind.GET, matrix=no, region=ALL) for no in NO_IDS},
    **{f"MAP of matrix {no!r:.20}": frame(Kind.MAP, matrix=no) for no in NO_IDS},
    **{f"UNMAP of matrix {no!r:.20}": frame(Kind.UNMAP, matrix=no, written=0) for no in NO_IDS},
    **{
        f"PUT of matrix {no!r:.20}": frame(Kind.PUT, bytes(NBYTES), matrix=no, region=ALL)
        for no in NO_IDS
    },
    **{f"GET of region {no!r:.30}": frame(Kind.GET, matrix=WHOLE, region=no) for no in NO_REGIONS},
    **{
        f"PUT of region {no!r:.30}": frame(Kind.PUT, bytes(NBYTES), matrix=WAITING, region=no)
        for no in NO_REGIONS
    },
    "GET of what waits": frame(Kind.GET, matrix=WAITING, region=ALL),
    "GET without a map": frame(Kind.GET),
    "GET of no region": frame(Kind.GET, matrix=WHOLE),
    "PUT without a map": frame(Kind.PUT),
    "PUT into what is whole": frame(Kind.PUT, bytes(NBYTES), matrix=WHOLE, region=ALL),
    "PUT of one byte less": frame(Kind.PUT, bytes(NBYTES - 1), matrix=WAITING, region=ALL),
    "PUT of one byte more": frame(Kind.PUT, bytes(NBYTES + 1), matrix=WAITING, region=ALL),
    "PUT of nothing": frame(Kind.PUT, matrix=WAITING, region=ALL),
    "PUT of 16 EiB": frame(Kind.PUT, claimed=(1 << 64) - 1, matrix=WAITING, region=ALL),
    "PUT of something into nothing": frame(
        Kind.PUT, bytes(8), matrix=WAITING, region=[3, 3, 0, 30]
    ),
    "a second HELLO": frame(Kind.HELLO, **HELLO),
    **{
        f"{kind.name} to a rank": frame(kind, matrix=WHOLE)
        for kind in (Kind.WELCOME, Kind.REFUSED, Kind.COMMAND, Kind.REPLY, Kind.EVENT, Kind.DATA)
    },
    **{
        f"a payload on {kind.name}": frame(kind, b"x" * 9, matrix=WHOLE, region=ALL)
        for kind in (Kind.GET, Kind.MAP, Kind.UNMAP, Kind.SYNC)
    },
    "UNMAP without MAP": frame(Kind.UNMAP, matrix=WHOLE, written=0),
    "MAP to write what is whole": frame(Kind.MAP, matrix=WHOLE, write=True),
    "MAP to read what waits": frame(Kind.MAP, matrix=WAITING),
}

# After a MAP that is right: through the Unix socket alone.
MAP = frame(Kind.MAP, matrix=WHOLE)
WRONG_MAPS: dict[str, bytes] = {
    **{f"MAP that knows {no!r:.20}": frame(Kind.MAP, matrix=WHOLE, known=no) for no in NO_LISTS},
    "MAP twice": MAP + MAP,
    "UNMAP twice": MAP + 2 * frame(Kind.UNMAP, matrix=WHOLE, written=0),
    **{
        f"UNMAP that wrote {no!r:.20}": MAP + frame(Kind.UNMAP, matrix=WHOLE, written=no)
        for no in (None, True, -1, 1, 1 << 63, 0.0, "0", [0], {}, "x" * 100_000)
    },
}
