"""The asyncio end of a connection: the same frames and refusals, on both event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.wire import asynchronous, frames, sockets
from mpi_workers.wire.asynchronous import FrameProtocol, listen, open_connection
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import Body, Frame, FrameBuffer, Kind
from tests.support.frames import SOON_S, TOKEN, bodies, cut, splits
from tests.support.traces import wait_until


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(Kind), bodies), min_size=1, max_size=5), splits)
def test_a_buffer_returns_the_same_frames_however_the_stream_is_cut(
    sent: list[tuple[Kind, Body]], at: list[int]
) -> None:
    found: list[Frame] = []
    buffer = FrameBuffer()
    for piece in cut(b"".join(frames.encode(kind, body) for kind, body in sent), at):
        buffer += piece
        while (frame := buffer.next()) is not None:
            found.append(frame)
    assert found == [Frame(*one, 0, encoded=frames.encode(*one)) for one in sent]
    assert not buffer


def refuse(protocol: FrameProtocol, body: Any) -> Body:
    raise Failure("SessionError", "not you")


loops = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])


class Listening:
    """A listener on a Unix socket or on TCP, whose peers a loop of its own serves."""

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
        hello = self._handlers.get("hello", lambda protocol, body: {})
        return listen([self._sock], TOKEN, hello, self._on_frame, self._on_lost)

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
            await asyncio.sleep(0.05)  # transports close

        self._call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SOON_S)
        self._loop.close()
        assert not self.errors


@loops
@pytest.mark.parametrize("where", ["unix", "127.0.0.1"])
def test_a_blocking_and_an_asyncio_end_exchange_frames(
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
        assert wait_until(lambda: listening.lost == 1, SOON_S) is not None


@loops
@pytest.mark.parametrize(
    ("hello", "kind", "why"),
    [
        (lambda p, body: {"n": body["node"]}, "AuthError", "malformed fields: KeyError"),
        (lambda p, body: {"n": {}.get(body["role"])}, "AuthError", "malformed fields: TypeError"),
        (lambda p, body: {"n": 1 // 0}, "AuthError", "ZeroDivisionError"),
        (refuse, "SessionError", "not you"),
    ],
)
def test_the_owner_can_refuse_an_authenticated_peer(
    new_loop: Callable[[], Any], hello: Any, kind: str, why: str, folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", hello=hello) as listening:
        with pytest.raises(Failure, match=why) as caught:
            connect(listening.address, TOKEN, {"role": [1]})
        assert caught.value.kind == kind
        assert listening.frames == []
        assert listening.lost == 0


@loops
@pytest.mark.parametrize("handler", [refuse, lambda protocol, _: protocol.close()])
def test_a_frame_that_the_owner_refuses_or_closes_after_is_the_last_one(
    new_loop: Callable[[], Any], handler: Any, folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", frame=handler) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.sock.sendall(3 * frames.encode(Kind.COMMAND, {"k": 1}))
            if handler is refuse:
                with pytest.raises(Failure, match="not you"):
                    connection.expect(Kind.REPLY, SOON_S)
            with pytest.raises(frames.ConnectionLost):
                connection.recv(SOON_S)
        assert len(listening.frames) == 1


@loops
def test_a_closed_connection_ends_although_its_peer_does_not_read(
    new_loop: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asynchronous, "CLOSE_TIMEOUT_S", 0.2)

    def flood(protocol: FrameProtocol, frame: Frame) -> None:
        protocol.send(Kind.REPLY, {"much": bytes(8 << 20)})
        protocol.close()

    with Listening(new_loop, f"{folder}/s.sock", frame=flood) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.send(Kind.COMMAND, {})
            assert wait_until(lambda: listening.lost == 1, SOON_S) is not None


def dialled(new_loop: Callable[[], Any], address: str, requests: int) -> list[Frame]:
    """The frames that an asyncio end gets which has connected: an event and the answers."""

    async def talk() -> list[Frame]:
        answers: asyncio.Queue[Frame] = asyncio.Queue()
        protocol = await open_connection(
            address, TOKEN, {"role": "test"}, lambda _, frame: answers.put_nowait(frame),
            lambda _: None,
        )  # fmt: skip
        try:
            for k in range(requests):
                protocol.send(Kind.COMMAND, {"k": k})
            return [await answers.get() for _ in range(requests + 1)]
        finally:
            protocol.close()
            await asyncio.sleep(0.05)  # the transport closes

    loop = new_loop()
    try:
        return loop.run_until_complete(asyncio.wait_for(talk(), SOON_S))
    finally:
        loop.close()


@loops
def test_two_asyncio_ends_exchange_frames_also_with_the_welcome(
    new_loop: Callable[[], Any], folder: Path
) -> None:
    def hello(peer: FrameProtocol, body: Body) -> Body:
        asyncio.get_running_loop().call_soon(peer.send, Kind.EVENT, {"k": body["role"]})
        return {}

    with Listening(new_loop, f"{folder}/s.sock", hello=hello) as listening:
        answers = dialled(new_loop, listening.address, 3)
    assert {frame.body["k"] for frame in answers} == {"test", 0, 1, 2}
