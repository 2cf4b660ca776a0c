"""Whatever a peer sends, it gets a clear refusal or a closed door, and nobody else notices."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import LINGER_S, Connection, connect
from mpi_workers.wire.frames import Frame, Kind
from tests.support import ranks
from tests.support.malformed import (
    ALL,
    DOORS,
    HELLO,
    MALFORMED,
    MAX_PEERS,
    NBYTES,
    SPREAD,
    STRANGE,
    WAIT_S,
    WAITING,
    WHOLE,
    WRONG,
    WRONG_MAPS,
    frame,
    framed,
)


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
        answers: list[Frame] = []
        while True:
            try:
                frame = connection.recv(WAIT_S)
                connection.read_into(memoryview(bytearray(frame.payload_nbytes)))
            except frames.ConnectionLost:
                return answers
            answers.append(frame)


def clear(frame: Frame) -> bool:
    """Whether a frame is a refusal that says something, and not too much."""
    message = frame.body.get("message", "")
    return frame.kind == Kind.REFUSED and 10 < len(message) < 500 and "kind" in frame.body


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("known", [False, True], ids=["stranger", "peer"])
@pytest.mark.parametrize("what", MALFORMED)
def test_what_is_malformed_is_refused_and_the_door_closed(
    host: ranks.Host, innocent: Innocent, what: str, known: bool, door: str
) -> None:
    if door == "control" and known and what == "a payload on a HELLO":
        what = "a payload of 16 EiB"
    answers = told(host, door, MALFORMED[what], known=known)
    assert [clear(frame) for frame in answers] == [True]
    innocent.check()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", STRANGE)
def test_a_stranger_is_refused_and_the_door_closed(
    host: ranks.Host, innocent: Innocent, what: str, door: str
) -> None:
    answers = told(host, door, STRANGE[what] + frame(Kind.SYNC), known=False)
    assert [clear(frame) for frame in answers] == [True]
    assert answers[0].body["kind"] == "AuthError"
    innocent.check()


@pytest.mark.parametrize("door", ["unix", "tcp"])
@pytest.mark.parametrize("what", WRONG)
def test_what_a_peer_asks_wrongly_is_refused(
    host: ranks.Host, innocent: Innocent, what: str, door: str
) -> None:
    answers = told(host, door, WRONG[what], known=True)
    assert [clear(frame) for frame in answers] == [True]
    innocent.check()


@pytest.mark.parametrize("what", WRONG_MAPS)
def test_what_a_peer_maps_wrongly_is_refused(
    host: ranks.Host, innocent: Innocent, what: str
) -> None:
    answers = told(host, "unix", WRONG_MAPS[what], known=True)
    assert [clear(frame) for frame in answers][-1]
    assert not any(frame.kind == Kind.REFUSED for frame in answers[:-1])
    innocent.check()


def test_a_refusal_that_needs_no_closed_door_leaves_it_open(host: ranks.Host) -> None:
    for what in WRONG:
        if what.startswith(("GET of", "MAP of", "UNMAP of")):
            answers = told(host, "unix", WRONG[what] + frame(Kind.SYNC), known=True)
            assert [frame.kind for frame in answers] == [Kind.REFUSED, Kind.SYNC], what


@pytest.mark.parametrize("door", DOORS)
def test_what_breaks_off_is_let_go_at_once(host: ranks.Host, innocent: Innocent, door: str) -> None:
    whole = frame(Kind.PUT, bytes(NBYTES), matrix=WAITING, region=ALL)
    hello = frame(Kind.HELLO, **HELLO)
    start = time.monotonic()
    for size in (0, 1, frames.HEADER.size - 1, frames.HEADER.size, len(hello) - 1):
        assert told(host, door, hello[:size], known=False) == []
    if door != "control":
        for size in (
            1,
            frames.HEADER.size,
            frames.HEADER.size + 5,
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
        with pytest.raises(frames.ConnectionLost):
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
    for answer in told(host, door, b"".join(sent), known=True):
        if answer.kind == Kind.REFUSED:
            assert clear(answer)
        else:
            assert answer.kind in (Kind.DATA, Kind.MAP, Kind.SYNC, Kind.REPLY)
    innocent.check()


@fuzzed
@given(st.binary(max_size=200) | nearly_frames(), st.sampled_from(DOORS))
def test_nothing_a_stranger_sends_opens_a_door(
    host: ranks.Host, innocent: Innocent, sent: bytes, door: str
) -> None:
    for answer in told(host, door, sent, known=False):
        assert answer.kind in (Kind.REFUSED, Kind.WELCOME)
        assert answer.kind == Kind.REFUSED or ranks.TOKEN.encode() in sent
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
    with pytest.raises(frames.ConnectionLost):
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
