"""The fork server: a warm, single-threaded interpreter that forks the proxies of gangs.

Importing NumPy, SciPy and mpi4py takes longer than starting MPI; a forked process has them
already. The node's agent starts the fork server and sends its orders over a socket pair. When the
agent has ended, the fork server waits for the gangs that still run, cleans up after them and ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from mpi_workers.failures import Failure, describe_status
from mpi_workers.node import cleanup
from mpi_workers.node.processes import adopt_orphans, allow_open_files, end_descendants, fork
from mpi_workers.node.specs import GangPlan
from mpi_workers.sigterm import outlive_sigterm

RunProxy = Callable[[GangPlan, int], None]
REASON_LIMIT = 4 << 10  # 4 KiB of what a proxy failed with reach the user


def main(agent: Connection[Any, Any], run_proxy: RunProxy) -> None:
    """Fork a proxy for every order until the agent and the last proxy have ended.

    An order is a plan and the number of this node in it. The agent gets ``("warm", "", "")``,
    ``("read", gang, "")`` before the fork (until then another fork server may take the order) and
    ``("gone", gang, why)``: what the proxy failed with, or its status in words.
    """
    adopt_orphans()
    outlive_sigterm()
    allow_open_files()
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cleanup.sweep()
    proxies: dict[int, tuple[str, int]] = {}  # by pid: the gang, and a file for the reason
    watched: list[Any] = [agent, wake_read]

    def tell(event: str, gang: str = "", what: str = "") -> None:
        with contextlib.suppress(OSError):  # the agent has ended
            agent.send((event, gang, what))

    tell("warm")
    while agent in watched or proxies:
        ready, _, _ = select.select(watched, [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            for pid in list(proxies):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    gang, reason = proxies.pop(pid)
                    why = os.pread(reason, REASON_LIMIT, 0).decode(errors="replace")
                    os.close(reason)
                    if status:  # it was killed: the processes of its ranks are our children now
                        end_descendants(spared=proxies)
                    cleanup.sweep()  # the proxy, or its manager, may have been killed
                    tell("gone", gang, why or f"it {describe_status(status)}")
        if agent in ready:
            try:
                plan, node = agent.recv()
            except (EOFError, OSError):
                watched.remove(agent)
                continue
            tell("read", plan.gang)
            reason = os.memfd_create("reason")
            pid = fork(partial(_run, run_proxy, plan, node, reason), reason, farewell=None)
            proxies[pid] = plan.gang, reason


def _run(run_proxy: RunProxy, plan: GangPlan, node: int, reason: int) -> None:
    try:
        run_proxy(plan, node)
    except Exception as error:
        why = error.message if isinstance(error, Failure) else f"it failed with {error!r}"
        os.write(reason, why.encode())
        raise
