"""Chaos: parts of a gang are killed at random while two programs compute on it.

Each result is compared with NumPy's. 30 s; ten minutes with ``make test-long``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import (
    AlchemistError,
    GroupError,
    GroupFailedError,
    GroupRecoveredError,
    SessionError,
    StaleHandleError,
    TransferError,
)
from alchemist_ray.runtime.cluster.names import NAMESPACE, group_name
from tests.faults.conftest import agent_pids, assert_clean, left, pid_of, record
from tests.faults.named.named_gangs import END_LIMIT_S, ROOT, managers
from tests.support import traces
from tests.support.suite import scaled

SECONDS = scaled(30, 600)
BACK_LIMIT_S = 60.0  # from a loss until the gang answers, on a loaded machine
NAME = "chaos"
PARTS = ("rank", "rank", "rank", "proxy", "agent", "program", "manager")
BETWEEN_S = (1.0, 3.0)  # between two losses
SIDE = 120
REPEAT = (GroupRecoveredError, TransferError)  # the gang goes on; matrices are as before the call

# Another program: it attaches, computes, and compares with NumPy, until it is killed.
PROGRAM = """
    from alchemist_ray.errors import AlchemistError
    while True:
        try:
            with AlchemistSession.attach("chaos") as als:
                while True:
                    X = np.random.random((90, 110))
                    A = als.send_matrix(X)
                    B = A @ A.T
                    if not np.allclose(B.fetch(), X @ X.T):
                        raise SystemExit("wrong")
        except AlchemistError:
            time.sleep(0.1)
"""


def add_to(comm: Any, A: Any, value: float) -> None:
    """Change a matrix in place."""
    A.local[...] += value


class Model:
    """The matrices of the gang, and what NumPy says that they are."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        self.known: dict[int, tuple[Handle, np.ndarray[Any, Any]]] = {}
        self.done: Counter[str] = Counter()
        self.als = self._start()

    def _start(self) -> AlchemistSession:
        """The gang, or another one if its manager is gone."""
        self.known.clear()
        deadline = time.monotonic() + BACK_LIMIT_S
        while True:
            try:
                return AlchemistSession(2, name=NAME, lifetime="detached", max_failures=10_000)
            except (AlchemistError, ray.exceptions.RayError):
                if time.monotonic() > deadline:
                    raise
                with contextlib.suppress(SessionError, ray.exceptions.RayError):
                    AlchemistSession.stop_gang(NAME)
                time.sleep(0.2)

    def step(self) -> None:
        """One random operation, repeated until the gang has done it."""
        operation = self.random.choice(
            (self.send, self.send_blocks, self.multiply, self.add, self.assign, self.run)
            + (self.compare,) * 3
        )
        try:
            self.repeat(operation)
        except (GroupFailedError, SessionError, GroupError) as error:
            if isinstance(error, GroupRecoveredError):
                raise
            self.done["gang lost"] += 1
            self.als.close()
            self.als = self._start()
        self.done[operation.__name__] += 1

    def repeat(self, operation: Callable[[], None]) -> None:
        deadline = time.monotonic() + BACK_LIMIT_S
        while True:
            try:
                return operation()
            except StaleHandleError as error:  # ranks were lost twice while it was made again
                if "lost ranks 2 times" not in str(error):
                    raise
                self.done["stale"] += 1
                self._forget_stale()
                return None
            except REPEAT:
                self.done["repeated"] += 1
                assert time.monotonic() < deadline

    def _forget_stale(self) -> None:
        alive = {handle.id for handle in self.als.list_matrices()}
        for ident in set(self.known) - alive:
            del self.known[ident]

    def _chosen(self) -> tuple[Handle, np.ndarray[Any, Any]]:
        if not self.known:
            self.send()
        return self.random.choice(list(self.known.values()))

    def _note(self, handle: Handle, wanted: np.ndarray[Any, Any]) -> None:
        self.known[handle.id] = (handle, wanted)
        if len(self.known) > 8:
            del self.known[self.random.choice(list(self.known))]

    def send(self) -> None:
        X = self.rng.random((SIDE, SIDE))
        layout = self.random.choice(("VC_STAR", "MC_MR", "STAR_STAR"))
        self._note(self.als.send_matrix(X, layout=layout), X)

    def send_blocks(self) -> None:
        X = self.rng.random((SIDE, SIDE))
        half = SIDE // 2
        blocks = [(ray.put(X[:half]), 0, 0), (ray.put(X[half:]), half, 0)]
        self._note(self.als.send_matrix(blocks), X)

    def multiply(self) -> None:
        (A, X), (B, Y) = self._chosen(), self._chosen()
        self._note(A @ B / SIDE, X @ Y / SIDE)

    def add(self) -> None:
        (A, X), (B, Y) = self._chosen(), self._chosen()
        self._note(A + B, X + Y)

    def assign(self) -> None:
        A, X = self._chosen()
        row = self.random.randrange(SIDE)
        A[row] = 0.5
        X = X.copy()
        X[row] = 0.5
        self.known[A.id] = (A, X)

    def run(self) -> None:
        A, X = self._chosen()
        self.als.run(add_to, A, 0.25)
        self.known[A.id] = (A, X + 0.25)

    def compare(self) -> None:
        A, X = self._chosen()
        np.testing.assert_allclose(A.fetch(), X, rtol=1e-9)


class Chaos:
    """Kills a part of the gang every few seconds."""

    def __init__(self, model: Model, address: str, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._model = model
        self._address = address
        self._random = random.Random(seed)
        self._over = threading.Event()
        self.wrong = 0
        self.program = self._start_program()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(*BETWEEN_S)):
            part = self._random.choice(PARTS)
            with contextlib.suppress(AlchemistError, ray.exceptions.RayError, OSError, ValueError):
                self._kill(part)
                self.killed[part] += 1

    def _kill(self, part: str) -> None:
        if part == "program":
            self._end_program()
            self.program = self._start_program()
            return
        if part == "agent":
            os.kill(agent_pids()["agent"], signal.SIGKILL)
            return
        if part == "manager":
            os.kill(pid_of(ray.get_actor(group_name(NAME), namespace=NAMESPACE)), signal.SIGKILL)
            return
        pid = self._random.choice(self._model.als.list_workers()).pid
        os.kill(pid if part == "rank" else traces.parent_of(pid), signal.SIGKILL)

    def end(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._end_program()
        assert not self.wrong, "another program found a wrong result"

    def _start_program(self) -> subprocess.Popen[bytes]:
        begin = f"import ray\nray.init(address={self._address!r}, log_to_driver=False)\n"
        begin += "from alchemist_ray import AlchemistSession\nimport numpy as np, time\n"
        text = begin + textwrap.dedent(PROGRAM)
        return subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stderr=subprocess.DEVNULL)

    def _end_program(self) -> None:
        self.wrong += self.program.poll() is not None
        self.program.kill()
        self.program.wait()


@pytest.fixture
def nothing_stays(cluster: str) -> Iterator[None]:
    """Afterwards nothing of the gangs is left; agents have been killed and stand again."""
    before, kept = left(), managers()
    yield
    with contextlib.suppress(SessionError):
        AlchemistSession.stop_gang(NAME)
    assert traces.wait_until(lambda: len(managers() - kept) <= 1, END_LIMIT_S) is not None
    agent_pids()
    assert_clean(before)


@pytest.mark.timeout(SECONDS + 240, func_only=True)
def test_no_result_is_wrong_and_nothing_stays(cluster: str, nothing_stays: None) -> None:
    seed = int(os.environ.get("CHAOS_SEED", "0"))
    model = Model(seed)
    chaos = Chaos(model, cluster, seed)
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            model.step()
    finally:
        chaos.end()
    for A, X in list(model.known.values()):
        with contextlib.suppress(StaleHandleError):
            np.testing.assert_allclose(A.fetch(), X, rtol=1e-9)
    model.als.close()
    told = ", ".join(f"{what} {count}" for what, count in sorted(model.done.items()))
    killed = ", ".join(f"{count} x {part}" for part, count in sorted(chaos.killed.items()))
    record(f"chaos of {SECONDS} s, killed: {killed}", 0.0, None, told)
    assert sum(chaos.killed.values()) >= SECONDS / 10
    assert model.done["compare"] > SECONDS / 10
