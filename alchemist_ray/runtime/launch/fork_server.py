"""An agent's end of its node's fork server, the process from which ranks are forked."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path

import mpi_workers
from alchemist_ray.errors import LaunchError
from mpi_workers.node.specs import GangPlan

FORK_SERVER_TIMEOUT_S = 60.0
FORK_TIMEOUT_S = 30.0  # a loaded node; other gangs depend on a fork server that is slow
# Variables of a job manager or an outer MPI would confuse the MPI of the ranks.
FOREIGN = ("PMI_", "PMIX_", "HYDI_", "HYDRA_", "RAY_", "MPI_LOCAL")


def rank_environment() -> dict[str, str]:
    """The environment of ranks: this process's, without variables of other launchers and of Ray.

    An agent serves many jobs, and its `sys.path` has folders of the first one: ranks get only
    the folder that this package was imported from, and what ``PYTHONPATH`` of the node names.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
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
        self._forked: dict[str, int] = {}  # pids of proxies, until `fork` returns them
        self._running: set[str] = set()  # gangs with a proxy
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def alive(self) -> bool:
        return not self._dead and self.process.poll() is None

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                event, gang, number = self._ours.recv()
                if event == "gone":
                    self._on_gone(gang)
                with self._changed:
                    match event:
                        case "warm":
                            self._warm = True
                        case "forked":
                            self._forked[gang] = number
                            self._running.add(gang)
                        case "gone":
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

    def fork(self, plan: GangPlan, node: int) -> int:
        """Fork a gang's proxy on this node, `node` of the plan; its pid. Raises `LaunchError`."""
        self.wait_warm()
        with contextlib.suppress(OSError), self._sending:
            self._ours.send((plan, node))
        with self._changed:
            self._changed.wait_for(lambda: plan.gang in self._forked or self._dead, FORK_TIMEOUT_S)
            if plan.gang not in self._forked:
                why = "ended" if self._dead else f"did not fork in {FORK_TIMEOUT_S:.0f} s"
                self.process.kill()  # a hanging one would delay the next gang too
                raise LaunchError(
                    f"the fork server on {os.uname().nodename} {why}; the next launch gets a "
                    "new one: try again"
                )
            return self._forked.pop(plan.gang)

    def holds(self, gang: str) -> bool:
        """Whether a gang's proxy was forked here and has not ended, as far as this one knows."""
        return not self._dead and gang in self._running

    def wait_gone(self, gang: str, timeout_s: float) -> None:
        """Wait until a gang's proxy has ended, if this fork server lives and has forked it."""
        with self._changed:
            self._changed.wait_for(lambda: not self.holds(gang), timeout_s)
