"""A node's rank processes: how they are started, reaped and killed; tools for processes.

Ranks are forked from this warm, single-threaded process, which the kernel makes their parent, or a
site's launcher starts them: mpiexec on this node, or srun on all nodes at once. Such ranks find
their proxy by its folder, and leave their pid there.

The proxy adopts the orphans of its ranks, so every process that a rank has started ends with the
gang.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import glob
import json
import os
import resource
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path

from mpi_workers.data import endpoint
from mpi_workers.failures import describe_status
from mpi_workers.matrix.available_memory import MEMBERSHIP, MOUNT, MemoryCgroup
from mpi_workers.matrix.sizes import readable
from mpi_workers.node.cleanup import PID_FILE, PREFIX
from mpi_workers.node.rank_output import LAUNCHER, RankOutput, rank_pipe
from mpi_workers.node.specs import RANK_PROGRAM, GangPlan, RankConfig, Start
from mpi_workers.protocol.proxy_messages import STDERR, STDOUT
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body

KILLED_END_S = 10.0  # for descendants to end after SIGKILL
REAP_INTERVAL_S = 0.002
PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61
ANYONE = -1  # for `let_trace`
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends (a child subreaper)."""
    if _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def let_trace(pid: int) -> None:
    """Allow a process and its descendants to read this one's stack, where Yama restricts that."""
    _libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)  # an error: there is no Yama


def _children() -> dict[int, list[int]]:
    """The children of every process on this machine."""
    found = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                found[int(stat.read().rpartition(")")[2].split()[1])].append(int(name))
    return found


def descendants(pids: Collection[int]) -> set[int]:
    """The children of these processes, their children, and so on."""
    children = _children()
    found: set[int] = set()
    left = list(pids)
    while left:
        for child in children[left.pop()]:
            if child not in found:
                found.add(child)
                left.append(child)
    return found


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill and reap all descendants of this process, which must have called `adopt_orphans`.

    Children in `spared` and their descendants are left alone. A process that was forked in the
    meantime becomes our child when its parent dies, and is killed in the next turn. Gives up after
    `KILLED_END_S`: a process that waits for a dead disk or device cannot be killed.
    """
    deadline = time.monotonic() + KILLED_END_S
    while time.monotonic() < deadline:
        ours = set(_children()[os.getpid()]) - set(spared)
        if not ours:
            return
        _kill(ours)
        while (ours := {pid for pid in ours if not _reaped(pid)}) and time.monotonic() < deadline:
            time.sleep(REAP_INTERVAL_S)


def _kill(pids: Collection[int]) -> None:
    """Kill processes and their descendants."""
    for pid in {*pids, *descendants(pids)}:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _reaped(pid: int) -> bool:
    """Whether a child has ended; it is reaped."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent dies."""
    _libc.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def allow_open_files() -> None:
    """Raise this process's limit on open files, which children inherit, as far as it may.

    Many systems start with 1024, and a proxy has six descriptors for each rank.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def close_all_but(*keep: int) -> None:
    """Close every inherited file descriptor but these."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        if fd not in keep:
            with contextlib.suppress(OSError):
                os.close(fd)


def close_listeners() -> None:
    """Close inherited sockets that accept connections: Hydra leaves its control port to ranks."""
    for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                with socket.socket(fileno=os.dup(fd)) as copy:
                    listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens:
                    os.close(fd)


class OomWatch:
    """Counts the kills of the kernel's OOM killer from the creation of this object."""

    def __init__(self, membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> None:
        self._cgroup = MemoryCgroup.find(membership, mount)
        self._before = self._kills()

    def _kills(self) -> int:
        return self._cgroup.oom_kills() if self._cgroup is not None else 0

    def limit(self) -> int | None:
        """Bytes that may be used: the lowest limit of the cgroup and those above it."""
        return self._cgroup.limit() if self._cgroup is not None else None

    def explained(self, status: int, words: str) -> str:
        """`words`, how a process ended, or that the OOM killer has killed it and why."""
        if not (status & 0x7F == signal.SIGKILL and self._kills() > self._before):
            return words
        self._before = self._kills()
        limit = self.limit()
        why = (
            f"the memory limit of its pod, container or job is {readable(limit)} ({limit} bytes)"
            if limit is not None
            else "the node has run out of memory"
        )
        return f"was killed by the kernel's OOM killer (signal 9): {why}"


RANK_FILE = "rank.json"  # in a proxy's folder: the configuration of ranks that it has not forked
LEAVE_S = 2.0  # time limit for a launcher of many nodes to end its ranks there


class WatchedProcess:
    """A process whose end the proxy notices: a rank, the data endpoint, a site's launcher.

    Attributes
    ----------
    pid : int
        0 while it is not known.
    pidfd : int or None
        A descriptor that is readable when the process has ended. None on Linux before 5.3.
    status : int or None
        As waitpid returns it.
    """

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.pidfd: int | None = None
        self.status: int | None = None

    def open_pidfd(self) -> int | None:
        if self.pidfd is None and self.pid:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)
        return self.pidfd


class RankProcess(WatchedProcess):
    """One rank of this node."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.control: FrameProtocol | None = None
        self.hello: Body = {}


class LocalRanks:
    """All ranks of this node, and the other processes that the proxy starts.

    Attributes
    ----------
    by_rank : dict of int to RankProcess
    output : RankOutput
        What they print.
    pmi : dict of int to socket
        Sockets on which forked ranks speak PMI.
    endpoint, starter : WatchedProcess
        The data endpoint, and the site's launcher.
    """

    def __init__(self, plan: GangPlan, node: int) -> None:
        self._plan = plan
        self._start = plan.start
        self._folder = Path()
        self.by_rank = {rank: RankProcess(rank) for rank in plan.ranks(node)}
        self.output = RankOutput(plan.log_folder)
        self.pmi: dict[int, socket.socket] = {}
        self.endpoint = WatchedProcess()
        self.starter = WatchedProcess()
        self._oom = OomWatch()

    @property
    def forked(self) -> bool:
        """Whether the ranks are this process's children. If not, a launcher has started them."""
        return self._start is None

    @property
    def children(self) -> list[WatchedProcess]:
        """The processes that this one has forked."""
        ranks = self.by_rank.values() if self.forked else ()
        return [process for process in (*ranks, self.endpoint, self.starter) if process.pid]

    def start_endpoint(self, listeners: Sequence[socket.socket]) -> None:
        """Fork the node's data endpoint, which takes over the listening sockets."""
        ranks = range(min(self.by_rank), max(self.by_rank) + 1)
        self.endpoint.pid = fork(
            lambda: endpoint.main(listeners, self._plan.token, ranks),
            *(listener.fileno() for listener in listeners),
        )
        for listener in listeners:
            listener.close()

    def start(
        self, config: RankConfig, folder: Path, run_rank: Callable[[RankConfig], None]
    ) -> None:
        """Start the ranks, also after `end`. Call it in the main thread."""
        self._folder = folder
        if self._start is None:
            for process in self.by_rank.values():
                self._fork_rank(process, config, run_rank)
            return
        for rank in self.by_rank:
            for stream in (STDOUT, STDERR):
                if (rank, stream) in self.output.pipes:
                    continue
                path = rank_pipe(folder, rank, stream)
                os.mkfifo(path, 0o600)
                self.output.pipes[rank, stream] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        unfinished = folder / f"{RANK_FILE}.new"
        with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            json.dump(asdict(config), file)
        unfinished.rename(folder / RANK_FILE)
        if 0 in self.by_rank:
            self._run(self._start)

    def _fork_rank(
        self, process: RankProcess, config: RankConfig, run_rank: Callable[[RankConfig], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        pipes = {stream: os.pipe() for stream in (STDOUT, STDERR)}
        writers = {stream: write_end for stream, (_, write_end) in pipes.items()}

        def run() -> None:
            for stream, write_end in writers.items():
                os.dup2(write_end, stream)
                os.close(write_end)
            os.environ.update(
                PMI_FD=str(theirs.fileno()),
                PMI_RANK=str(process.rank),
                PMI_SIZE=str(self._plan.size),
            )
            run_rank(config)

        self.pmi[process.rank] = ours
        self.output.pipes |= {(process.rank, name): ends[0] for name, ends in pipes.items()}
        try:
            process.pid = fork(run, theirs.fileno(), *writers.values())
        finally:
            theirs.close()
            for write_end in writers.values():
                os.close(write_end)

    def _run(self, start: Start) -> None:
        """Run the command that starts the ranks of all nodes."""
        read_end, write_end = os.pipe()
        # The folders of other nodes have other names, which all begin with the gang's.
        names = f"{PREFIX}{self._plan.gang}-*" if start.across_nodes else self._folder.name
        pattern = str(Path(glob.escape(str(self._folder.parent))) / names / RANK_FILE)
        program = [sys.executable, "-m", "mpi_workers", "rank", pattern]
        argv = [word for w in start.argv for word in (program if w == RANK_PROGRAM else [w])]
        env = {k: v for k, v in os.environ.items() if not k.startswith(start.drops)}
        env |= start.adds
        for variable, text in start.files.items():
            file = self._folder / variable
            file.write_text(text)
            env[variable] = str(file)

        def run() -> None:
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it
            for stream, fd in enumerate((os.open(os.devnull, os.O_RDONLY), write_end, write_end)):
                os.dup2(fd, stream)
            os.execvpe(argv[0], argv, env)

        # SIGTERM lets a launcher of many nodes end its ranks on all of them.
        farewell = signal.SIGTERM if start.across_nodes else signal.SIGKILL
        self.starter.pid = fork(run, write_end, farewell=farewell)
        os.close(write_end)
        self.output.pipes[LAUNCHER, STDOUT] = read_end

    def end_of(self, process: WatchedProcess) -> str | None:
        """How a process has ended; None if it runs, or if that was told before."""
        if process not in self.children:
            return "ended"  # only its launcher knows how
        if process.status is not None or (status := _reap(process)) is None:
            return None
        if process is self.starter and self._start is not None:
            code = os.waitstatus_to_exitcode(status)
            return f"and all of {Path(self._start.argv[0]).name} ended with {code}"
        return self._oom.explained(status, describe_status(status))

    def ended_children(self) -> Iterator[WatchedProcess]:
        """Children without a pidfd that have ended; orphans that ranks have left are reaped.

        Children with a pidfd are reaped when it is readable: in the order in which they ended.
        """
        by_pid = {process.pid: process for process in self.children}
        with contextlib.suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                process = by_pid.get(ended.si_pid) or WatchedProcess(ended.si_pid)
                if process.pidfd is not None:
                    return
                if ended.si_pid in by_pid:
                    yield process  # the caller asks how it has ended
                _reap(process)

    def any_alive(self) -> bool:
        """Whether any rank still runs."""
        return any(
            process.status is None and os.path.exists(f"/proc/{process.pid}")
            for process in self.by_rank.values()
            if process.pid
        )

    def pids(self) -> set[int]:
        """The ranks that run here, and processes of a launcher that are not ranks yet."""
        known = {p.pid for p in self.by_rank.values() if p.pid and p.status is None}
        if self._start is not None and self._start.across_nodes:
            left = self._folder.glob(f"{PID_FILE}*")
            known |= {int(path.name.removeprefix(PID_FILE)) for path in left}
        if self.starter.pid:
            known |= descendants([self.starter.pid])
        return known

    def end(self) -> None:
        """End the ranks, so that they can be started again; the data endpoint goes on."""
        self.kill(spared=[self.endpoint.pid])
        for process in (*self.by_rank.values(), self.starter):
            if process.pidfd is not None:
                os.close(process.pidfd)
        for sock in self.pmi.values():
            sock.close()
        self.pmi.clear()
        self.output.end(kept=not self.forked)
        self.by_rank.update({rank: RankProcess(rank) for rank in self.by_rank})
        self.starter = WatchedProcess()

    def kill(self, spared: Collection[int] = ()) -> None:
        """Kill the ranks and all their descendants, and wait until they have ended."""
        farewell = self._start is not None and self._start.across_nodes and self.starter.pid
        if farewell and _reap(self.starter) is None:
            os.kill(self.starter.pid, signal.SIGTERM)
        if not self.forked:
            _kill(self.pids())
        deadline = time.monotonic() + LEAVE_S
        while farewell and _reap(self.starter) is None and time.monotonic() < deadline:
            time.sleep(REAP_INTERVAL_S)
        end_descendants(spared)


def fork(run: Callable[[], None], *kept: int, farewell: int | None = signal.SIGKILL) -> int:
    """Fork a process that has no descriptors but 0, 1, 2 and `kept`; its pid.

    It gets the signal `farewell` when this process ends; None: none.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        if farewell is not None:
            die_with_parent(parent, farewell)
        gc.freeze()  # the end of a parent's object would close a descriptor of this process
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        close_all_but(0, 1, 2, *kept)
        if random := sys.modules.get("numpy.random"):
            random.seed()  # as in a process of its own: all ranks would draw the same numbers
        run()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _reap(process: WatchedProcess) -> int | None:
    """The status of a child that has ended, None while it runs."""
    if process.status is None:
        # A thread of this process that has started py-spy may have reaped it.
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(process.pid, os.WNOHANG)
            process.status = status if pid else None
    return process.status


def sign_in(folder: str | Path) -> None:
    """Leave this process's pid for the proxy of its node, which has not started it."""
    with contextlib.suppress(OSError):
        Path(folder, f"{PID_FILE}{os.getpid()}").touch()


# MPICH's collectives through shared memory test a flag 1000 times between two tests of everything
# else, and do not sleep. Its collectives of messages sleep: 6 ranks on 2 cores took 79 s for the
# conformance tests of ScaLAPACK with the former, 17 s with the latter.
BY_MESSAGES = {
    f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "mpir"
    for name in ("ALLREDUCE", "BARRIER", "BCAST", "REDUCE")
}


def crowded(threads: int) -> bool:
    """Whether this machine has fewer cores than this number of busy threads."""
    return threads > len(os.sched_getaffinity(0))


SET_TURN = {"x86_64": 314, "aarch64": 274}  # the number of `sched_setattr`
TURN_NS = 100_000  # the least that Linux gives
SLACK_NS = 1000


def take_short_turns() -> None:
    """Have this rank go on soon after a wait, beside a program that wants its core, too.

    Linux 6.12 and later: a busy program has a core for 3 ms otherwise; the rank's share of the core
    stays what it was.
    """
    number = SET_TURN.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # size, policy, flags, nice, priority, runtime, deadline, period
    turn = struct.pack("=IIQiIQQQ", 48, os.SCHED_OTHER, 0, nice, 0, TURN_NS, 0, 0)
    _libc.syscall(number, 0, turn, 0)


def wake_on_time() -> None:
    """Have the sleeps of this rank end when they should, not up to 50 us later.

    Not for ranks that share cores: there MPICH yields by a sleep of 1 ns (`set_waits`). An exact
    one returns at once, and the core is not free for another rank.
    """
    _libc.prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)


def physical_cores() -> int:
    """Cores that this process may use; hardware threads of one core count once."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            place = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
            siblings.add(place.read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def set_waits(crowded: bool, env: MutableMapping[str, str] = os.environ) -> None:
    """Set MPICH's variables for waits. Call it before MPI_Init.

    Parameters
    ----------
    crowded : bool
        Whether the ranks share cores.
    env : mapping
        Algorithms that are chosen already are kept.
    """
    env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1" if crowded else "0"  # yields sleep, or do not
    if crowded:
        for name, value in BY_MESSAGES.items():
            env.setdefault(name, value)
