"""The agent: one standing actor per node, doing on its node what others must not do from afar.

It keeps the fork server from which ranks are forked, and it sends the blocks that
lie in its node's object store. Gangs outlive it: their life line is the
GroupManager, not the agent.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import ray

from alchemist_ray.errors import LaunchError
from alchemist_ray.functions import node_files
from alchemist_ray.transfer import node_jobs
from mpi_workers.node import cleanup
from mpi_workers.node.specs import ProxySpec

FORK_SERVER_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.01  # between looks at a gang that is ending
# What a job manager or an outer MPI left in the environment would confuse the ranks' MPI.
FOREIGN = ("PMI_", "PMIX_", "HYDI_", "HYDRA_", "RAY_", "MPI_LOCAL")


def rank_environment() -> dict[str, str]:
    """The environment for the MPI side: ours, less other launchers' and Ray's variables."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"  # a threaded BLAS must not fork
    env["PYTHONUNBUFFERED"] = "1"
    return env


class ForkServer:
    """The agent's end of the fork server process.

    Parameters
    ----------
    on_gone : callable(gang)
        Called when a gang's proxy has ended here, however that came about.
    """

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mpi_workers", "fork-server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=rank_environment(),
                start_new_session=True,
            )
        self._changed = threading.Condition()
        self._warm = False
        self._dead = False
        self._proxies: dict[str, int] = {}  # by gang
        self._gone: set[str] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._dead and self.process.poll() is None

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._ours.makefile() as lines:
            for line in lines:
                message = json.loads(line)
                if message["event"] == "gone":
                    self._on_gone(message["gang"])
                with self._changed:
                    match message["event"]:
                        case "warm":
                            self._warm = True
                        case "forked":
                            self._proxies[message["gang"]] = message["pid"]
                        case "gone":
                            self._gone.add(message["gang"])
                    self._changed.notify_all()
        with self._changed:
            self._dead = True
            self._changed.notify_all()
        self.process.wait()

    def wait_warm(self) -> None:
        """Wait until it can fork. Raises `LaunchError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._warm or self._dead, FORK_SERVER_TIMEOUT_S):
                self.process.kill()
                raise LaunchError(
                    f"the warm process on {os.uname().nodename} was not ready in "
                    f"{FORK_SERVER_TIMEOUT_S:.0f} s: importing NumPy and mpi4py hangs there"
                )
            if not self._warm:
                raise LaunchError(
                    f"the warm process on {os.uname().nodename} ended at once (exit code "
                    f"{self.process.poll()}): are numpy, scipy, mpi4py and mpich installed there? "
                    "Its output is in the Ray worker's log"
                )

    def fork(self, spec: ProxySpec) -> int:
        """Fork a gang's proxy on this node; its pid. Raises `LaunchError`."""
        self.wait_warm()
        with contextlib.suppress(OSError):
            self._ours.sendall((json.dumps(asdict(spec)) + "\n").encode())
        with self._changed:
            self._changed.wait_for(lambda: spec.gang in self._proxies or self._dead, FORK_TIMEOUT_S)
            if spec.gang not in self._proxies:
                why = "ended" if self._dead else f"did not fork in {FORK_TIMEOUT_S:.0f} s"
                self.process.kill()  # one that hangs would hold up the next gang too
                raise LaunchError(
                    f"the warm process on {os.uname().nodename} {why}; the next launch gets a "
                    "new one: try again"
                )
            return self._proxies[spec.gang]

    def holds(self, gang: str) -> bool:
        """Whether a gang's proxy was forked here and has not ended, as far as this one knows."""
        with self._changed:
            return not self._dead and gang in self._proxies and gang not in self._gone

    def wait_gone(self, gang: str, timeout_s: float) -> None:
        """Wait until a gang's proxy has ended, if this fork server lives and has forked it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._dead or gang not in self._proxies or gang in self._gone, timeout_s
            )
            if gang in self._gone:
                del self._proxies[gang]
                self._gone.discard(gang)


class Agent:
    """Actor: see the module. Threaded, so that sending does not hold up launching."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0
        self._fork_server = ForkServer(node_jobs.forget)

    def ready(self) -> dict[str, Any]:
        """Wait until ranks can be forked at once; facts about the node."""
        self._live_fork_server().wait_warm()
        return {
            "ip": ray.util.get_node_ip_address(),
            "hostname": os.uname().nodename,
            "name": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        }

    def _live_fork_server(self) -> ForkServer:
        with self._lock:
            if not self._fork_server.alive:
                self._fork_server = ForkServer(node_jobs.forget)
            return self._fork_server

    def launch(self, spec: ProxySpec) -> int:
        """Start a gang's part on this node; the proxy's pid."""
        return self._live_fork_server().fork(spec)

    def wait_gone(self, gang: str, timeout_s: float) -> bool:
        """Wait until nothing of a gang runs on this node; whether that is so."""
        deadline = time.monotonic() + timeout_s
        self._fork_server.wait_gone(gang, timeout_s)
        # Its fork server may have died before it: then nobody has told, nor swept.
        while here := cleanup.runs_here(gang):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        node_jobs.forget()
        cleanup.sweep()
        return not here

    def runs(self, gang: str) -> bool:
        """Whether a gang's proxy lives on this node."""
        return self._fork_server.holds(gang) or cleanup.runs_here(gang)

    def sweep(self) -> int:
        """Remove what dead gangs and managers have left on this node; how many there were."""
        return cleanup.sweep()

    def run(self, job: node_jobs.InspectJob | node_jobs.SendJob, refs: list[Any]) -> Any:
        """Look at, or send, this node's blocks of a matrix."""
        with self._lock:
            self._jobs += 1
        try:
            return job.run(refs)
        finally:
            with self._lock:
                self._jobs -= 1

    def idle(self) -> bool:
        """Whether nobody would miss this agent: no gang on its node, no blocks on their way."""
        return self._jobs == 0 and not cleanup.runs_here(cleanup.ANY_GANG)

    def stage(self, gang: str, name: str, data: node_files.Data) -> None:
        """Put a file into the folder of a gang's ranks on this node."""
        node_files.put(gang, name, data)

    def parts(self, gang: str, name: str) -> list[Any]:
        """The parts of a result that rank 0 of a gang has left on this node."""
        return node_files.parts(gang, name)

    def pids(self) -> dict[str, int]:
        """Process ids of the agent and its fork server, for whoever looks after the node."""
        return {"agent": os.getpid(), "fork-server": self._fork_server.process.pid}
