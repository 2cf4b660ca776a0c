"""The asyncio end of a connection: the same frames, the same refusals, on either event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.wire import frames, sockets
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Frame, Kind
from tests.support.frames import SOON_S, TOKEN, bodies, cut, splits


class Transport:
    """As much of a transport as a `FrameProtocol` uses."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def get_extra_info(self, name: str) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(Kind), bodies), min_size=1, max_size=5), splits)
def test_a_protocol_takes_frames_however_the_stream_is_cut(
    sent: list[tuple[Kind, Body]], at: list[int]
) -> None:
    got: list[tuple[Kind, Body]] = []
    protocol = FrameProtocol(lambda _, frame: got.append((frame.kind, frame.body)), print)
    protocol.connection_made(Transport())  # type: ignore[arg-type]
    for local_indices in cut(b"".join(frames.encode(kind, body) for kind, body in sent), at):
        protocol.data_received(local_indices)
    assert got == sent


loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Listening:
    """A real server of `FrameProtocol`s on a Unix socket or on TCP, on a loop of its own."""

    def __init__(self, new_loop: Callable[[], Any], address: str, **handlers: Any) -> None:
        self.frames: list[Frame] = []
        self.lost = 0
        self.errors: list[Any] = []
        self._handlers = handlers
        self._loop = new_loop()
        self._loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        if address.startswith("/"):
            self._sock, self.address = sockets.listen_unix(address)
        else:
            self._sock, self.address = sockets.listen_tcp(address)
        self.server = self._call(self._listen())

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SOON_S)

    async def _listen(self) -> Any:
        def protocol() -> FrameProtocol:
            return FrameProtocol(self._on_frame, self._on_lost, TOKEN, self._handlers.get("hello"))

        if self._sock.family == socket.AF_UNIX:
            return await self._loop.create_unix_server(protocol, sock=self._sock)
        return await self._loop.create_server(protocol, sock=self._sock)

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        self.frames.append(frame)
        if "frame" in self._handlers:
            self._handlers["frame"](protocol, frame)
        else:
            protocol.send(Kind.REPLY, frame.body)

    def _on_lost(self, protocol: FrameProtocol) -> None:
        self.lost += 1

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *exc: object) -> None:
        async def end() -> None:
            self.server.close()
            await asyncio.sleep(0.05)  # transports say goodbye

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()
        assert not self.errors


@loops
@pytest.mark.parametrize("where", ["unix", "127.0.0.1"])
def test_the_two_ends_talk_to_each_other(
    new_loop: Callable[[], Any], where: str, folder: Path
) -> None:
    address = f"{folder}/s.sock" if where == "unix" else where
    with Listening(new_loop, address, hello=lambda p, body: {"you": body["role"]}) as listening:
        connection, welcome = connect(listening.address, TOKEN, {"role": "test"})
        with connection:
            assert welcome == {"you": "test"}
            for k in range(50):
                body = {"k": k, "z": complex(k, -k), "text": "x" * (k * 500)}
                connection.send(Kind.COMMAND, body)
                assert connection.expect(Kind.REPLY, SOON_S).body == body
        deadline = time.monotonic() + SOON_S
        while not listening.lost and time.monotonic() < deadline:
            time.sleep(0.01)
        assert listening.lost == 1


def refuse(protocol: FrameProtocol, body: Any) -> Body:
    raise Failure("SessionError", "not you")


@loops
@pytest.mark.parametrize(
    ("opening", "hello", "kind", "why"),
    [
        (frames.encode(Kind.HELLO, {"token": "no"}), None, "AuthError", "token"),
        (frames.encode(Kind.COMMAND, {"token": TOKEN}), None, "AuthError", "open with HELLO"),
        (frames.encode(Kind.HELLO, {"token": TOKEN}, 5), None, "AuthError", "payload"),
        (frames.encode(Kind.HELLO, {"x": "x" * 5000}), None, "AuthError", "over the limit"),
        (frames.HEADER.pack(b"ALCH", 2, 1, 0, 0), None, "AuthError", "version 2 meets version 1"),
        (b"x" * 100, None, "AuthError", "not an Alchemist frame"),
        (
            frames.encode(Kind.HELLO, {"token": TOKEN}),
            lambda p, body: {"n": body["node"]},
            "AuthError",
            "malformed HELLO: KeyError",
        ),
        (
            frames.encode(Kind.HELLO, {"token": TOKEN, "node": [1]}),
            lambda p, body: {"n": {}.get(body["node"])},
            "AuthError",
            "malformed HELLO: TypeError",
        ),
        (frames.encode(Kind.HELLO, {"token": TOKEN}), refuse, "SessionError", "not you"),
    ],
)
def test_a_protocol_tells_strangers_why(
    new_loop: Callable[[], Any], opening: bytes, hello: Any, kind: str, why: str, folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", hello=hello) as listening:
        with Connection(sockets.dial(listening.address)) as connection:
            connection.sock.sendall(opening + frames.encode(Kind.COMMAND, {"never": "seen"}))
            frame = connection.recv(SOON_S)
            assert (frame.kind, frame.body["kind"]) == (Kind.REFUSED, kind)
            assert why in frame.body["message"]
            with pytest.raises(frames.ConnectionLost):
                connection.recv(SOON_S)
        assert listening.frames == []
        assert listening.lost == 0


@loops
def test_a_protocol_gives_up_a_stranger_that_says_nothing(
    new_loop: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HELLO_TIMEOUT_S", 0.2)
    with (
        Listening(new_loop, f"{folder}/s.sock") as listening,
        Connection(sockets.dial(listening.address)) as connection,
    ):
        frame = connection.recv(SOON_S)
        assert frame.body == {"kind": "AuthError", "message": "refused: no HELLO in time"} | {
            "facts": {}
        }
        with pytest.raises(frames.ConnectionLost):
            connection.recv(SOON_S)


@loops
def test_a_protocol_refuses_what_its_owner_refuses_and_takes_nothing_after_it(
    new_loop: Callable[[], Any], folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", frame=refuse) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.sock.sendall(2 * frames.encode(Kind.COMMAND, {"k": 1}))
            with pytest.raises(Failure, match="not you"):
                connection.expect(Kind.REPLY, SOON_S)
            with pytest.raises(frames.ConnectionLost):
                connection.recv(SOON_S)
        assert len(listening.frames) == 1


@loops
def test_a_protocol_takes_nothing_after_its_owner_closed_it(
    new_loop: Callable[[], Any], folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", frame=lambda p, _: p.close()) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.sock.sendall(3 * frames.encode(Kind.COMMAND, {"k": 1}))
            with pytest.raises(frames.ConnectionLost):
                connection.recv(SOON_S)
        assert len(listening.frames) == 1


@loops
def test_a_peer_that_does_not_read_cannot_hold_a_closed_connection(
    new_loop: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "HELLO_TIMEOUT_S", 0.2)

    def flood(protocol: FrameProtocol, frame: Frame) -> None:
        protocol.send(Kind.REPLY, {"much": bytes(8 << 20)})
        protocol.close()

    with Listening(new_loop, f"{folder}/s.sock", frame=flood) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.send(Kind.COMMAND, {})
            deadline = time.monotonic() + SOON_S
            while not listening.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            assert listening.lost == 1
