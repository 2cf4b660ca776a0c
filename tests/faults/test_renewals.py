"""Ranks that end are started again in the same memory: what is kept, undefined, and fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import scipy.sparse

from alchemist_ray import AlchemistSession, Executor, Handle
from alchemist_ray.attached.info import GangInfo
from alchemist_ray.errors import (
    CallTimeoutError,
    GroupFailedError,
    GroupRecoveredError,
    MatrixError,
    RoutineError,
)
from alchemist_ray.launchers.mpiexec import find_mpiexec
from alchemist_ray.observe.doctor.ranks import started_again
from mpi_workers.node.processes import descendants
from tests.faults.conftest import Call
from tests.support import traces
from tests.support.suite import scaled

pytestmark = pytest.mark.timeout(100, func_only=True)
X = np.random.default_rng(0).random((300, 40))


@pytest.fixture(scope="module")
def als(cluster: str) -> Iterator[AlchemistSession]:
    with AlchemistSession(2) as session:
        yield session


def about(als: AlchemistSession) -> GangInfo:
    (found,) = (gang for gang in als.list() if gang.name == als.connection.address.gang)
    return found


def die(comm: Any, how: str, *matrices: Any, rank: int = 1) -> None:
    """Change matrices, then end one rank; the others wait for it."""
    import ctypes  # noqa: PLC0415

    from mpi4py import MPI  # noqa: PLC0415

    for matrix in matrices:
        matrix.local[...] = -1
    if comm.rank == rank:
        match how:
            case "SIGSEGV":
                ctypes.string_at(0)
            case "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "exit(0)":
                os._exit(0)
            case "MPI_Abort":
                MPI.COMM_WORLD.Abort(7)
    comm.Barrier()


WORDS = {
    "SIGSEGV": "SIGSEGV",
    "SIGKILL": "SIGKILL",
    "exit": "exited with code 3",
    "exit(0)": "exited with code 0",
    "MPI_Abort": r"MPI_Abort\(7\)",
}


@pytest.mark.parametrize("how", WORDS)
def test_every_kind_of_matrix_outlives_a_crash(als: AlchemistSession, how: str) -> None:
    S = scipy.sparse.random_array((200, 300), density=0.1, rng=1).tocsr()
    sparse = als.send_matrix(S)
    dense = {
        layout: als.send_matrix(X, layout=layout)
        for layout in ("VC_STAR", "MC_MR", "STAR_STAR", "CIRC_CIRC", "BLOCK_CYCLIC:8")
    }
    cube = als.send_matrix(np.arange(60.0).reshape(3, 4, 5))
    empty = als.send_matrix(np.empty((0, 4)))
    product = dense["VC_STAR"] @ dense["VC_STAR"].T
    given = als.send_matrix(X, name="given")
    before = about(als).renewals
    with pytest.raises(GroupRecoveredError, match=f"{WORDS[how]}.*in die") as caught:
        als.run(die, how, given)
    assert caught.value.rank == 1
    for handle in dense.values():
        np.testing.assert_array_equal(handle.fetch(), X)
    np.testing.assert_array_equal((dense["MC_MR"] + 1).fetch(), X + 1)
    np.testing.assert_allclose(product.fetch(), X @ X.T)
    np.testing.assert_array_equal(cube.fetch(), np.arange(60.0).reshape(3, 4, 5))
    assert empty.fetch().shape == (0, 4)
    np.testing.assert_allclose((sparse @ np.ones(300)).fetch(), S @ np.ones(300))
    for use in (given.fetch, lambda: given + 1, lambda: als.run(die, "", given)):
        with pytest.raises(MatrixError, match="given is undefined: ranks were lost during die"):
            use()
    given.free()
    assert about(als).renewals == before + 1
    assert "rank 1" in about(als).last_loss


def test_a_view_of_what_a_call_may_have_changed_is_undefined(als: AlchemistSession) -> None:
    A = als.send_matrix(X)
    same = als.run(lambda comm, A: A, A)
    other = als.send_matrix(X)
    with pytest.raises(GroupRecoveredError):
        als.run(die, "SIGKILL", A)
    for handle in (A, same):
        with pytest.raises(MatrixError, match="undefined"):
            handle.fetch()
    np.testing.assert_array_equal(other.fetch(), X)


def test_a_pure_call_is_run_again(als: AlchemistSession) -> None:
    A = als.send_matrix(X)
    victim = als.list_workers()[0].pid
    call = Call(lambda: als.run(slow, A, pure=True))
    time.sleep(0.5)
    os.kill(victim, signal.SIGKILL)
    outcome = call.outcome(0.0, 30)
    assert outcome.result == pytest.approx(X.sum())
    np.testing.assert_array_equal(A.fetch(), X)


def slow(comm: Any, A: Any) -> float:
    time.sleep(1.0)
    total: float = comm.allreduce(float(A.local.sum()))
    return total


def test_calls_that_wait_go_on_in_every_process(als: AlchemistSession) -> None:
    A = als.send_matrix(X)

    @ray.remote(num_cpus=0)
    def elsewhere(A: Handle) -> float:
        return float(np.sum([A.sum().fetch() for _ in range(30)]))

    linalg = als.load_library("linalg")
    task = elsewhere.remote(A)
    calls = [Call(lambda: als.run(slow, A)) for _ in range(3)]
    later = linalg.norm.remote(A)
    time.sleep(0.3)
    crash = Call(lambda: als.run(die, "SIGSEGV"))
    outcomes = [call.outcome(0.0, 60) for call in calls]
    assert [one.result for one in outcomes] == pytest.approx([X.sum()] * 3)
    assert isinstance(crash.outcome(0.0, 60).error, GroupRecoveredError)
    assert ray.get(later, timeout=60) == pytest.approx(np.linalg.norm(X))
    assert ray.get(task, timeout=60) == pytest.approx(30 * X.sum())


def test_an_executor_loses_the_future_of_the_call_alone(cluster: str) -> None:
    with Executor(num_workers=1, max_gangs=1) as executor:
        calls = [executor.submit(lambda comm, i: i, 1) for _ in range(3)]
        lost = executor.submit(die, "exit", rank=0)
        calls += [executor.submit(lambda comm, i: i, 1) for _ in range(3)]
        wait(calls, timeout=60)
        assert [call.result() for call in calls] == [1] * 6
        assert isinstance(lost.exception(timeout=60), GroupRecoveredError)


def test_a_crash_in_c_is_named_and_the_library_is_loaded_again(
    als: AlchemistSession, tmp_path: Path
) -> None:
    source = tmp_path / "crashing.py"
    source.write_text(
        "import os, ctypes\n"
        "from ali import Context, routine\n"
        "loads = []\n"
        "@routine('count')\n"
        "def count(ctx: Context) -> int:\n"
        "    loads.append(1)\n"
        "    return len(loads)\n"
        "@routine()\n"
        "def crash(ctx: Context) -> None:\n"
        "    ctypes.string_at(0) if ctx.rank == 0 else ctx.comm.Barrier()\n"
    )
    lib = als.load_library("crashing", source)
    assert [lib.count(), lib.count()] == [1, 2]
    with pytest.raises(GroupRecoveredError, match=r"SIGSEGV.*in crashing\.crash") as caught:
        lib.crash()
    assert "it crashed in" in str(caught.value)
    assert "what libraries keep" in str(caught.value)
    assert lib.count() == 1  # its variables are lost
    with pytest.raises(GroupRecoveredError):
        lib.crash()
    source.write_text(source.read_text().replace("len(loads)", "-len(loads)"))
    with pytest.raises(Exception, match="'crashing' must be loaded again"):
        lib.count()
    assert als.load_library("crashing", source).count() == -1


def test_the_error_of_a_call_is_the_first_cause(als: AlchemistSession) -> None:
    """Rank 0 dies because rank 1 has raised, and its wait was ended."""

    def careless(comm: Any) -> None:
        if comm.rank == 1:
            raise ValueError("Unknown command bogus")
        try:
            comm.Barrier()
        except BaseException:
            os._exit(9)

    A = als.send_matrix(X)
    with pytest.raises(RoutineError, match="rank 1: ValueError: Unknown command bogus"):
        als.run(careless)
    np.testing.assert_array_equal(A.fetch(), X)


def test_a_time_limit_is_the_error_of_ranks_that_are_ended_for_it(als: AlchemistSession) -> None:
    def dies_late(comm: Any) -> None:
        try:
            comm.recv(source=(comm.rank + 1) % comm.size)
        except BaseException:
            os._exit(9)

    with pytest.raises(CallTimeoutError, match="exited with code 9"):
        als.run(dies_late, timeout_s=0.3)
    assert als.run(lambda comm: comm.allreduce(1)) == 2


@pytest.mark.parametrize("starts", [1, 9])
def test_a_launcher_that_cannot_run_again_costs_the_gang_and_the_doctor_says_so(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    runs, script = tmp_path / "runs", tmp_path / "mpiexec"
    script.write_text(
        f"#!/bin/sh\necho >> {runs}\ntest $(wc -l < {runs}) -le {starts} || exit 3\n"
        f'exec {" ".join(find_mpiexec())} "$@"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("ALCHEMIST_MPIEXEC", str(script))
    with AlchemistSession(1, launcher="mpiexec") as als:  # with others, all CPUs of the cluster
        A = als.send_matrix(X)
        found = started_again(als)
        assert found.status == ("ok" if starts > 1 else "warn"), found
        if starts > 1:
            np.testing.assert_array_equal((A + 1).fetch(), X + 1)
            return
        assert "the loss of a rank ends the gang" in found.message
        assert "mpiexec ended with 3" in found.message
        with pytest.raises(GroupFailedError, match="4 times"):
            als.run(lambda comm: comm.size)


class Program:
    """A random program on a gang, and the same in NumPy.

    Attributes
    ----------
    known : list of (Handle, int)
        Matrices, and the number of their memory.
    memory : list of ndarray or None
        What is in memory; None: undefined.
    """

    def __init__(self, als: AlchemistSession, seed: int) -> None:
        self.als, self.rng = als, np.random.default_rng(seed)
        self.known: list[tuple[Handle, int]] = []
        self.memory: list[Any] = []

    def add(self, handle: Handle, value: Any) -> None:
        self.memory.append(value)
        self.known.append((handle, len(self.memory) - 1))

    def step(self) -> None:
        x = self.rng.random((int(self.rng.integers(0, 90)), int(self.rng.integers(1, 60))))
        layout = str(self.rng.choice(["VC_STAR", "MC_MR", "STAR_STAR", "CIRC_CIRC"]))
        do = str(self.rng.choice(list(self.STEPS), p=self.STEPS_P))
        if do == "send" or not self.known:
            self.add(self.als.send_matrix(x, layout=layout), x)
            return
        which = int(self.rng.integers(len(self.known)))
        handle, place = self.known[which]
        if do == "kill":
            pid = self.als.list_workers()[0].pid
            os.kill(pid, signal.SIGKILL)
            while pid in [worker.pid for worker in self.als.list_workers()]:
                pass  # a call that is sent before the loss is known fails with it
        elif do == "free":
            del self.known[which]
        elif do == "crash":
            with pytest.raises(GroupRecoveredError):
                self.als.run(die, str(self.rng.choice(list(WORDS))))
        elif self.memory[place] is None:
            with pytest.raises(MatrixError, match="undefined"):
                self.als.run(same, handle)
        elif do == "spoil":
            with pytest.raises(GroupRecoveredError):
                self.als.run(die, "exit", handle)
            self.memory[place] = None
        elif do == "new":
            self.add(handle * 2 + 1, self.memory[place] * 2 + 1)
        elif do == "view":
            self.known.append((self.als.run(same, handle), place))
        elif do == "change":
            self.als.run(double, handle)
            self.memory[place] = self.memory[place] * 2

    STEPS = ("send", "new", "view", "change", "free", "kill", "crash", "spoil")
    STEPS_P = (0.2, 0.2, 0.15, 0.15, 0.1, 0.07, 0.08, 0.05)

    def check(self) -> None:
        for handle, place in self.known:
            if self.memory[place] is None:
                with pytest.raises(MatrixError, match="undefined"):
                    handle.fetch()
            else:
                np.testing.assert_array_equal(handle.fetch(), self.memory[place])


def same(comm: Any, A: Any) -> Any:
    return A


def double(comm: Any, A: Any) -> None:
    A.local[...] *= 2


@pytest.mark.timeout(scaled(100, 3600), func_only=True)
def test_random_programs_with_crashes_give_what_numpy_gives(als: AlchemistSession) -> None:
    for seed in range(scaled(4, 500)):
        program = Program(als, seed)
        for _ in range(20):
            program.step()
        program.check()


@pytest.mark.timeout(scaled(100, 3600), func_only=True)
def test_many_crashes_leave_nothing(als: AlchemistSession) -> None:
    A = als.send_matrix(X)
    with pytest.raises(GroupRecoveredError):
        als.run(die, "exit")
    parent = traces.parent_of(als.list_workers()[0].pid)
    als.run(lambda comm: comm.size)

    def held() -> tuple[int, int]:
        endpoint = min(descendants([parent]))
        return len(os.listdir(f"/proc/{parent}/fd")), len(os.listdir(f"/proc/{endpoint}/fd"))

    before = held()
    for turn in range(scaled(10, 1000)):
        with pytest.raises(GroupRecoveredError):
            als.run(die, ("exit", "SIGKILL")[turn % 2])
    assert als.run(lambda comm: comm.allreduce(1)) == 2
    assert max(b - a for a, b in zip(before, held(), strict=True)) <= 2
    np.testing.assert_array_equal(A.fetch(), X)
