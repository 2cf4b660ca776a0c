"""A node's supervisor: starts Ray on its node of a job, and removes every trace of it.

One process per node, started by a single step of the job. It receives its commands from the keeper
(`keeper`). When that connection breaks, or the keeper says so, it stops Ray, kills all descendants,
and removes the node's folder. It reports SIGTERM to the keeper, whose program may still need Ray.

    python -m alchemist_ray.deploy.slurm.node '{"keeper": "tcp:10.0.0.1:4000", ...}'
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.slurm import allocation, sites
from alchemist_ray.deploy.slurm.relay import VARIABLE as RELAY
from alchemist_ray.deploy.slurm.relay import Relay
from alchemist_ray.errors import JobError
from alchemist_ray.network import local_address
from alchemist_ray.tracebacks import without_native_frames
from mpi_workers.failures import describe_status
from mpi_workers.node import cleanup, processes
from mpi_workers.node.processes import descendants, end_descendants
from mpi_workers.sigterm import KEPT_VARIABLE
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
        folders = self.path.parent.glob(f"{PREFIX}*")
        for path in cleanup.abandoned(filter(cleanup.is_private, folders)):
            _clear(path)

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


RAY_END_S = 4.0  # for an orderly end of Ray
OUTPUT_NBYTES = 4 << 10  # the end of a log that errors quote
KEPT_NBYTES = 1 << 20  # the end of a log that is kept after a failure
# Ray's own time limits (30 s) are short for a cold start from a shared file system. A start that
# exceeds them is repeated within the keeper's time limit; a quick failure is repeated once.
RAY_STARTS = 2
QUICK_S = 20.0
STORE_MIN_NBYTES = 80 << 20  # Ray's minimum for its object store
DROPPED = ("RAY_ADDRESS", "PMI_", "PMIX_")  # variables of another Ray, or of a launcher
GPUS = "SLURM_GPUS_ON_NODE"  # those of the step: Ray itself counts NVIDIA's only where it sees them
NO_PROGRAM = 127
# Ray starts a server for Ray Client on the head whenever gRPC is installed, at all interfaces, and
# has no option against it. Sessions do not use it.
# scancel sends SIGTERM to all processes of a job. Ray's own ones would end at once: they and their
# children block it. Ray's workers run user code, whose children need it: `ray_worker` unblocks it.
RAY_START = """
import functools, signal, sys
from importlib.util import find_spec
from pathlib import Path
from ray._private import parameter
from ray.scripts import scripts
scripts.get_ray_client_dependency_error = lambda: "not used"
worker = str(Path(find_spec("alchemist_ray").origin).with_name("deploy") / "slurm/ray_worker.py")
parameter.RayParams = functools.partial(parameter.RayParams, worker_path=worker)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
scripts.cli(["start", *sys.argv[1:]])
"""
STARTED = "ray_current_cluster"  # `ray start` writes it when the GCS knows the node
DAEMONS = ("raylet", "gcs_server")
ENDED = ("", "Z", "X")  # states of a process
RAY_EXIT = re.compile(r"(raylet|gcs_server) \[exit code=(-?\d+)")
LOGS = ("raylet*", "gcs_server*", "*agent*")  # in a session's folder

News = tuple[str, dict[str, Any]]


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
    object_store : float
        Share of the job's memory on the node for Ray's object store.
    metrics : bool
        Whether Ray's metrics ports are open; they require no token.
    container : list of str
        Command prefix that runs a program in the job's image; empty without an image.
    """

    keeper: str
    token: str
    job: str
    tmp: str
    interface: list[str]
    object_store: float
    metrics: bool
    container: list[str]


@dataclass(slots=True)
class RayNode:
    """Starts and watches Ray; `news` reports its events.

    Attributes
    ----------
    folder : NodeFolder
        For Ray's sockets and logs.
    kept : Path
        Folder for copies of Ray's logs after a failure; on a file system that all nodes share.
    ip : str
        This node's address.
    variables : mapping
        Ray's environment, in addition to this process's.
    task : NodeTask
    """

    folder: NodeFolder
    kept: Path
    ip: str
    variables: Mapping[str, str]
    task: NodeTask
    _command: list[str] = field(default_factory=list, init=False)
    _metrics: dict[str, str] = field(default_factory=dict, init=False)  # variables with ports
    _failures: int = field(default=0, init=False)  # quick ones
    _began: float = field(default=0.0, init=False)
    _ray: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _is_up: bool = field(default=False, init=False)  # Ray is not restarted any more
    _daemons: dict[int, str] = field(default_factory=dict, init=False)  # names by process
    _oom: processes.OomWatch = field(default_factory=processes.OomWatch, init=False)

    def start(self, *, head: bool, address: str, first: int, cpus: int, memory: int) -> None:
        """Start the head of the cluster, or a node of the one at `address`.

        Parameters
        ----------
        first : int
            First port of the job's block.
        memory : int
            Bytes of the job on this node; 0: all.
        """
        ports = allocation.ports(first)
        gcs = ports.pop("gcs")
        memory = memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        share = int(memory * self.task.object_store)
        store = max(STORE_MIN_NBYTES, min(share, self.folder.shared_memory()))
        prefix = self.task.container
        python = [*prefix, sites.PYTHON] if prefix else [sys.executable]
        gpus = "" if prefix else os.environ.get(GPUS)  # an image may hide them
        role = ["--head", f"--port={gcs}", "--include-dashboard=false"]
        if not head:
            role = [f"--address={address}"]
            del ports["dashboard-port"]
        self._command = [
            *python, "-c", RAY_START, "--block",
            "--disable-usage-stats",
            "--log-color=false",
            f"--node-ip-address={self.ip}",
            f"--num-cpus={cpus}",
            *([f"--num-gpus={gpus}"] if gpus else []),
            f"--object-store-memory={store}",
            f"--temp-dir={self.folder.ray}",
            "--min-worker-port=0", "--max-worker-port=0",
            *role,
            *(f"--{name}={port}" for name, port in ports.items()),
        ]  # fmt: skip
        metrics = allocation.metrics_ports(first, are_open=self.task.metrics)
        self._metrics = {name: str(port) for name, port in metrics.items()}
        self._try()

    def news(self) -> Iterator[News]:
        """Yield events since the last call: ``up``, ``again`` (restarted), ``ray_ended``."""
        if self._ray is None:
            return
        if not self._is_up:
            self._is_up = (self.folder.ray / STARTED).exists()
            # Also those in a container, and those that have just ended.
            below = {pid: _process(pid)[0] for pid in descendants([os.getpid()])}
            self._daemons |= {pid: name for pid, name in below.items() if name in DAEMONS}
            if self._is_up:
                yield "up", {}
        if (said := self._dead_daemon() or self._ended()) is None:
            return
        said += self._keep_logs()
        gave_up = self._is_up or self._failures >= RAY_STARTS or self._ray.poll() == NO_PROGRAM
        self._ray = None
        end_descendants()
        yield "ray_ended" if gave_up else "again", {"said": said}
        if not gave_up:  # the next start profits from the file system's cache
            shutil.rmtree(self.folder.ray, ignore_errors=True)
            self._try()

    def _dead_daemon(self) -> str | None:
        """How one of Ray's own processes has ended; None if all run.

        `ray start` waits half a minute for a raylet that is dead, and takes SIGTERM for its end.
        """
        ended = {
            name: about
            for pid, name in self._daemons.items()
            if (about := _process(pid))[1] in ENDED
        }
        if not ended:
            return None
        # A raylet gives its agents 15 s: on a busy machine it dies of that.
        self._failures += time.monotonic() - self._began < QUICK_S
        (name, (_, state, status)), *_ = ended.items()
        known = state != ""  # otherwise its parent has read the status
        # Before `ray start` ends the others, it notes which one died; it has read its status.
        exits = self.folder.ray.glob("session_2*/logs/ray_process_exit.log")
        if noted := [found for log in exits for found in RAY_EXIT.findall(_end_of(log))]:
            name, code = noted[0][0], int(noted[0][1])
            known, status = True, -code if code < 0 else code << 8
        how = self._oom.explained(status, describe_status(status)) if known else "has ended"
        logs = [*self.folder.ray.glob(f"session_2*/logs/{name}.*")]
        ends = [f"the end of {log.name}:\n{said}" for log in logs if (said := _end_of(log))]
        return "\n".join([f"{name} on {os.uname().nodename} {how}", *ends])

    def _ended(self) -> str | None:
        """How `ray start` has ended; None if it runs."""
        if self._ray is None or (code := self._ray.poll()) is None:
            return None
        self._failures += time.monotonic() - self._began < QUICK_S
        where = os.uname().nodename
        return f"`ray start` on {where} ended with exit code {code}\n{_end_of(self.folder.log)}"

    def _keep_logs(self) -> str:
        """Copy the ends of Ray's logs to the job's folder. Returns a line about it."""
        logs = [log for name in LOGS for log in self.folder.ray.glob(f"session_2*/logs/{name}")]
        try:
            self.kept.mkdir(parents=True, exist_ok=True)
            for log in (self.folder.log, *logs):
                (self.kept / log.name).write_bytes(_tail(log, KEPT_NBYTES))
        except OSError as error:
            return f"\nRay's logs could not be kept: {error}"
        return f"\nRay's logs of this node are kept in {self.kept}"

    def end(self) -> None:
        """Kill Ray's own processes, and wait a while for others to end with them.

        The gangs' proxies remove their files and end their srun then.
        """
        own = {pid for pid in self._daemons if _process(pid)[1] not in ENDED}
        others = descendants(own)
        for pid in own:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + RAY_END_S
        while own and time.monotonic() < deadline:
            if all(_process(pid)[1] in ENDED for pid in others):
                return
            time.sleep(POLL_INTERVAL_S)

    def _try(self) -> None:
        self._began = time.monotonic()
        self._daemons.clear()
        env = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)}
        env |= {"TMPDIR": str(self.folder.path), "RAY_USAGE_STATS_ENABLED": "0"}
        env |= {**self._metrics, **self.variables}
        env[KEPT_VARIABLE] = "1"
        env.setdefault("RAY_agent_register_timeout_ms", "120000")
        env.setdefault("RAY_enable_metrics_collection", str(int(self.task.metrics)))
        # A shell reports a missing container runtime, and ends with 127.
        words = ["/bin/sh", "-c", 'exec "$@"', "sh", *self._command]
        with open(self.folder.log, "ab") as out:
            self._ray = subprocess.Popen(
                words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip


def _process(pid: int) -> tuple[str, str, int]:
    """Return a process's name, state (empty: it is gone) and, if it has ended, wait status."""
    try:
        name, _, about = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    except OSError:
        return "", "", 0
    state, *fields = about.split()
    return name.partition(" (")[2], state, int(fields[48])


def _tail(path: Path, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - nbytes))
        return file.read()


def _end_of(path: Path) -> str:
    try:
        return without_native_frames(_tail(path, OUTPUT_NBYTES).decode(errors="replace"))
    except OSError:
        return ""


POLL_INTERVAL_S = 0.1
KEEPER_TIMEOUT_S = 30.0  # for the keeper to answer
KEPT = "ray-logs"  # in the job's folder, by node


def supervise(task: NodeTask, signals: Sequence[int]) -> None:
    """Obey the keeper until it ends this, or has ended; remove every trace then.

    The keeper is told of the first of `signals`.

    Raises
    ------
    JobError
        If the node's folder cannot be created, or the network interface does not exist.
    """
    token = Path(task.token).read_text()
    name = allocation.this_node()
    with ExitStack() as ends:
        folder = NodeFolder(task.tmp, task.job)
        ends.callback(folder.remove)
        ends.callback(end_descendants)
        ip = local_address(task.interface, task.keeper.split(":")[1])
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": task.token}
        if task.container:  # the image has no srun
            variables[RELAY] = str(folder.path / "relay")
            ends.callback(Relay(variables[RELAY]).close)
        kept = Path(task.token).parent / KEPT / name
        ray = RayNode(folder, kept, ip, variables, task)
        ends.callback(ray.end)
        hello: Body = {
            "role": "supervisor",
            "name": name,
            "hostname": os.uname().nodename,
            "ip": ip,
            "free": allocation.free_attempts(task.job, ip),
            "cores": os.cpu_count() or 1,
            "others": allocation.other_users(),
        }
        connection, _ = connect(task.keeper, token, hello, timeout_s=KEEPER_TIMEOUT_S)
        with closing(connection):
            _obey(connection, ray, signals)
            ends.close()
            _tell(connection, "gone")


def _obey(connection: Connection, ray: RayNode, signals: Sequence[int]) -> None:
    told = False
    while True:
        if signals and not told:
            told = True
            _tell(connection, "signalled")
        if connection.readable(POLL_INTERVAL_S):
            try:
                order = dict(connection.recv().body)
            except WireError:
                return  # the keeper has ended
            if order.pop("op") == "stop":
                return
            ray.start(**order)
        for op, about in ray.news():
            _tell(connection, op, **about)


def _tell(connection: Connection, op: str, **fields: Any) -> None:
    with suppress(WireError):
        connection.send(Kind.EVENT, {"op": op, **fields})


def main(argv: list[str]) -> int:
    """Supervise this node until the end. Returns the exit code."""
    processes.adopt_orphans()
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: signals.append(number))
    supervise(NodeTask(**json.loads(argv[0])), signals)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
