"""A node's supervisor: starts Ray on its node of a job, and removes every trace of it.

One process per node, started by a single step of the job. It receives its commands from the keeper
(`keeper`). When that connection breaks, or the batch system sends SIGTERM, it stops Ray, kills
all descendants, and removes the node's folder.

    python -m alchemist_ray.deploy.slurm.node '{"keeper": "tcp:10.0.0.1:4000", ...}'
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from alchemist_ray.deploy.slurm import allocation, container
from alchemist_ray.deploy.slurm.relay import VARIABLE as RELAY
from alchemist_ray.deploy.slurm.relay import Relay
from alchemist_ray.errors import JobError
from alchemist_ray.runtime.cluster.network import local_address
from mpi_workers.node import cleanup, processes
from mpi_workers.node.processes import end_descendants
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import Body, Kind, WireError

PREFIX = "alch-"
# Ray's sockets: <temp-dir>/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store
RAY_TAIL = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
UNIX_LIMIT = 107
SEGMENT = "mpich_shm_*"
SEGMENT_S = 5.0  # processes that need a segment have mapped it by this age


class NodeFolder:
    """``<tmp>/alch-<job>``, of mode 700, locked while its supervisor runs.

    Raises
    ------
    JobError
        If it cannot be created, exists already, or its path is too long for Unix sockets.
    """

    def __init__(self, tmp: str, job: str) -> None:
        number = job.partition(".")[0]  # PBS: 123.server
        self.path = Path(os.path.expandvars(tmp)) / f"{PREFIX}{number}"
        self.ray = self.path / "r"
        self.log = self.path / "ray.log"
        if len(str(self.ray)) + RAY_TAIL > UNIX_LIMIT:
            raise JobError(
                f"{self.ray} is too long for the Unix sockets in it (at most "
                f"{UNIX_LIMIT - RAY_TAIL} bytes): set nodes.tmp of the site file to a shorter one"
            )
        self._lock = -1
        self._sweep()
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise JobError(
                f"{self.path} on {os.uname().nodename} exists already: another Ray of this job "
                "runs there, or another user's job has the same number"
            ) from None
        except OSError as error:
            raise JobError(
                f"cannot create a folder for the job's sockets on {os.uname().nodename}: {error}; "
                "set nodes.tmp of the site file to another place"
            ) from None
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sweep(self) -> None:
        """Remove folders of this user's jobs whose supervisor was killed."""
        for path in self.path.parent.glob(f"{PREFIX}*"):
            try:
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(path)
            except OSError:
                continue  # its supervisor runs
            finally:
                os.close(lock)

    def shared_memory(self) -> int:
        """Return the bytes of free shared memory on this node."""
        about = os.statvfs(cleanup.SHM)
        return int(about.f_bavail * about.f_frsize * 0.9)

    def remove(self) -> None:
        """Remove the folder, and segments that the job's gangs left in /dev/shm."""
        _clear(self.path)
        _unlink_unused()
        os.close(self._lock)


def _clear(path: Path) -> None:
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        cleanup.sweep()
    finally:
        tempfile.tempdir = before
    shutil.rmtree(path, ignore_errors=True)


def _unlink_unused() -> None:
    """Remove this user's segments that no process has mapped: of ranks that died in MPI_Init.

    A gang's proxy knows the names of its segments. Under another launcher it learns them when its
    ranks connect, which these never did.
    """
    old = time.time() - SEGMENT_S
    with suppress(OSError):
        for path, about in cleanup.unused([SEGMENT]):
            if about.st_ctime < old:
                path.unlink()


END_TIMEOUT_S = 4.0  # for an orderly end of Ray
OUTPUT_NBYTES = 4 << 10  # the end of Ray's output that errors quote
# Ray's own time limits (30 s) are short for a cold start from a shared file system. A start that
# exceeds them is repeated within the keeper's time limit; quick failures are repeated twice.
TRIES = 3
QUICK_S = 20.0
STORE_MIN_NBYTES = 80 << 20  # Ray's minimum for its object store
DROPPED = ("RAY_ADDRESS", "PMI_", "PMIX_")  # variables of another Ray, or of a launcher
NO_PROGRAM = 127
PROGRAMS = "alchemist_ray.deploy.slurm.ray_programs"

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
        numbers = allocation.ports(first)
        memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        store = max(STORE_MIN_NBYTES, min(int(memory * object_store), self._folder.shared_memory()))
        role = [f"--address={address}"]
        names = allocation.NAMES[1 : -len(allocation.ON_HEAD)]
        if head:
            role = ["--head", f"--port={numbers['gcs']}", "--include-dashboard=false"]
            names = allocation.NAMES[1:]
        self._command = [
            *self._python, "-m", PROGRAMS, "start", "--block",
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
        words = [*self._python, "-m", PROGRAMS, "wait", address, str(nodes), str(limit_s)]
        self._waiting = self._spawn(words, self._ready_log)

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


POLL_INTERVAL_S = 0.1
KEEPER_TIMEOUT_S = 30.0  # for the keeper to answer


@dataclass(frozen=True, slots=True)
class NodeTask:
    """Parameters of a supervisor.

    Attributes
    ----------
    keeper : str
        Address of the keeper.
    token : str
        Path of the file with the job's token.
    job : str
    tmp : str
        Parent of the node's folder.
    interface : list of str
        As in the site file.
    container : list of str
        Command prefix that runs a program in the job's image; empty without an image.
    """

    keeper: str
    token: str
    job: str
    tmp: str
    interface: list[str]
    container: list[str]


class Supervisor:
    """A supervisor, and the owner of its node's folder.

    Raises
    ------
    JobError
        If the folder cannot be created, or the network interface does not exist.
    """

    def __init__(self, task: NodeTask) -> None:
        self._task = task
        self._token = Path(task.token).read_text()
        self._folder = NodeFolder(task.tmp, task.job)
        self._relay: Relay | None = None
        self._ray: RayNode | None = None
        self._connection: Connection | None = None
        self._stopped = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: end at the next poll."""
        self._stopped = True

    def run(self) -> int:
        """Obey the keeper until the end. Returns the exit code."""
        task = self._task
        try:
            ip = local_address(task.interface, task.keeper)
            variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": task.token}
            if task.container:  # the image has no srun
                self._relay = Relay(self._folder.path / "relay")
                variables[RELAY] = str(self._relay.path)
            self._ray = RayNode(self._folder, ip, variables, task.container)
            hello: Body = {
                "role": "supervisor",
                "name": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
                "hostname": os.uname().nodename,
                "ip": ip,
                "free": allocation.free_attempts(task.job, ip),
                "cores": os.cpu_count() or 1,
                "others": allocation.other_users(),
            }
            self._connection, _ = connect(
                task.keeper, self._token, hello, timeout_s=KEEPER_TIMEOUT_S
            )
            self._obey(self._connection, self._ray)
        finally:
            self._end()
        return 0

    def _obey(self, connection: Connection, ray: RayNode) -> None:
        while not self._stopped:
            if connection.readable(POLL_INTERVAL_S):
                try:
                    order = dict(connection.recv().body)
                except WireError:
                    return  # the keeper has ended
                match order.pop("op"):
                    case "start":
                        ray.start(**order)
                    case "await":
                        ray.await_nodes(**order)
                    case "settled":
                        ray.settled = True
                    case "stop":
                        return
            for op, told in ray.news():
                self._tell(op, **told)

    def _tell(self, op: str, **fields: Any) -> None:
        if self._connection is not None:
            with suppress(WireError):
                self._connection.send(Kind.EVENT, {"op": op, **fields})

    def _end(self) -> None:
        if self._ray is not None:
            self._ray.end()
        if self._relay is not None:
            self._relay.close()
        processes.end_descendants()
        self._folder.remove()
        self._tell("gone")
        if self._connection is not None:
            self._connection.close()


def main(argv: list[str]) -> int:
    """Supervise this node until the end. Returns the exit code."""
    processes.adopt_orphans()
    supervisor = Supervisor(NodeTask(**json.loads(argv[0])))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, supervisor.stop)
    return supervisor.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
