"""A gang of MPI ranks without Ray, for one function call.

For tests of code that runs on ranks::

    found = local_gang.run("tests.ali.ranks_linalg:accuracy", 3, "float64")

The function gets a real `Gang` and the arguments, and returns a value that JSON can represent. An
exception on any rank is raised as an AssertionError with the output of all ranks. Every run has a
time limit, prints the stacks of ranks that hang to stderr, and leaves no processes or files. The
ranks (`local_rank.py`) are forked from a warm interpreter (`rank_server.py`), which ends with this
process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mpi_workers.local.rank_server import ORDER_FILE
from mpi_workers.node.processes import crowded, die_with_parent, set_waits
from mpi_workers.node.stacks import by_stack, crash_file, of_main_thread
from mpi_workers.waits.interruption import (
    EndedWaits,
    begin,
    interrupt,
    uninterruptible,
    unsafe,
)

# All but close and run: on a rank.
__all__ = ["EndedWaits", "begin", "close", "interrupt", "run", "uninterruptible", "unsafe"]
END_LIMIT_S = 20.0  # until killed ranks, or the server, have ended
OUTPUT_LIMIT = 6000  # characters of the ranks' output in a failure


def run(
    function: str,
    ranks: int,
    *arguments: Any,
    timeout: float = 60.0,
    timeout_name: str = "timeout",
    under: Sequence[str] | None = None,
) -> Any:
    """Run ``module:function`` on `ranks` MPI ranks.

    Parameters
    ----------
    function : str
        ``"module:name"`` of ``f(gang, *arguments)``.
    ranks : int
        Number of ranks.
    *arguments
        Values that JSON can represent.
    timeout : float
        Seconds; then all ranks are killed.
    timeout_name : str
        What the caller calls it, for the error.
    under : sequence of str, optional
        A command that starts each rank, such as ``["gdb", "--args"]``. The ranks then have the
        standard streams of this process.

    Returns
    -------
    object
        The value that the function returned on rank 0.

    Raises
    ------
    AssertionError
        If a rank failed or time ran out; its message ends with the ranks' output.
    """
    deadline = time.time() + timeout
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        argv = [function, json.dumps(arguments), folder, str(deadline)]
        gang: _Forked | _Started
        # A preloaded library, such as a sanitizer, may not outlive a fork.
        if under is None and "LD_PRELOAD" not in os.environ:
            gang = _Forked(folder, ranks, argv)
        else:
            gang = _Started(under, folder, ranks, argv)
        try:
            output, code = gang.wait(deadline + 1)
            what = f"exit code {code}"
        except TimeoutError:
            sys.stderr.write(_where(Path(folder), tested=under is None))
            output = gang.end()
            what = f"over {timeout:g} s ({timeout_name})"
        finally:
            gang.end()
        done = len(list(Path(folder).glob("done*")))
        if done != ranks:
            said = output.decode(errors="replace")[-OUTPUT_LIMIT:]
            raise AssertionError(f"{function} on {ranks} ranks: {what}, {done} done\n{said}")
        return json.loads(Path(folder, "result.json").read_text())


class _Forked:
    """A gang of the rank server."""

    def __init__(self, folder: str, ranks: int, argv: list[str]) -> None:
        order = {
            "ranks": ranks, "argv": argv, "cwd": os.getcwd(),
            "cores": sorted(os.sched_getaffinity(0)),
        }  # fmt: skip
        Path(folder, ORDER_FILE).write_text(json.dumps(order))
        self._said = bytearray()
        self._owner, theirs = socket.socketpair()
        self._output, output = os.pipe()
        try:
            with theirs, open(output, "wb", buffering=0):
                _server_for(_environment()).start(folder, output, theirs.fileno())
        except BaseException:
            self.end()
            raise

    def wait(self, deadline: float) -> tuple[bytes, int]:
        """Wait for the end of the ranks: what they have printed, and their exit code."""
        ready = select.poll()
        ready.register(self._output, select.POLLIN)
        while ready.poll(max(deadline - time.time(), 0.0) * 1000):
            if not (more := os.read(self._output, 1 << 16)):
                return bytes(self._said), (self._owner.recv(1) or b"\1")[0]
            self._said += more
        raise TimeoutError

    def end(self) -> bytes:
        """End the ranks. What they have printed."""
        if self._owner.fileno() >= 0:
            self._owner.shutdown(socket.SHUT_WR)
            with contextlib.suppress(TimeoutError):
                self.wait(time.time() + END_LIMIT_S)
            self._owner.close()
            os.close(self._output)
        return bytes(self._said)


class _Started:
    """A gang that mpiexec starts; under another command it has this process's streams."""

    def __init__(
        self, under: Sequence[str] | None, folder: str, ranks: int, argv: list[str]
    ) -> None:
        self._folder = folder
        self._said = Path(folder, "output")
        mpiexec = Path(sys.executable).parent / "mpiexec"
        program = [sys.executable, "-m", "mpi_workers", "local-rank", *argv]
        env = _environment()
        set_waits(crowded(ranks), env)
        parent = os.getpid()
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [mpiexec, "-n", str(ranks), *(under or ()), *program],
                env=env,
                stdin=subprocess.DEVNULL if under is None else None,
                stdout=said if under is None else None,
                stderr=subprocess.STDOUT if under is None else None,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(parent, signal.SIGTERM),  # and its ranks
            )

    def wait(self, deadline: float) -> tuple[bytes, int]:
        try:
            code = self._process.wait(max(deadline - time.time(), 0.0))
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
        return self._said.read_bytes(), code

    def end(self) -> bytes:
        """Kill what still runs. Hydra gives every rank its own session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for path in Path(self._folder).glob("rank*.pid"):
            pid = int(path.read_text())
            with contextlib.suppress(OSError):
                if self._folder.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.wait()
        return self._said.read_bytes()


class _Server:
    """A process of `rank_server`, for gangs in one environment."""

    def __init__(self, env: dict[str, str]) -> None:
        self.env = env
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "mpi_workers", "local-server", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, env=env, cwd="/", stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            start_new_session=True,
        )  # fmt: skip
        theirs.close()

    def start(self, folder: str, *descriptors: int) -> None:
        socket.send_fds(self._orders, [folder.encode()], descriptors)

    def close(self) -> None:
        """End it; gangs that run go on."""
        with contextlib.suppress(OSError):
            self._orders.shutdown(socket.SHUT_RDWR)
        self._orders.close()
        try:
            self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_server: _Server | None = None
_lock = threading.Lock()


def _server_for(env: dict[str, str]) -> _Server:
    global _server
    with _lock:
        if _server is not None and (_server.env != env or _server.process.poll() is not None):
            _server.close()
            _server = None
        _server = _server or _Server(env)
        return _server


def close() -> None:
    """End the process that starts ranks; the next `run` starts another one."""
    global _server
    with _lock:
        if _server is not None:
            _server.close()
        _server = None


def _forget() -> None:
    """In a forked process: the server belongs to its parent."""
    global _server, _lock
    _server, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _environment() -> dict[str, str]:
    drops = ("PMI", "HYDI", "MPI", "PYTEST_CURRENT_TEST")
    env = {k: v for k, v in os.environ.items() if not k.startswith(drops)}
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"
    return env


def _where(folder: Path, *, tested: bool) -> str:
    """The stacks of the ranks; in tests also each rank's own, with the frames of this package."""
    pids = {int(path.stem[4:]): int(path.read_text()) for path in folder.glob("rank*.pid")}
    with ThreadPoolExecutor() as pool:
        found = dict(zip(pids, pool.map(of_main_thread, pids.values()), strict=True))
    lines = by_stack({rank: frames for rank, frames in found.items() if frames})
    for rank, frames in found.items():
        file = Path(crash_file(str(folder), rank))
        if (tested or not frames) and file.exists():
            lines.append(f"rank {rank}:\n{file.read_text(errors='replace')}")
    return "\n".join([*lines, ""])
