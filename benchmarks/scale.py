"""The control path of gangs of up to 8192 ranks on 64 nodes, simulated on one machine.

The dispatcher, the wire protocol and the user's control channel are the real ones, and so is node
0: a proxy with its PMI server, and a process for each rank, which answers commands without MPI.
The other nodes are connections that answer with the combined reply of a proxy. A real gang's nodes
work at the same time, so a call takes as long as the dispatcher and one node.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import pickle
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from multiprocessing.context import SpawnProcess
from typing import Any

import uvloop

from alchemist_ray.errors import GroupFailedError
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.control_channel import SocketChannel, open_socket_channel
from alchemist_ray.runtime.dispatcher import Dispatcher
from benchmarks.harness import Report, timed
from mpi_workers.node import proxy
from mpi_workers.node.specs import ProxySpec, RankConfig
from mpi_workers.wire.asynchronous import ConnectingProtocol, FrameProtocol
from mpi_workers.wire.blocking import connect
from mpi_workers.wire.frames import Body, Frame, Kind

TOKEN = "simulated"
SIZES = ((2, 1), (128, 1), (1024, 8), (2048, 16), (4096, 32), (8192, 64))  # ranks, nodes
BARRIERS = 3  # the first one with keys; the last one is measured, when all have read them
CARD = "description#node0000.example.com$port#40000$ifname#10.0.0.1$" + "x" * 40
CALLS, BATCHES = 100, 5
LIMIT_S = 60.0


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

    def line(self) -> str:
        return (
            f"| {self.ranks} | {self.nodes} | {self.start_s:.2f} | {self.barrier_s * 1e3:.2f} | "
            f"{self.call_s * 1e3:.2f} | {self.failure_s * 1e3:.0f} | "
            f"{self.address_nbytes / 1024:.1f} | {self.client_nbytes / 1024:.0f} | "
            f"{self.manager_nbytes / 1024:.0f} |"
        )


HEAD = (
    "| ranks | nodes | start, s | barrier, ms | empty call, ms | failure, ms | address, KiB | "
    "client, KiB | manager, KiB |\n|---|---|---|---|---|---|---|---|---|\n"
)


def memory() -> int:
    """Resident bytes of this process that it shares with no file."""
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Anonymous"))


# --- the manager ---


def manager(pipe: Pipe, counts: list[int], folder: str) -> None:
    """A process with the dispatcher of a gang."""
    uvloop.run(_manage(pipe, counts, folder))


async def _manage(pipe: Pipe, counts: list[int], folder: str) -> None:
    dispatcher = Dispatcher(lambda error: False, lambda: None)
    before = memory()
    nodes = dispatcher.new_nodes(len(counts), sum(counts))
    listeners = dispatcher.new_listeners(TOKEN, nodes)
    await listeners.open("127.0.0.1", f"{folder}/manager")
    dispatcher.use(nodes)
    pipe.send(listeners.addresses)
    await nodes.ready
    address = GangAddress(
        gang="simulated",
        session="simulated",
        epoch=1,
        token=TOKEN,
        addresses=tuple(listeners.addresses),
        nodes=tuple(about for _, about in sorted(nodes.data.items())),
        incarnation="simulated.1",
        hosts=tuple(map(nodes.host, range(len(counts)))),
        node_ids=tuple(f"{node:056x}" for node in range(len(counts))),
    )
    pipe.send(address)
    await asyncio.to_thread(pipe.recv)  # the client has measured
    pipe.send(memory() - before)
    await asyncio.to_thread(pipe.recv)


# --- the nodes ---


def full_node(pipe: Pipe, counts: list[int], addresses: list[str]) -> None:
    """Node 0: a proxy, and a process for each rank."""
    spec = ProxySpec(
        gang=f"simulated{os.getpid()}.1", manager=addresses, token=TOKEN, node=0, counts=counts,
        host="127.0.0.1", kvs_name="simulated", threads=1, keep_bytes=0, start_timeout_s=LIMIT_S,
    )  # fmt: skip
    pipe.send("ready")
    pipe.recv()
    proxy.main(spec, _rank)


def _rank(config: RankConfig) -> None:
    """A rank that answers each command at once."""
    rank = int(os.environ["PMI_RANK"])
    pmi = socket.socket(fileno=int(os.environ["PMI_FD"])).makefile("rw")

    def ask(line: str) -> str:
        pmi.write(line + "\n")
        pmi.flush()
        return pmi.readline()

    ask("cmd=init pmi_version=1 pmi_subversion=1")
    ask(f"cmd=put kvsname=simulated key=card-{rank} value={CARD}")
    for _ in range(BARRIERS - 1):
        ask("cmd=barrier_in")
    barrier_s = timed(lambda: ask("cmd=barrier_in"))
    about = {
        "role": "rank", "rank": rank, "size": config.size, "pid": os.getpid(),
        "hostname": "node0", "mpi": "none", "segments": [],
    }  # fmt: skip
    control, _ = connect(config.control, config.token, about, take_fds=False)
    while (body := control.recv().body)["op"] != "exit":
        reply: Body = {"seq": body["seq"]}
        match body.get("routine"):
            case "die" if rank == 0:
                os._exit(1)
            case "barrier" if rank == 0:
                reply["value"] = [barrier_s]
            case "nothing" if rank == 0:
                reply["value"] = []
        if body["op"] == "load" and rank == 0:
            reply["value"] = _described()
        control.send(Kind.REPLY, reply)
    os._exit(0)


def _described() -> Body:
    names = ("nothing", "barrier", "die")
    routines = [{"name": name, "parameters": [], "results": [], "doc": ""} for name in names]
    return {"name": "simulated", "doc": "", "routines": routines}


def light_nodes(pipe: Pipe, counts: list[int], addresses: list[str]) -> None:
    """All nodes but the first."""
    uvloop.run(_light_nodes(pipe, counts, addresses))


async def _light_nodes(pipe: Pipe, counts: list[int], addresses: list[str]) -> None:
    pipe.send("ready")
    await asyncio.to_thread(pipe.recv)
    nodes = [_LightNode(number, counts) for number in range(1, len(counts))]
    for node in nodes:
        await node.connect(addresses[-1])
    await asyncio.gather(*(node.ended.wait() for node in nodes))


class _LightNode:
    """A connection that answers as a proxy does."""

    def __init__(self, number: int, counts: list[int]) -> None:
        self._number = number
        first = sum(counts[:number])
        self._ranks = range(first, first + counts[number])
        self._size = sum(counts)
        self._barriers = 0
        self.ended = asyncio.Event()

    async def connect(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp:").rpartition(":")
        fields = {"role": "proxy", "node": self._number}
        protocol = ConnectingProtocol(self._on_frame, lambda _: self.ended.set(), TOKEN, fields)
        await asyncio.get_running_loop().create_connection(lambda: protocol, host, int(port))
        await protocol.welcome
        puts = {f"card-{rank}": CARD for rank in self._ranks}
        self._event(protocol, "pmi_barrier", puts=puts)

    def _event(self, protocol: FrameProtocol, op: str, **fields: Any) -> None:
        protocol.send(Kind.EVENT, {"op": op, "node": self._number, **fields})

    def _on_frame(self, protocol: FrameProtocol, frame: Frame) -> None:
        body = frame.body
        if "seq" in body:
            protocol.send(Kind.REPLY, {"seq": body["seq"], "node": self._number})
        elif body["op"] == "pmi_release":
            self._barriers += 1
            if self._barriers < BARRIERS:
                self._event(protocol, "pmi_barrier", puts={})
                return
            ranks = [
                {"rank": r, "size": self._size, "pid": r, "hostname": f"node{self._number}",
                 "mpi": "none"}
                for r in self._ranks
            ]  # fmt: skip
            where = [f"unix:/nowhere/{self._number}", "tcp:127.0.0.1:1"]
            self._event(protocol, "ready", ranks=ranks, addresses=where)


# --- the client ---


def simulate(ranks: int, nodes: int, calls: int = CALLS, batches: int = BATCHES) -> Measured:
    """Start a simulated gang, measure it, and end it by the end of a rank."""
    counts = [ranks // nodes + (node < ranks % nodes) for node in range(nodes)]
    with tempfile.TemporaryDirectory(prefix="scale-") as folder, _Processes() as processes:
        managing = processes.start(manager, counts, folder)
        addresses = managing.recv()
        parts = [processes.start(full_node, counts, addresses)]
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
        channel = open_socket_channel(address, hello, lambda fields: None)
        assert isinstance(channel, SocketChannel)
        channel.request({"op": "load", "library": "simulated"})
        call_s = _call_s(channel, calls, batches)
        barrier_s = _call(channel, "barrier")["values"][0]
        client_nbytes = memory() - before
        managing.send("measured")
        manager_nbytes = managing.recv()
        begin = time.perf_counter()
        try:
            _call(channel, "die")
        except GroupFailedError:
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


def _call_s(channel: SocketChannel, calls: int, batches: int) -> float:
    """The p50 of an empty call: the best of some batches."""
    _call(channel, "nothing")
    return min(
        statistics.median(timed(lambda: _call(channel, "nothing")) for _ in range(calls))
        for _ in range(batches)
    )


class _Processes:
    """The processes of a simulated gang; all have ended after the context."""

    def __enter__(self) -> _Processes:
        self._context = multiprocessing.get_context("spawn")
        self._started: list[SpawnProcess] = []
        return self

    def start(self, target: Any, *args: Any) -> _Limited:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *args), daemon=False)
        process.start()
        theirs.close()
        self._started.append(process)
        return _Limited(ours)

    def __exit__(self, *exc: object) -> None:
        for process in self._started:
            process.join(LIMIT_S if exc[0] is None else 0.0)
            if process.is_alive():
                process.terminate()
                process.join()


class _Limited:
    """A pipe to a process, with a time limit for its answers."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def send(self, value: Any) -> None:
        self._pipe.send(value)

    def recv(self) -> Any:
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"a part of the simulated gang did not answer in {LIMIT_S:.0f} s")
        return self._pipe.recv()


# --- the report ---


def growth(sizes: list[float], values: list[float]) -> float:
    """By which factor a value grows when the size doubles: fitted over all sizes."""
    logs = [math.log2(size) for size in sizes]
    return 2 ** statistics.linear_regression(logs, [math.log2(v) for v in values]).slope


def run() -> Report:
    report = Report("scale")
    found = []
    print(HEAD, end="")
    for ranks, nodes in SIZES:
        found.append(simulate(ranks, nodes))
        print(found[-1].line(), flush=True)
    few, last = simulate(512, 64), found[-1]
    report.add(
        "empty call at 8192 ranks on 64 nodes, p50", last.call_s * 1e3, 5.0, "ms", at_most=True,
        detail="128 rank processes on one node, 63 nodes that answer at once",
    )  # fmt: skip
    report.add(
        "what a user's process learns of a gang on 64 nodes, 8192 ranks to 512",
        last.address_nbytes / few.address_nbytes, 1.05, "x", at_most=True,
        detail=f"{last.address_nbytes} and {few.address_nbytes} bytes",
    )  # fmt: skip
    sizes = [float(one.nodes) for one in found[1:]]
    for name, what in (("call_s", "empty call"), ("start_s", "start")):
        values = [getattr(one, name) for one in found[1:]]
        report.add(
            f"{what}: growth per doubling of the nodes, 128 ranks each", growth(sizes, values), 2.0,
            "x", at_most=True,
        )  # fmt: skip
    report.notes.append(HEAD + "\n".join(one.line() for one in found))
    return report


if __name__ == "__main__":
    run().save()
