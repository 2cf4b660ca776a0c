"""Random frames to every listening socket: refusals or answers, no crash, no growth.

5,000 frames; a million with ``make test-long``. A failure prints the seed: set
``ALCHEMIST_FUZZ_SEED`` to repeat it.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgpack
import pytest

from mpi_workers.wire import frames, sockets
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer, authenticate
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Kind
from mpi_workers.wire.handshake import ConnectingSide
from tests.support import ranks
from tests.support.frames import (
    ALL,
    HELLO,
    INVALID,
    INVALID_MAPS,
    MALFORMED,
    SEALED,
    UNAUTHENTICATED,
    UNPROVED,
    UNSEALED,
    answers,
    check_echoes,
    check_served,
    framed,
    fuzzed,
)
from tests.support.suite import scaled

FRAMES = scaled(5_000, 1_000_000)
SEED = int(os.environ.get("ALCHEMIST_FUZZ_SEED", random.randrange(1 << 32)))
WAIT_S = 10.0
CHECK_EVERY = 200  # connections
STAGES = ("stranger", "challenged", "peer")
KNOWN = [*MALFORMED.values(), *UNAUTHENTICATED.values(), *UNPROVED.values()]
KNOWN += [*INVALID.values(), *INVALID_MAPS.values()]
ANSWERS = {
    "stranger": {Kind.CHALLENGE, Kind.REFUSED},
    "challenged": {Kind.REFUSED},
    "peer": {
        Kind.WELCOME, Kind.REFUSED, Kind.DATA, Kind.MAP, Kind.SAME_NODE, Kind.SYNC, Kind.REPLY,
    },
}  # fmt: skip

pytestmark = pytest.mark.timeout(scaled(300, 7200), func_only=True)


class Echo:
    """An `Acceptor` whose peers are answered by a thread: that of rank channels and of Slurm."""

    def __init__(self) -> None:
        sock, self.address = sockets.listen_tcp("127.0.0.1")
        known = partial(authenticate, token=ranks.TOKEN, welcome={})
        self._acceptor = Acceptor([sock], known, self._answer).start()

    def _answer(self, peer: AuthenticatedPeer) -> None:
        connection, _ = peer
        with connection, contextlib.suppress(frames.WireError, OSError):
            while True:
                frame = connection.recv(WAIT_S)
                if frame.payload_nbytes:
                    return
                connection.send(Kind.REPLY, frame.body)

    def close(self) -> None:
        self._acceptor.close()


class Fuzzer:
    """Makes byte strings that are nearly valid frames."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def value(self, depth: int = 0) -> Any:
        dice = self.dice
        kinds = 8 if depth < 3 else 6
        match dice.randrange(kinds):
            case 0:
                return dice.choice([None, True, False, 0, 1, -1, SEALED, UNSEALED])
            case 1:
                return dice.choice([1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 20, 30, 600])
            case 2:
                return dice.random() * 10 ** dice.randrange(-300, 300)
            case 3:
                return dice.randbytes(dice.choice([0, 1, 31, 32, 33, 200]))
            case 4:
                return "x" * dice.choice([0, 1, 32, 300])
            case 5:
                return list(ALL)
            case 6:
                return [self.value(depth + 1) for _ in range(dice.randrange(5))]
            case _:
                return {f"k{i}": self.value(depth + 1) for i in range(dice.randrange(4))}

    def body(self) -> dict[str, Any]:
        names = ("matrix", "region", "known", "write", "written", "tiled", "nonce", "proof")
        body = {name: self.value() for name in (*names, "fields", "op") if self.dice.random() < 0.3}
        if self.dice.random() < 0.6:
            body["matrix"] = self.dice.choice([SEALED, UNSEALED])
        if self.dice.random() < 0.6:
            body["region"] = list(ALL)
        if self.dice.random() < 0.5:
            body.update(HELLO)
        return body

    def frame(self) -> bytes:
        """A frame, possibly with a wrong length, flipped bytes, or cut off."""
        dice = self.dice
        if dice.random() < 0.2:
            data = bytearray(dice.choice(KNOWN))
        else:
            kind = dice.choice(list(Kind)) if dice.random() < 0.9 else dice.randrange(1 << 16)
            payload = dice.randbytes(dice.choice([0, 0, 0, 1, 64]))
            claimed = dice.choice([None, None, None, 0, 8, 4800, (1 << 64) - 1])
            data = bytearray(framed(kind, msgpack.packb(self.body()), payload, claimed))
        if dice.random() < 0.3:
            for _ in range(dice.randrange(1, 4)):
                data[dice.randrange(len(data))] = dice.randrange(256)
        if dice.random() < 0.1:
            del data[dice.randrange(len(data)) :]
        return bytes(data)


@pytest.fixture(scope="module")
def host() -> Iterator[ranks.Host]:
    with fuzzed(handshake_timeout_s=2.0) as host:
        yield host


@pytest.fixture(scope="module")
def addresses(host: ranks.Host) -> Iterator[dict[str, str]]:
    """Every kind of listener: a rank's two, an asyncio one, an acceptor's."""
    echo = Echo()
    yield {**host.listeners, "acceptor": echo.address}
    echo.close()


def opened(address: str, stage: str) -> Connection:
    if stage == "peer":
        fields = {"role": "data"}
        return connect(address, ranks.TOKEN, fields, timeout_s=WAIT_S, take_fds=False)[0]
    connection = Connection(sockets.dial(address))
    if stage == "challenged":
        side = ConnectingSide(ranks.TOKEN, {})
        connection.send(Kind.HELLO, side.hello())
        side.prove(connection.recv(WAIT_S))
    return connection


def attack(address: str, stage: str, data: bytes) -> None:
    """Send bytes, and check every answer until the listener closes the connection."""
    for answer in answers(opened(address, stage), data):
        assert answer.kind in ANSWERS[stage]
        if answer.kind == Kind.REFUSED:
            assert 10 < len(answer.body["message"]) < 500


def check(host: ranks.Host, addresses: dict[str, str]) -> None:
    """A well-behaved peer is served."""
    for name, address in addresses.items():
        with opened(address, "peer") as connection:
            if name in ("unix", "tcp"):
                check_served(host, connection)
            else:
                check_echoes(connection)


def test_no_random_frame_crashes_a_listener_or_passes_a_handshake(
    host: ranks.Host, addresses: dict[str, str]
) -> None:
    fuzzer = Fuzzer(SEED)
    dice = fuzzer.dice
    print(f"seed {SEED}")
    check(host, addresses)
    sent = connections = 0
    threads = rss = 0
    while sent < FRAMES:
        count = dice.choice([1, 1, 2, 4, 8, 16])
        data = b"".join(fuzzer.frame() for _ in range(count))
        attack(dice.choice(list(addresses.values())), dice.choice(STAGES), data)
        sent += count
        connections += 1
        if connections % CHECK_EVERY == 0:
            check(host, addresses)
            if not rss:  # after one-time allocations
                threads, rss = host.settled()[0], host.rss_kb()
    check(host, addresses)
    assert host.settled()[0] <= threads
    assert host.rss_kb() - rss < 16 << 10
    assert host.unhandled() == []
