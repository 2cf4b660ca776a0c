"""Addresses, handshakes of blocking ends, and waits that poll before they sleep."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from mpi_workers.failures import Failure
from mpi_workers.wire import blocking, frames, sockets
from mpi_workers.wire.acceptor import Acceptor, authenticate
from mpi_workers.wire.blocking import Connection, ShortWait, connect
from mpi_workers.wire.frames import Body, Kind
from mpi_workers.wire.handshake import ConnectingSide
from tests.support.frames import SOON_S, TOKEN

BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.parametrize("host", ["unix", "unix far", "127.0.0.1", "::1"])
def test_an_address_leads_back_to_its_listener(host: str, folder: Path) -> None:
    if host.startswith("unix"):
        folder /= "far" * 50 * (host == "unix far")
        folder.mkdir(mode=0o700, exist_ok=True)
        listener, address = sockets.listen_unix(f"{folder}/s.sock")
        assert address.endswith(f":{folder}/s.sock")
        assert sockets.reachable_here(address)
    else:
        try:
            listener, address = sockets.listen_tcp(host)
        except OSError:
            pytest.skip(f"this machine has no {host}")
        assert address.startswith(f"tcp:{host}:")
        assert not sockets.reachable_here(address)
    with listener, sockets.dial(address) as ours:
        theirs, _ = listener.accept()
        with theirs:
            ours.sendall(b"hello")
            assert theirs.recv(5) == b"hello"
            assert ours.gettimeout() is None


def test_an_address_that_leads_nowhere_is_an_error(folder: Path) -> None:
    with pytest.raises(OSError, match=r".+"):
        sockets.dial(f"unix:{BOOT_ID}:{folder}/nothing")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match=r".+"):
        sockets.dial(f"tcp:127.0.0.1:{port}")
    for address in ("http://x", "", "127.0.0.1:80"):
        with pytest.raises(ValueError, match="not an address"):
            sockets.dial(address)
    assert not sockets.reachable_here(f"unix:{BOOT_ID}:{folder}/nothing")


Accepted = SimpleQueue[tuple[Connection, Body]]


def accepting(listener: socket.socket, **options: Any) -> tuple[Any, Accepted]:
    """An acceptor, to be closed, and the peers that are authenticated, with their fields."""
    accepted: Accepted = SimpleQueue()
    known = partial(authenticate, token=TOKEN, welcome={"rank": 3})
    acceptor = Acceptor([listener], known, accepted.put, **options)
    return contextlib.closing(acceptor.start()), accepted


def test_two_ends_with_the_same_token_are_connected(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    acceptor, accepted = accepting(listener)
    with acceptor:
        connection, welcome = connect(address, TOKEN, {"role": "test", "z": 1j})
        with connection:
            assert connection.sock.gettimeout() is None
            assert welcome == {"rank": 3}
            other, fields = accepted.get(timeout=SOON_S)
            other.close()
            assert fields == {"role": "test", "z": 1j}


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "x", TOKEN + "\0", "é", "another"])
def test_a_client_refuses_a_listener_with_another_token(folder: Path, token: str) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    acceptor, accepted = accepting(listener)
    with acceptor, pytest.raises(Failure, match="does not have the same token") as caught:
        connect(address, token, {})
    assert caught.value.kind == "AuthError"
    assert accepted.empty()


def test_frames_that_follow_the_proof_at_once_are_not_lost(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    acceptor, accepted = accepting(listener)
    side = ConnectingSide(TOKEN, {})
    with acceptor, Connection(sockets.dial(address)) as client:
        client.send(Kind.HELLO, side.hello())
        proof = frames.encode(Kind.PROOF, side.prove(client.recv(SOON_S)))
        client.sock.sendall(proof + frames.encode(Kind.GET, {"matrix": 1}))
        with accepted.get(timeout=SOON_S)[0] as connection:
            assert connection.recv(SOON_S).body == {"matrix": 1}


def test_only_data_connections_have_patience() -> None:
    def user_timeout_s(sock: socket.socket) -> float:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000

    for keepalive, expected_s in ((sockets.CONTROL, 6), (sockets.DATA, 120)):
        listener, address = sockets.listen_tcp("127.0.0.1")
        acceptor, accepted = accepting(listener, keepalive=keepalive)
        with acceptor:
            connection, _ = connect(address, TOKEN, {}, keepalive=keepalive)
        with connection, accepted.get(timeout=SOON_S)[0] as other:
            assert user_timeout_s(connection.sock) == user_timeout_s(other.sock) == expected_s


# --- short waits ---


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
    monkeypatch.setattr(blocking, "SPIN_S", 0.005)
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
        begin = 2 * blocking.MOST_SKIPPED
        found = [wait(0.0) for _ in range(begin)]
        assert all(found)
        ours.recv(1)
        before = time.thread_time()
        wait(0.2)
        assert time.thread_time() - before > 0.5 * blocking.SPIN_S
