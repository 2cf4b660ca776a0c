"""Addresses, handshakes of blocking ends, and waits that poll before they sleep."""

from __future__ import annotations

import contextlib
import errno
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
from mpi_workers.wire.acceptor import MAX_STRANGERS, Acceptor, authenticate
from mpi_workers.wire.blocking import Connection, ShortWait, connect
from mpi_workers.wire.frames import Body, Kind
from mpi_workers.wire.handshake import ConnectingSide, ListeningSide
from tests.support import traces
from tests.support.frames import SOON_S, TOKEN, Faulty

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


# --- many peers at once, and errors of `accept` ---


def connected_at_once(address: str, count: int, timeout_s: float = SOON_S) -> list[Connection]:
    """The connections of those of so many peers that got one."""
    opened: list[Connection] = []

    def one() -> None:
        with contextlib.suppress(OSError, frames.WireError):
            opened.append(connect(address, TOKEN, {}, timeout_s=timeout_s)[0])

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * SOON_S)
        assert not thread.is_alive()
    return opened


@pytest.mark.parametrize("host", ["unix", "127.0.0.1"])
@pytest.mark.parametrize("expected", [0, 32])
def test_more_peers_at_once_than_strangers_are_allowed_all_get_in(
    host: str, expected: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello, attempts = ConnectingSide.hello, SimpleQueue[None]()

    def slow_hello(side: ConnectingSide) -> Body:
        attempts.put(None)
        time.sleep(0.3)  # of a peer on a busy node
        return hello(side)

    monkeypatch.setattr(ConnectingSide, "hello", slow_hello)
    where = f"{folder}/s.sock" if host == "unix" else host
    listen = sockets.listen_unix if host == "unix" else sockets.listen_tcp
    listener, address = listen(where)
    acceptor, _ = accepting(listener, expected=expected)
    with acceptor, contextlib.ExitStack() as stack:
        opened = connected_at_once(address, MAX_STRANGERS + 32)
        assert len(opened) == MAX_STRANGERS + 32
        for connection in opened:
            stack.enter_context(connection)
            assert not connection.readable()  # none was displaced later
    assert not expected or attempts.qsize() == len(opened)  # each had its place


def test_peers_wait_for_a_place_in_a_full_queue_of_a_listener(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    listener.listen(1)
    waiting = [sockets.dial(address) for _ in range(2)]
    with pytest.raises(BlockingIOError):
        sockets.dial(address)
    with contextlib.ExitStack() as stack:
        timer = threading.Timer(0.3, lambda: stack.enter_context(accepting(listener)[0]))
        timer.start()
        opened = connected_at_once(address, 20)
        timer.join()
        for connection in (*opened, *waiting):
            connection.close()
    assert len(opened) == 20


def test_a_peer_is_never_displaced_after_its_welcome(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others come in the moment in which its proof is found right: it connects again."""
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    receive, proofs = ListeningSide.receive, []

    def displaced(side: ListeningSide, frame: frames.Frame) -> Body:
        answer = receive(side, frame)
        if frame.kind == Kind.PROOF:
            proofs.append(frame)
            if len(proofs) == 1:
                acceptor.thing.strangers.displace()
        return answer

    monkeypatch.setattr(ListeningSide, "receive", displaced)
    acceptor, accepted = accepting(listener)
    with acceptor, connect(address, TOKEN, {})[0] as connection:
        other, _ = accepted.get(timeout=SOON_S)
        other.send(Kind.GET, {"matrix": 1})
        assert connection.recv(SOON_S).body == {"matrix": 1}
        other.close()
    assert len(proofs) == 2


def test_a_listener_that_ends_or_refuses_is_not_asked_again(folder: Path) -> None:
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    with accepting(listener)[0], pytest.raises(Failure, match="same token"):
        connect(address, "another", {})
    for place in (address, f"unix:{BOOT_ID}:{folder}/nothing"):
        begun = traces.clock()
        with pytest.raises(OSError, match=r".+"):
            connect(place, TOKEN, {})
        assert traces.clock() - begun < 1


# What Linux reports of a connection that is to be accepted, and that resources are missing.
ODD = "EPROTO EHOSTUNREACH ENETUNREACH ENETDOWN EHOSTDOWN ENONET ENOPROTOOPT EOPNOTSUPP EPERM"
ODD += " ECONNABORTED ECONNRESET ETIMEDOUT EMFILE ENFILE ENOBUFS ENOMEM"


@pytest.mark.parametrize("name", ODD.split())
def test_a_listener_outlives_errors_of_accept(name: str) -> None:
    listener, address = sockets.listen_tcp("127.0.0.1")
    faulty = Faulty(listener, [getattr(errno, name)] * 3)
    acceptor, accepted = accepting(faulty)
    with acceptor:
        for _ in range(2):
            with connect(address, TOKEN, {})[0], accepted.get(timeout=SOON_S)[0]:
                assert not faulty.errors


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
