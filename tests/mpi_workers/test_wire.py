"""Frames travel whole, whatever the stream is cut into; nothing else is believed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers import sockets, wire
from mpi_workers.connection import Connection, connect, greet
from mpi_workers.failures import Failure
from mpi_workers.protocol import FrameProtocol
from mpi_workers.wire import Body, Frame, Kind

TOKEN = "a secret of the gang"
SOON_S = 5.0

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
bodies = st.dictionaries(st.text(max_size=10), values, max_size=5)
frames = st.tuples(st.sampled_from(Kind), bodies, st.binary(max_size=1500))
splits = st.lists(st.integers(0, 1 << 20), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(bounds)]


class Pieces:
    """As much of a socket as a `Connection` reads from: gives one piece at a time."""

    family = socket.AF_INET

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces[::-1]

    def recv(self, most: int) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.pop()
        if len(piece) > most:
            self._pieces.append(piece[most:])
        return piece[:most]

    def recv_into(self, view: memoryview) -> int:
        piece = self.recv(len(view))
        view[: len(piece)] = piece
        return len(piece)

    def gettimeout(self) -> None: ...
    def settimeout(self, seconds: float | None) -> None: ...
    def close(self) -> None: ...


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = socket.socketpair()
    with Connection(ours, **options) as near, Connection(theirs, **options) as far:
        yield near, far


@contextlib.contextmanager
def beside(action: Callable[[], Any]) -> Iterator[None]:
    """Run something on another thread, which must be done by the end of the block."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(SOON_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="wire-") as path:
        yield Path(path)


# --- the blocking end ---


@settings(max_examples=100, deadline=None)
@given(st.lists(frames, min_size=1, max_size=4), splits)
def test_frames_arrive_whole_however_the_stream_is_cut(
    sent: list[tuple[Kind, Body, bytes]], at: list[int]
) -> None:
    data = b"".join(wire.encode(kind, body, len(raw)) + raw for kind, body, raw in sent)
    connection = Connection(Pieces(cut(data, at)))  # type: ignore[arg-type]
    for kind, body, raw in sent:
        frame = connection.recv()
        payload = bytearray(frame.payload_nbytes)
        connection.read_into(memoryview(payload))
        assert (frame.kind, frame.body, bytes(payload)) == (kind, body, raw)
    with pytest.raises(wire.ConnectionLost):
        connection.recv()


@settings(max_examples=50, deadline=None)
@given(frames, st.integers(0, 1 << 20))
def test_a_frame_that_breaks_off_is_a_lost_connection(
    sent: tuple[Kind, Body, bytes], where: int
) -> None:
    kind, body, raw = sent
    data = wire.encode(kind, body, len(raw)) + raw
    connection = Connection(Pieces([data[: where % len(data)]]))  # type: ignore[arg-type]
    with pytest.raises(wire.ConnectionLost):  # noqa: PT012 - either read may find out
        frame = connection.recv()
        connection.read_into(memoryview(bytearray(frame.payload_nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 1000, (1 << 14) - 1, 1 << 14, 3 << 20])
def test_payloads_of_all_sizes_cross_a_real_socket(nbytes: int) -> None:
    payload = os.urandom(nbytes)
    with pair() as (near, far), beside(lambda: near.send(Kind.DATA, {"n": nbytes}, payload)):
        frame = far.recv(SOON_S)
        got = bytearray(frame.payload_nbytes)
        far.read_into(memoryview(got))
        assert (frame.kind, frame.body, got) == (Kind.DATA, {"n": nbytes}, payload)


def test_a_payload_may_be_any_contiguous_buffer() -> None:
    words = memoryview(bytearray(range(32))).cast("Q")
    with pair() as (near, far):
        near.send(Kind.DATA, None, words)
        frame = far.recv(SOON_S)
        got = bytearray(32)
        far.read_into(memoryview(got))
        assert frame.payload_nbytes == 32
        assert got == bytes(range(32))


@given(st.complex_numbers())
def test_complex_values_keep_every_bit(value: complex) -> None:
    body = wire.decode_body(wire.encode(Kind.REPLY, {"v": value})[wire.HEADER.size :])
    assert type(body["v"]) is complex
    assert repr(body["v"]) == repr(value)  # nan and signed zeros too


def test_what_no_map_can_carry_is_refused_before_anything_is_sent() -> None:
    with pair() as (near, far):
        for value in (object(), {1, 2}, 1 << 64):
            with pytest.raises((TypeError, OverflowError)):
                near.send(Kind.COMMAND, {"v": value})
        with pytest.raises(Failure, match="over the limit") as caught:
            near.send(Kind.COMMAND, {"v": b"x" * (wire.MAP_LIMIT + 1)})
        assert caught.value.kind == "TransferError"
        near.send(Kind.COMMAND, {"v": 1})
        assert far.recv(SOON_S).body == {"v": 1}


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (wire.HEADER.pack(b"HTTP", 1, 1, 0, 0), "not an Alchemist frame"),
        (wire.HEADER.pack(b"ALCH", 99, 1, 0, 0), "protocol version 99 meets version 1"),
        (wire.HEADER.pack(b"ALCH", 1, 0, 0, 0), "unknown kind of frame 0"),
        (wire.HEADER.pack(b"ALCH", 1, 999, 0, 0), "unknown kind of frame 999"),
        (wire.HEADER.pack(b"ALCH", 1, 1, 4097, 0), "4097 bytes is over the limit of 4096"),
        (wire.HEADER.pack(b"ALCH", 1, 1, (1 << 32) - 1, 0), "over the limit"),
    ],
)
def test_a_header_that_is_off_is_told_apart(header: bytes, why: str) -> None:
    with pytest.raises(wire.WireError, match=why):
        wire.decode_header(header, wire.STRANGER_MAP_LIMIT)


@pytest.mark.parametrize(
    "packed",
    [
        b"\xc1",
        b"\x81",
        msgpack.packb([1, 2]),
        msgpack.packb(7),
        msgpack.packb({b"bytes": 1}),
        msgpack.packb({1: 1}, strict_types=True),
        msgpack.packb({"a": 1}) + b"\x00",
        msgpack.packb({"a": msgpack.ExtType(1, b"short")}),
        msgpack.packb({"a": msgpack.ExtType(42, b"x" * 16)}),
        b"\x81\xa1a\xa2\xff\xfe",  # a string that is not UTF-8
        b"\x81\xa1a" + b"\x91" * 5000,  # nested too deep
        b"\xdf\xff\xff\xff\xff",  # a map that claims 4 billion entries
    ],
)
def test_a_map_that_is_off_is_a_wire_error(packed: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_body(packed)


@settings(max_examples=300, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_no_bytes_break_the_map_decoder(packed: bytes) -> None:
    with contextlib.suppress(wire.WireError):
        assert isinstance(wire.decode_body(packed), dict)


def test_memory_for_a_map_is_taken_as_it_arrives() -> None:
    asked: list[int] = []

    class Watched(Pieces):
        def recv(self, most: int) -> bytes:
            asked.append(most)
            return super().recv(most)

    header = wire.HEADER.pack(b"ALCH", wire.VERSION, Kind.COMMAND, wire.MAP_LIMIT, 0)
    connection = Connection(Watched([header, b"x", b"y"]))  # type: ignore[arg-type]
    with pytest.raises(wire.ConnectionLost):
        connection.recv()
    assert len(asked) > 2
    assert max(asked) <= wire.READ_BYTES


def test_a_peer_that_trickles_is_given_up_in_time() -> None:
    class Trickle(Pieces):
        def recv(self, most: int) -> bytes:
            time.sleep(0.005)  # always within the limit of a single read
            return super().recv(1)

    data = wire.encode(Kind.COMMAND, {"a": "x" * 500})
    connection = Connection(Trickle([data]))  # type: ignore[arg-type]
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.recv(0.3)
    assert 0.25 < time.monotonic() - start < 1


def test_a_frame_that_was_late_can_still_be_received() -> None:
    data = wire.encode(Kind.REPLY, {"a": 1})
    with pair() as (near, far):
        near.sock.sendall(data[:-1])
        with pytest.raises(TimeoutError):
            far.recv(0.05)
        near.sock.sendall(data[-1:])
        assert far.recv(SOON_S).body == {"a": 1}


def test_a_peer_that_takes_nothing_ends_a_send() -> None:
    with pair() as (near, _far):
        near.sock.settimeout(0.2)
        with pytest.raises(wire.ConnectionLost, match="timed out"):
            near.send(Kind.DATA, None, bytes(16 << 20))


def test_hanging_up_ends_a_wait_on_another_thread() -> None:
    with pair() as (near, _far):

        def wait() -> None:
            with pytest.raises(wire.ConnectionLost):
                near.recv()

        with beside(wait):
            time.sleep(0.1)
            near.hang_up()


def test_a_refusal_is_raised_where_another_kind_was_expected() -> None:
    with pair() as (near, far):
        near.send(Kind.REFUSED, Failure("ShapeError", "too wide", rank=3).to_map())
        with pytest.raises(Failure, match="too wide") as caught:
            far.expect(Kind.SYNC, SOON_S)
        assert (caught.value.kind, caught.value.facts) == ("ShapeError", {"rank": 3})
        near.send(Kind.GET)
        with pytest.raises(wire.WireError, match="expected SYNC, got GET"):
            far.expect(Kind.SYNC, SOON_S)


# --- file descriptors ---


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_file_descriptors_arrive_with_their_frame() -> None:
    read_end, write_end = os.pipe()
    with pair(take_fds=True) as (near, far):
        near.send(Kind.MAP, {"segment": 1}, fds=[write_end])
        near.send(Kind.SYNC)
        frame = far.recv(SOON_S)
        (fd,) = frame.fds
        os.write(fd, b"through")
        os.close(fd)
        assert os.read(read_end, 100) == b"through"
        assert far.recv(SOON_S) == Frame(Kind.SYNC, {}, 0, ())
    os.close(read_end)
    os.close(write_end)


def test_file_descriptors_that_nobody_asked_for_are_dropped() -> None:
    with pair() as (near, far):
        before = open_fds()
        for _ in range(20):
            near.send(Kind.MAP, {"segment": 1}, fds=[0, 0, 0])
            assert far.recv(SOON_S).fds == ()
        assert open_fds() == before


def test_file_descriptors_of_half_a_frame_are_closed_with_the_connection() -> None:
    before = open_fds()
    with pair(take_fds=True) as (near, far):
        socket.send_fds(near.sock, [wire.encode(Kind.MAP, {"a": 1})[:10]], [0])
        with pytest.raises(TimeoutError):
            far.recv(0.05)
    assert open_fds() == before


# --- addresses, handshake ---


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
            except (wire.WireError, OSError) as error:
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
    assert isinstance(error, wire.WireError)


@pytest.mark.parametrize(
    "opening",
    [
        wire.encode(Kind.HELLO, {"token": 7}),
        wire.encode(Kind.HELLO, {"token": [TOKEN]}),
        wire.encode(Kind.HELLO, {"token": TOKEN.encode()}),
        wire.encode(Kind.HELLO, {}),
        wire.encode(Kind.GET, {"token": TOKEN}),
        wire.encode(Kind.HELLO, {"token": TOKEN}, 1),
        wire.encode(Kind.HELLO, {"token": TOKEN, "more": "x" * 5000}),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        wire.HEADER.pack(b"ALCH", wire.VERSION + 1, Kind.HELLO, 0, 0),
    ],
)
def test_a_stranger_is_told_why_it_is_refused(folder: Path, opening: bytes) -> None:
    def talk(address: str) -> Frame:
        with Connection(sockets.dial(address)) as connection:
            connection.sock.sendall(opening)
            frame = connection.recv(SOON_S)
            with pytest.raises(wire.ConnectionLost):
                connection.recv(SOON_S)
            return frame

    frame, error = greeted(folder, talk)
    assert frame.kind == Kind.REFUSED
    assert frame.body["kind"] == "AuthError"
    assert frame.body["message"].startswith("refused: ")
    assert isinstance(error, wire.WireError)


def test_a_stranger_that_says_nothing_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.2)

    def talk(address: str) -> Frame:
        with Connection(sockets.dial(address)) as connection:
            connection.sock.sendall(wire.encode(Kind.HELLO, {"token": TOKEN})[:-3])
            return connection.recv(SOON_S)

    frame, _ = greeted(folder, talk)
    assert frame.body["kind"] == "AuthError"
    assert "timed out" in frame.body["message"]


@given(st.text(), st.text())
def test_only_the_same_token_matches(given_token: str, token: str) -> None:
    assert wire.token_matches({"token": given_token}, token) == (given_token == token)
    assert wire.token_matches({"token": token}, token)


# --- the asyncio end ---


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
    for piece in cut(b"".join(wire.encode(kind, body) for kind, body in sent), at):
        protocol.data_received(piece)
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
        (wire.encode(Kind.HELLO, {"token": "no"}), None, "AuthError", "token"),
        (wire.encode(Kind.COMMAND, {"token": TOKEN}), None, "AuthError", "open with HELLO"),
        (wire.encode(Kind.HELLO, {"token": TOKEN}, 5), None, "AuthError", "payload"),
        (wire.encode(Kind.HELLO, {"x": "x" * 5000}), None, "AuthError", "over the limit"),
        (wire.HEADER.pack(b"ALCH", 2, 1, 0, 0), None, "AuthError", "version 2 meets version 1"),
        (b"x" * 100, None, "AuthError", "not an Alchemist frame"),
        (
            wire.encode(Kind.HELLO, {"token": TOKEN}),
            lambda p, body: {"n": body["node"]},
            "AuthError",
            "malformed HELLO: KeyError",
        ),
        (
            wire.encode(Kind.HELLO, {"token": TOKEN, "node": [1]}),
            lambda p, body: {"n": {}.get(body["node"])},
            "AuthError",
            "malformed HELLO: TypeError",
        ),
        (wire.encode(Kind.HELLO, {"token": TOKEN}), refuse, "SessionError", "not you"),
    ],
)
def test_a_protocol_tells_strangers_why(
    new_loop: Callable[[], Any], opening: bytes, hello: Any, kind: str, why: str, folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", hello=hello) as listening:
        with Connection(sockets.dial(listening.address)) as connection:
            connection.sock.sendall(opening + wire.encode(Kind.COMMAND, {"never": "seen"}))
            frame = connection.recv(SOON_S)
            assert (frame.kind, frame.body["kind"]) == (Kind.REFUSED, kind)
            assert why in frame.body["message"]
            with pytest.raises(wire.ConnectionLost):
                connection.recv(SOON_S)
        assert listening.frames == []
        assert listening.lost == 0


@loops
def test_a_protocol_gives_up_a_stranger_that_says_nothing(
    new_loop: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.2)
    with (
        Listening(new_loop, f"{folder}/s.sock") as listening,
        Connection(sockets.dial(listening.address)) as connection,
    ):
        frame = connection.recv(SOON_S)
        assert frame.body == {"kind": "AuthError", "message": "refused: no HELLO in time"} | {
            "facts": {}
        }
        with pytest.raises(wire.ConnectionLost):
            connection.recv(SOON_S)


@loops
def test_a_protocol_refuses_what_its_owner_refuses_and_takes_nothing_after_it(
    new_loop: Callable[[], Any], folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", frame=refuse) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.sock.sendall(2 * wire.encode(Kind.COMMAND, {"k": 1}))
            with pytest.raises(Failure, match="not you"):
                connection.expect(Kind.REPLY, SOON_S)
            with pytest.raises(wire.ConnectionLost):
                connection.recv(SOON_S)
        assert len(listening.frames) == 1


@loops
def test_a_protocol_takes_nothing_after_its_owner_closed_it(
    new_loop: Callable[[], Any], folder: Path
) -> None:
    with Listening(new_loop, f"{folder}/s.sock", frame=lambda p, _: p.close()) as listening:
        connection, _ = connect(listening.address, TOKEN, {})
        with connection:
            connection.sock.sendall(3 * wire.encode(Kind.COMMAND, {"k": 1}))
            with pytest.raises(wire.ConnectionLost):
                connection.recv(SOON_S)
        assert len(listening.frames) == 1


@loops
def test_a_peer_that_does_not_read_cannot_hold_a_closed_connection(
    new_loop: Callable[[], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "HELLO_TIMEOUT_S", 0.2)

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
