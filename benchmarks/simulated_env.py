"""Simulated gangs for environments: one process answers the orders of all ranks after a time."""

from __future__ import annotations

import heapq
import multiprocessing
import select
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from types import SimpleNamespace
from typing import Any

import numpy as np

from alchemist_ray.attached.rank_channel import RankChannel
from ali.simulator.spec import parse
from mpi_workers.wire.blocking import Connection, connect
from mpi_workers.wire.frames import ConnectionLost, Kind

SPEC = parse("simulated", '{"observation": {"shape": [16]}, "action": {"shape": [4]}}')
DIAL_S = 30.0


def ranks(pipe: Pipe, step_s: float) -> None:
    """A process that is rank 0 of every gang: it dials, and answers each order after `step_s`."""
    record = np.zeros(1, SPEC.layout).tobytes()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    connections: dict[int, Connection] = {}
    due: list[tuple[float, int, int]] = []
    while True:
        wait_s = max(0.0, due[0][0] - time.perf_counter()) if due else 1.0
        for fd, _ in poll.poll(1e3 * wait_s):
            if fd == pipe.fileno():
                if (call := pipe.recv()) is None:
                    return
                found, _ = connect(*call, {"rank": 0}, timeout_s=DIAL_S, take_fds=False)
                fd = found.sock.fileno()
                connections[fd] = found
                poll.register(found.sock, select.POLLIN)
                if not found.buffered:  # else the first order has come with the welcome
                    continue
            try:
                order = connections[fd].recv().body
            except ConnectionLost:
                poll.unregister(fd)
                connections.pop(fd).close()
                continue
            later = step_s if order["do"] == "advance" else 0.0
            heapq.heappush(due, (time.perf_counter() + later, fd, order["n"]))
        while due and due[0][0] <= time.perf_counter():
            _, fd, number = heapq.heappop(due)
            if fd in connections:
                connections[fd].send(Kind.REPLY, {"n": number, "value": record})


class SimulatedGangs:
    """Sessions whose gangs are connections to one process.

    Parameters
    ----------
    step_s : float
        Time of a step of the simulation.
    """

    def __init__(self, step_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=ranks, args=(theirs, step_s), daemon=True)
        self._process.start()
        self._lock = threading.Lock()

    def dial(self, address: str, token: str) -> None:
        """Make a simulated rank call an environment."""
        with self._lock:
            self._pipe.send((address, token))

    def open_session(
        self, owner: object, config: object
    ) -> tuple[SimulatedSession, Callable[[], None]]:
        """In place of `envs.simulation.open_session`."""
        session = SimulatedSession(self)
        return session, session.close

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._pipe.send(None)
        self._process.join(10)


class Channel(RankChannel):
    """A channel whose serving routine ends with it."""

    def hang_up(self) -> None:
        super().hang_up()
        self.cancel()


class SimulatedSession:
    """What a `Simulation` uses of a session; also the library on the gang."""

    def __init__(self, gangs: SimulatedGangs) -> None:
        self._gangs = gangs
        self._over = threading.Event()

    def request_workers(self, workers: int) -> None:
        """Nothing starts."""

    def load_library(self, name: str) -> Any:
        """The library `simulator`."""
        attach = SimpleNamespace(options=lambda **_: lambda *_: SPEC.text)
        return SimpleNamespace(attach=attach, serve=self._serve)

    def _serve(self, addresses: list[str], token: str, shared: str) -> None:
        self._gangs.dial(addresses[0], token)
        self._over.wait()

    def open_rank_channel(self, serve: Callable[[list[str], str], Any], timeout_s: float) -> Any:
        """A real channel to the simulated rank."""
        self._over.clear()
        address: Any = SimpleNamespace(nodes=(), size=1)
        return Channel(serve, self._over.set, address, timeout_s)

    def kill_workers(self, reason: str) -> None:
        """After a failure."""
        self._over.set()

    def close(self) -> None:
        """The serving routine ends."""
        self._over.set()
