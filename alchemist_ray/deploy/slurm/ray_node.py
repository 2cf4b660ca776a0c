"""Ray on one node of a job: its command line, its start and restarts, its end."""

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
from mpi_workers.node.process_control import end_descendants

END_TIMEOUT_S = 4.0  # for an orderly end of Ray
OUTPUT_NBYTES = 4 << 10  # the end of Ray's output that errors quote
# Ray's own time limits (30 s) are short for a cold start from a shared file system. A start that
# exceeds them is repeated within the keeper's time limit; quick failures are repeated twice.
TRIES = 3
QUICK_S = 20.0
STORE_MIN_NBYTES = 80 << 20  # Ray's minimum for its object store
DROPPED = ("RAY_ADDRESS", "PMI_", "PMIX_")  # variables of another Ray, or of a launcher
NO_PROGRAM = 127

News = tuple[str, dict[str, Any]]


class RayNode:
    """Starts and watches Ray; `news` reports its events.

    Parameters
    ----------
    folder : NodeFolder
        For Ray's sockets and logs.
    ip : str
        This node's address.
    variables : mapping
        Ray's environment, in addition to this process's.
    prefix : sequence of str
        Command prefix that runs a program in the job's image; empty without an image.
    """

    def __init__(
        self, folder: NodeFolder, ip: str, variables: Mapping[str, str], prefix: Sequence[str]
    ) -> None:
        self._folder = folder
        self._ip = ip
        self._variables = variables
        self._python = [*prefix, container.PYTHON] if prefix else [sys.executable]
        self._command: list[str] = []
        self._metrics = False
        self._failures = 0  # quick ones
        self._began = 0.0
        self._port = 0  # Ray opens it last; 0: it is open, or Ray is not started
        self._ray: subprocess.Popen[bytes] | None = None
        self._waiting: subprocess.Popen[bytes] | None = None
        self.settled = False  # the whole cluster is up: Ray is not restarted any more
        self._counted = 0  # bytes of the log in which nodes are counted

    def start(
        self,
        *,
        head: bool,
        address: str,
        first: int,
        cpus: int,
        memory: int,
        object_store: float,
        metrics: bool,
    ) -> None:
        """Start the head of the cluster, or a node of the one at `address`.

        Parameters
        ----------
        first : int
            First port of the job's block.
        memory : int
            Bytes of the job on this node; 0: all.
        object_store : float
            Share of them for Ray's object store.
        metrics : bool
            Whether the metrics port is open; it requires no token.
        """
        self._metrics = metrics
        numbers = ports.ports(first)
        memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        store = max(STORE_MIN_NBYTES, min(int(memory * object_store), self._folder.shared_memory()))
        role = [f"--address={address}"]
        names = ports.NAMES[1 : -len(ports.ON_HEAD)]
        if head:
            role = ["--head", f"--port={numbers['gcs']}", "--include-dashboard=false"]
            names = ports.NAMES[1:]
        self._command = [
            *self._python, "-m", "alchemist_ray.deploy.slurm.ray_start", "--block",
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
        """Start to wait until the cluster has this many nodes."""
        words = [
            "-m",
            "alchemist_ray.deploy.slurm.wait_for_nodes",
            address,
            str(nodes),
            str(limit_s),
        ]
        self._waiting = self._spawn([*self._python, *words], self._ready_log)

    def news(self) -> Iterator[News]:
        """Yield events since the last call.

        ``up``, ``counted`` (one more node), ``ready``, ``again`` (restarted), ``ray_ended``.
        """
        if self._port and self._ray is not None and _listens(self._ip, self._port):
            self._port = 0
            yield "up", {}
        if self._waiting is not None and (size := _size(self._ready_log)) > self._counted:
            self._counted = size
            yield "counted", {}
        if self._waiting is not None and (code := self._waiting.poll()) is not None:
            self._waiting = None
            yield "ready", {"ok": code == 0, "said": _end_of(self._ready_log)}
        if self._ray is not None and (code := self._ray.poll()) is not None:
            self._ray = None
            self._failures += time.monotonic() - self._began < QUICK_S
            told = {"code": code, "said": _end_of(self._folder.log)}
            if self.settled or self._failures == TRIES or code == NO_PROGRAM:
                yield "ray_ended", told
            else:
                yield "again", told
                # The next start profits from the file system's cache.
                end_descendants([] if self._waiting is None else [self._waiting.pid])
                shutil.rmtree(self._folder.ray, ignore_errors=True)
                self._try()

    def end(self) -> None:
        """Stop Ray, orderly if it ends in time."""
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._ray.wait(END_TIMEOUT_S)

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
        env.setdefault("RAY_enable_metrics_collection", str(int(self._metrics)))
        # A shell reports a missing container runtime, and ends with 127.
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _end_of(path: Path) -> str:
    try:
        return path.read_bytes()[-OUTPUT_NBYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
