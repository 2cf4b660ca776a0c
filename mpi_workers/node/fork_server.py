"""The fork server: a warm, single-threaded interpreter that forks the proxies of gangs.

Importing NumPy, SciPy and mpi4py takes longer than starting MPI; a forked process has them
already. The node's agent starts the fork server and sends its orders over a socket, one JSON
object per line. When the agent has ended, the fork server waits for the gangs that still run,
cleans up after them and ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from mpi_workers.node import cleanup
from mpi_workers.node.processes import adopt_orphans, close_all_but, end_descendants
from mpi_workers.node.specs import ProxySpec


def main(agent: socket.socket, run_proxy: Callable[[ProxySpec], None]) -> None:
    """Fork a proxy for every order until the agent and the last proxy have ended."""
    adopt_orphans()
    wake_read, wake_write = os.pipe()
    for fd in (wake_read, wake_write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    cleanup.sweep()
    buffer = bytearray()
    proxies: dict[int, str] = {}
    watched: list[Any] = [agent, wake_read]
    tell(agent, {"event": "warm", "pid": os.getpid()})
    while agent in watched or proxies:
        ready, _, _ = select.select(watched, [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            for pid in list(proxies):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    gang = proxies.pop(pid)
                    if status:  # it was killed: the processes of its ranks are our children now
                        end_descendants(spared=proxies)
                    cleanup.sweep()  # the proxy, or its manager, may have been killed
                    tell(agent, {"event": "gone", "gang": gang, "status": status})
        if agent in ready:
            data = agent.recv(1 << 20)
            if not data:
                watched.remove(agent)
                continue
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                spec = ProxySpec(**json.loads(buffer[:end]))
                del buffer[: end + 1]
                pid = _fork_proxy(spec, run_proxy)
                proxies[pid] = spec.gang
                tell(agent, {"event": "forked", "gang": spec.gang, "pid": pid})


def tell(agent: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        agent.sendall((json.dumps(message) + "\n").encode())


def _fork_proxy(spec: ProxySpec, run_proxy: Callable[[ProxySpec], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_all_but(0, 1, 2)
        run_proxy(spec)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)
