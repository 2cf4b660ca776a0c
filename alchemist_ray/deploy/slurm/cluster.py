"""The keeper: brings Ray up on all nodes of a job, watches it, and ends it.

One step of the job starts a supervisor on every node (`node.py`); they connect back. The keeper
picks ports that are free on all nodes, has the head started, then the others at once, and sees
that Ray counts them all. If the keeper dies, the supervisors notice and end what they have started.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from alchemist_ray.deploy.slurm import ports
from alchemist_ray.deploy.slurm.allocation import Allocation, Node
from alchemist_ray.deploy.slurm.node import NodeTask
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import DROPPED, step_environment
from alchemist_ray.runtime.batch_job import FOLDER_VARIABLE, JobCluster, JobFolder
from alchemist_ray.runtime.network import address_of, address_towards, interfaces
from mpi_workers.wire.acceptor import Acceptor
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind, WireError
from mpi_workers.wire.sockets import listen_tcp

POLL_INTERVAL_S = 0.1
STOP_S = 10.0  # for the nodes to be clean
STEP_S = 5.0  # for their step to end then
SAID = 4 << 10  # 4 KiB of what the step said are told


def step_base(env: Mapping[str, str]) -> dict[str, str]:
    """An environment for a new step of the job, without what another has left in it."""
    kept = {k: v for k, v in env.items() if not k.startswith(DROPPED)}
    return kept | step_environment(env)


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How much of each node Ray gets, and how long it may take to come up."""

    cpus: int | None = None
    start_timeout_s: float = 120.0


class RayInJob:
    """Ray on the nodes of a job (a context manager). Raises `JobError` if it does not come up.

    Parameters
    ----------
    allocation : Allocation
    site : Site
    folder : JobFolder
        Where token and address go.
    options : RayOptions
    check : callable()
        Called while waiting; raises what ends the wait (a signal has come).
    container : sequence of str
        What runs a program in the job's image; empty: there is none.
    settings : mapping
        What is said to launchers, by environment variables; for programs that join later.
    """

    def __init__(
        self,
        allocation: Allocation,
        site: Site,
        folder: JobFolder,
        options: RayOptions,
        check: Callable[[], None],
        container: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._allocation = allocation
        self._site = site
        self._folder = folder
        self._options = options
        self._check = check
        self._container = list(container)
        self._settings = dict(settings or {})
        self._events: queue.Queue[tuple[str, Body]] = queue.Queue()
        self._nodes: dict[str, Connection] = {}
        self._hello: dict[str, Body] = {}
        self._lost: list[str] = []
        self._up: set[str] = set()
        self._failed: dict[str, str] = {}  # what Ray said where it had to be started again
        self._ready = False
        self._step: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._secret = ""
        self.address: JobCluster | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # --- up ---

    def _start(self) -> None:
        self._folder.make()
        self._secret = self._folder.new_token()
        deadline = time.monotonic() + self._options.start_timeout_s
        nodes = self._allocation.nodes
        self._begin_step(self._listen())
        self._await(lambda: len(self._hello) == len(nodes), deadline, self._not_here)
        first = self._block()
        here = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        head = next((node for node in nodes if node.name == here), nodes[0])
        address = f"{self._hello[head.name]['ip']}:{first}"
        self._order_start(head, first, address, head=True)
        self._await(lambda: head.name in self._up, deadline, lambda: f"Ray's head on {head.name}")
        for node in nodes:
            if node is not head:
                self._order_start(node, first, address, head=False)
        limit_s = max(1.0, deadline - time.monotonic())
        self._tell(head.name, "await", address=address, nodes=len(nodes), limit_s=limit_s)
        self._await(lambda: self._ready, deadline + POLL_INTERVAL_S, lambda: "Ray's other nodes")
        self.address = JobCluster(
            address=address,
            job=self._allocation.job,
            head=head.name,
            nodes=[node.name for node in nodes],
            cpus=sum(self._cpus(node) for node in nodes),
            keeper_host=os.uname().nodename,
            keeper_pid=os.getpid(),
            container=self._container,
            settings=self._settings,
        )
        for node in nodes:
            self._tell(node.name, "settled")
        self._folder.write_cluster(self.address)

    def _cpus(self, node: Node) -> int:
        return self._options.cpus or node.cpus

    def _order_start(self, node: Node, first: int, address: str, *, head: bool) -> None:
        self._tell(
            node.name,
            "start",
            head=head,
            address=address,
            first=first,
            cpus=self._cpus(node),
            memory=node.memory_nbytes or 0,
            object_store=self._site.nodes.object_store,
        )

    def _block(self) -> int:
        """The first port of a block that is free on every node."""
        job = self._allocation.job
        free = set.intersection(*(set(hello["free"]) for hello in self._hello.values()))
        if not free:
            raise JobError(
                f"no {ports.BLOCK} ports in a row are free on all nodes: looked at "
                f"{ports.TRIES} blocks from {ports.block(job)} on"
            )
        return ports.block(job, min(free))

    def _listen(self) -> str:
        nodes = self._allocation.nodes
        here = os.uname().nodename
        with contextlib.suppress(JobError):  # a login host has not the nodes' network
            if self._site.nodes.interface:
                return self._open(address_of(self._site.nodes.interface, interfaces()))
        other = next((node.name for node in nodes if node.name != here), nodes[0].name)
        return self._open(address_towards(other))

    def _open(self, ip: str) -> str:
        self._listener, address = listen_tcp(ip)
        acceptor = Acceptor([self._listener], self._secret, {})
        threading.Thread(target=self._accept, args=(acceptor,), daemon=True).start()
        return address

    def _begin_step(self, address: str) -> None:
        task = NodeTask(
            keeper=address,
            token=str(self._folder.token),
            job=self._allocation.job,
            tmp=self._site.nodes.tmp,
            interface=list(self._site.nodes.interface),
            container=self._container,
        )
        words = [sys.executable, "-m", "alchemist_ray.deploy.slurm.node", json.dumps(asdict(task))]
        command = [*self._once_per_node(), *words]
        if shutil.which(command[0]) is None:
            raise JobError(f"there is no program {command[0]!r} to start something on every node")
        with open(self._folder.path / "nodes.log", "wb") as out:
            self._step = subprocess.Popen(
                command,
                env=step_base(os.environ) | {FOLDER_VARIABLE: str(self._folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for the program; this goes by `stop`
            )

    def _once_per_node(self) -> list[str]:
        if not self._allocation.uses_srun:
            return shlex.split(self._site.nodes.start)
        count = len(self._allocation.nodes)
        return [
            "srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
            "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--quiet",
            "--input=none", "--job-name=alchemist-ray",
        ]  # fmt: skip

    # --- the nodes ---

    def _accept(self, acceptor: Acceptor) -> None:
        with contextlib.suppress(OSError), contextlib.closing(acceptor):  # until `stop`
            while True:
                for peer in acceptor.poll():
                    threading.Thread(target=self._serve, args=peer, daemon=True).start()

    def _serve(self, connection: Connection, hello: Body) -> None:
        """One node: its HELLO, then what it tells, until it is gone."""
        name = ""
        try:
            name = self._named(hello)
            self._nodes[name] = connection
            self._events.put((name, {"op": "hello", **hello}))
            while True:
                self._events.put((name, connection.recv().body))
        except WireError:
            connection.close()
            if name:
                self._events.put((name, {"op": "lost"}))

    def _named(self, hello: Body) -> str:
        """The node of the job that this is."""
        told = (str(hello["name"]), str(hello["hostname"]))
        for node in self._allocation.nodes:
            if node.name in told or node.name.partition(".")[0] == told[1].partition(".")[0]:
                return node.name
        raise WireError(f"{told[0]} is no node of this job")

    def _tell(self, name: str, op: str, **fields: Any) -> None:
        with contextlib.suppress(WireError, KeyError):
            self._nodes[name].send(Kind.COMMAND, {"op": op, **fields})

    def _await(self, done: Callable[[], bool], deadline: float, what: Callable[[], str]) -> None:
        """Wait for the nodes. Raises `JobError` with what they said, or that time is over."""
        while not done():
            self._check()
            if time.monotonic() > deadline:
                raise JobError(
                    f"{what()} did not come up in {self._options.start_timeout_s:.0f} s. "
                    f"{self._step_said()}"
                )
            if self._step is not None and (code := self._step.poll()) is not None:
                raise JobError(f"the step on the nodes ended with {code}. {self._step_said()}")
            for name, body in self._news(POLL_INTERVAL_S):
                self._during_start(name, body)

    def _during_start(self, name: str, body: Body) -> None:
        match body["op"]:
            case "hello":
                self._hello[name] = body
            case "up":
                self._up.add(name)
            case "again":
                self._failed[name] = str(body["said"])
            case "ready" if body["ok"]:
                self._ready = True
            case "ready":
                raise JobError(f"Ray's nodes did not find each other: {body['said']}")
            case "ray_ended":
                raise JobError(
                    f"Ray on {name} ended with {body['code']} instead of coming up:\n{body['said']}"
                )
            case "lost":
                raise JobError(f"node {name} was lost while Ray was coming up. {self._step_said()}")

    def _news(self, wait_s: float) -> list[tuple[str, Body]]:
        news = []
        with contextlib.suppress(queue.Empty):
            news.append(self._events.get(timeout=wait_s))
            while True:
                news.append(self._events.get_nowait())
        return news

    def _not_here(self) -> str:
        missing = [n.name for n in self._allocation.nodes if n.name not in self._hello]
        return f"the supervisors on {', '.join(missing)}"

    def _step_said(self) -> str:
        failed = "".join(
            f"\nRay on {name}, where it was started again:\n{said}"
            for name, said in self._failed.items()
        )
        with contextlib.suppress(OSError):
            said = (self._folder.path / "nodes.log").read_bytes()[-SAID:].decode(errors="replace")
            if said.strip():
                return f"What they said:\n{said.strip()}{failed}"
        return failed.strip() or "They said nothing"

    # --- while it runs ---

    def look(self) -> list[str]:
        """Nodes that were lost since the last look.

        Raises
        ------
        JobError
            If the head is one of them: Ray is gone.
        """
        lost = []
        for name, body in self._news(POLL_INTERVAL_S):
            if body["op"] in ("lost", "ray_ended") and name not in self._lost:
                self._lost.append(name)
                lost.append(name)
        if self.address is not None and self.address.head in lost:
            raise JobError(f"node {self.address.head}, with Ray's head, is gone")
        return lost

    # --- down ---

    def stop(self) -> None:
        """End Ray on all nodes and wait until they are clean."""
        with contextlib.suppress(OSError):
            self._folder.token.unlink()  # first: there may not be the time to come to the end
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
        for name in list(self._nodes):
            self._tell(name, "stop")
        left = set(self._nodes) - set(self._lost)
        deadline = time.monotonic() + STOP_S
        while left and time.monotonic() < deadline:
            left -= {
                name for name, body in self._news(POLL_INTERVAL_S) if body["op"] in ("gone", "lost")
            }
        for connection in self._nodes.values():
            connection.hang_up()
        self._end_step(STEP_S if not self._lost else 0.0)
        self._folder.clear()

    def _end_step(self, wait_s: float) -> None:
        if self._step is None:
            return
        for end, limit_s in ((None, wait_s), (self._step.terminate, STEP_S), (self._step.kill, 5)):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._step.wait(limit_s)
                return
