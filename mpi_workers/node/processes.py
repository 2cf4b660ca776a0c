"""A node's rank processes: how they are started, reaped and killed.

Ranks are forked from this warm, single-threaded process, which the kernel makes their parent, or a
site's launcher starts them: mpiexec on this node, or srun on all nodes at once. Such ranks find
their proxy by its folder, and leave their pid there.

The proxy adopts the orphans of its ranks, so every process that a rank has started ends with the
gang.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from mpi_workers.data import endpoint
from mpi_workers.failures import describe_status
from mpi_workers.node.cleanup import PREFIX
from mpi_workers.node.oom_watch import OomWatch
from mpi_workers.node.output_lines import STDERR, STDOUT, rank_pipe
from mpi_workers.node.process_control import (
    close_all_but,
    descendants,
    die_with_parent,
    end_descendants,
)
from mpi_workers.node.rank_output import LAUNCHER, RankOutput
from mpi_workers.node.specs import RANK_PROGRAM, ProxySpec, RankConfig
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body

RANK_FILE = "rank.json"  # in a proxy's folder: the configuration of ranks that it has not forked
PID_FILE = "pid-"  # in that folder too, with a pid: a process of such a rank
LEAVE_S = 2.0  # time limit for a launcher of many nodes to end its ranks there


class RankProcess:
    """One rank of this node."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.pidfd: int | None = None
        self.status: int | None = None  # as waitpid returns it
        self.control: FrameProtocol | None = None
        self.hello: Body = {}

    def open_pidfd(self) -> int | None:
        """A descriptor that is readable when the process has ended, or None (Linux < 5.3)."""
        if self.pidfd is None and self.pid is not None:
            with contextlib.suppress(OSError):
                self.pidfd = os.pidfd_open(self.pid)
        return self.pidfd


class LocalRanks:
    """All ranks of this node.

    Attributes
    ----------
    by_rank : dict of int to RankProcess
    output : RankOutput
        What they print.
    pmi : dict of int to socket
        Sockets on which forked ranks speak PMI.
    endpoint_pid, endpoint_end : int, str or None
        The process of the data endpoint, and how it has ended.
    """

    def __init__(self, spec: ProxySpec) -> None:
        self._spec = spec
        self._starter: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self.by_rank = {rank: RankProcess(rank) for rank in spec.local_ranks}
        self.output = RankOutput(spec.log_folder)
        self.pmi: dict[int, socket.socket] = {}
        self.endpoint_pid = 0
        self.endpoint_end: str | None = None
        self._oom = OomWatch()

    @property
    def forked(self) -> bool:
        """Whether the ranks are this process's children. If not, a launcher has started them."""
        return self._spec.start is None

    def start_endpoint(self, listeners: Sequence[socket.socket]) -> None:
        """Fork the node's data endpoint, which takes over the listening sockets."""
        parent = os.getpid()
        self.endpoint_pid = os.fork()
        if self.endpoint_pid:
            for listener in listeners:
                listener.close()
            return
        try:
            die_with_parent(parent)
            close_all_but(0, 1, 2, *(listener.fileno() for listener in listeners))
            ranks = self._spec.local_ranks
            endpoint.main(listeners, self._spec.token, range(ranks[0], ranks[-1] + 1))
        finally:
            os._exit(1)

    def start(
        self, config: RankConfig, folder: Path, run_rank: Callable[[RankConfig], None]
    ) -> None:
        """Start the ranks, before this process has an event loop: forks must not inherit one."""
        self._folder = folder
        if self._spec.start is not None:
            for rank in self.by_rank:
                for stream in (STDOUT, STDERR):
                    path = rank_pipe(folder, rank, stream)
                    os.mkfifo(path, 0o600)
                    self.output.pipes[rank, stream] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._write_config(config, folder / RANK_FILE)
            if self._spec.node == 0:
                self._run(self._spec.start)
            return
        for process in self.by_rank.values():
            self._fork(process, config, run_rank)

    def _fork(
        self, process: RankProcess, config: RankConfig, run_rank: Callable[[RankConfig], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        pipes = {stream: os.pipe() for stream in (STDOUT, STDERR)}
        parent = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self.pmi[process.rank] = ours
            for stream, (read_end, write_end) in pipes.items():
                os.close(write_end)
                self.output.pipes[process.rank, stream] = read_end
            process.pid = pid
            return
        try:
            die_with_parent(parent)
            for stream, (_, write_end) in pipes.items():
                os.dup2(write_end, stream)
            close_all_but(0, 1, 2, theirs.fileno())
            os.environ.update(
                PMI_FD=str(theirs.fileno()),
                PMI_RANK=str(process.rank),
                PMI_SIZE=str(self._spec.size),
            )
            run_rank(config)
        finally:
            os._exit(1)

    def _write_config(self, config: RankConfig, path: Path) -> None:
        """Write the configuration for the ranks of this node, atomically."""
        unfinished = path.with_suffix(".new")
        with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            json.dump(asdict(config), file)
        unfinished.rename(path)

    def _run(self, command: list[str]) -> None:
        """Run the command that starts the ranks of all nodes."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        # The folders of other nodes have other names, which all begin with the gang's.
        names = f"{PREFIX}{self._spec.gang}-*" if self._spec.across_nodes else self._folder.name
        pattern = str(Path(glob.escape(str(self._folder.parent))) / names / RANK_FILE)
        program = [sys.executable, "-m", "mpi_workers", "rank", pattern]
        argv = [word for w in command for word in (program if w == RANK_PROGRAM else [w])]
        dropped = tuple(self._spec.start_drops)
        env = {k: v for k, v in os.environ.items() if not dropped or not k.startswith(dropped)}
        env |= self._spec.start_adds
        for variable, text in self._spec.start_files.items():
            file = self._folder / variable
            file.write_text(text)
            env[variable] = str(file)
        # SIGTERM lets a launcher of many nodes end its ranks on all of them.
        farewell = signal.SIGTERM if self._spec.across_nodes else signal.SIGKILL
        try:
            self._starter = subprocess.Popen(
                argv,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, farewell),
            )
        finally:
            os.close(write_end)
        self.output.pipes[LAUNCHER, STDOUT] = read_end

    def reap(self, process: RankProcess) -> str | None:
        """How a rank has ended, or None if it runs."""
        if not self.forked:
            return "ended"
        if process.status is not None or process.pid is None:
            return None
        pid, status = os.waitpid(process.pid, os.WNOHANG)
        if not pid:
            return None
        process.status = status
        return self._oom.explained(status, describe_status(status))

    def reap_children(self) -> list[tuple[int, str]]:
        """Reap orphans that ranks have left; ended ranks without a pidfd, and how they ended.

        Ranks with a pidfd are reaped by `reap`, in the order in which they ended.
        """
        ranks = {process.pid: process for process in self.by_rank.values()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return []
            if ended is None:
                return []
            if self._starter is not None and ended.si_pid == self._starter.pid:
                name = Path(self._spec.start[0]).name if self._spec.start else ""
                cause = f"and all of {name} ended with {self._starter.poll()}"
                return [(next(iter(self.by_rank)), cause)]
            if ended.si_pid == self.endpoint_pid:
                status = os.waitpid(self.endpoint_pid, os.WNOHANG)[1]
                self.endpoint_end = self._oom.explained(status, describe_status(status))
                continue
            if (process := ranks.get(ended.si_pid)) is not None:
                how = None if process.pidfd is not None else self.reap(process)
                return [] if how is None else [(process.rank, how)]
            os.waitpid(ended.si_pid, os.WNOHANG)

    def any_alive(self) -> bool:
        """Whether any rank still runs."""
        if self.forked:
            for process in self.by_rank.values():
                self.reap(process)
            return any(p.pid is not None and p.status is None for p in self.by_rank.values())
        return any(os.path.exists(f"/proc/{p.pid}") for p in self.by_rank.values() if p.pid)

    def pids(self) -> set[int]:
        """The ranks that run here, and processes of a launcher that are not ranks yet."""
        known = {p.pid for p in self.by_rank.values() if p.pid is not None and p.status is None}
        if self._spec.across_nodes:
            left = self._folder.glob(f"{PID_FILE}*")
            known |= {int(path.name.removeprefix(PID_FILE)) for path in left}
        if self._starter is not None:
            known |= descendants([self._starter.pid])
        return known

    def kill(self) -> None:
        """Kill the ranks and all their descendants, and wait until they have ended."""
        if self._starter is not None and self._spec.across_nodes:
            self._starter.terminate()
        if not self.forked:
            ranks = self.pids()
            for pid in ranks | descendants(ranks):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        if self._starter is not None and self._spec.across_nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._starter.wait(LEAVE_S)
        end_descendants()


def sign_in(folder: str | Path) -> None:
    """Leave this process's pid for the proxy of its node, which has not started it."""
    with contextlib.suppress(OSError):
        Path(folder, f"{PID_FILE}{os.getpid()}").touch()
