"""A node's rank processes: started, listened to, waited for, killed.

Ranks are forked from this (warm, single-threaded) process, so that the kernel
ties their lives to it, or started by a site's launcher: mpiexec here, or srun on
all nodes at once. Such ranks find their proxy by its folder, and leave their pid there.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from mpi_workers.node.cgroup import OomWatch
from mpi_workers.node.cleanup import PREFIX
from mpi_workers.node.output import STDERR, STDOUT, OutputLines, rank_pipe
from mpi_workers.node.process_control import (
    close_all_but,
    descendants,
    describe_status,
    die_with_parent,
)
from mpi_workers.node.specs import RANK_PROGRAM, ProxySpec, RankConfig
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Body

RANK_FILE = "rank.json"  # in a proxy's folder: what ranks are told that it has not forked
PID_FILE = "pid-"  # there too, with a pid: such a rank
TAIL_LIMIT = 4 << 10  # 4 KiB of a rank's last words are told
READ_BYTES = 64 << 10  # 64 KiB: what a pipe holds
READS = 4  # at once; then others have their turn
LEAVE_S = 2.0  # how long a launcher of many nodes may take to end its ranks there
LAUNCHER = -1  # speaks for ranks that have no pipes of their own yet

Speaker = tuple[int, int]  # rank (or LAUNCHER) and stream


class RankProcess:
    """One rank of this node."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pid: int | None = None
        self.status: int | None = None  # as waitpid gives it
        self.control: FrameProtocol | None = None
        self.hello: Body = {}
        self._tail: deque[bytes] = deque()
        self._tail_nbytes = 0

    def said(self, data: bytes) -> None:
        """Remember the end of what the rank prints."""
        self._tail.append(data)
        self._tail_nbytes += len(data)
        while self._tail_nbytes - len(self._tail[0]) > TAIL_LIMIT:
            self._tail_nbytes -= len(self._tail.popleft())

    def last_words(self) -> str:
        return b"".join(self._tail)[-TAIL_LIMIT:].decode(errors="replace").strip()


class LocalRanks:
    """All ranks of this node.

    Attributes
    ----------
    by_rank : dict of int to RankProcess
    pipes : dict of (int, int) to int
        File descriptors of what is printed, by rank and stream. A site's launcher has a pipe
        of its own, of what its ranks say until they have found theirs.
    lines : OutputLines
        What ranks have printed and nobody was told yet.
    pmi : dict of int to socket
        Where forked ranks speak PMI; closed by a rank's end and nothing else.
    """

    def __init__(self, spec: ProxySpec) -> None:
        self._spec = spec
        self._starter: subprocess.Popen[bytes] | None = None
        self._folder = Path()
        self.by_rank = {rank: RankProcess(rank) for rank in spec.local_ranks}
        self.pipes: dict[Speaker, int] = {}
        self.lines = OutputLines()
        self._ears: select.poll | None = None
        self._launcher = RankProcess(LAUNCHER)
        self.pmi: dict[int, socket.socket] = {}
        self._oom = OomWatch()

    @property
    def forked(self) -> bool:
        """Whether the ranks are this process's children (else a launcher has started them)."""
        return self._spec.start is None

    @property
    def launching(self) -> bool:
        """Whether the command that has started the ranks is this process's child."""
        return self._starter is not None

    def start(
        self, config: RankConfig, folder: Path, run_rank: Callable[[RankConfig], None]
    ) -> None:
        """Start them. Called before an event loop exists: a fork must not inherit it."""
        self._folder = folder
        if self._spec.start is not None:
            for rank in self.by_rank:
                for stream in (STDOUT, STDERR):
                    path = rank_pipe(folder, rank, stream)
                    os.mkfifo(path, 0o600)
                    self.pipes[rank, stream] = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._await(config, folder / RANK_FILE)
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
                self.pipes[process.rank, stream] = read_end
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

    def _await(self, config: RankConfig, path: Path) -> None:
        """Leave word for the ranks of this node, whole or not at all."""
        unfinished = path.with_suffix(".new")
        with open(os.open(unfinished, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            json.dump(asdict(config), file)
        unfinished.rename(path)

    def _run(self, command: list[str]) -> None:
        """Run the command that starts the ranks of all nodes."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        # Other nodes' folders have other names: what they share is the gang's.
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
        # A launcher of many nodes is asked to go, so that it ends its ranks on all of them.
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
        self.pipes[LAUNCHER, STDOUT] = read_end

    def listen(self, speaker: Speaker) -> bool:
        """Take in what was printed to a pipe, but not for ever; whether it is still open.

        The pipe must not block.
        """
        rank, stream = speaker
        for _ in range(READS):
            try:
                data = os.read(self.pipes[speaker], READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                return False
            self.by_rank.get(rank, self._launcher).said(data)
            self.lines.add(rank, stream, data)
            if len(data) < READ_BYTES:
                break
        return True

    def hear_out(self, rank: int | None = None) -> None:
        """Take in all that a rank (or any) has printed so far, also what has no newline yet."""
        if self._ears is None:
            self._ears = select.poll()
            for pipe in self.pipes.values():
                self._ears.register(pipe, select.POLLIN)
        if ready := dict(self._ears.poll(0)):  # one look at all of them
            for speaker, pipe in self.pipes.items():
                if pipe in ready:
                    self.listen(speaker)
        self.lines.finish(rank)

    def last_words(self, rank: int) -> str:
        """The end of what a rank printed (or of what its launcher said, where it said nothing)."""
        for speaker in list(self.pipes):
            if speaker[0] in (rank, LAUNCHER):
                with contextlib.suppress(OSError):
                    self.listen(speaker)
        return self.by_rank[rank].last_words() or self._launcher.last_words()

    def ended(self) -> list[tuple[int, str]]:
        """Ranks that have ended since the last look, each with how."""
        found = []
        if self._starter is not None and self._starter.poll() is not None:
            name = Path(self._spec.start[0]).name if self._spec.start else ""
            cause = f"and all of {name} ended with {self._starter.returncode}"
            found.append((next(iter(self.by_rank)), cause))
        if not self.forked:
            return found
        for process in self.by_rank.values():
            if process.status is None and process.pid is not None:
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                if pid:
                    process.status = status
                    words = self._oom.explained(status, describe_status(status))
                    found.append((process.rank, words))
        return found

    def any_alive(self) -> bool:
        """Whether any rank still runs."""
        if self.forked:
            self.ended()
            return any(p.pid is not None and p.status is None for p in self.by_rank.values())
        return any(os.path.exists(f"/proc/{p.pid}") for p in self.by_rank.values() if p.pid)

    def pids(self) -> set[int]:
        """The ranks that run here, and what a launcher has started and is not a rank yet."""
        known = {p.pid for p in self.by_rank.values() if p.pid is not None and p.status is None}
        if self._spec.across_nodes:
            left = self._folder.glob(f"{PID_FILE}*")
            return known | {int(path.name.removeprefix(PID_FILE)) for path in left}
        return known | (descendants(self._starter.pid) if self._starter is not None else set())

    def kill(self) -> None:
        """Kill what still runs, and wait until it is gone."""
        if self._starter is not None and self._spec.across_nodes:
            self._starter.terminate()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if self._starter is not None:
            if self._spec.across_nodes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._starter.wait(LEAVE_S)
            with contextlib.suppress(OSError):
                os.killpg(self._starter.pid, signal.SIGKILL)
            self._starter.wait()
        if not self.forked:
            return
        for process in self.by_rank.values():
            if process.pid is not None and process.status is None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)


def sign_in(folder: str | Path) -> None:
    """Leave this process's pid for the proxy of its node, which has not started it."""
    with contextlib.suppress(OSError):
        Path(folder, f"{PID_FILE}{os.getpid()}").touch()
