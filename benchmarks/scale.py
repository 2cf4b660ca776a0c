"""The control path of gangs of up to 8192 ranks on 64 nodes, simulated on one machine.

The dispatcher, the wire protocol and the user's control channel are the real ones, and so is node
0: a proxy with its PMI server, and a process for each rank. These have no core each, as ranks have:
they start, and one process answers commands for all of them. The other nodes are connections that
answer with the combined reply of a proxy. A real gang's nodes work at the same time, so a call
takes as long as the dispatcher and one node.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import pickle
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from typing import Any

import numpy as np

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.connection import Transport
from alchemist_ray.attached.control_channel import SocketChannel
from alchemist_ray.cluster.placement import per_node
from alchemist_ray.errors import GroupRecoveredError
from benchmarks.harness import Report, in_batches, markdown, table_line, timed
from benchmarks.simulated_gang import (
    LIMIT_S,
    crowd,
    full_node,
    light_nodes,
    manager,
    memory,
)
from mpi_workers.data.description import DataEndpoints, NodeAddress, NodeTimes, TransferTarget
from mpi_workers.data.node_connections import Array, NodeConnection, NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.matrix.layout import Distribution, default_grid
from mpi_workers.matrix.node_shares import Region
from mpi_workers.matrix.redistribution import exchanges
from mpi_workers.wire.frames import Body

SIZES = ((2, 1), (128, 1), (1024, 8), (2048, 16), (4096, 32), (8192, 64))  # ranks, nodes
CALLS, BATCHES = 100, 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One simulated gang. Times in seconds, sizes in bytes.

    `barrier_s` is a PMI barrier without keys, seen by rank 0; `failure_s` the time from the end
    of a rank to the error of the caller.
    """

    ranks: int
    nodes: int
    start_s: float
    barrier_s: float
    call_s: float
    failure_s: float
    address_nbytes: int
    client_nbytes: int
    manager_nbytes: int

    def cells(self) -> tuple[object, ...]:
        times_ms = self.barrier_s * 1e3, self.call_s * 1e3, self.failure_s * 1e3
        sizes = self.address_nbytes / 1024, self.client_nbytes / 1024, self.manager_nbytes / 1024
        forms = zip((self.start_s, *times_ms, *sizes), "2220100", strict=True)
        return self.ranks, self.nodes, *(f"{number:.{digits}f}" for number, digits in forms)


HEAD = (
    "ranks", "nodes", "start, s", "barrier, ms", "empty call, ms", "failure, ms", "address, KiB",
    "client, KiB", "manager, KiB",
)  # fmt: skip


# --- the client ---


def simulate(ranks: int, nodes: int, calls: int = CALLS) -> Measured:
    """Start a simulated gang, measure it, and end it by the end of a rank."""
    counts = [ranks // nodes + (node < ranks % nodes) for node in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="scale-") as folder, Processes() as processes:
        managing = processes.start(manager, counts, folder)
        addresses = managing.recv()
        parts = [
            processes.start(full_node, counts, addresses, folder),
            processes.start(crowd, counts[0], folder),
        ]
        if nodes > 1:
            parts.append(processes.start(light_nodes, counts, addresses))
        for part in parts:
            part.recv()
        begin = time.perf_counter()
        for part in parts:
            part.send("start")
        address: GangAddress = managing.recv()
        start_s = time.perf_counter() - begin
        before = memory()
        hello = {"role": "client", "owner": True, "session": True, "process": "p", "where": "w"}
        channel = Transport().open_channel(address, hello, lambda fields, op: None)
        assert isinstance(channel, SocketChannel)
        channel.request({"op": "load", "library": "simulated"})
        _call(channel, "nothing")
        call_s = in_batches(lambda: _call(channel, "nothing"), calls)[0][calls // 2]
        barrier_s = _call(channel, "barrier")["values"][0]
        client_nbytes = memory() - before
        managing.send("measured")
        manager_nbytes = managing.recv()
        begin = time.perf_counter()
        try:
            _call(channel, "die")
        except GroupRecoveredError:
            failure_s = time.perf_counter() - begin
        channel.close()
        managing.send("end")
    return Measured(
        ranks, nodes, start_s, barrier_s, call_s, failure_s, len(pickle.dumps(address)),
        client_nbytes, manager_nbytes,
    )  # fmt: skip


def _call(channel: SocketChannel, routine: str) -> Body:
    body = {"op": "call", "library": "simulated", "routine": routine, "arguments": {}}
    return channel.request(body)


class Processes:
    """The processes of a simulated gang; all have ended after the context."""

    def __enter__(self) -> Processes:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[SpawnProcess] = []
        return self

    def start(self, target: Any, *args: Any) -> _Limited:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *args), daemon=False)
        process.start()
        theirs.close()
        self._started.append(process)
        return _Limited(ours, process, target.__name__)

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.join(LIMIT_S if exc[0] is None else 0.0)
            if process.is_alive():
                process.terminate()
                process.join()


class _Limited:
    """A pipe to a process, with a time limit for its answers."""

    def __init__(self, pipe: Pipe, process: SpawnProcess, name: str) -> None:
        self._pipe = pipe
        self._process = process
        self._name = name

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def recv(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"{self._name} did not answer in {LIMIT_S:.0f} s")
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join(LIMIT_S)
            code = self._process.exitcode
            raise RuntimeError(f"{self._name} ended with code {code}: see its error") from None


# --- data: a client's work for a row ---


class _SilentNode(NodeConnection):
    """The connections to a node that moves nothing: what is left is the work of the client."""

    def get(
        self, target: TransferTarget, ranks: list[int], region: Region, array: Array, stream: int
    ) -> NodeTimes:
        return NodeTimes(self.node, self.route, array.nbytes)

    put = get

    def sync(self) -> NodeTimes:
        return NodeTimes(self.node, self.route)


def row_cpu_s(kind: type[MatrixReader | MatrixWriter], ranks: int) -> tuple[float, int]:
    """CPU time to plan the transfer of a row that one rank holds; in how many nodes it looked."""
    nodes = tuple(
        NodeAddress(first, 32, ("tcp:127.0.0.1:1",)) for first in range(0, max(ranks, 32), 32)
    )
    connections = NodeConnections(DataEndpoints("", nodes), connection_type=_SilentNode)
    distribution = Distribution("VC_STAR", (1_000_000, 100), default_grid(ranks))
    target, row = TransferTarget(1, distribution, np.dtype(float)), np.zeros((1, 100))

    def move() -> None:
        with kind(connections, target, region=Region(7, 8, 0, 100)) as transfer:
            visited.append(len(transfer.times))
            if isinstance(transfer, MatrixReader):
                transfer.read_block(row, (7, 0))
            else:
                transfer.write_block(row, (7, 0))

    visited: list[int] = []
    move()  # the first one also fills the caches
    cpu_s = []
    for _ in range(BATCHES):
        begin = time.process_time()
        for _ in range(CALLS):
            move()
        cpu_s.append((time.process_time() - begin) / CALLS)
    connections.close()
    return min(cpu_s), visited[0]


# --- the report ---


def growth(sizes: list[float], values: list[float]) -> float:
    """By which factor a value grows when the size doubles: fitted over all sizes."""
    logs = [math.log2(size) for size in sizes]
    return 2 ** statistics.linear_regression(logs, [math.log2(v) for v in values]).slope


def planned(ranks: int, old: str, new: str) -> tuple[float, int]:
    """Seconds in which one rank plans a redistribution, and its exchanges with other ranks."""
    shape, grid = (1_000_000, 1_000_000), default_grid(ranks)
    source, result = Distribution(old, shape, grid), Distribution(new, shape, grid)
    count = len(list(exchanges(source, result, 1)))  # the first time also fills the caches
    return min(timed(lambda: list(exchanges(source, result, 1))) for _ in range(BATCHES)), count


def _add_plans(report: Report) -> None:
    sizes = [ranks for ranks, _ in SIZES[1:]]
    for old, new, most in (("MC_MR", "VC_STAR", 2.0), ("VC_STAR", "STAR_VC", 50.0)):
        plans = [planned(ranks, old, new) for ranks in sizes]
        seconds = [plan_s for plan_s, _ in plans]
        rate = growth([float(ranks) for ranks in sizes], seconds)
        report.add(
            f"redistribution {old} to {new}, planned by one of 8192 ranks", seconds[-1] * 1e3, most,
            "ms", at_most=True,
            detail=f"{plans[-1][1]} exchanges with other ranks; {rate:.2f} x per doubling of ranks",
        )  # fmt: skip
    shares = per_node(8192, "PACK", [128] * 64)
    report.add(
        "bundles of the placement group, 8192 ranks on 64 free nodes", float(len(shares)), 64,
        "bundles", at_most=True,
    )  # fmt: skip


def run() -> Report:
    report = Report("scale")
    found = []
    print(table_line(HEAD))
    for ranks, nodes in SIZES:
        found.append(simulate(ranks, nodes))
        print(table_line(found[-1].cells()), flush=True)
    few, last = simulate(512, 64), found[-1]
    report.add(
        "empty call at 8192 ranks on 64 nodes, p50", last.call_s * 1e3, 5.0, "ms", at_most=True,
        detail="128 ranks of one node, 63 nodes that answer at once",
    )  # fmt: skip
    report.add(
        "what a user's process learns of a gang on 64 nodes, 8192 ranks to 512",
        last.address_nbytes / few.address_nbytes, 1.05, "x", at_most=True,
        detail=f"{last.address_nbytes} and {few.address_nbytes} bytes",
    )  # fmt: skip
    _add_plans(report)
    for what, kind in (("fetch", MatrixReader), ("send", MatrixWriter)):
        (small_s, _), (large_s, count) = row_cpu_s(kind, 64), row_cpu_s(kind, 4096)
        report.add(
            f"{what} of a row: CPU of the client, 4096 ranks to 64", large_s / small_s, 1.5, "x",
            at_most=True,
            detail=f"{large_s * 1e3:.2f} and {small_s * 1e3:.2f} ms; nodes with a part: {count}",
        )  # fmt: skip
    sizes = [float(one.nodes) for one in found[1:]]
    for name, what in (("call_s", "empty call"), ("start_s", "start")):
        values = [getattr(one, name) for one in found[1:]]
        report.add(
            f"{what}: growth per doubling of the nodes, 128 ranks each", growth(sizes, values), 2.0,
            "x", at_most=True,
        )  # fmt: skip
    report.notes.append(markdown(HEAD, [one.cells() for one in found]).rstrip())
    return report


if __name__ == "__main__":  # ranks, nodes, calls: one gang, as JSON
    print(json.dumps(asdict(simulate(*map(int, sys.argv[1:])))))
