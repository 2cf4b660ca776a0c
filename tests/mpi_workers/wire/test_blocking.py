"""Addresses lead to their listeners, and only who knows the token comes in."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.blocking import Connection, connect, greet
from mpi_workers.wire.frames import Body, Frame, Kind
from tests.support.frames import SOON_S, TOKEN, beside


@pytest.mark.parametrize("host", ["unix", "127.0.0.1", "::1"])
def test_an_address_leads_back_to_its_listener(host: str, folder: Path) -> None:
    if host == "unix":
        listener, address = sockets.listen_unix(f"{folder}/s.sock")
        assert address == f"unix:{folder}/s.sock"
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
        sockets.dial(f"unix:{folder}/nothing")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match=r".+"):
        sockets.dial(f"tcp:127.0.0.1:{port}")
    for address in ("http://x", "", "127.0.0.1:80"):
        with pytest.raises(ValueError, match="not an address"):
            sockets.dial(address)
    assert not sockets.reachable_here(f"unix:{folder}/nothing")


def greeted(folder: Path, talk: Callable[[str], Any]) -> tuple[Any, Body | BaseException]:
    """What `talk(address)` returns, and what the greeting side made of it."""
    listener, address = sockets.listen_unix(f"{folder}/s.sock")
    outcome: list[Body | BaseException] = []

    def serve() -> None:
        sock, _ = listener.accept()
        with Connection(sock) as connection:
            try:
                outcome.append(greet(connection, TOKEN, {"rank": 3}))
            except (frames.WireError, OSError) as error:
                outcome.append(error)

    with listener, beside(serve):
        result = talk(address)
    return result, outcome[0]


def test_the_right_token_opens_the_door(folder: Path) -> None:
    def talk(address: str) -> Body:
        connection, welcome = connect(address, TOKEN, {"role": "test"})
        with connection:
            assert connection.sock.gettimeout() is None
            return welcome

    welcome, hello = greeted(folder, talk)
    assert welcome == {"rank": 3}
    assert hello == {"role": "test", "token": TOKEN}


@pytest.mark.parametrize("token", ["", TOKEN[:-1], TOKEN + "x", "é", "another"])
def test_another_token_is_refused(folder: Path, token: str) -> None:
    def talk(address: str) -> Failure:
        with pytest.raises(Failure, match="token is not this gang's") as caught:
            connect(address, token, {})
        return caught.value

    failure, error = greeted(folder, talk)
    assert failure.kind == "AuthError"
    assert isinstance(error, frames.WireError)


@pytest.mark.parametrize(
    "opening",
    [
        frames.encode(Kind.HELLO, {"token": 7}),
        frames.encode(Kind.HELLO, {"token": [TOKEN]}),
        frames.encode(Kind.HELLO, {"token": TOKEN.encode()}),
        frames.encode(Kind.HELLO, {}),
        frames.encode(Kind.GET, {"token": TOKEN}),
        frames.encode(Kind.HELLO, {"token": TOKEN}, 1),
        frames.encode(Kind.HELLO, {"token": TOKEN, "more": "x" * 5000}),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        frames.HEADER.pack(b"ALCH", frames.VERSION + 1, Kind.HELLO, 0, 0),
    ],
)
def test_a_stranger_is_told_why_it_is_refused(folder: Path, opening: bytes) -> None:
    def talk(address: str) -> Frame:
        with Connection(sockets.dial(address)) as connection:
            connection.sock.sendall(opening)
            frame = connection.recv(SOON_S)
            with pytest.raises(frames.ConnectionLost):
                connection.recv(SOON_S)
            return frame

    frame, error = greeted(folder, talk)
    assert frame.kind == Kind.REFUSED
    assert frame.body["kind"] == "AuthError"
    assert frame.body["message"].startswith("refused: ")
    assert isinstance(error, frames.WireError)


def test_a_stranger_that_says_nothing_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HELLO_TIMEOUT_S", 0.2)

    def talk(address: str) -> Frame:
        with Connection(sockets.dial(address)) as connection:
            connection.sock.sendall(frames.encode(Kind.HELLO, {"token": TOKEN})[:-3])
            return connection.recv(SOON_S)

    frame, _ = greeted(folder, talk)
    assert frame.body["kind"] == "AuthError"
    assert "timed out" in frame.body["message"]


@given(st.text(), st.text())
def test_only_the_same_token_matches(given_token: str, token: str) -> None:
    assert frames.token_matches({"token": given_token}, token) == (given_token == token)
    assert frames.token_matches({"token": token}, token)
