"""Send and fetch, compared with np.copyto on one thread and with a plain socket stream."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession, Handle
from benchmarks.harness import Peer, Report, Time, Turns, in_turns, timed
from mpi_workers.matrix import copy_kernels

N = 4000
LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VC")
COMPILED, TILED = 0.65, 0.45  # of np.copyto: with the compiled copy kernel, and without
FRESH = {"contiguous columns": 0.5, "another order": 0.35}  # of A.copy()


def run() -> Report:
    report = Report("transfer")
    A = np.random.default_rng(0).random((N, N))
    other = np.zeros_like(A)
    with AlchemistSession(4, progress=False) as als:
        quarter = N // 4
        blocks = [(ray.put(A[i : i + quarter]), i, 0) for i in range(0, N, quarter)]
        rates: dict[str, dict[str, float]] = {"send": {}, "fetch": {}}
        target = TILED if copy_kernels.level() is None else COMPILED
        for layout in LAYOUTS:
            times = _turns(als, A, other, blocks, layout)
            copy = times["copy"]
            _compare(report, layout, times)
            for what in ("send", "blocks", "fetch"):
                name = {"blocks": "object store →"}.get(what, "NumPy →")
                label = f"fetch, {layout}" if what == "fetch" else f"{name} gang, {layout}"
                report.add(
                    label,
                    copy / times[what],
                    target,
                    "x np.copyto",
                    detail=f"{A.nbytes / times[what] / 1e9:.1f} GB/s; copyto "
                    f"{A.nbytes / copy / 1e9:.1f}",
                )
                if what in rates:
                    rates[what][layout] = times[what]
        for what, by_layout in rates.items():
            report.add(
                f"slowest / fastest layout, {what}",
                max(by_layout.values()) / min(by_layout.values()),
                2,
                "x",
                at_most=True,
            )
        _fresh_memory(report, als)
        _few_rows(report, als)
    report.notes.append(f"Copies between array orders: {copy_kernels.description()}.")
    for what, ratio, detail in between_nodes():
        name = f"between nodes, {what}, per stream"
        report.add(name, ratio, 0.9, "x plain stream", detail=detail)
    return report


def _compare(report: Report, layout: str, times: dict[str, Time]) -> None:
    """Times beside Ray's own, through its object store."""
    operation = f"128 MB in, {layout}"
    report.compare(Peer(operation, "ray.put", times["put"], times["put"], 1.0))
    for what, who in (("send", "send_matrix"), ("blocks", "send_matrix of the object store")):
        report.compare(Peer(operation, who, times[what], times[what], times[what] / times["put"]))
    operation = f"128 MB out, {layout}"
    report.compare(Peer(operation, "ray.get and a copy", times["get"], times["get"], 1.0))
    ratio = times["fetch"] / times["get"]
    report.compare(Peer(operation, "fetch", times["fetch"], times["fetch"], ratio))


def _turns(
    als: AlchemistSession, A: Any, other: Any, blocks: list[Any], layout: str
) -> dict[str, Time]:
    held: list[Handle] = [als.send_matrix(A, layout=layout)]
    result: list[Any] = [None]

    def send(source: Any) -> None:
        handle = als.send_matrix(source, layout=layout)
        held.append(handle)

    def fetch() -> None:
        result[0] = None  # the last result's memory is used again
        result[0] = held[0].fetch()

    def put() -> None:
        result[0] = None
        result[0] = ray.put(A)

    stored = ray.put(A)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(other, A),
        "send": lambda: send(A),
        "blocks": lambda: send(blocks),
        "fetch": fetch,
        "put": put,
        "get": lambda: np.copyto(other, ray.get(stored)),
    }
    turns = Turns()
    for _ in range(8):
        for name, work in works.items():
            turns.add(name, timed(work))
        for handle in held[1:]:
            handle.free()
        del held[1:]
    times = turns.times()
    if not np.array_equal(held[0].fetch(), A):
        raise SystemExit("what came back is not what was sent")
    held[0].free()
    return times


def _fresh_memory(report: Report, als: AlchemistSession) -> None:
    """Sends into memory that the ranks did not have before; NumPy copies into such memory too."""
    C = np.random.default_rng(2).random((N, N))
    held: list[Handle] = []

    for what, array, layout in (
        ("contiguous columns", C.T, "STAR_VC"),
        ("another order", C, "VC_STAR"),
    ):
        works = {
            "copy": array.copy,
            "send": lambda a=array, to=layout: held.append(als.send_matrix(a, layout=to)),
        }
        times = in_turns(works, rounds=5)
        ratio = times["copy"] / times["send"]
        detail = f"{times['send'] * 1e3:.0f} ms; A.copy() {times['copy'] * 1e3:.0f}"
        report.add(
            f"send into fresh memory, {what}", ratio, FRESH[what], "x A.copy()", detail=detail
        )
        for handle in held:
            handle.free()
        held.clear()


def _few_rows(report: Report, als: AlchemistSession) -> None:
    """First fetches of 3 rows: from 800 MB, and from 4 MB."""
    large, small = (als.send_matrix(np.ones((m, 100))) for m in (1_000_000, 5_000))
    if als.connection is None:
        raise SystemExit("the session has no gang")
    nodes = als.connection.nodes

    def first(handle: Handle) -> None:
        nodes.trim()
        handle.fetch(rows=slice(0, 3))

    times = in_turns({"large": lambda: first(large), "small": lambda: first(small)}, rounds=20)
    detail = f"{times['large'] * 1e3:.2f} ms"
    ratio = times["large"] / times["small"]
    report.add("first fetch of 3 rows, 800 MB / 4 MB", ratio, 1.5, "x", at_most=True, detail=detail)
    large.free()
    small.free()


# --- the path between nodes, on loopback: a data endpoint with one rank, and one stream ----

NODE = """
import sys, tempfile, threading, numpy as np
from mpi_workers.data.endpoint import DataEndpoint
from mpi_workers.data.rank_memory import RankMemory
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
from mpi_workers.wire import sockets

storage = Storage(0, Pool(1 << 31, shared=True))
distribution = Distribution("VC_STAR", (int(sys.argv[1]), int(sys.argv[1])), (1, 1))
for ident in (1, 2):
    storage.put(ident, storage.new(distribution, np.dtype("float64")), sealed=ident == 2)
with tempfile.TemporaryDirectory() as folder:
    unix, near = sockets.listen_unix(folder + "/data.sock")
    tcp, far = sockets.listen_tcp(sys.argv[2])
    endpoint = DataEndpoint([unix, tcp], "token", range(1))
    threading.Thread(target=endpoint.serve, daemon=True).start()
    memory = RankMemory(storage, "token", near)
    print(far, flush=True)
    sys.stdin.read()
"""

# Serves plain streams: an order, r (receive) or s (send), and the number of bytes.
PLAIN = """
import socket, sys, threading, numpy as np
buffer = np.zeros(int(sys.argv[1]) ** 2)

def serve(peer):
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (order := peer.recv(9, socket.MSG_WAITALL)):
        view = memoryview(buffer).cast("B")[: int.from_bytes(order[1:], "little")]
        if order[:1] == b"r":
            got = 0
            while got < len(view):
                got += peer.recv_into(view[got:])
            peer.sendall(b"k")
        else:
            peer.sendall(view)

with socket.create_server((sys.argv[2], 0)) as server:
    print("%s:%s" % server.getsockname(), flush=True)
    while True:
        peer, _ = server.accept()
        threading.Thread(target=serve, args=(peer,), daemon=True).start()
"""


def between_nodes() -> list[tuple[str, float, str]]:
    """Ratios of our stream to a bare one of the same bytes, in and out."""

    from mpi_workers.data import node_connections
    from mpi_workers.data.description import DataEndpoints, NodeAddress, TransferTarget
    from mpi_workers.data.node_connections import NodeConnections
    from mpi_workers.data.transfers import MatrixReader, MatrixWriter
    from mpi_workers.matrix.layout import Distribution

    n = 2500
    A = np.random.default_rng(1).random((n, n))
    out = np.zeros_like(A)
    found = []
    with _child(NODE, n) as node, _child(PLAIN, n) as plain:
        address = node.stdout.readline().strip()
        port = int(plain.stdout.readline().rpartition(":")[2])
        node_connections.STREAMS = 1
        about = NodeAddress(0, 1, (address,))
        nodes = NodeConnections(DataEndpoints("token", (about,)))
        distribution = Distribution("VC_STAR", (n, n), (1, 1))
        peer = socket.create_connection(("127.0.0.1", port))
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw = memoryview(A).cast("B")
        into = memoryview(out).cast("B")

        length = len(raw).to_bytes(8, "little")

        def plain_out() -> None:
            peer.sendall(b"r" + length)
            peer.sendall(raw)
            peer.recv(1)

        def plain_in() -> None:
            peer.sendall(b"s" + length)
            got = 0
            while got < len(into):
                got += peer.recv_into(into[got:])

        def ours_out() -> None:
            with MatrixWriter(nodes, TransferTarget(1, distribution, A.dtype)) as writer:
                writer.write_block(A, (0, 0))

        def ours_in() -> None:
            with MatrixReader(nodes, TransferTarget(2, distribution, A.dtype)) as reader:
                reader.read_block(out, (0, 0))

        times = in_turns(
            {"a": plain_out, "send": ours_out, "b": plain_in, "fetch": ours_in}, rounds=9
        )
        found = [
            ("send", times["a"] / times["send"], f"plain {A.nbytes / times['a'] / 1e9:.2f} GB/s"),
            ("fetch", times["b"] / times["fetch"], f"plain {A.nbytes / times['b'] / 1e9:.2f} GB/s"),
        ]
        peer.close()
        nodes.close()
    return found


def _child(program: str, n: int) -> Any:
    return _Child(
        subprocess.Popen(
            [sys.executable, "-c", program, str(n), "127.0.0.1"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
    )


class _Child:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __enter__(self) -> subprocess.Popen[str]:
        return self._process

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    run().save()
