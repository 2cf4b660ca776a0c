"""Short waits: the news of a poll, in time, and without polling for peers that are slow."""

from __future__ import annotations

import select
import socket
import threading
import time

import pytest

from mpi_workers.wire import short_waits
from mpi_workers.wire.short_waits import ShortWait


def polled(end: socket.socket) -> ShortWait:
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return ShortWait(poll)


def test_news_and_the_time_limit_are_those_of_the_poll() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wait = polled(ours)
        for _ in range(5):  # with polling and without
            start = time.monotonic()
            assert wait(20.0) == []
            assert time.monotonic() - start >= 0.02
            theirs.send(b"x")
            assert wait(1000.0) == [(ours.fileno(), select.POLLIN)]
            ours.recv(1)
            timer = threading.Timer(0.02, theirs.send, [b"x"])
            timer.start()
            assert wait(None) == [(ours.fileno(), select.POLLIN)]
            timer.join()
            ours.recv(1)


def test_slow_peers_cost_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_waits, "SPIN_S", 0.005)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wait = polled(ours)
        before = time.thread_time()
        for _ in range(200):
            assert wait(6.0) == []
        assert time.thread_time() - before < 0.2  # polling all the time: 1 s


def test_a_peer_that_becomes_quick_is_polled_for_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wait = polled(ours)
        for _ in range(15):
            wait(0.1)
        theirs.send(b"x")
        begin = 2 * short_waits.MOST_SKIPPED
        found = [wait(0.0) for _ in range(begin)]
        assert all(found)
        ours.recv(1)
        before = time.thread_time()
        wait(0.2)
        assert time.thread_time() - before > 0.5 * short_waits.SPIN_S
