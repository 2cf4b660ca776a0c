"""Frames arrive whole however the stream is cut; malformed bytes are refused."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import socket
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers.failures import Failure
from mpi_workers.wire import frames
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Frame, Kind
from tests.support.frames import (
    MALFORMED,
    REASONS,
    SOON_S,
    Pieces,
    any_frame,
    cut,
    in_thread,
    pair,
    splits,
)  # fmt: skip

# --- the blocking end ---


@settings(max_examples=100)
@given(st.lists(any_frame, min_size=1, max_size=4), splits)
def test_frames_arrive_whole_however_the_stream_is_cut(
    sent: list[tuple[Kind, Body, bytes]], at: list[int]
) -> None:
    data = b"".join(frames.encode(kind, body, len(raw)) + raw for kind, body, raw in sent)
    connection = Connection(Pieces(cut(data, at)))
    for kind, body, raw in sent:
        frame = connection.recv()
        payload = bytearray(frame.payload_nbytes)
        connection.read_into(memoryview(payload))
        assert (frame.kind, frame.body, bytes(payload)) == (kind, body, raw)
    with pytest.raises(frames.ConnectionLost):
        connection.recv()


@settings(max_examples=50)
@given(any_frame, st.integers(0, 1 << 20))
def test_a_frame_that_breaks_off_is_a_lost_connection(
    sent: tuple[Kind, Body, bytes], where: int
) -> None:
    kind, body, raw = sent
    data = frames.encode(kind, body, len(raw)) + raw
    connection = Connection(Pieces([data[: where % len(data)]]))
    with pytest.raises(frames.ConnectionLost):  # noqa: PT012 - either read may find out
        frame = connection.recv()
        connection.read_into(memoryview(bytearray(frame.payload_nbytes)))


@pytest.mark.parametrize("nbytes", [0, 1, 1000, (1 << 14) - 1, 1 << 14, 3 << 20])
def test_payloads_of_all_sizes_cross_a_real_socket(nbytes: int) -> None:
    payload = os.urandom(nbytes)
    with pair() as (near, far), in_thread(lambda: near.send(Kind.DATA, {"n": nbytes}, payload)):
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
    body = frames.decode_body(frames.encode(Kind.REPLY, {"v": value})[frames.HEADER.size :])
    assert type(body["v"]) is complex
    assert repr(body["v"]) == repr(value)  # nan and signed zeros too


def test_a_value_that_no_map_can_hold_is_refused_before_anything_is_sent() -> None:
    with pair() as (near, far):
        for value in (object(), {1, 2}, 1 << 64):
            with pytest.raises((TypeError, OverflowError)):
                near.send(Kind.COMMAND, {"v": value})
        with pytest.raises(Failure, match="over the limit") as caught:
            near.send(Kind.COMMAND, {"v": b"x" * (frames.MAP_LIMIT + 1)})
        assert caught.value.kind == "TransferError"
        near.send(Kind.COMMAND, {"v": 1})
        assert far.recv(SOON_S).body == {"v": 1}


@settings(max_examples=300)
@given(st.binary(min_size=1, max_size=300))
def test_no_bytes_break_the_map_decoder(packed: bytes) -> None:
    with contextlib.suppress(frames.WireError):
        assert isinstance(frames.decode_body(packed), dict)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_bytes_are_refused(name: str) -> None:
    with pytest.raises(frames.WireError, match=re.escape(REASONS.get(name, " "))):
        frames.FrameBuffer(MALFORMED[name]).next()


def test_memory_for_a_map_grows_as_its_bytes_arrive() -> None:
    asked: list[int] = []

    class Watched(Pieces):
        def recv(self, most: int) -> bytes:
            asked.append(most)
            return super().recv(most)

    header = frames.HEADER.pack(b"ALCH", frames.VERSION, Kind.COMMAND, frames.MAP_LIMIT, 0)
    connection = Connection(Watched([header, b"x", b"y"]))
    with pytest.raises(frames.ConnectionLost):
        connection.recv()
    assert len(asked) > 2
    assert max(asked) <= frames.FIRST_READ_BYTES


def test_a_slow_frame_times_out_as_a_whole() -> None:
    class Trickle(Pieces):
        def recv(self, most: int) -> bytes:
            time.sleep(0.005)  # always within the limit of a single read
            return super().recv(1)

    data = frames.encode(Kind.COMMAND, {"a": "x" * 2000})  # 10 s
    connection = Connection(Trickle([data]))
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.recv(0.3)
    assert 0.25 < time.monotonic() - start < 5


def test_a_frame_that_was_late_can_still_be_received() -> None:
    data = frames.encode(Kind.REPLY, {"a": 1})
    with pair() as (near, far):
        near.sock.sendall(data[:-1])
        with pytest.raises(TimeoutError):
            far.recv(0.05)
        near.sock.sendall(data[-1:])
        assert far.recv(SOON_S).body == {"a": 1}


def test_a_send_to_a_peer_that_does_not_read_times_out() -> None:
    with pair() as (near, _far):
        near.sock.settimeout(0.2)
        with pytest.raises(frames.ConnectionLost, match="timed out"):
            near.send(Kind.DATA, None, bytes(16 << 20))


def test_hang_up_ends_a_wait_on_another_thread() -> None:
    with pair() as (near, _far):

        def wait() -> None:
            with pytest.raises(frames.ConnectionLost):
                near.recv()

        with in_thread(wait):
            time.sleep(0.1)
            near.hang_up()


def test_a_refusal_is_raised_where_another_kind_was_expected() -> None:
    with pair() as (near, far):
        near.send(Kind.REFUSED, Failure("ShapeError", "too wide", rank=3).to_map())
        with pytest.raises(Failure, match="too wide") as caught:
            far.expect(Kind.SYNC, SOON_S)
        assert (caught.value.kind, caught.value.facts) == ("ShapeError", {"rank": 3})
        near.send(Kind.GET)
        with pytest.raises(frames.WireError, match="expected SYNC, got GET"):
            far.expect(Kind.SYNC, SOON_S)


# --- file descriptors ---


def open_fds() -> set[str]:
    gc.collect()  # an exception that an earlier test caught holds its sockets in a cycle
    return set(os.listdir("/proc/self/fd"))


def test_file_descriptors_arrive_with_their_frame() -> None:
    read_end, write_end = os.pipe()
    with pair(take_fds=True) as (near, far):
        near.send(Kind.MAP, {"segment": 1}, fds=[write_end])
        near.send(Kind.SYNC)
        frame = far.recv(SOON_S)
        (fd,) = frame.fds
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC  # not for programs that we start
        os.write(fd, b"through")
        os.close(fd)
        assert os.read(read_end, 100) == b"through"
        assert far.recv(SOON_S) == Frame(Kind.SYNC, {}, 0, ())
    os.close(read_end)
    os.close(write_end)


def test_unexpected_file_descriptors_are_dropped() -> None:
    with pair() as (near, far):
        before = open_fds()
        for _ in range(20):
            near.send(Kind.MAP, {"segment": 1}, fds=[0, 0, 0])
            assert far.recv(SOON_S).fds == ()
        assert not open_fds() - before


def test_file_descriptors_of_half_a_frame_are_closed_with_the_connection() -> None:
    before = open_fds()
    with pair(take_fds=True) as (near, far):
        socket.send_fds(near.sock, [frames.encode(Kind.MAP, {"a": 1})[:10]], [0])
        with pytest.raises(TimeoutError):
            far.recv(0.05)
    assert not open_fds() - before
