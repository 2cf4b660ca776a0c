"""Every invalid frame gets a clear refusal or a closed connection, and disturbs no other peer."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Frame, Kind
from tests.support import ranks, traces
from tests.support.frames import (
    ALL,
    DISTRIBUTION,
    HELLO,
    INVALID,
    INVALID_MAPS,
    LISTENERS,
    MALFORMED,
    MAX_PEERS,
    NBYTES,
    REASONS,
    SEALED,
    UNAUTHENTICATED,
    UNPROVED,
    UNSEALED,
    WAIT_S,
    answers,
    check_echoes,
    check_served,
    frame,
    fuzzed,
)


class Bystander:
    """A well-behaved peer of each listener, connected during all tests."""

    def __init__(self, host: ranks.Host) -> None:
        self._host = host
        self._data = [connect(a, ranks.TOKEN, {})[0] for a in host.addresses[0]]
        self._control, _ = connect(host.control, ranks.TOKEN, {})

    def check(self) -> None:
        """Assert that it gets timely and correct answers."""
        for connection in self._data:
            check_served(self._host, connection)
        check_echoes(self._control)

    def close(self) -> None:
        for connection in (*self._data, self._control):
            connection.close()


@pytest.fixture(scope="module")
def host() -> Iterator[ranks.Host]:
    with fuzzed(handshake_timeout_s=1.0, max_peers=MAX_PEERS) as host:
        yield host


@pytest.fixture(scope="module")
def bystander(host: ranks.Host) -> Iterator[Bystander]:
    bystander = Bystander(host)
    yield bystander
    bystander.check()
    bystander.close()


@pytest.fixture(params=LISTENERS)
def listener(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def peer(host: ranks.Host, listener: str) -> Connection:
    """An authenticated connection."""
    return connect(host.listeners[listener], ranks.TOKEN, {}, timeout_s=WAIT_S)[0]


def stranger(host: ranks.Host, listener: str) -> Connection:
    """A connection before its handshake."""
    return Connection(sockets.dial(host.listeners[listener]))


Connected = Callable[[ranks.Host, str], Connection]


def clear(frame: Frame, what: str = "") -> bool:
    """Whether a frame is a refusal with its reason, in a message of reasonable length."""
    message = frame.body.get("message", "")
    whole = frame.kind == Kind.REFUSED and 10 < len(message) < 500 and "kind" in frame.body
    return whole and REASONS.get(what, "") in message


@pytest.mark.parametrize("connected", [stranger, peer])
@pytest.mark.parametrize("what", MALFORMED)
def test_malformed_frames_are_refused_and_the_connection_closed(
    host: ranks.Host, bystander: Bystander, what: str, connected: Connected, listener: str
) -> None:
    found = answers(connected(host, listener), MALFORMED[what])
    assert [clear(frame, what) for frame in found] == [True]
    bystander.check()


@pytest.mark.parametrize("what", UNAUTHENTICATED)
def test_a_stranger_is_refused_and_its_connection_closed(
    host: ranks.Host, bystander: Bystander, what: str, listener: str
) -> None:
    found = answers(stranger(host, listener), UNAUTHENTICATED[what] + frame(Kind.SYNC))
    assert [clear(frame, what) for frame in found] == [True]
    assert found[0].body["kind"] == "AuthError"
    bystander.check()


@pytest.mark.parametrize("what", UNPROVED)
def test_a_stranger_without_a_valid_proof_is_refused_after_the_challenge(
    host: ranks.Host, bystander: Bystander, what: str, listener: str
) -> None:
    opening = frame(Kind.HELLO, **HELLO) + UNPROVED[what] + frame(Kind.SYNC)
    challenge, refusal = answers(stranger(host, listener), opening)
    assert challenge.kind == Kind.CHALLENGE
    assert clear(refusal, what)
    assert refusal.body["kind"] == "AuthError"
    bystander.check()


@pytest.mark.parametrize("listener", ["unix", "tcp"])
@pytest.mark.parametrize("what", INVALID)
def test_an_invalid_request_of_a_peer_is_refused(
    host: ranks.Host, bystander: Bystander, what: str, listener: str
) -> None:
    found = answers(peer(host, listener), INVALID[what])
    assert [clear(frame) for frame in found] == [True]
    bystander.check()


@pytest.mark.parametrize("what", INVALID_MAPS)
def test_an_invalid_request_after_a_map_is_refused(
    host: ranks.Host, bystander: Bystander, what: str
) -> None:
    found = answers(peer(host, "unix"), INVALID_MAPS[what])
    assert [clear(frame) for frame in found][-1]
    assert not any(frame.kind == Kind.REFUSED for frame in found[:-1])
    bystander.check()


def test_a_connection_stays_open_after_a_refused_request_without_payload(host: ranks.Host) -> None:
    for what in INVALID:
        if what.startswith(("GET of", "MAP of", "UNMAP of")):
            found = answers(peer(host, "unix"), INVALID[what] + frame(Kind.SYNC))
            assert [frame.kind for frame in found] == [Kind.REFUSED, Kind.SYNC], what


def test_an_incomplete_frame_is_given_up_when_the_peer_closes(
    host: ranks.Host, bystander: Bystander, listener: str
) -> None:
    whole = frame(Kind.PUT, bytes(NBYTES), matrix=UNSEALED, region=ALL)
    hello = frame(Kind.HELLO, **HELLO)
    start = traces.clock()
    for size in (0, 1, frames.HEADER.size - 1, frames.HEADER.size, len(hello) - 1):
        assert answers(stranger(host, listener), hello[:size]) == []
    if listener != "control":
        head = frames.HEADER.size
        for size in (1, head, head + 5, len(whole) - NBYTES, len(whole) - 1):
            assert answers(peer(host, listener), whole[:size]) == []
    assert traces.clock() - start < WAIT_S
    bystander.check()


def test_strangers_that_send_nothing_or_too_slowly_are_refused_in_time(
    host: ranks.Host, bystander: Bystander, listener: str
) -> None:
    hello = frame(Kind.HELLO, **HELLO)
    crowd = [stranger(host, listener) for _ in range(20)]
    start, begun = time.monotonic(), traces.clock()
    sent = 0
    while time.monotonic() - start < 1.2 and sent < len(hello) - 1:
        for connection in crowd[:10]:
            with contextlib.suppress(OSError):
                connection.sock.send(hello[sent : sent + 1])
        sent += 1
        bystander.check()
        time.sleep(0.02)
    for connection in crowd:
        assert clear(refusal := connection.recv(WAIT_S))
        assert "timed out" in refusal.body["message"]
        with pytest.raises(frames.ConnectionLost):
            connection.recv(WAIT_S)
        connection.close()
    assert traces.clock() - begun < 6


# --- resources ---


def test_a_thousand_bad_peers_leave_nothing_behind(host: ranks.Host, bystander: Bystander) -> None:
    dice = random.Random(7)
    bad: list[tuple[bytes, Connected]] = [
        *((data, stranger) for data in (*MALFORMED.values(), *UNAUTHENTICATED.values())),
        *((data, peer) for data in (*MALFORMED.values(), *INVALID.values())),
        *((data, peer) for data in INVALID_MAPS.values()),
    ]
    before, rss = (0, 0), 0
    for times in range(1400):
        if times == 400:  # one-time allocations are made
            before, rss = host.settled(), host.rss_kb()
        data, connected = dice.choice(bad)
        answers(connected(host, dice.choice(LISTENERS)), data)
    bystander.check()
    assert host.settled() == before
    assert host.rss_kb() - rss < 4096
    assert host.unhandled() == []


def test_file_descriptors_that_a_peer_passes_are_not_kept(
    host: ranks.Host, bystander: Bystander
) -> None:
    before = host.settled()
    for connected in (stranger, peer):
        with connected(host, "unix") as connection:
            for byte in frame(Kind.HELLO, **HELLO)[:20]:
                socket.send_fds(connection.sock, [bytes([byte])], [0, 1, 2])
            time.sleep(0.05)
            assert host.fds() <= before[1] + 1
    bystander.check()
    assert host.settled() == before


def test_an_endpoint_out_of_file_descriptors_recovers(
    host: ranks.Host, bystander: Bystander
) -> None:
    _, fds = host.settled()
    limits = resource.prlimit(host.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(host.pid, resource.RLIMIT_NOFILE, (fds + 3, limits[1]))
    try:
        crowd = [
            sockets.dial(host.listeners[listener]) for listener in ("unix", "tcp") for _ in range(8)
        ]
        time.sleep(0.1)
        assert host.fds() < fds + len(crowd)
        bystander.check()
        for sock in crowd:
            sock.close()
    finally:
        resource.prlimit(host.pid, resource.RLIMIT_NOFILE, limits)
    for listener in ("unix", "tcp"):
        connection, _ = connect(host.listeners[listener], ranks.TOKEN, {}, timeout_s=WAIT_S)
        connection.close()
    assert host.settled()[1] == fds


def test_a_loan_needs_no_file_descriptor_of_the_endpoint(
    host: ranks.Host, bystander: Bystander
) -> None:
    """It has those of all segments. Without a free one, a new matrix is refused."""
    host.new(3, DISTRIBUTION, "float64")
    limits = resource.prlimit(host.pid, resource.RLIMIT_NOFILE)
    with peer(host, "unix") as connection:
        host.settled()
        used = set(map(int, os.listdir(f"/proc/{host.pid}/fd")))
        least = next(fd for fd in range(1 << 20) if fd not in used)
        resource.prlimit(host.pid, resource.RLIMIT_NOFILE, (least, limits[1]))
        try:
            connection.send(Kind.MAP, {"matrix": 3, "write": True})
            (fd,) = connection.expect(Kind.MAP, WAIT_S).fds
            os.close(fd)
            with pytest.raises(Failure, match="Too many open files") as caught:
                host.new(4, DISTRIBUTION, "float64")
            assert caught.value.kind == "ResourceError"
        finally:
            resource.prlimit(host.pid, resource.RLIMIT_NOFILE, limits)
        connection.send(Kind.UNMAP, {"matrix": 3})
        connection.expect(Kind.SYNC, WAIT_S)
    host.free(3)
    assert host.unhandled() == []


def test_peers_over_the_limit_are_refused_until_others_leave(
    host: ranks.Host, bystander: Bystander
) -> None:
    before = host.settled()
    crowd = [connect(host.listeners["tcp"], ranks.TOKEN, {})[0] for _ in range(MAX_PEERS - 2)]
    with peer(host, "unix") as refused, pytest.raises(Failure, match=f"has {MAX_PEERS} clients"):
        refused.expect(Kind.SYNC, WAIT_S)
    bystander.check()
    for connection in crowd:
        connection.close()
    assert host.settled() == before
    connection, _ = connect(host.listeners["unix"], ranks.TOKEN, {})
    connection.close()


def test_a_reset_connection_does_no_harm(host: ranks.Host, bystander: Bystander) -> None:
    """Before and after the first answer."""
    before = host.settled()
    asked = frame(Kind.GET, matrix=SEALED, region=ALL)
    for listener in LISTENERS:
        for data in (b"", b"x", MALFORMED["zeros"], frame(Kind.HELLO, **HELLO) + 50 * asked):
            sock = sockets.dial(host.listeners[listener])
            if listener == "tcp":
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            sock.sendall(data)
            sock.close()
    bystander.check()
    assert host.settled() == before
    assert host.unhandled() == []
