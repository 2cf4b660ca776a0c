"""Ray on one node of a job: its command line, its start and its tries, its end."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.slurm import container, ports
from alchemist_ray.deploy.slurm.folder import NodeFolder
from alchemist_ray.deploy.slurm.processes import kill_descendants

END_S = 4.0  # for Ray to end in good order
LAST_WORDS = 4 << 10  # 4 KiB of Ray's output are told
# Its own time limits (30 s) are short for a cold start from a shared file system: a try that fails
# by them does not count, the keeper has the time limit for all. One that fails at once does.
TRIES = 3
AT_ONCE_S = 20.0
STORE_MIN = 80 << 20  # bytes: the least that Ray takes for its object store
DROPPED = ("RAY_ADDRESS", "PMI_", "PMIX_")  # variables of another Ray, or of a launcher
NO_PROGRAM = 127

News = tuple[str, dict[str, Any]]


class RayNode:
    """Starts and watches Ray; what it sees is told by `news`.

    Parameters
    ----------
    folder : NodeFolder
        For Ray's sockets and logs.
    ip : str
        This node's address.
    variables : mapping
        That Ray has beside this process's own.
    prefix : sequence of str
        What runs a program in the job's image; empty: there is none.
    """

    def __init__(
        self, folder: NodeFolder, ip: str, variables: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        self._folder = folder
        self._ip = ip
        self._variables = variables
        self._python = [*prefix, container.PYTHON] if prefix else [sys.executable]
        self._command: list[str] = []
        self._failed = 0  # tries that counted
        self._began = 0.0
        self._port = 0  # that it will open last; 0: it has, or is not started
        self._ray: subprocess.Popen[bytes] | None = None
        self._waiting: subprocess.Popen[bytes] | None = None
        self.settled = False  # the whole cluster is up: from now on a Ray that ends is lost

    def start(
        self, *, head: bool, address: str, first: int, cpus: int, memory: int, object_store: float
    ) -> None:
        """Start the head of the cluster, or a node of the one at `address`.

        Parameters
        ----------
        first : int
            First port of the job's block.
        memory : int
            Bytes that the job has on this node; 0: all there are.
        object_store : float
            Share of them for Ray's object store.
        """
        numbers = ports.ports(first)
        memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        store = max(STORE_MIN, min(int(memory * object_store), self._folder.shared_memory()))
        role = [f"--address={address}"]
        names = ports.NAMES[1 : -len(ports.ON_HEAD)]
        if head:
            role = ["--head", f"--port={numbers['gcs']}", "--include-dashboard=false"]
            names = ports.NAMES[1:]
        self._command = [
            *self._python, "-m", "ray.scripts.scripts", "start", "--block",
            "--disable-usage-stats",
            "--log-color=false",
            f"--node-ip-address={self._ip}",
            f"--num-cpus={cpus}",
            f"--object-store-memory={store}",
            f"--temp-dir={self._folder.ray}",
            "--min-worker-port=0", "--max-worker-port=0",
            *role,
            *(f"--{name}={numbers[name]}" for name in names),
        ]  # fmt: skip
        self._port = numbers["node-manager-port"]
        self._try()

    def await_nodes(self, address: str, nodes: int, limit_s: float) -> None:
        """Begin to look whether the cluster has so many nodes."""
        words = ["-m", "alchemist_ray.deploy.slurm.ready", address, str(nodes), str(limit_s)]
        self._waiting = self._spawn([*self._python, *words], self._ready_log)

    def news(self) -> Iterator[News]:
        """What has happened since the last look: ``up``, ``ready``, ``again``, ``ray_ended``."""
        if self._port and self._ray is not None and _listens(self._ip, self._port):
            self._port = 0
            yield "up", {}
        if self._waiting is not None and (code := self._waiting.poll()) is not None:
            self._waiting = None
            yield "ready", {"ok": code == 0, "said": _end_of(self._ready_log)}
        if self._ray is not None and (code := self._ray.poll()) is not None:
            self._ray = None
            self._failed += time.monotonic() - self._began < AT_ONCE_S
            told = {"code": code, "said": _end_of(self._folder.log)}
            if self.settled or self._failed == TRIES or code == NO_PROGRAM:
                yield "ray_ended", told
            else:
                yield "again", told
                # On what this try has warmed up.
                kill_descendants(spare=self._waiting)
                shutil.rmtree(self._folder.ray, ignore_errors=True)
                self._try()

    def end(self) -> None:
        """End Ray in good order, if it does so in time."""
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._ray.wait(END_S)

    @property
    def _ready_log(self) -> Path:
        return self._folder.path / "ready.log"

    def _try(self) -> None:
        self._began = time.monotonic()
        self._ray = self._spawn(self._command, self._folder.log)

    def _spawn(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
        env |= {"TMPDIR": str(self._folder.path), "RAY_USAGE_STATS_ENABLED": "0"}
        env |= self._variables
        env.setdefault("RAY_agent_register_timeout_ms", "120000")
        # A shell says what is wrong where a container runtime is not there, and ends with 127.
        words = ["/bin/sh", "-c", 'exec "$@"', "sh", *command]
        with open(log, "ab") as out:
            return subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip


def _listens(host: str, port: int) -> bool:
    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, port)) == 0


def _end_of(path: Path) -> str:
    try:
        return path.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
    except OSError:
        return ""
