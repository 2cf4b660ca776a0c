"""The processes of a gang that `scale` simulates: its dispatcher, and its nodes without MPI."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
from multiprocessing.connection import Connection as Pipe
from typing import Any

import uvloop

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.errors import AlchemistError
from alchemist_ray.runtime.commands.dispatcher import Dispatcher
from alchemist_ray.runtime.commands.nodes import Nodes
from benchmarks.harness import timed
from mpi_workers.node import proxy
from mpi_workers.node.specs import GangPlan, NodePlan, RankConfig, RankOptions
from mpi_workers.wire.asynchronous import FrameProtocol, open_connection
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, ConnectionLost, Frame, Kind

TOKEN = "simulated"
BARRIERS = 3  # the first one with keys; the last one is measured, when all have read them
CARD = "description#node0000.example.com$port#40000$ifname#10.0.0.1$" + "x" * 40
CROWD = "ALCHEMIST_SIMULATED_CROWD"  # the path of its socket
LIMIT_S = 60.0


def memory() -> int:
    """Resident bytes of this process that it shares with no file."""
    with open("/proc/self/smaps_rollup") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("Anonymous"))


# --- the manager ---


class Owner:
    """It starts no ranks again."""

    def ranks_lost(self, error: AlchemistError) -> None:
        pass

    def nodes_lost(self, error: AlchemistError) -> bool:
        return False

    def node_leaving(self, nodes: Nodes, error: AlchemistError) -> bool:
        return False

    def orphaned(self) -> None:
        pass


def manager(pipe: Pipe, counts: list[int], folder: str) -> None:
    """A process with the dispatcher of a gang."""
    uvloop.run(_manage(pipe, counts, folder))


async def _manage(pipe: Pipe, counts: list[int], folder: str) -> None:
    dispatcher = Dispatcher(Owner())
    before = memory()
    nodes = dispatcher.new_nodes(len(counts), sum(counts))
    _, addresses = dispatcher.listen(TOKEN, nodes, "127.0.0.1", f"{folder}/manager")
    dispatcher.use(nodes)
    pipe.send(addresses)
    await nodes.ready
    address = GangAddress(
        gang="simulated",
        session="simulated",
        epoch=1,
        token=TOKEN,
        addresses=addresses,
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


def full_node(pipe: Pipe, counts: list[int], addresses: list[str], folder: str) -> None:
    """Node 0: a proxy, and a process for each rank."""
    os.environ[CROWD] = f"{folder}/crowd"
    nodes = tuple(NodePlan("127.0.0.1", count) for count in counts)
    plan = GangPlan(
        f"simulated{os.getpid()}.1", nodes, token=TOKEN, manager=tuple(addresses), keep_bytes=0,
        options=RankOptions(start_timeout_s=LIMIT_S),
    )  # fmt: skip
    pipe.send("ready")
    pipe.recv()
    proxy.main(plan, 0, _rank)


def _rank(config: RankConfig) -> None:
    """A rank: it checks in, and the crowd answers commands for it."""
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
        "hostname": "node0", "mpi": "none", "gpus": "", "segments": [],
    }  # fmt: skip
    control, _ = connect(config.control, config.token, about, take_fds=False)
    with socket.socket(socket.AF_UNIX) as crowd_socket:
        crowd_socket.connect(os.environ[CROWD])
        place = f"{rank} {os.getpid()} {barrier_s}".encode()
        socket.send_fds(crowd_socket, [place], [control.sock.fileno()])
        crowd_socket.recv(1)  # the end of the gang
    os._exit(0)


def crowd(pipe: Pipe, ranks: int, folder: str) -> None:
    """Answers commands for all ranks of node 0, at once."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/crowd")
        listener.listen(ranks)
        pipe.send("ready")
        poller, answers, kept = select.epoll(), {}, []
        for _ in range(ranks):
            kept.append(listener.accept()[0])
            place, fds, _, _ = socket.recv_fds(kept[-1], 100, 1)
            rank, pid, barrier_s = place.decode().split()
            answers[fds[0]] = _Answers(socket.socket(fileno=fds[0]), rank, pid, barrier_s)
            poller.register(fds[0], select.EPOLLIN)
    while answers:
        for fd, _ in poller.poll():
            if not answers[fd].next():
                poller.unregister(fd)
                del answers[fd]


class _Answers:
    """A rank's end of the connection to its proxy."""

    def __init__(self, sock: socket.socket, rank: str, pid: str, barrier_s: str) -> None:
        self._control = Connection(sock)
        self._pid = int(pid)
        values = {"nothing": [], "barrier": [float(barrier_s)], "load": _described()}
        self._values: Body = values if rank == "0" else {}

    def next(self) -> bool:
        """Answer a command; False at the end."""
        try:
            body = self._control.recv().body
            if body["op"] == "exit":
                return False
            what = body.get("routine", body["op"])
            if what == "die" and self._values:
                os.kill(self._pid, signal.SIGKILL)
                return True
            value = {"value": self._values[what]} if what in self._values else {}
            self._control.send(Kind.REPLY, {"seq": body["seq"], **value})
        except ConnectionLost:
            return False
        return True


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
        fields = {"role": "proxy", "node": self._number}
        protocol = await open_connection(
            address, TOKEN, fields, self._on_frame, lambda _: self.ended.set()
        )
        puts = {f"card-{rank}": CARD for rank in self._ranks}
        self._event(protocol, "pmi_barrier", puts=puts)

    def _event(self, protocol: FrameProtocol, op: str, **fields: Any) -> None:
        protocol.send(Kind.EVENT, {"op": op, **fields})

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
                 "mpi": "none", "gpus": ""}
                for r in self._ranks
            ]  # fmt: skip
            where = [f"unix:/nowhere/{self._number}", "tcp:127.0.0.1:1"]
            self._event(protocol, "ready", ranks=ranks, addresses=where)
