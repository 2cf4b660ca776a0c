"""A node's supervisor: starts Ray on its node of a job, and leaves nothing of it behind.

One process per node, started by a single step of the job. Its connection to the keeper
(`cluster.py`) brings its orders and is its life line: when that breaks, or the batch system sends
SIGTERM, it ends Ray and all that came of it, and removes the node's folder.

    python -m alchemist_ray.slurm.node '{"keeper": "tcp:10.0.0.1:4000", ...}'
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from alchemist_ray.slurm import ports
from alchemist_ray.slurm.folder import NodeFolder
from alchemist_ray.slurm.network import local_address
from mpi_workers.connection import Connection, connect
from mpi_workers.wire import Body, Kind, WireError

LOOK_S = 0.1
KEEPER_S = 30.0  # for the keeper to answer
RAY_END_S = 4.0  # for Ray to end in good order
LAST_WORDS = 4 << 10  # 4 KiB of Ray's output are told
RAY_TRIES = 3  # its own time limits (30 s) are short for a cold start from a shared file system
RAY_MIN = 80 << 20  # the least that Ray takes for its object store
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class NodeTask:
    """What a supervisor is started with.

    Attributes
    ----------
    keeper : str
        Where the keeper listens.
    token : str
        Path of the file with the job's secret.
    job : str
    tmp : str
        Parent of the node's folder.
    interface : list of str
        As in the site file.
    """

    keeper: str
    token: str
    job: str
    tmp: str
    interface: list[str]


class Supervisor:
    """See the module."""

    def __init__(self, task: NodeTask) -> None:
        self._task = task
        self._ray: subprocess.Popen[bytes] | None = None
        self._command: list[str] = []
        self._tries = 0
        self._settled = False  # the whole cluster is up
        self._waiting: subprocess.Popen[bytes] | None = None
        self._port: tuple[str, int] | None = None  # that Ray will listen at
        self._stopped = False
        self._folder: NodeFolder | None = None
        self._ip = ""
        self._connection: Connection | None = None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """On a signal: end at the next look."""
        self._stopped = True

    def run(self) -> int:
        """Do what the keeper says until the end; the exit code."""
        task = self._task
        secret = Path(task.token).read_text()
        self._folder = NodeFolder(task.tmp, task.job)
        try:
            self._ip = local_address(task.interface, task.keeper)
            hello: Body = {
                "role": "supervisor",
                "name": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                "hostname": os.uname().nodename,
                "ip": self._ip,
                "free": ports.free_attempts(task.job, self._ip),
            }
            self._connection, _ = connect(task.keeper, secret, hello, timeout_s=KEEPER_S)
            self._obey(self._connection)
        finally:
            self._end()
        return 0

    def _obey(self, connection: Connection) -> None:
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        while not self._stopped:
            # The connection buffers: what it has read already does not show in the socket.
            if connection.has_news() or poller.poll(LOOK_S * 1000):
                try:
                    body = connection.recv().body
                except WireError:
                    return  # the keeper is gone
                if body["op"] == "stop":
                    return
                getattr(self, f"_on_{body['op']}")(body)
            self._look()

    def _tell(self, op: str, **fields: Any) -> None:
        if self._connection is not None:
            with suppress(WireError):
                self._connection.send(Kind.EVENT, {"op": op, **fields})

    # --- orders ---

    def _on_start(self, body: Body) -> None:
        """Start Ray: the head, or a node of the one at `address`."""
        assert self._folder is not None
        numbers = ports.ports(body["first"])
        memory = body["memory"] or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = int(memory * body["object_store"])
        store = max(RAY_MIN, min(share, self._folder.shared_memory()))
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
            "--disable-usage-stats",
            "--log-color=false",
            f"--node-ip-address={self._ip}",
            f"--num-cpus={body['cpus']}",
            f"--object-store-memory={store}",
            f"--temp-dir={self._folder.ray}",
            "--min-worker-port=0", "--max-worker-port=0",
        ]  # fmt: skip
        if body["head"]:
            command += ["--head", f"--port={numbers['gcs']}", "--include-dashboard=false"]
        else:
            command += [f"--address={body['address']}"]
        others = ports.NAMES if body["head"] else ports.NAMES[: -len(ports.ON_HEAD)]
        command += [f"--{name}={numbers[name]}" for name in others[1:]]
        self._port = (self._ip, numbers["node-manager-port"])  # the last that it opens
        self._command = command
        self._start_ray()

    def _start_ray(self) -> None:
        assert self._folder is not None
        self._tries += 1
        self._ray = self._spawn(self._command, self._folder.log)

    def _on_settled(self, body: Body) -> None:
        """The cluster is up: from now on a Ray that ends is lost."""
        self._settled = True

    def _on_await(self, body: Body) -> None:
        """See that the cluster has so many nodes."""
        assert self._folder is not None
        words = [body["address"], str(body["nodes"]), str(body["limit_s"])]
        command = [sys.executable, "-m", "alchemist_ray.slurm.ready", *words]
        self._waiting = self._spawn(command, self._folder.path / "ready.log")

    def _spawn(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        assert self._folder is not None
        dropped = ("RAY_ADDRESS", "PMI_", "PMIX_")
        env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        env |= {
            "TMPDIR": str(self._folder.path),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": self._task.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        env.setdefault("RAY_agent_register_timeout_ms", "120000")
        with open(log, "ab") as out:
            return subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    # --- what happens here ---

    def _look(self) -> None:
        assert self._folder is not None
        if self._port is not None and _listens(*self._port):
            self._port = None
            self._tell("up")
        if self._waiting is not None and (code := self._waiting.poll()) is not None:
            self._waiting = None
            log = self._folder.path / "ready.log"
            self._tell("ready", ok=code == 0, said=_end_of(log))
        if self._ray is not None and (code := self._ray.poll()) is not None:
            self._ray = None
            if self._settled or self._tries == RAY_TRIES:
                self._tell("ray_ended", code=code, said=_end_of(self._folder.log))
            else:
                self._again()

    def _again(self) -> None:
        """Start Ray anew, on what its last try has warmed up."""
        assert self._folder is not None
        _kill_descendants(spare=self._waiting)
        shutil.rmtree(self._folder.ray, ignore_errors=True)
        self._start_ray()

    def _end(self) -> None:
        if self._ray is not None and self._ray.poll() is None:
            self._ray.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._ray.wait(RAY_END_S)
        _kill_descendants()
        if self._folder is not None:
            self._folder.remove()
        self._tell("gone")
        if self._connection is not None:
            self._connection.close()


def _listens(host: str, port: int) -> bool:
    import socket  # noqa: PLC0415

    with socket.socket() as sock:
        sock.settimeout(1.0)
        return sock.connect_ex((host, port)) == 0


def _end_of(path: Path) -> str:
    try:
        return path.read_bytes()[-LAST_WORDS:].decode(errors="replace").strip()
    except OSError:
        return ""


def _kill_descendants(spare: subprocess.Popen[bytes] | None = None) -> None:
    """Kill all that came of this process; what lost its parent has become its child."""
    me = os.getpid()
    spared = {me} if spare is None else {me, spare.pid}
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        parents: dict[int, int] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError, IndexError, ValueError):
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    parents[int(folder.name)] = int(fields[1])
        ours = {me}
        while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
            ours |= more
        if ours <= spared:
            return
        for pid in ours - spared:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def main(argv: list[str]) -> int:
    """Supervise this node until the end."""
    import ctypes  # noqa: PLC0415

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisor = Supervisor(NodeTask(**json.loads(argv[0])))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
