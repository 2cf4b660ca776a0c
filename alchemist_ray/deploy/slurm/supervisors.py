"""The keeper's side of the supervisors: one step of the job starts them, and they connect back."""

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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from alchemist_ray.deploy.slurm.allocation import Allocation, is_same_node, is_this_node
from alchemist_ray.deploy.slurm.node import NodeTask
from alchemist_ray.deploy.slurm.signals import END_TIMEOUT_S, end
from alchemist_ray.deploy.slurm.sites import Site
from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import DROPPED, step_environment
from alchemist_ray.runtime.cluster.batch_job import FOLDER_VARIABLE, JobFolder
from alchemist_ray.runtime.cluster.network import address_of, address_towards
from mpi_workers.wire.acceptor import Acceptor
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, Kind, WireError
from mpi_workers.wire.interfaces import interfaces
from mpi_workers.wire.sockets import listen_tcp

POLL_INTERVAL_S = 0.1
STOP_TIMEOUT_S = 10.0  # for the nodes to clean up
OUTPUT_NBYTES = 4 << 10  # the end of the step's output that errors quote


def step_base(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a new step of the job, without variables of another step."""
    kept = {k: v for k, v in env.items() if not k.startswith(DROPPED)}
    return kept | step_environment(env)


class Supervisors:
    """The supervisors of all nodes of a job.

    Parameters
    ----------
    allocation : Allocation
    site : Site
    folder : JobFolder
        With the token.
    container : sequence of str
        Command prefix that runs a program in the job's image; empty without an image.
    """

    def __init__(
        self, allocation: Allocation, site: Site, folder: JobFolder, container: Sequence[str]
    ) -> None:
        self._allocation = allocation
        self._site = site
        self._folder = folder
        self._container = list(container)
        self._events: queue.Queue[tuple[str, Body]] = queue.Queue()
        self._nodes: dict[str, Connection] = {}
        self._lost: set[str] = set()
        self._step: subprocess.Popen[bytes] | None = None
        self._listener: socket.socket | None = None
        self._token = ""

    def start(self) -> None:
        """Start the step. Raises `JobError`."""
        self._token = self._folder.new_token()
        task = NodeTask(
            keeper=self._listen(),
            token=str(self._folder.token),
            job=self._allocation.job,
            tmp=self._site.nodes.tmp,
            interface=list(self._site.nodes.interface),
            container=self._container,
        )
        words = [sys.executable, "-m", "alchemist_ray.deploy.slurm.node", json.dumps(asdict(task))]
        command = [*self._once_per_node(), *words]
        if shutil.which(command[0]) is None:
            raise JobError(
                f"starting a step on every node needs {command[0]!r}, which was not found on PATH"
            )
        with open(self._folder.path / "nodes.log", "wb") as out:
            self._step = subprocess.Popen(
                command,
                env=step_base(os.environ) | {FOLDER_VARIABLE: str(self._folder.path)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C is for the program; `stop` ends the step
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

    # --- connections ---

    def _listen(self) -> str:
        nodes = self._allocation.nodes
        with contextlib.suppress(JobError):  # a login host may lack the nodes' network
            if self._site.nodes.interface:
                return self._open(address_of(self._site.nodes.interface, interfaces()))
        other = next((node.name for node in nodes if not is_this_node(node.name)), nodes[0].name)
        return self._open(address_towards(other))

    def _open(self, ip: str) -> str:
        self._listener, address = listen_tcp(ip)
        acceptor = Acceptor([self._listener], self._token, {})
        threading.Thread(target=self._accept, args=(acceptor,), daemon=True).start()
        return address

    def _accept(self, acceptor: Acceptor) -> None:
        with contextlib.suppress(OSError), contextlib.closing(acceptor):  # until `stop`
            while True:
                for peer in acceptor.poll():
                    threading.Thread(target=self._serve, args=peer, daemon=True).start()

    def _serve(self, connection: Connection, hello: Body) -> None:
        """Serve one node: its HELLO, then its events, until the connection ends."""
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
        for node in self._allocation.nodes:
            if node.name in names or is_same_node(node.name, names[1]):
                return node.name
        listed = ", ".join(node.name for node in self._allocation.nodes)
        raise WireError(f"{' or '.join(dict.fromkeys(names))} is not a node of this job: {listed}")

    def tell(self, name: str, op: str, **fields: Any) -> None:
        """Send a command to a node; a lost node ignores it."""
        with contextlib.suppress(WireError, KeyError):
            self._nodes[name].send(Kind.COMMAND, {"op": op, **fields})

    def news(self) -> list[tuple[str, Body]]:
        """Return events since the last call, by node; wait a moment for the first."""
        news = []
        with contextlib.suppress(queue.Empty):
            news.append(self._events.get(timeout=POLL_INTERVAL_S))
            while True:
                news.append(self._events.get_nowait())
        self._lost |= {name for name, body in news if body["op"] == "lost"}
        return news

    # --- the step ---

    def exit_code(self) -> int | None:
        """Return the exit code of the step, or None while it runs."""
        return None if self._step is None else self._step.poll()

    def output(self) -> str:
        """Return the end of the step's output."""
        with contextlib.suppress(OSError):
            text = (self._folder.path / "nodes.log").read_bytes()[-OUTPUT_NBYTES:]
            return text.decode(errors="replace").strip()
        return ""

    def stop(self) -> None:
        """Stop Ray on all nodes and wait until they are clean."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # ends the acceptor, which closes it
        for name in list(self._nodes):
            self.tell(name, "stop")
        left = set(self._nodes) - self._lost
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while left and time.monotonic() < deadline:
            left -= {name for name, body in self.news() if body["op"] in ("gone", "lost")}
        for connection in self._nodes.values():
            connection.hang_up()
        if self._step is not None:
            end(self._step, END_TIMEOUT_S if not self._lost else 0.0)
