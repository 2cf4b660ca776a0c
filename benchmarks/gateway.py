"""A thin client: rates against a plain TLS stream, calls against a session inside."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.gateway import client
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server import actor
from alchemist_ray.gateway.server.access import TokenFile, certificate
from benchmarks.harness import Report, alone, in_turns, timed
from tests.support import thin_clients

NBYTES = 1 << 30
PIECE = 4 << 20  # 4 MiB, as in the gateway
CALLS = 1000
CLIENTS = 100
KILLED = """
import time, numpy as np
from alchemist_ray import AlchemistSession
als = AlchemistSession(2, name="bench-killed", lifetime="detached")
als.send_matrix(np.eye(100), name="A")
print("ready", flush=True)
time.sleep(600)
"""


def run() -> Report:
    report = Report("gateway")
    with tempfile.TemporaryDirectory() as folder:
        file = TokenFile(Path(folder, "tokens.json"))
        token = file.create("bench", ("call", "run_code"))
        info = actor.serve(
            "127.0.0.1", 0, tokens=str(file.path), audit=str(Path(folder, "audit.log"))
        )
        there = {"address": info.address, "token": token}
        try:
            _calls(report, there)
            _rates(report, there)
            _clients(report, there)
            _crowd(report, there)
            _killed(report, there)
        finally:
            info.stop()
    return report


def _calls(report: Report, there: dict[str, str]) -> None:
    with (
        AlchemistSession(2, progress=False) as inside,
        AlchemistSession(2, progress=False, **there) as thin,
    ):
        nothing = {name: als.load_library("echo").nothing
                   for name, als in (("inside", inside), ("thin", thin))}  # fmt: skip
        times: dict[str, list[float]] = {"inside": [], "thin": []}
        for _ in range(6):
            for name, call in nothing.items():
                batch = sorted(timed(call) for _ in range(CALLS))
                times[name].append(batch[CALLS // 2])
    more = 1e3 * (min(times["thin"]) - min(times["inside"]))
    report.add(
        "empty routine, p50, more than inside", more, 0.3, "ms", at_most=True,
        detail=f"best batches: {1e3 * min(times['thin']):.2f} ms through the gateway, "
        f"{1e3 * min(times['inside']):.2f} ms inside",
    )  # fmt: skip


def _rates(report: Report, there: dict[str, str]) -> None:
    A = np.random.default_rng(0).random((NBYTES // 8 // 4096, 4096))
    out = np.empty_like(A)
    with PlainStream() as plain, AlchemistSession(2, progress=False, **there) as als:
        kept: list[Any] = [als.send_matrix(A)]

        def up() -> None:
            kept.clear()
            kept.append(als.send_matrix(A))

        shortest = in_turns(
            {
                "plain up": lambda: plain.send(A),
                "up": up,
                "plain down": lambda: plain.receive(out),
                "plain down, new memory": lambda: plain.receive(np.empty_like(A)),
                "down": lambda: kept[0].fetch(),
            },
            rounds=5,
        )
    for name, key, plainly in (
        ("up", "up", "plain up"),
        ("down", "down", "plain down"),
        ("down, the stream into new memory, too", "down", "plain down, new memory"),
    ):
        rate, reference = (NBYTES / shortest[which] / 1e9 for which in (key, plainly))
        report.add(
            f"1 GB {name}", rate / reference, 0.8, "x a plain TLS stream",
            detail=f"{rate:.2f} GB/s; the stream {reference:.2f} GB/s",
        )  # fmt: skip


def _clients(report: Report, there: dict[str, str]) -> None:
    gateway = GatewayAddress.parse(there["address"])
    with AlchemistSession(2, name="bench-many", lifetime="detached", **there):
        about = {"op": "attach_gang", "name": "bench-many", "timeout_s": 30.0}
        described = client.ask(gateway, there["token"], about)

        def one(_: int) -> float:
            connection = client.connection_to(gateway, there["token"], described)
            begun = time.perf_counter()
            for _ in range(20):
                connection.ping()
            spent = time.perf_counter() - begun
            connection.close()
            return spent / 20

        begun = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            spent = list(pool.map(one, range(CLIENTS)))
        total = time.perf_counter() - begun
    AlchemistSession.stop_gang("bench-many", **there)
    report.add(
        f"{CLIENTS} clients attach at once, 20 commands each", total, 10.0, "s", at_most=True,
        detail=f"a command {1e3 * sorted(spent)[CLIENTS // 2]:.1f} ms (median of the clients)",
    )  # fmt: skip


def _crowd(report: Report, there: dict[str, str]) -> None:
    program = f"from tests.support.thin_clients import main; main('bench-crowd', {CLIENTS})"
    with AlchemistSession(2, name="bench-crowd", lifetime="detached", **there):
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "ALCHEMIST_ADDRESS": there["address"],
                 "ALCHEMIST_TOKEN": there["token"]},
        )  # fmt: skip
    AlchemistSession.stop_gang("bench-crowd", **there)
    found = json.loads(done.stdout)
    assert not found["failed"]
    spent = sorted(found["spent"])
    rate = CLIENTS * thin_clients.NBYTES / spent[-1] / 1e9
    report.add(
        f"{CLIENTS} clients send and fetch twice 10 MB at once: slowest to median",
        spent[-1] / spent[CLIENTS // 2], 2.0, "x", at_most=True,
        detail=f"{spent[-1]:.1f} s, {rate:.2f} GB/s together",
    )  # fmt: skip


def _killed(report: Report, there: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "ALCHEMIST_ADDRESS": there["address"],
             "ALCHEMIST_TOKEN": there["token"]},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    begun = time.perf_counter()
    with AlchemistSession.attach("bench-killed", **there) as again:
        again.matrix("A").fetch()
    spent = time.perf_counter() - begun
    process.wait()
    AlchemistSession.stop_gang("bench-killed", **there)
    report.add("attach after a killed client, with a fetch", spent, 2.0, "s", at_most=True)


class PlainStream:
    """One connection with TLS to another process: `sendall` and `recv_into` of the ssl module."""

    def __enter__(self) -> PlainStream:
        listener = socket.create_server(("127.0.0.1", 0))
        self._peer = get_context("fork").Process(target=_peer, args=(listener,), daemon=True)
        self._peer.start()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        raw = socket.create_connection(listener.getsockname())
        self._sock = context.wrap_socket(raw)
        listener.close()
        return self

    def __exit__(self, *exc: object) -> None:
        self._sock.close()
        self._peer.join()

    def send(self, array: Any) -> None:
        self._sock.sendall(b"u")
        raw = memoryview(array).cast("B")
        for start in range(0, len(raw), PIECE):
            self._sock.sendall(raw[start : start + PIECE])
        self._sock.recv(1)

    def receive(self, array: Any) -> None:
        self._sock.sendall(b"d")
        _fill(self._sock, memoryview(array).cast("B"))


def _fill(sock: ssl.SSLSocket, raw: memoryview) -> None:
    ready = 0
    while ready < len(raw):
        ready += sock.recv_into(raw[ready:])


def _peer(listener: socket.socket) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(None, None))
    raw, _ = listener.accept()
    sock = context.wrap_socket(raw, server_side=True)
    piece = memoryview(bytearray(PIECE))
    while order := sock.recv(1):
        for _ in range(0, NBYTES, PIECE):
            if order == b"u":
                _fill(sock, piece)
            else:
                sock.sendall(piece)
        if order == b"u":
            sock.sendall(b".")


if __name__ == "__main__":
    alone(run)
