"""The agent: one standing actor per node. Runs node-local work: forks ranks, sends local blocks.

Gangs outlive it: they depend on their GroupManager, not on the agent.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from typing import Any

import ray

from alchemist_ray.observe import exporter, logs, metrics
from alchemist_ray.runtime.launch.fork_server import ForkServer
from alchemist_ray.transfer import node_jobs
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.node import cleanup
from mpi_workers.node.specs import GangPlan

POLL_INTERVAL_S = 0.01  # between checks of a gang that is ending


class Agent:
    """Actor, see the module. Threaded: sending does not delay launching."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs = 0
        self._fork_server = ForkServer(node_jobs.forget)
        host = os.uname().nodename
        exporter.start(lambda: metrics.gauge("alchemist_free_bytes", available_bytes(), (host,)))

    def ready(self) -> dict[str, Any]:
        """Wait until ranks can be forked at once; facts about the node."""
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

    def launch(self, plan: GangPlan, node: int) -> int:
        """Start a gang's part on this node, `node` of the plan; the proxy's pid."""
        if plan.log_folder:
            plan = replace(plan, log_folder=str(logs.folder(plan.log_folder)))
        return self._live_fork_server().fork(plan, node)

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

    def runs(self, gang: str) -> bool:
        """Whether a gang's proxy lives on this node."""
        return self._fork_server.holds(gang) or cleanup.runs_here(gang)

    def sweep(self) -> int:
        """Remove leftovers of dead gangs and managers on this node; their number."""
        return cleanup.sweep()

    def run(self, job: Any, refs: list[Any]) -> Any:
        """Inspect or send blocks that are on this node; move matrices: see `transfer.node_jobs`.

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
        """Whether this agent can be ended: no gang on its node, no job under way."""
        return self._jobs == 0 and not cleanup.runs_here(cleanup.ANY_GANG)

    def pids(self) -> dict[str, int]:
        """Process ids of the agent and its fork server."""
        return {"agent": os.getpid(), "fork-server": self._fork_server.process.pid}
