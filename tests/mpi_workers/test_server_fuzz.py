"""Whatever a peer sends, it gets a clear refusal or a closed door, and nobody else notices."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_workers import sockets, wire
from mpi_workers.connection import LINGER_S, Connection, connect
from mpi_workers.layout import Spread
from mpi_workers.wire import Frame, Kind
from tests.support import ranks

SPREAD = Spread("CIRC_CIRC", (20, 30), (1, 1))
WHOLE, WAITING = 1, 2  # a matrix that is sealed, and one that waits for its elements
ALL = [0, 20, 0, 30]
NBYTES = 20 * 30 * 8
WAIT_S = 3.0
HELLO = {"token": ranks.TOKEN, "role": "test"}
DOORS = ("unix", "tcp", "control")
MAX_PEERS = 50


class Innocent:
    """A well-behaved peer of each door, connected all the while."""

    def __init__(self, host: ranks.Host) -> None:
        self._data = [connect(a, ranks.TOKEN, {})[0] for a in host.addresses[0]]
        self._control, _ = connect(host.control, ranks.TOKEN, {})
        self._wanted = host.local(WHOLE, 0)

    def check(self) -> None:
        """All it is served is in time and right."""
        for connection in self._data:
            connection.send(Kind.GET, {"matrix": WHOLE, "region": ALL})
            frame = connection.expect(Kind.DATA, WAIT_S)
            payload = bytearray(frame.payload_nbytes)
            connection.read_into(memoryview(payload))
            assert np.array_equal(np.frombuffer(payload).reshape(20, 30, order="F"), self._wanted)
        self._control.send(Kind.COMMAND, {"are you": "well"})
        assert self._control.expect(Kind.REPLY, WAIT_S).body == {"are you": "well"}

    def close(self) -> None:
        for connection in (*self._data, self._control):
            connection.close()


@pytest.fixture(scope="module")
def host() -> Iterator[ranks.Host]:
    with ranks.Host(1, hello_timeout_s=1.0, max_peers=MAX_PEERS) as host:
        host.new(WHOLE, SPREAD, "float64")
        host.fill(WHOLE)
        host.new(WAITING, SPREAD, "float64")
        yield host
        assert host.unhandled() == []


@pytest.fixture(scope="module")
def innocent(host: ranks.Host) -> Iterator[Innocent]:
    innocent = Innocent(host)
    yield innocent
    innocent.check()
    innocent.close()


def address(host: ranks.Host, door: str) -> str:
    return host.control if door == "control" else host.addresses[0][DOORS.index(door)]


def told(host: ranks.Host, door: str, data: bytes, *, known: bool) -> list[Frame]:
    """All that a peer is answered that sends `data` and no more, until the door is closed."""
    with Connection(sockets.dial(address(host, door))) as connection:
        connection.sock.settimeout(WAIT_S)
        if known:
            connection.send(Kind.HELLO, HELLO)
            connection.expect(Kind.WELCOME, WAIT_S)
            connection.sock.settimeout(WAIT_S)
        with contextlib.suppress(OSError):  # it may be refused before all is sent
            connection.sock.sendall(data)
            connection.sock.shutdown(socket.SHUT_WR)
        frames: list[Frame] = []
        while True:
            try:
                frame = connection.recv(WAIT_S)
                connection.read_into(memoryview(bytearray(frame.payload_nbytes)))
            except wire.ConnectionLost:
                return frames
            frames.append(frame)


def clear(frame: Frame) -> bool:
    """Whether a frame is a refusal that says something, and not too much."""
    message = frame.body.get("message", "")
    return frame.kind == Kind.REFUSED and 10 < len(message) < 500 and "kind" in frame.body


def header(
    kind: int = Kind.GET,
    nbytes: int = 0,
    payload: int = 0,
    version: int = 1,
    magic: bytes = b"ALCH",
) -> bytes:
    return wire.HEADER.pack(magic, version, kind, nbytes, payload)


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
    "a map over the limit": header(nbytes=wire.MAP_LIMIT + 1),
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


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("known", [False, True], ids=["stranger", "peer"])
@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_refused_and_the_door_closed(
    host: ranks.Host, innocent: Innocent, what: str, known: bool, door: str
) -> None:
    if door == "control" and known and what == "a payload on a HELLO":
        what = "a payload of 16 EiB"
    frames = told(host, door, MALFORMED[what], known=known)
    assert [clear(frame) for frame in frames] == [True]
    innocent.check()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", STRANGE)
def test_a_stranger_is_refused_and_the_door_closed(
    host: ranks.Host, innocent: Innocent, what: str, door: str
) -> None:
    frames = told(host, door, STRANGE[what] + frame(Kind.SYNC), known=False)
    assert [clear(frame) for frame in frames] == [True]
    assert frames[0].body["kind"] == "AuthError"
    innocent.check()


@pytest.mark.parametrize("door", ["unix", "tcp"])
@pytest.mark.parametrize("what", WRONG)
def test_what_a_peer_asks_wrongly_is_refused(
    host: ranks.Host, innocent: Innocent, what: str, door: str
) -> None:
    frames = told(host, door, WRONG[what], known=True)
    assert [clear(frame) for frame in frames] == [True]
    innocent.check()


@pytest.mark.parametrize("what", WRONG_MAPS)
def test_what_a_peer_maps_wrongly_is_refused(
    host: ranks.Host, innocent: Innocent, what: str
) -> None:
    frames = told(host, "unix", WRONG_MAPS[what], known=True)
    assert [clear(frame) for frame in frames][-1]
    assert not any(frame.kind == Kind.REFUSED for frame in frames[:-1])
    innocent.check()


def test_a_refusal_that_needs_no_closed_door_leaves_it_open(host: ranks.Host) -> None:
    for what in WRONG:
        if what.startswith(("GET of", "MAP of", "UNMAP of")):
            frames = told(host, "unix", WRONG[what] + frame(Kind.SYNC), known=True)
            assert [frame.kind for frame in frames] == [Kind.REFUSED, Kind.SYNC], what


@pytest.mark.parametrize("door", DOORS)
def test_what_breaks_off_is_let_go_at_once(host: ranks.Host, innocent: Innocent, door: str) -> None:
    whole = frame(Kind.PUT, bytes(NBYTES), matrix=WAITING, region=ALL)
    hello = frame(Kind.HELLO, **HELLO)
    start = time.monotonic()
    for size in (0, 1, wire.HEADER.size - 1, wire.HEADER.size, len(hello) - 1):
        assert told(host, door, hello[:size], known=False) == []
    if door != "control":
        for size in (
            1,
            wire.HEADER.size,
            wire.HEADER.size + 5,
            len(whole) - NBYTES,
            len(whole) - 1,
        ):
            assert told(host, door, whole[:size], known=True) == []
    assert time.monotonic() - start < WAIT_S
    innocent.check()


@pytest.mark.parametrize("door", DOORS)
def test_strangers_that_say_nothing_or_trickle_are_sent_away(
    host: ranks.Host, innocent: Innocent, door: str
) -> None:
    hello = frame(Kind.HELLO, **HELLO)
    crowd = [Connection(sockets.dial(address(host, door))) for _ in range(20)]
    start = time.monotonic()
    sent = 0
    while time.monotonic() - start < 1.2 and sent < len(hello) - 1:
        for connection in crowd[:10]:
            with contextlib.suppress(OSError):
                connection.sock.send(hello[sent : sent + 1])
        sent += 1
        innocent.check()
        time.sleep(0.02)
    for connection in crowd:
        assert clear(connection.recv(WAIT_S))
        with pytest.raises(wire.ConnectionLost):
            connection.recv(WAIT_S)
        connection.close()
    assert time.monotonic() - start < 2.5


# --- anything at all ---

small = st.none() | st.booleans() | st.integers(-5, 40) | st.integers(-(1 << 63), (1 << 63) - 1)
anything = st.recursive(
    small | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "matrix": st.sampled_from([WHOLE, WAITING]) | anything,
        "region": st.just(ALL) | st.lists(small, min_size=4, max_size=4) | anything,
        "known": st.lists(small, max_size=4) | anything,
        "write": st.booleans() | anything,
        "written": small | anything,
        "tiled": st.booleans() | anything,
        "token": st.just(ranks.TOKEN) | anything,
    },
)


@st.composite
def nearly_frames(draw: st.DrawFn) -> bytes:
    """A frame that may be right, and may be spoilt in its header, its map or its length."""
    packed = msgpack.packb(draw(fields))
    payload = draw(st.binary(max_size=64))
    claimed = draw(st.none() | st.integers(0, (1 << 64) - 1))
    kind = draw(st.sampled_from(Kind) | st.integers(0, (1 << 16) - 1))
    data = bytearray(framed(kind, packed, payload, claimed))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=2)
    ):
        data[at % len(data)] = value
    return bytes(data[: draw(st.none() | st.integers(0, len(data)))])


fuzzed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@fuzzed
@given(st.lists(nearly_frames(), max_size=4), st.sampled_from(DOORS))
def test_nothing_a_peer_sends_does_harm(
    host: ranks.Host, innocent: Innocent, sent: list[bytes], door: str
) -> None:
    for frame in told(host, door, b"".join(sent), known=True):
        if frame.kind == Kind.REFUSED:
            assert clear(frame)
        else:
            assert frame.kind in (Kind.DATA, Kind.MAP, Kind.SYNC, Kind.REPLY)
    innocent.check()


@fuzzed
@given(st.binary(max_size=200) | nearly_frames(), st.sampled_from(DOORS))
def test_nothing_a_stranger_sends_opens_a_door(
    host: ranks.Host, innocent: Innocent, sent: bytes, door: str
) -> None:
    for frame in told(host, door, sent, known=False):
        assert frame.kind in (Kind.REFUSED, Kind.WELCOME)
        assert frame.kind == Kind.REFUSED or ranks.TOKEN.encode() in sent
    innocent.check()


# --- nothing grows ---


def settled(host: ranks.Host) -> tuple[int, int]:
    """Threads and file descriptors, once the last peers have been let go.

    One who is refused may linger for `LINGER_S`: less than that without a change says nothing.
    """
    deadline = time.monotonic() + WAIT_S
    found, since = (host.threads(), host.fds()), time.monotonic()
    while time.monotonic() < min(deadline, since + LINGER_S + 0.2):
        time.sleep(0.02)
        last, found = found, (host.threads(), host.fds())
        if last != found:
            since = time.monotonic()
    return found


def test_a_thousand_bad_peers_leave_nothing_behind(host: ranks.Host, innocent: Innocent) -> None:
    dice = random.Random(7)
    bad = [(data, False) for data in (*MALFORMED.values(), *STRANGE.values())]
    bad += [(data, True) for data in (*MALFORMED.values(), *WRONG.values(), *WRONG_MAPS.values())]

    def annoy(times: int) -> None:
        for _ in range(times):
            data, known = dice.choice(bad)
            told(host, dice.choice(DOORS), data, known=known)

    annoy(400)  # what is allocated once has been
    before, rss = settled(host), host.rss_kb()
    annoy(1000)
    innocent.check()
    assert settled(host) == before
    assert host.rss_kb() - rss < 4096
    assert host.unhandled() == []


def test_file_descriptors_that_a_peer_passes_are_not_kept(
    host: ranks.Host, innocent: Innocent
) -> None:
    before = settled(host)
    for known in (False, True):
        with Connection(sockets.dial(address(host, "unix"))) as connection:
            if known:
                connection.send(Kind.HELLO, HELLO)
                connection.expect(Kind.WELCOME, WAIT_S)
            for byte in frame(Kind.HELLO, **HELLO)[:20]:
                socket.send_fds(connection.sock, [bytes([byte])], [0, 1, 2])
            time.sleep(0.05)
            assert host.fds() <= before[1] + 1
    innocent.check()
    assert settled(host) == before


def test_a_rank_out_of_file_descriptors_recovers(host: ranks.Host, innocent: Innocent) -> None:
    _, fds = settled(host)
    limits = resource.prlimit(host.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(host.pid, resource.RLIMIT_NOFILE, (fds + 3, limits[1]))
    try:
        crowd = [sockets.dial(address(host, door)) for door in ("unix", "tcp") for _ in range(8)]
        time.sleep(0.1)
        # The limit is for the numbers of descriptors, and some above it may be in use.
        assert fds + 3 <= host.fds() < fds + len(crowd)
        innocent.check()
        for sock in crowd:
            sock.close()
    finally:
        resource.prlimit(host.pid, resource.RLIMIT_NOFILE, limits)
    for door in ("unix", "tcp"):
        connection, _ = connect(address(host, door), ranks.TOKEN, {}, timeout_s=WAIT_S)
        connection.close()
    assert settled(host)[1] == fds


def test_peers_beyond_the_most_are_turned_away_and_later_welcome(
    host: ranks.Host, innocent: Innocent
) -> None:
    before = settled(host)
    crowd = [connect(address(host, "tcp"), ranks.TOKEN, {})[0] for _ in range(MAX_PEERS - 2)]
    with pytest.raises(wire.ConnectionLost):
        connect(address(host, "unix"), ranks.TOKEN, {})
    innocent.check()
    for connection in crowd:
        connection.close()
    assert settled(host) == before
    connection, _ = connect(address(host, "unix"), ranks.TOKEN, {})
    connection.close()


def test_a_door_slammed_on_the_way_does_no_harm(host: ranks.Host, innocent: Innocent) -> None:
    """Peers that reset the connection, before and after they have been answered."""
    before = settled(host)
    asked = frame(Kind.GET, matrix=WHOLE, region=ALL)
    for door in DOORS:
        for data in (b"", b"x", MALFORMED["zeros"], frame(Kind.HELLO, **HELLO) + 50 * asked):
            sock = sockets.dial(address(host, door))
            if door == "tcp":
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.sendall(data)
            sock.close()
    innocent.check()
    assert settled(host) == before
    assert host.unhandled() == []
