"""For tests of the wire: strategies for frames and cuts of a stream, two ends of a connection.

And frames that a listener must refuse: malformed, from strangers, or invalid requests of peers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import msgpack
import numpy as np
from hypothesis import strategies as st

from mpi_workers.matrix.layout import Distribution
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Frame, Kind
from tests.support import ranks

TOKEN = "a secret of the gang"
SOON_S = 5.0
ANSWER_S = 10.0  # of a listener under attack

scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False) | st.text(max_size=20) | st.binary(max_size=20)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(max_size=10), values, max_size=5)
any_frame = st.tuples(st.sampled_from(Kind), bodies, st.binary(max_size=1500))
splits = st.lists(st.integers(0, 1 << 20), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(bounds)]


class Pieces:
    """A socket for a `Connection` to read from; returns one piece at a time."""

    family = socket.AF_INET

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces[::-1]

    def recv(self, most: int) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.pop()
        if len(piece) > most:
            self._pieces.append(piece[most:])
        return piece[:most]

    def recv_into(self, view: memoryview) -> int:
        piece = self.recv(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def gettimeout(self) -> None: ...
    def settimeout(self, seconds: float | None) -> None: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = socket.socketpair()
    with Connection(ours, **options) as near, Connection(theirs, **options) as far:
        yield near, far


@contextlib.contextmanager
def in_thread(action: Callable[[], Any]) -> Iterator[None]:
    """Run an action on another thread; it must be finished soon after the end of the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(SOON_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


class Faulty(socket.socket):
    """A listener, which is detached for it, on which `accept` fails with some errors first."""

    def __init__(self, listener: socket.socket, errors: list[int]) -> None:
        super().__init__(fileno=listener.detach())
        self.errors = errors

    def accept(self) -> Any:
        if self.errors:
            raise OSError(self.errors.pop(), "an error of the network")
        return super().accept()


DISTRIBUTION = Distribution("CIRC_CIRC", (20, 30), (1, 1))
SEALED, UNSEALED = 1, 2  # ids of matrices
ALL = [0, 20, 0, 30]
NBYTES = 20 * 30 * 8
WAIT_S = 3.0
HELLO: dict[str, Any] = {"nonce": bytes(32)}
LISTENERS = ("unix", "tcp", "control")
MAX_PEERS = 50


@contextlib.contextmanager
def fuzzed(**options: Any) -> Iterator[ranks.Host]:
    """A rank with a sealed and an unsealed matrix, which must have survived all frames."""
    with ranks.Host(1, **options) as host:
        host.new(SEALED, DISTRIBUTION, "float64")
        host.fill(SEALED)
        host.new(UNSEALED, DISTRIBUTION, "float64")
        yield host
        assert host.unhandled() == []


def answers(connection: Connection, data: bytes) -> list[Frame]:
    """All answers to `data`, until the listener closes the connection."""
    with connection:
        connection.sock.settimeout(ANSWER_S)
        with contextlib.suppress(OSError):  # refused before all is sent
            connection.sock.sendall(data)
            connection.sock.shutdown(socket.SHUT_WR)
        found: list[Frame] = []
        while True:
            try:
                frame = connection.recv(ANSWER_S)
                connection.read_into(memoryview(bytearray(frame.payload_nbytes)))
            except frames.ConnectionLost:
                return found
            found.append(frame)


def check_served(host: ranks.Host, connection: Connection) -> None:
    """A peer of a data endpoint gets the elements of the sealed matrix."""
    connection.send(Kind.GET, {"matrix": SEALED, "region": ALL, "order": "F"})
    payload = bytearray(connection.expect(Kind.DATA, ANSWER_S).payload_nbytes)
    connection.read_into(memoryview(payload))
    block = np.frombuffer(payload).reshape(DISTRIBUTION.shape, order="F")
    assert np.array_equal(block, host.local(SEALED, 0))


def check_echoes(connection: Connection) -> None:
    """A peer of a control listener gets its frame back."""
    connection.send(Kind.COMMAND, {"are you": "well"})
    assert connection.expect(Kind.REPLY, ANSWER_S).body == {"are you": "well"}


def header(
    kind: int = Kind.GET,
    nbytes: int = 0,
    payload: int = 0,
    version: int = frames.VERSION,
    magic: bytes = b"ALCH",
) -> bytes:
    return frames.HEADER.pack(magic, version, kind, nbytes, payload)


def framed(kind: int, packed: bytes, payload: bytes = b"", claimed: int | None = None) -> bytes:
    size = len(payload) if claimed is None else claimed
    return header(kind, len(packed), size) + packed + payload


def frame(kind: int, payload: bytes = b"", claimed: int | None = None, **body: Any) -> bytes:
    return framed(kind, msgpack.packb(body), payload, claimed)


# Refused by every listener, before and after the handshake.
MALFORMED = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "zeros": bytes(1000),
    "another magic": header(magic=b"ALCI"),
    "a later version": header(version=frames.VERSION + 1),
    "an earlier version": header(version=frames.VERSION - 1),
    "version zero": header(version=0),
    "kind zero": header(0),
    "an unknown kind": header(max(Kind) + 1),
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
    "an unknown extension": framed(Kind.HELLO, msgpack.packb({"a": msgpack.ExtType(5, bytes(16))})),
    "half a complex number": framed(Kind.HELLO, msgpack.packb({"a": msgpack.ExtType(1, b"x" * 8)})),
    "a bottomless list": framed(Kind.HELLO, b"\x81\xa1a" + b"\x91" * 4000),
    "a list that claims 4 billion items": framed(Kind.HELLO, b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    "lists that each claim what is left": framed(Kind.HELLO, b"\x81\xa1a" + b"\xdc\x0f\x00" * 1200),
    "a payload on a HELLO": frame(Kind.HELLO, b"x" * 10, **HELLO),
    "a payload of 16 EiB": frame(Kind.GET, claimed=(1 << 64) - 1, matrix=SEALED, region=ALL),
}

# Refused before the handshake only.
UNAUTHENTICATED = {
    "no HELLO": frame(Kind.GET, matrix=SEALED, region=ALL),
    "no nonce": frame(Kind.HELLO),
    "the token itself": frame(Kind.HELLO, token=ranks.TOKEN),
    "a nonce that is short": frame(Kind.HELLO, nonce=bytes(31)),
    "a nonce that is long": frame(Kind.HELLO, nonce=bytes(33)),
    "a nonce of text": frame(Kind.HELLO, nonce="x" * 32),
    "a nonce in a list": frame(Kind.HELLO, nonce=[bytes(32)]),
    "a nonce that is true": frame(Kind.HELLO, nonce=True),
    "a WELCOME": frame(Kind.WELCOME, **HELLO),
    "a map over a stranger's limit": frame(Kind.HELLO, **HELLO, more="x" * 4096),
    "a map announced over a stranger's limit": header(Kind.HELLO, nbytes=4097),
    "a PUT": frame(Kind.PUT, bytes(NBYTES), matrix=UNSEALED, region=ALL),
}

# Refused after the CHALLENGE.
UNPROVED = {
    "a second HELLO": frame(Kind.HELLO, **HELLO),
    "a command": frame(Kind.COMMAND, op="list_matrices"),
    "no proof": frame(Kind.PROOF),
    "no fields": frame(Kind.PROOF, proof=bytes(32)),
    "an empty proof": frame(Kind.PROOF, proof=b"", fields=b""),
    "a proof of zeros": frame(Kind.PROOF, proof=bytes(32), fields=b"\x80"),
    "a proof of text": frame(Kind.PROOF, proof="x" * 32, fields=b"\x80"),
    "fields that are a map": frame(Kind.PROOF, proof=bytes(32), fields={"role": "client"}),
    "the token itself": frame(Kind.PROOF, proof=ranks.TOKEN.encode(), fields=b"\x80"),
}

# Words of the refusals of some of them.
REASONS = {
    "another protocol": "not an Alchemist frame",
    "a later version": f"is {frames.VERSION} here and {frames.VERSION + 1} on the other side",
    "kind zero": "unknown kind of frame 0",
    "an unknown kind": f"unknown kind of frame {max(Kind) + 1}",
    "a map over the limit": f"a map of {frames.MAP_LIMIT + 1} bytes is over the limit of ",
    "a payload on a HELLO": "must not have a payload",
    "no HELLO": "must open with HELLO",
    "no nonce": "no valid 'nonce'",
    "a nonce of text": "no valid 'nonce'",
    "a map announced over a stranger's limit": "4097 bytes is over the limit of 4096",
    "a second HELLO": "must be a PROOF",
    "a proof of zeros": "the token is not this gang's",
}

INVALID_IDS: list[Any] = [
    *(None, True, False, -1, 0, 99, 1 << 63, -(1 << 63), 1.0, float("nan"), "1", b"1", ""),
    *([], [SEALED], {}, {"a": 1}, [[[]]], "x" * 100_000, [1] * 100_000),
]
INVALID_REGIONS: list[Any] = [
    *(None, True, 7, "0, 1, 0, 1", b"\0\0\0\0", {}, {"row0": 0}, [], [0, 1], [0, 1, 0, 1, 0]),
    *([0, 1, 0, True], [False, 1, 0, 1], [0, 1.0, 0, 1], [None] * 4, ["0"] * 4, [[0]] * 4),
    *([-1, 1, 0, 1], [1, 0, 0, 1], [0, 21, 0, 30], [0, 20, 0, 31], [0, 1, 5, 4], [20, 21, 0, 1]),
    *([0, 1 << 63, 0, 1], [0, 1, -(1 << 63), 1], [1 << 63] * 4, [0] * 100_000, ["x" * 10_000] * 4),
]
INVALID_RANKS: list[Any] = [
    *(7, "0", [], {}, [True], [None], ["0"], [[0]], [0, 0], [1], [-1], [0, 1], [1 << 63]),
    *([0] * 5000, ["x" * 10_000]),
]
INVALID_ROWS: list[Any] = [
    *(None, 7, "x" * 8, [0], {}, b"", bytes(7), b"\xff" * 8, (20).to_bytes(8, "little"), bytes(16))
]

# Invalid requests of an authenticated peer to a data endpoint.
INVALID: dict[str, bytes] = {
    **{
        f"GET of matrix {value!r:.20}": frame(Kind.GET, matrix=value, region=ALL)
        for value in INVALID_IDS
    },
    **{f"MAP of matrix {value!r:.20}": frame(Kind.MAP, matrix=value) for value in INVALID_IDS},
    **{
        f"UNMAP of matrix {value!r:.20}": frame(Kind.UNMAP, matrix=value, written=[])
        for value in INVALID_IDS
    },
    **{
        f"PUT of matrix {value!r:.20}": frame(Kind.PUT, bytes(NBYTES), matrix=value, region=ALL)
        for value in INVALID_IDS
    },
    **{
        f"GET of region {value!r:.30}": frame(Kind.GET, matrix=SEALED, region=value)
        for value in INVALID_REGIONS
    },
    **{
        f"PUT of region {value!r:.30}": frame(
            Kind.PUT, bytes(NBYTES), matrix=UNSEALED, region=value
        )
        for value in INVALID_REGIONS
    },
    **{
        f"{kind.name} of ranks {value!r:.30}": frame(kind, matrix=SEALED, region=ALL, ranks=value)
        for kind in (Kind.GET, Kind.MAP)
        for value in INVALID_RANKS
    },
    **{
        f"PUT of rows {value!r:.30}": frame(Kind.PUT, bytes(240), matrix=UNSEALED, rows=value)
        for value in INVALID_ROWS
    },
    "PUT of a row, one byte less": frame(Kind.PUT, bytes(239), matrix=UNSEALED, rows=bytes(8)),
    "GET of an unsealed matrix": frame(Kind.GET, matrix=UNSEALED, region=ALL),
    "GET without a map": frame(Kind.GET),
    "GET without a region": frame(Kind.GET, matrix=SEALED),
    "PUT without a map": frame(Kind.PUT),
    "PUT into a sealed matrix": frame(Kind.PUT, bytes(NBYTES), matrix=SEALED, region=ALL),
    "PUT of one byte less": frame(Kind.PUT, bytes(NBYTES - 1), matrix=UNSEALED, region=ALL),
    "PUT of one byte more": frame(Kind.PUT, bytes(NBYTES + 1), matrix=UNSEALED, region=ALL),
    "PUT without a payload": frame(Kind.PUT, matrix=UNSEALED, region=ALL),
    "PUT of 16 EiB": frame(Kind.PUT, claimed=(1 << 64) - 1, matrix=UNSEALED, region=ALL),
    "PUT into an empty region": frame(Kind.PUT, bytes(8), matrix=UNSEALED, region=[3, 3, 0, 30]),
    "a second HELLO": frame(Kind.HELLO, **HELLO),
    **{
        f"{kind.name} to an endpoint": frame(kind, matrix=SEALED)
        for kind in (Kind.WELCOME, Kind.REFUSED, Kind.COMMAND, Kind.REPLY, Kind.EVENT, Kind.DATA)
    },
    **{
        f"a payload on {kind.name}": frame(kind, b"x" * 9, matrix=SEALED, region=ALL)
        for kind in (Kind.GET, Kind.MAP, Kind.UNMAP, Kind.SYNC, Kind.SAME_NODE)
    },
    "UNMAP without MAP": frame(Kind.UNMAP, matrix=SEALED, written=[]),
    "MAP to write a sealed matrix": frame(Kind.MAP, matrix=SEALED, write=True),
    "MAP to read an unsealed matrix": frame(Kind.MAP, matrix=UNSEALED),
}

# Invalid after a valid MAP, or through the Unix socket only.
MAP = frame(Kind.MAP, matrix=SEALED)
INVALID_MAPS: dict[str, bytes] = {
    "MAP twice": MAP + MAP,
    "UNMAP twice": MAP + 2 * frame(Kind.UNMAP, matrix=SEALED, written=[]),
    **{
        f"UNMAP that wrote {value!r:.20}": MAP + frame(Kind.UNMAP, matrix=SEALED, written=value)
        for value in (None, True, -1, 1, 1 << 63, 0.0, "0", [0], {}, "x" * 100_000)
    },
    **{
        f"UNMAP that wrote {value!r:.20} of rank 0": MAP
        + frame(Kind.UNMAP, matrix=SEALED, written=[[0, value]])
        for value in (None, True, -1, 1, 1 << 63, 0.0, "0", [0], {}, "x" * 100_000)
    },
}
