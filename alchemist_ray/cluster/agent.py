"""The agent: one standing actor per node. Runs node-local work: forks ranks, sends local blocks.

Gangs outlive it: they depend on their GroupManager, not on the agent.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import ray

import mpi_workers
from alchemist_ray.cluster import node_jobs
from alchemist_ray.errors import LaunchError
from alchemist_ray.measures import exporter, logs, metrics
from mpi_workers.matrix.available_memory import (
    KEEPER_OOM_SCORE,
    available_bytes,
    set_oom_score,
)
from mpi_workers.node import cleanup
from mpi_workers.node.specs import RANK_VARIABLE, GangPlan

FORK_SERVER_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 30.0  # a loaded node; other gangs depend on a fork server that is slow
# Variables of a job manager or an outer MPI would confuse the MPI of the ranks.
FOREIGN = ("PMI_", "PMIX_", "HYDI_", "HYDRA_", "RAY_", "MPI_LOCAL")
POLL_INTERVAL_S = 0.01  # between checks of a gang that is ending
IDLE_S = 30.0  # after which an agent can be ended


def rank_environment() -> dict[str, str]:
    """The environment of ranks: this process's, without variables of other launchers and of Ray.

    An agent serves many jobs, and its `sys.path` has folders of the first one: ranks get only
    the folder that this package was imported from, and what ``PYTHONPATH`` of the node names.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    env[RANK_VARIABLE] = "1"
    own = [str(Path(mpi_workers.__file__).parents[1]), *env.get("PYTHONPATH", "").split(":")]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in own if path))
    env["OPENBLAS_NUM_THREADS"] = env["OMP_NUM_THREADS"] = "1"  # a threaded BLAS must not fork
    env["PYTHONUNBUFFERED"] = "1"
    return env


class ForkServer:
    """The agent's end of the fork server process.

    Parameters
    ----------
    on_gone : callable(gang)
        Called when a gang's proxy on this node has ended.
    """

    def __init__(self, on_gone: Callable[[str], None]) -> None:
        self._on_gone = on_gone
        self._ours, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mpi_workers", "fork-server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=rank_environment(),
                start_new_session=True,
            )
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._warm = False
        self._dead = False
        self._running: set[str] = set()  # gangs with a proxy, or an order for one that was read
        self.why_ended: dict[str, str] = {}  # of proxies, until `wait_gone`
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._dead and self.process.poll() is None

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                event, gang, what = self._ours.recv()
                if event == "gone":
                    self._on_gone(gang)
                with self._changed:
                    match event:
                        case "warm":
                            self._warm = True
                        case "read":
                            self._running.add(gang)
                        case "gone":
                            self.why_ended[gang] = what
                            self._running.discard(gang)
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
                    f"the fork server on {os.uname().nodename} was not ready in "
                    f"{FORK_SERVER_TIMEOUT_S:.0f} s: importing NumPy and mpi4py hangs there"
                )
            if not self._warm:
                raise LaunchError(
                    f"the fork server on {os.uname().nodename} ended at once (exit code "
                    f"{self.process.poll()}): are numpy, scipy, mpi4py and mpich installed there? "
                    "Its output is in the Ray worker's log"
                )

    def fork(self, plan: GangPlan, node: int) -> bool:
        """Have a gang's proxy forked on this node, `node` of the plan. Raises `LaunchError`.

        False if the fork server ended before it read the order: another one may take it.
        """

        def read() -> bool:
            return plan.gang in self._running or plan.gang in self.why_ended

        self.wait_warm()
        with contextlib.suppress(OSError), self._sending:
            self._ours.send((plan, node))
        with self._changed:
            if not self._changed.wait_for(lambda: read() or self._dead, FORK_TIMEOUT_S):
                self.process.kill()  # a hanging one would delay the next gang too
                raise LaunchError(
                    f"the fork server on {os.uname().nodename} did not fork in "
                    f"{FORK_TIMEOUT_S:.0f} s; the next launch gets a new one: try again"
                )
            return read()

    def holds(self, gang: str) -> bool:
        """Whether a gang's proxy was forked here and has not ended, as far as this one knows."""
        return not self._dead and gang in self._running

    def wait_gone(self, gang: str, timeout_s: float) -> None:
        """Wait until a gang's proxy has ended, if this fork server lives and has forked it."""
        with self._changed:
            self._changed.wait_for(lambda: not self.holds(gang), timeout_s)
            self.why_ended.pop(gang, None)


class Agent:
    """Actor, see the module. Threaded: sending does not delay launching."""

    def __init__(self) -> None:
        set_oom_score(KEEPER_OOM_SCORE)  # its fork server and their proxies inherit it
        self._lock = threading.Lock()
        self._jobs = 0
        self._used = time.monotonic()
        self._fork_server = ForkServer(node_jobs.forget)
        host = os.uname().nodename
        exporter.start(lambda: metrics.gauge("alchemist_free_bytes", available_bytes(), (host,)))

    def ready(self) -> dict[str, Any]:
        """Wait until ranks can be forked at once; facts about the node."""
        self._used = time.monotonic()  # for a gang that starts next
        self._live_fork_server().wait_warm()
        return {
            "ip": ray.util.get_node_ip_address(),
            "hostname": os.uname().nodename,
            "name": os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
            "memory": available_bytes(),
        }

    def _live_fork_server(self) -> ForkServer:
        with self._lock:
            if not self._fork_server.alive:
                self._fork_server = ForkServer(node_jobs.forget)
            return self._fork_server

    def launch(self, plan: GangPlan, node: int) -> None:
        """Start a gang's part on this node, `node` of the plan."""
        if plan.log_folder:
            plan = replace(plan, log_folder=str(logs.folder(plan.log_folder)))
        for _ in range(2):
            if self._live_fork_server().fork(plan, node):
                return
        raise LaunchError(
            f"two fork servers on {os.uname().nodename} ended before they forked: if the kernel's "
            "log there says that memory was used up, free some and try again"
        )

    def wait_gone(self, gang: str, timeout_s: float) -> bool:
        """Wait until nothing of a gang runs on this node; whether that is so."""
        deadline = time.monotonic() + timeout_s
        self._fork_server.wait_gone(gang, timeout_s)
        # A fork server that died reports nothing and removes nothing.
        while here := cleanup.runs_here(gang):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_INTERVAL_S)
        node_jobs.forget()
        cleanup.sweep()
        return not here

    def memory(self) -> int:
        """Bytes that processes on this node can still allocate."""
        return available_bytes()

    def why_ended(self, gang: str) -> str | None:
        """Why a gang's proxy on this node has ended; None if it lives."""
        if self._fork_server.holds(gang) or cleanup.runs_here(gang):
            return None
        return self._fork_server.why_ended.get(gang, "the node's fork server was killed: try again")

    def sweep(self) -> int:
        """Remove leftovers of dead gangs and managers on this node; their number."""
        return cleanup.sweep()

    def run(self, job: Any, refs: list[Any]) -> Any:
        """Inspect or send blocks that are on this node; move matrices: see `node_jobs`.

        `refs` are objects of its store.
        """
        with self._lock:
            self._jobs += 1
        try:
            return job.run(refs)
        finally:
            with self._lock:
                self._jobs -= 1

    def log_lines(self, gang: str, since: dict[str, int]) -> logs.NodeLog | None:
        """Lines of a gang's newest log files on this node, after positions in them."""
        return logs.read(gang, since)

    def idle(self) -> bool:
        """Whether this agent can be ended: for a while no gang on its node, and no job."""
        if self._jobs or cleanup.runs_here(cleanup.ANY_GANG):
            self._used = time.monotonic()
        return time.monotonic() - self._used > IDLE_S

    def pids(self) -> dict[str, int]:
        """Process ids of the agent and its fork server."""
        return {"agent": os.getpid(), "fork-server": self._fork_server.process.pid}
