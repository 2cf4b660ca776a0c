"""The keeper: starts Ray on all nodes of a job by their supervisors, watches it, and stops it.

One step of the job starts a supervisor on every node; they connect back.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Self

from alchemist_ray.cluster.batch_job import FOLDER_VARIABLE, JobCluster, JobFolder
from alchemist_ray.deploy.slurm import allocation
from alchemist_ray.deploy.slurm.allocation import Allocation, Node, is_same_node, is_this_node
from alchemist_ray.deploy.slurm.node import NodeTask
from alchemist_ray.deploy.slurm.signals import SIGNALLED_END_S, end
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import DROPPED, step_environment
from alchemist_ray.network import address_towards, local_address
from alchemist_ray.plural import counted
from mpi_workers.wire.acceptor import Acceptor, AuthenticatedPeer, authenticate
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind, WireError
from mpi_workers.wire.sockets import listen_tcp

POLL_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 10.0  # for the nodes to clean up
OUTPUT_NBYTES = 4 << 10  # the end of the step's output that errors quote
NODES_LOG = "nodes.log"
SLOW_S = 30.0  # a longer start is explained


def step_base(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a new step of the job, without variables of another step."""
    kept = {k: v for k, v in env.items() if not k.startswith(DROPPED)}
    return kept | step_environment(env)


def up_text(address: JobCluster) -> str:
    """Format what runs in a job."""
    nodes, cpus = counted(len(address.nodes), "node"), counted(address.cpus, "CPU")
    return f"Ray is up on {nodes} with {cpus}, head {address.head}"


@dataclass(slots=True)
class RayInJob:
    """Ray on the nodes of a job (a context manager).

    Attributes
    ----------
    allocation : Allocation
    site : Site
    folder : JobFolder
        For token and address.
    check : callable()
        Called while waiting; raises to end the wait (a signal has arrived).
    container : list of str
        Command prefix that runs a program in the job's image; empty without an image.
    settings : dict
        Environment variables with launcher settings, for programs that join later.
    cpus_per_node : int, optional
        CPUs of each node for Ray. None: the job's.
    start_timeout_s : float
        Time limit of the start without progress.
    address : JobCluster
        Once Ray is up.

    Raises
    ------
    JobError
        If Ray does not start.
    """

    allocation: Allocation
    site: Site
    folder: JobFolder
    check: Callable[[], None]
    container: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)
    cpus_per_node: int | None = None
    start_timeout_s: float = 120.0
    address: JobCluster = field(init=False)
    _events: queue.Queue[tuple[str, Body]] = field(default_factory=queue.Queue, init=False)
    _nodes: dict[str, Connection] = field(default_factory=dict, init=False)
    _broken: set[str] = field(default_factory=set, init=False)  # lost connections
    _step: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _acceptor: Acceptor[AuthenticatedPeer] | None = field(default=None, init=False)
    _hello: dict[str, Body] = field(default_factory=dict, init=False)
    _up: set[str] = field(default_factory=set, init=False)
    _lost: set[str] = field(default_factory=set, init=False)
    _began: float = field(default_factory=time.monotonic, init=False)
    _progress: float = field(default_factory=time.monotonic, init=False)  # time of the last
    _slowest: tuple[float, str] = field(default=(0.0, ""), init=False)  # a wait, and its subject

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- start ---

    def _start(self) -> None:
        self.folder.make()
        nodes = self.allocation.nodes
        self._start_step()
        self._await("the supervisors", self._hello, nodes)
        warnings = allocation.check(self.allocation, self._hello, self.site.nodes.shared)
        first = self._block()
        head = next((node for node in nodes if is_this_node(node.name)), nodes[0])
        address = f"{self._hello[head.name]['ip']}:{first}"
        self._order_start(head, first, address, head=True)
        self._await("Ray's head", self._up, [head])
        for node in nodes:
            if node is not head:
                self._order_start(node, first, address, head=False)
        self._await("Ray", self._up, nodes)
        self.address = JobCluster(
            address=address,
            job=self.allocation.job,
            head=head.name,
            nodes=[node.name for node in nodes],
            cpus=sum(self._cpus(node) for node in nodes),
            keeper_host=os.uname().nodename,
            keeper_pid=os.getpid(),
            container=self.container,
            settings=self.settings,
        )
        self.folder.write_cluster(self.address)
        took = time.monotonic() - self._began
        if took > SLOW_S:
            waited, subject = self._slowest
            warnings.append(
                f"Ray took {took:.0f} s to start, including {waited:.0f} s of waiting for {subject}"
            )
        self._say(f"{up_text(self.address)} at {self.address.address}")
        for text in warnings:
            self._say(f"warning: {text}")

    def _cpus(self, node: Node) -> int:
        return self.cpus_per_node or node.cpus

    def _order_start(self, node: Node, first: int, address: str, *, head: bool) -> None:
        cpus, memory = self._cpus(node), node.memory_nbytes or 0
        self._tell(
            node.name, "start", head=head, address=address, first=first, cpus=cpus, memory=memory
        )

    def _block(self) -> int:
        """Return the first port of a block that is free on every node."""
        job = self.allocation.job
        free = set.intersection(*(set(hello["free"]) for hello in self._hello.values()))
        if not free:
            raise JobError(
                f"no {allocation.BLOCK_PORTS} consecutive ports are free on all nodes: checked "
                f"{allocation.TRIES} blocks, the first at {allocation.block(job)}"
            )
        return allocation.block(job, min(free))

    def _await(self, what: str, arrived: Container[str], nodes: Sequence[Node]) -> None:
        """Wait until these nodes have arrived, as long as there is progress. Raises `JobError`."""
        limit_s = self.start_timeout_s
        while missing := [node.name for node in nodes if node.name not in arrived]:
            subject = f"{what} on {', '.join(missing)}"
            self.check()
            if time.monotonic() > self._progress + limit_s:
                raise JobError(
                    f"{self._output()}\n{subject} did not start: no progress in {limit_s:.0f} s "
                    "(--start-timeout)"
                )
            if self._step is not None and (code := self._step.poll()) is not None:
                raise JobError(
                    f"{self._output()}\nthe step that starts Ray on the nodes ended with exit code "
                    f"{code}: see its output above, and the job's log"
                )
            for name, body in self._news():
                if self._is_progress(name, body):
                    now = time.monotonic()
                    self._slowest = max(self._slowest, (now - self._progress, subject))
                    self._progress = now

    def _is_progress(self, name: str, body: Body) -> bool:
        """Note an event during the start; returns whether it is progress."""
        match body["op"]:
            case "hello":
                self._hello[name] = body
            case "up":
                self._up.add(name)
            case "again":
                self._say(f"Ray is started once more: {body['said']}")
                return False
            case "ray_ended":
                raise JobError(f"Ray did not start: {body['said']}")
            case "unknown":  # it was started by the job's step
                raise JobError(f"a supervisor was started on another node: {body['why']}")
            case "lost":
                raise JobError(f"{self._output()}\nnode {name} was lost while Ray was starting")
        return True

    def _output(self) -> str:
        """Return the end of the output of the supervisors."""
        said = ""
        with contextlib.suppress(OSError):
            text = (self.folder.path / NODES_LOG).read_bytes()[-OUTPUT_NBYTES:]
            said = text.decode(errors="replace").strip()
        return f"output of the supervisors:\n{said or '(none)'}"

    def _say(self, line: str) -> None:
        print(f"alchemist: {line}", file=sys.stderr, flush=True)

    def _start_step(self) -> None:
        """Start a supervisor on every node, by one step of the job."""
        token = self.folder.new_token()
        task = NodeTask(
            keeper=self._listen(token),
            token=str(self.folder.token),
            job=self.allocation.job,
            tmp=self.site.nodes.tmp,
            interface=list(self.site.nodes.interface),
            object_store=self.site.nodes.object_store,
            metrics=self.site.nodes.metrics,
            container=self.container,
        )
        words = [sys.executable, "-m", "alchemist_ray.deploy.slurm.node", json.dumps(asdict(task))]
        command = [*self._once_per_node(), *words]
        if shutil.which(command[0]) is None:
            raise JobError(
                f"starting a step on every node needs {command[0]!r}, which was not found on PATH"
            )
        with open(self.folder.path / NODES_LOG, "wb") as out:
            self._step = subprocess.Popen(
                command,
                env=step_base(os.environ) | {FOLDER_VARIABLE: str(self.folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for the program; `stop` ends the step
            )

    def _once_per_node(self) -> list[str]:
        if not self.allocation.uses_srun:
            return shlex.split(self.site.nodes.start)
        count = len(self.allocation.nodes)
        return [
            "srun", "--overlap", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1",
            "--no-kill", "--kill-on-bad-exit=0", "--mpi=none", "--cpu-bind=none", "--quiet",
            "--input=none", "--job-name=alchemist-ray",
        ]  # fmt: skip

    # --- connections ---

    def _listen(self, token: str) -> str:
        nodes = self.allocation.nodes
        other = next((node.name for node in nodes if not is_this_node(node.name)), nodes[0].name)
        try:
            ip = local_address(self.site.nodes.interface, other)
        except JobError:  # a login host may lack the nodes' network
            ip = address_towards(other)
        listener, address = listen_tcp(ip)
        known = partial(authenticate, token=token, welcome={})
        self._acceptor = Acceptor([listener], known, self._serve, expected=len(nodes)).start()
        return address

    def _serve(self, peer: AuthenticatedPeer) -> None:
        """Serve one node: its HELLO, then its events, until the connection ends."""
        connection, hello = peer
        name = ""
        try:
            name = self._name_of(hello)
            self._nodes[name] = connection
            self._events.put((name, {"op": "hello", **hello}))
            while True:
                self._events.put((name, connection.recv().body))
        except WireError as error:
            connection.close()
            self._events.put(
                (name, {"op": "lost"} if name else {"op": "unknown", "why": str(error)})
            )

    def _name_of(self, hello: Body) -> str:
        names = (str(hello["name"]), str(hello["hostname"]))
        for node in self.allocation.nodes:
            if node.name in names or is_same_node(node.name, names[1]):
                return node.name
        listed = ", ".join(node.name for node in self.allocation.nodes)
        raise WireError(f"{' or '.join(dict.fromkeys(names))} is not a node of this job: {listed}")

    def _tell(self, name: str, op: str, **fields: Any) -> None:
        """Send a command to a node; a lost node ignores it."""
        with contextlib.suppress(WireError, KeyError):
            self._nodes[name].send(Kind.COMMAND, {"op": op, **fields})

    def _news(self) -> list[tuple[str, Body]]:
        """Return events since the last call, by node; wait a moment for the first."""
        news = []
        with contextlib.suppress(queue.Empty):
            news.append(self._events.get(timeout=POLL_INTERVAL_S))
            while True:
                news.append(self._events.get_nowait())
        self._broken |= {name for name, body in news if body["op"] == "lost"}
        if any(body["op"] == "signalled" for _, body in news):  # the step, or all of the job
            os.kill(os.getpid(), signal.SIGTERM)
        return news

    # --- while it runs ---

    def watch(self) -> None:
        """Wait a moment, and report nodes that were lost meanwhile.

        Raises
        ------
        JobError
            If the head is one of them: Ray is lost.
        """
        for name, body in self._news():
            if body["op"] not in ("lost", "ray_ended") or name in self._lost:
                continue
            self._lost.add(name)
            said = body.get("said", "its supervisor does not answer")
            if self.address.head == name:
                raise JobError(f"node {name}, with Ray's head, is lost: {said}")
            self._say(f"node {name} is lost; Ray continues without it: {said}")

    # --- end ---

    def stop(self) -> None:
        """Stop Ray on all nodes and wait until they are clean."""
        with contextlib.suppress(OSError):
            self.folder.token.unlink()  # first: the time may not suffice for the rest
        if self._acceptor is not None:
            self._acceptor.close()
        for name in list(self._nodes):
            self._tell(name, "stop")
        left = set(self._nodes) - self._broken
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while left and time.monotonic() < deadline:
            left -= {name for name, body in self._news() if body["op"] in ("gone", "lost")}
        for connection in self._nodes.values():
            connection.hang_up()
        if self._step is not None:
            end(self._step, SIGNALLED_END_S if not self._broken else 0.0)
        self.folder.clear()
