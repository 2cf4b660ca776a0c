"""For tests of the wire: strategies for frames and cuts of a stream, two ends of a connection."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Kind

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
any_frame = st.tuples(st.sampled_from(Kind), bodies, st.binary(max_size=1500))
splits = st.lists(st.integers(0, 1 << 20), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[a:b] for a, b in pairwise(bounds)]


class Pieces:
    """A socket for a `Connection` to read from; returns one piece at a time."""

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
def in_thread(action: Callable[[], Any]) -> Iterator[None]:
    """Run an action on another thread; it must be finished soon after the end of the block."""
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
