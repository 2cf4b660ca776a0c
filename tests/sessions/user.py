"""A user of the gang, in this process or in one of its own; what a step asks of its session.

A process of its own takes its orders over a socket: the name of a method of `Steps` and its
arguments. It answers with the result or the error.
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    CallTimeoutError,
    GroupRecoveredError,
    MatrixError,
    MatrixNotFoundError,
    RoutineError,
)

ROOT = Path(__file__).parents[2]
STEP_LIMIT_S = 60.0  # for a step, with the recovery that it may wait for; and to start a process


def values(seed: int) -> np.ndarray[Any, Any]:
    """The matrix that `seed` stands for: 1 to 60 rows, 1 to 9 columns."""
    return np.random.default_rng(seed).random((1 + seed % 60, 1 + seed % 9))


def add_to(comm: Any, A: Any, value: float) -> None:
    """Change a matrix in place."""
    A.local[...] += value


def fail(comm: Any) -> None:
    """Fail on the last rank, while the others wait in MPI."""
    if comm.rank == comm.size - 1:
        raise ValueError("as asked")
    comm.barrier()


class Steps:
    """A session and its handles, by the machine's keys."""

    def __init__(self, session: AlchemistSession) -> None:
        self.als = session
        self.held: dict[int, Any] = {}

    def send(self, key: int, layout: str, named: bool) -> None:
        name = f"m{key}" if named else None
        if name is not None:  # an earlier attempt may have been answered too late
            with contextlib.suppress(MatrixNotFoundError):
                self.als.matrix(name).free()
        self.held[key] = self.als.send_matrix(values(key), layout=layout, name=name)

    def take(self, key: int) -> None:
        self.held[key] = self.als.matrix(f"m{key}")

    def double(self, key: int, of: int) -> None:
        self.held[key] = self.held[of] * 2.0

    def gram(self, key: int, of: int) -> None:
        self.held[key] = self.held[of].T @ self.held[of]

    def fetch(self, key: int) -> np.ndarray[Any, Any]:
        return np.asarray(self.held[key].fetch())

    def change(self, key: int, value: float) -> None:
        self.als.run(add_to, self.held[key], value)

    def watched_change(self, key: int, value: float) -> None:
        """Change a matrix while threads of this process fetch it."""
        with ThreadPoolExecutor(3) as pool:
            for _ in range(3):
                pool.submit(self.fetch, key)
            self.change(key, value)
            for _ in range(3):
                pool.submit(self.fetch, key)

    def stream(self, key: int) -> None:
        """Send a matrix in blocks, each of which needs another matrix."""

        def blocks() -> Iterator[Any]:
            for row in values(key):
                yield row[None] * self.als.send_matrix(np.ones((1, 1))).fetch()

        self.held[key] = self.als.send_blocks(blocks(), shape=values(key).shape)

    def restored(self, folder: str) -> dict[str, np.ndarray[Any, Any]]:
        """The matrices of a checkpoint that is written now."""
        self.als.checkpoint(folder)
        with AlchemistSession.restore(folder, 1) as als:
            return {handle.name: handle.fetch() for handle in als.list_matrices()}

    def assign(self, key: int, value: float) -> None:
        self.held[key][0] = value

    def drop(self, key: int) -> None:
        self.held.pop(key, None)
        gc.collect()
        self.als.connection.ping()  # the gang knows it before another process does a step

    def free(self, key: int) -> str:
        """Free a named matrix; or why it is not freed: another process still has it."""
        refused = ""
        try:
            self.held[key].free()
        except MatrixError as error:
            refused = str(error)
        del self.held[key]
        return refused

    def dropped_call(self, of: int) -> None:
        """A call whose ObjectRef is dropped before it has run."""
        self.als.load_library("linalg").svdvals.remote(self.held[of])
        gc.collect()

    def failing_call(self) -> None:
        with contextlib.suppress(RoutineError):
            self.als.run(fail)

    def late_call(self) -> None:
        with contextlib.suppress(CallTimeoutError):
            self.als.run(lambda comm: time.sleep(20), timeout_s=0.05)

    def payload(self, nbytes: int) -> None:
        data = os.urandom(nbytes)
        assert self.als.run(lambda comm, x: x, data) == data

    def blocks(self, rows: int) -> None:
        """Blocks of the object store become a matrix."""
        import ray  # noqa: PLC0415 - a thin client has none

        parts = [(ray.put(np.full((rows, 7), float(i))), rows * i, 0) for i in range(4)]
        assert float(self.als.send_matrix(parts).sum()) == rows * 7 * 6

    def task(self, rows: int) -> None:
        """A Ray task uses a handle."""
        import ray  # noqa: PLC0415 - a thin client has none

        @ray.remote(num_cpus=0)
        def total(handle: Any) -> float:
            return float((handle + 1.0).sum())

        A = self.als.send_matrix(np.ones((rows, 3)))
        try:
            assert ray.get(total.remote(A), timeout=STEP_LIMIT_S) == rows * 6
        finally:  # it was pickled, so it stays until it is freed by name
            deadline = time.monotonic() + STEP_LIMIT_S
            while True:
                try:
                    A.free()
                    break
                except (MatrixError, GroupRecoveredError):  # the task's process may still hold it
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

    def private_session(self, rows: int) -> None:
        """A gang of this process alone, from its start to its end."""
        with AlchemistSession(1) as als:
            assert float((als.send_matrix(np.ones((rows, 2))) * 2.0).sum()) == rows * 4

    def disconnect(self) -> None:
        """Break the control connection; the next step connects again."""
        channel = self.als.connection._channel
        if channel is not None:
            channel._connection.hang_up()

    def resize(self, workers: int) -> None:
        self.als.resize(workers)

    def ids(self) -> list[int]:
        """Of all matrices; without handles, with which this process would have them."""
        told = self.als.connection.request({"op": "list_matrices", "names": []})
        return [about["matrix"] for about in told["matrices"]]

    def ranks(self) -> list[int]:
        return [worker.pid for worker in self.als.list_workers()]


class Here:
    """A user in this process."""

    def __init__(self, session: AlchemistSession) -> None:
        self.als = session
        self._steps = Steps(session)
        self.pid = os.getpid()
        self._thread = ThreadPoolExecutor(1)

    def begin(self, step: str, *arguments: Any) -> Future[Any]:
        return self._thread.submit(getattr(self._steps, step), *arguments)

    def end(self) -> None:
        self._thread.shutdown()
        self._steps.held.clear()
        gc.collect()
        self.als.close()


class Elsewhere:
    """A user in a process of its own.

    Parameters
    ----------
    name : str
        Of the gang.
    folder : Path
        For the socket.
    begin : str
        The beginning of its program.
    environment : mapping
    """

    def __init__(self, name: str, folder: Path, begin: str, environment: Mapping[str, str]) -> None:
        path = str(folder / f"{time.monotonic_ns():x}")
        program = f"{begin}\nfrom tests.sessions.user import serve\nserve({name!r}, {path!r})\n"
        with Listener(path, "AF_UNIX") as listener:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program], cwd=ROOT, env=dict(environment)
            )
            sock: Any = listener._listener
            sock._socket.settimeout(STEP_LIMIT_S)
            self._orders = listener.accept()
        self._answer("attach")  # before then a broken link is the end of the process
        self.pid = self.process.pid
        self._thread = ThreadPoolExecutor(1)

    def begin(self, step: str, *arguments: Any) -> Future[Any]:
        return self._thread.submit(self._ask, step, arguments)

    def _ask(self, step: str, arguments: tuple[Any, ...]) -> Any:
        self._orders.send((step, arguments))
        return self._answer(f"{step}{arguments}")

    def _answer(self, to: str) -> Any:
        if not self._orders.poll(STEP_LIMIT_S):
            raise AssertionError(f"{to} has not ended in {STEP_LIMIT_S:.0f} s")
        failed, answer = self._orders.recv()
        if failed:
            raise answer
        return answer

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._thread.shutdown()
        self._orders.close()


def serve(name: str, path: str) -> None:
    """Attach to a gang and follow the orders of the machine until it hangs up."""
    with Client(path, "AF_UNIX") as orders:
        steps = Steps(AlchemistSession.attach(name))
        orders.send((False, None))
        while True:
            try:
                step, arguments = orders.recv()
            except EOFError:
                return
            answer: tuple[bool, Any]
            try:
                answer = False, getattr(steps, step)(*arguments)
            except Exception as error:
                answer = True, error
            orders.send(answer)
