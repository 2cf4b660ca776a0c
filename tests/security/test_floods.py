"""Peers without the token cannot keep those with it out."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time

import pytest

from mpi_workers.wire import sockets
from mpi_workers.wire.acceptor import MAX_STRANGERS, Strangers
from mpi_workers.wire.blocking import connect
from tests.security.conftest import line_of
from tests.support import ranks
from tests.support.frames import LISTENERS
from tests.support.traces import wait_until

CROWD = 400  # silent connections

# Opens connections as fast as it can, says HELLO on each, and keeps the last thousand.
FLOOD = """
import collections, socket, sys, time
host, _, port = sys.argv[1].rpartition(":")
hello = bytes.fromhex(sys.argv[2])
kept = collections.deque(maxlen=1000)
print("ready", flush=True)
while True:
    try:
        sock = socket.create_connection((host, int(port)))
        sock.sendall(hello)
        kept.append(sock)
    except OSError:
        time.sleep(0.001)
"""


def connect_s(place: str) -> float:
    """Seconds to authenticate."""
    start = time.monotonic()
    connect(place, ranks.TOKEN, {})[0].close()
    return time.monotonic() - start


@pytest.mark.parametrize("listener", LISTENERS)
def test_silent_strangers_take_no_thread_and_no_place_of_a_peer(
    host: ranks.Host, listener: str
) -> None:
    threads, fds = host.settled()
    crowd = [sockets.dial(host.listeners[listener]) for _ in range(CROWD)]
    try:
        assert max(connect_s(host.listeners[listener]) for _ in range(20)) < 1
        # Once the peers that have just left are gone; the one rank is expected.
        most = threads, fds + MAX_STRANGERS + 1
        left = wait_until(lambda: host.threads() <= most[0] and host.fds() <= most[1], 20.0)
        assert left is not None, (host.threads(), host.fds(), most)
    finally:
        for sock in crowd:
            sock.close()


def test_peers_get_in_while_a_process_floods_the_listener(host: ranks.Host) -> None:
    place = host.addresses[0][1]
    hello = "414c434800020001" + "00000029" + "0" * 16 + "81a56e6f6e6365c420" + "00" * 32
    flood = subprocess.Popen(
        [sys.executable, "-I", "-c", FLOOD, place.removeprefix("tcp:"), hello],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert line_of(flood) == "ready"
        time.sleep(0.5)
        times = []
        refused = 0
        for _ in range(100):
            try:
                times.append(connect_s(place))
            except OSError:
                refused += 1
        assert refused == 0
        assert statistics.median(times) < 0.5
    finally:
        flood.kill()
        flood.communicate()


class Member:
    def __init__(self, source: str) -> None:
        self.source = source
        self.dropped = False

    def drop(self) -> None:
        self.dropped = True


def test_a_source_with_many_strangers_displaces_its_own() -> None:
    strangers = Strangers(10)
    lone = Member("a lone host")
    strangers.add(lone)
    crowd = [Member("a flooding host") for _ in range(100)]
    for member in crowd:
        strangers.add(member)
    assert len(strangers) == 10
    assert not lone.dropped
    assert [member.dropped for member in crowd] == [True] * 91 + [False] * 9


def test_an_authenticated_peer_is_never_displaced(host: ranks.Host) -> None:
    place = host.addresses[0][1]
    connection, _ = connect(place, ranks.TOKEN, {})
    with contextlib.ExitStack() as stack:
        stack.enter_context(connection)
        for _ in range(CROWD):
            stack.enter_context(sockets.dial(place))
        time.sleep(0.2)
        assert not connection.readable()
