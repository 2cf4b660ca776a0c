"""Streams between two hosts, which are namespaces of this machine: ours and plain ones.

One array from a process of the other host; and a Dask array in the object store of one host, which
is sent to a gang on the other, on which the user's process is too.

Needs root. ``python -m benchmarks.between_hosts``; with addresses, the measuring client.
"""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dask.array
import numpy as np
import ray
from ray.util.dask import ray_dask_get

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Time, in_turns
from benchmarks.transfer import NODE, PLAIN
from mpi_workers.data import node_connections
from mpi_workers.data.description import DataEndpoints, NodeAddress, TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.matrix.layout import Distribution
from tests.faults import inside
from tests.faults.hosts import Host, Hosts, why_not

N = 2500  # 50 MB
STREAMS = (1, 2, 4)
ROUNDS = 9
LIMIT_S = 120.0
BLOCKS = (2, 200)  # of the Dask array
TALL = (160_000, 100)  # its shape, 128 MB
PARTS = 1.25  # target: the time of many blocks over that of few


def run() -> Report:
    report = Report("between_hosts")
    if (reason := why_not()) is not None:
        report.notes.append(f"Not measured: {reason}.")
        print(report.notes[0], flush=True)
        return report
    with Hosts(2) as hosts:
        near, far = hosts[0], hosts[1]
        with served(far, NODE) as node, served(far, PLAIN) as plain:
            told = near.run(
                sys.executable, "-m", "benchmarks.between_hosts", node, plain, limit_s=LIMIT_S
            )
        hosts.start_ray([2, 0], store_bytes=1 << 30)
        with served(far, PLAIN, math.isqrt(math.prod(TALL))) as plain:
            of_blocks = near.call(
                "benchmarks.between_hosts:measured_blocks", far.ip, plain, limit_s=LIMIT_S
            )
    found: dict[str, list[float]] = json.loads(told.splitlines()[-1])
    times = {name: Time(turns) for name, turns in found.items()}
    for streams in STREAMS:
        for what in ("send", "fetch"):
            ours, bare = times[f"{what} {streams}"], times[f"plain {what} {streams}"]
            report.add(
                f"{what}, {streams} stream{'s' if streams > 1 else ''}", bare / ours, 0.9,
                "x as many plain streams", detail=f"{8e-9 * N * N / ours:.2f} GB/s; {ours}",
            )  # fmt: skip
    _add_blocks(report, of_blocks)
    return report


def _add_blocks(report: Report, found: dict[str, Any]) -> None:
    times = {name: Time(turns) for name, turns in found["times"].items()}
    few, many = (times[f"{count} blocks"] for count in BLOCKS)
    for count, took in zip(BLOCKS, (few, many), strict=True):
        report.add(
            f"Dask array of {count} blocks on the other host", times["plain"] / took, 0.9,
            "x as many plain streams",
            detail=f"{8e-9 * math.prod(TALL) / took:.2f} GB/s; {took}",
        )  # fmt: skip
    report.add(
        f"Dask array on the other host, {BLOCKS[1]} blocks / {BLOCKS[0]}", many / few, PARTS,
        "x the time", at_most=True, detail=f"{found['connections']} connections from its agent to "
        f"the gang's node in {found['sends']} sends",
    )  # fmt: skip


class served:  # a context manager
    """A program on a host that prints the address that it listens at."""

    def __init__(self, host: Host, program: str, n: int = N) -> None:
        self._process = subprocess.Popen(
            host.enter(sys.executable, "-c", program, n, host.ip),
            env=host.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        # The program itself ends with its host: do not wait for the end of its output.
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


def _measured(node: str, plain: str) -> dict[str, list[float]]:
    """The turns of all transfers of one array, from this host."""
    A = np.random.default_rng(1).random((N, N))
    out = np.zeros_like(A)
    host, _, port = plain.rpartition(":")
    endpoints = DataEndpoints("token", (NodeAddress(0, 1, (node,)),))
    distribution = Distribution("VC_STAR", A.shape, (1, 1))
    works: dict[str, Callable[[], object]] = {}
    for streams in STREAMS:
        node_connections.STREAMS = streams
        nodes = NodeConnections(endpoints)
        with MatrixReader(nodes, TransferTarget(2, distribution, A.dtype)) as reader:
            reader.read_block(out, (0, 0))  # connects
        sockets = [socket.create_connection((host, int(port))) for _ in range(streams)]
        works |= {
            f"plain send {streams}": plain_streams(sockets, A, b"r"),
            f"send {streams}": _sending(nodes, distribution, A),
            f"plain fetch {streams}": plain_streams(sockets, out, b"s"),
            f"fetch {streams}": _fetching(nodes, distribution, out),
        }
    return {name: list(took.turns) for name, took in in_turns(works, ROUNDS).items()}


def plain_streams(sockets: list[socket.socket], array: Any, order: bytes) -> Callable[[], None]:
    parts = [memoryview(part).cast("B") for part in np.array_split(array, len(sockets))]
    threads = ThreadPoolExecutor(len(sockets))

    def move(peer: socket.socket, part: memoryview) -> None:
        peer.sendall(order + len(part).to_bytes(8, "little"))
        if order == b"r":
            peer.sendall(part)
            peer.recv(1)
            return
        got = 0
        while got < len(part):
            got += peer.recv_into(part[got:])

    return lambda: list(threads.map(move, sockets, parts)).clear()


def _sending(nodes: NodeConnections, distribution: Distribution, array: Any) -> Callable[[], None]:
    def send() -> None:
        with MatrixWriter(nodes, TransferTarget(1, distribution, array.dtype)) as writer:
            writer.write_block(array, (0, 0))

    return send


def _fetching(nodes: NodeConnections, distribution: Distribution, out: Any) -> Callable[[], None]:
    def fetch() -> None:
        with MatrixReader(nodes, TransferTarget(2, distribution, out.dtype)) as reader:
            reader.read_block(out, (0, 0))

    return fetch


# --- blocks of a Dask array ---


def measured_blocks(far: str, plain: str) -> dict[str, Any]:
    """The turns of sends of a Dask array whose chunks are all on the host `far`, from this one."""
    inside.join(2)
    out = np.empty(TALL)
    host, _, port = plain.rpartition(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(node_connections.STREAMS)]
    there = inside.task_on(far)
    A = np.random.default_rng(0).random(TALL)
    with AlchemistSession(2, progress=False) as als:
        works: dict[str, Callable[[], object]] = {"plain": plain_streams(sockets, out, b"s")}
        for count in BLOCKS:
            x = dask.array.from_array(A, chunks=(len(A) // count, -1)) + 0.0
            kept = x.persist(scheduler=ray_dask_get, ray_remote_args=there)
            refs = list(dict(kept.__dask_graph__()).values())
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            handle = als.send_matrix(kept)
            if not np.array_equal(handle.fetch(), A):
                raise AssertionError("what came is not what was sent")
            handle.free()
            works[f"{count} blocks"] = lambda kept=kept: als.send_matrix(kept).free()
        times = in_turns(works, ROUNDS)
        connections = len(inside.connections_from(far, als))
    return {
        "times": {name: list(took.turns) for name, took in times.items()},
        "connections": connections,
        "sends": len(BLOCKS) * (ROUNDS + 1),
    }


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print(json.dumps(_measured(*sys.argv[1:])))
    else:
        made = run()
        if made.rows:
            made.save()
