"""Ranks that end are started again in the same memory: what is kept, undefined, and fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
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
    GroupError,
    GroupRecoveredError,
    MatrixError,
    RoutineError,
)
from alchemist_ray.launchers.mpiexec import find_mpiexec
from alchemist_ray.observe.doctor.ranks import started_again
from mpi_workers.node.processes import descendants
from tests.faults.conftest import ERROR_LIMIT_S, Call, until_replaced
from tests.mpi_workers.cgroups import limited_memory, limited_processes
from tests.support import traces
from tests.support.build import needs_compiler, shared_object
from tests.support.suite import scaled

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
        als.run(dies_late, timeout_s=5.0)
    assert als.run(lambda comm: comm.allreduce(1)) == 2


COMPUTES_ON = """
#include <mpi.h>
#include <time.h>
void computes_on(int comm, double seconds) {
    double one = 1, sum;
    MPI_Allreduce(&one, &sum, 1, MPI_DOUBLE, MPI_SUM, (MPI_Comm)comm);
    clock_t end = clock() + (clock_t)(seconds * CLOCKS_PER_SEC);
    while (clock() < end) sum += one;
}
"""


@needs_compiler
@pytest.mark.parametrize("holds", [ctypes.CDLL, ctypes.PyDLL])  # PyDLL: Python's lock, as NEURON
def test_native_code_that_computes_on_without_mpi_is_ended(
    als: AlchemistSession, tmp_path: Path, holds: Any
) -> None:
    (tmp_path / "computes.c").write_text(COMPUTES_ON)
    built = str(shared_object(tmp_path / "computes.c", tmp_path / "computes.so"))

    def careless(comm: Any, seconds: float, file: str) -> None:
        if comm.rank == 1:
            raise ValueError("Unknown command bogus")
        function = holds(built).computes_on
        function.argtypes = ctypes.c_int, ctypes.c_double
        try:
            function(comm.handle & 0xFFFFFFFF, seconds)
        finally:
            time.sleep(2.5)
            Path(file).write_text("cleaned up")

    A, file = als.send_matrix(X), tmp_path / "file"
    begun = traces.clock()
    for seconds in (0.0, 300.0):
        with pytest.raises(RoutineError, match="rank 1: ValueError: Unknown command bogus"):
            als.run(careless, seconds, str(file))
        assert als.run(lambda comm: comm.allreduce(1)) == 2
        assert file.exists() == (seconds == 0.0), "Python cleans up, native code does not go on"
        file.unlink(missing_ok=True)
    assert traces.clock() - begun < 30  # 8 s; stuck_timeout_s is 30
    np.testing.assert_array_equal(A.fetch(), X)


@pytest.mark.parametrize("starts", [1, 9])
def test_a_launcher_that_cannot_run_again_costs_the_ranks_and_the_doctor_says_so(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    runs, allowed, script = (tmp_path / name for name in ("runs", "allowed", "mpiexec"))
    allowed.write_text(f"{starts}\n")
    script.write_text(
        f"#!/bin/sh\necho >> {runs}\ntest $(wc -l < {runs}) -le $(cat {allowed}) || exit 3\n"
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
        assert "a gang that loses a rank goes on without ranks" in found.message
        assert "mpiexec ended with 3" in found.message
        with pytest.raises(GroupError, match=r"has no ranks.*mpiexec ended with 3"):
            als.run(lambda comm: comm.size)
        np.testing.assert_array_equal(A.fetch(), X)
        allowed.write_text("99\n")
        np.testing.assert_array_equal((A + 1).fetch(), X + 1)


@contextlib.contextmanager
def no_room(what: str, proxy: int) -> Iterator[None]:
    """The proxy forks, and its ranks get no memory; are killed for it; or it may not fork."""
    if what == "processes":
        with limited_processes(proxy, 0):
            yield
    elif what == "OOM killer":
        with limited_memory(24 << 20) as group:
            (group / "cgroup.procs").write_text(f"{proxy}")
            try:
                yield
            finally:
                for pid in (group / "cgroup.procs").read_text().split():
                    (group.parent / "cgroup.procs").write_text(pid)
    else:
        before = resource.prlimit(proxy, resource.RLIMIT_AS)
        room = traces.memory(proxy, "VmSize") + (16 << 20), before[1]
        resource.prlimit(proxy, resource.RLIMIT_AS, room)
        yield
        resource.prlimit(proxy, resource.RLIMIT_AS, before)


@pytest.mark.parametrize("what", ["address space", "processes", "OOM killer"])
def test_a_gang_without_room_for_ranks_has_its_matrices(als: AlchemistSession, what: str) -> None:
    name = als.connection.address.gang
    A, S = als.send_matrix(X), scipy.sparse.random_array((200, 300), density=0.1, rng=1)
    sparse, large = als.send_matrix(S), als.send_matrix(np.ones((4000, 2000)))
    copies = als.send_matrix(X, layout="STAR_STAR")
    proxy = traces.parent_of(als.list_workers()[0].pid)
    endpoint = min(descendants([proxy]))
    with no_room(what, proxy):
        with pytest.raises(GroupRecoveredError):
            als.run(die, "SIGSEGV")
        for use in ((A + 1).fetch, lambda: als.run(die, ""), lambda: als.send_matrix(X)):
            with pytest.raises(GroupError, match=r"has no ranks.*could not.*again.*free\(\)"):
                use()
        for handle in (A, copies):
            np.testing.assert_array_equal(handle.fetch(), X)
            np.testing.assert_array_equal(handle.fetch(rows=slice(3, 5)), X[3:5])
        equal(sparse.fetch(), S)

        @ray.remote(num_cpus=0)
        def elsewhere(A: Handle) -> Any:
            return A.fetch()

        np.testing.assert_array_equal(ray.get(elsewhere.remote(A), timeout=60), X)

        def kept() -> int:
            files = Path(f"/proc/{endpoint}/fd").iterdir()
            segments = [f for f in files if "memfd:alchemist " in os.readlink(f)]
            return sum(f.stat().st_blocks for f in segments) * 512

        held = kept()
        large.free()
        assert held - kept() >= 64_000_000
        assert als.list_workers() == []
    np.testing.assert_array_equal((A + 1).fetch(), X + 1)
    np.testing.assert_allclose((sparse @ np.ones(300)).fetch(), S @ np.ones(300))
    assert als.connection.address.gang == name
    rank, *keepers = [
        int(Path(f"/proc/{pid}/oom_score_adj").read_text())
        for pid in (als.list_workers()[0].pid, proxy, endpoint)
    ]
    assert rank > max(keepers), "where memory runs out, the kernel ends ranks first"


@ray.remote(num_cpus=0)
class Attached:
    """Another process on the gang, which keeps what it has mapped."""

    def fetch(self, handle: Handle) -> Any:
        return handle.fetch()

    def new(self, handle: Handle) -> Handle:
        return handle * 2


def equal(found: Any, expected: Any) -> None:
    if scipy.sparse.issparse(expected):
        found, expected = found.toarray(), expected.toarray()
    np.testing.assert_array_equal(found, expected)


class Program:
    """A random program of two processes on a gang, and the same in NumPy.

    Attributes
    ----------
    known : list of (Handle, int)
        Matrices, and the number of their memory.
    memory : list
        What is in memory, an array of NumPy or SciPy; None: undefined.
    """

    def __init__(self, als: AlchemistSession, other: Any, seed: int) -> None:
        self.als, self.other, self.rng = als, other, np.random.default_rng(seed)
        self.known: list[tuple[Handle, int]] = []
        self.memory: list[Any] = []

    def add(self, handle: Handle, value: Any) -> None:
        self.memory.append(value)
        self.known.append((handle, len(self.memory) - 1))

    def step(self) -> None:
        x = self.rng.random((int(self.rng.integers(0, 90)), int(self.rng.integers(1, 60))))
        layout = str(self.rng.choice(["VC_STAR", "MC_MR", "STAR_STAR", "CIRC_CIRC"]))
        do = str(self.rng.choice(list(self.STEPS), p=self.STEPS_P))
        if do == "sparse":
            x = scipy.sparse.csr_array(np.where(x < 0.1, x, 0.0)[: len(x) or 1])
            self.add(self.als.send_matrix(x), x)
            return
        if do == "send" or not self.known:
            self.add(self.als.send_matrix(x, layout=layout), x)
            return
        which = int(self.rng.integers(len(self.known)))
        handle, place = self.known[which]
        value = self.memory[place]
        if do == "kill":
            pid = self.als.list_workers()[0].pid
            os.kill(pid, signal.SIGKILL)
            # A call that is sent before the loss is known fails with it.
            until_replaced(self.als, {pid}, ERROR_LIMIT_S)
        elif do == "free":
            del self.known[which]
        elif do == "crash":
            with pytest.raises(GroupRecoveredError):
                self.als.run(die, str(self.rng.choice(list(WORDS))))
        elif value is None:
            with pytest.raises(MatrixError, match="undefined"):
                self.als.run(same, handle)
        elif do == "spoil":
            with pytest.raises(GroupRecoveredError):
                self.als.run(lose, handle)
            self.memory[place] = None
        elif do == "new":
            self.add(handle * 2, value * 2)
        elif do == "new there":
            self.add(ray.get(self.other.new.remote(handle), timeout=60), value * 2)
        elif do == "fetch there":
            equal(ray.get(self.other.fetch.remote(handle), timeout=60), value)
        elif scipy.sparse.issparse(value):
            ones = np.ones(value.shape[1])
            np.testing.assert_allclose((handle @ ones).fetch(), value @ ones)
        elif do == "view":
            self.known.append((self.als.run(same, handle), place))
        elif do == "change":
            self.als.run(double, handle)
            self.memory[place] = value * 2

    STEPS = (
        "send", "sparse", "new", "new there", "fetch there", "view", "change", "free", "kill",
        "crash", "spoil",
    )  # fmt: skip
    STEPS_P = (0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.07, 0.05, 0.08, 0.05)

    def check(self) -> None:
        for handle, place in self.known:
            if self.memory[place] is None:
                with pytest.raises(MatrixError, match="undefined"):
                    handle.fetch()
            else:
                equal(handle.fetch(), self.memory[place])


def same(comm: Any, A: Any) -> Any:
    return A


def double(comm: Any, A: Any) -> None:
    A.local[...] *= 2


def lose(comm: Any, A: Any) -> None:
    os._exit(3)


@pytest.mark.timeout(scaled(300, 7200), func_only=True)
def test_random_programs_with_crashes_give_what_numpy_gives(als: AlchemistSession) -> None:
    other = Attached.remote()  # type: ignore[attr-defined]
    for seed in range(scaled(4, 500)):
        program = Program(als, other, seed)
        for number in range(20):
            try:
                program.step()
            except Exception as error:
                error.add_note(f"program {seed}, step {number}")
                raise
        program.check()


@pytest.mark.timeout(scaled(300, 7200), func_only=True)
def test_many_crashes_leave_nothing(als: AlchemistSession) -> None:
    A = als.send_matrix(X)

    def crash(times: int) -> None:
        for turn in range(times):
            with pytest.raises(GroupRecoveredError):
                als.run(die, ("exit", "SIGKILL")[turn % 2])
        assert als.run(lambda comm: comm.allreduce(1)) == 2

    crash(scaled(1, 50))  # what grows at first, is not much
    proxy = traces.parent_of(als.list_workers()[0].pid)
    endpoint = min(descendants([proxy]))
    # One is this gang's.
    managers = [pid for pid, line in traces.processes().items() if "GroupManager" in line]
    kept = {"program": os.getpid(), "proxy": proxy, "endpoint": endpoint}
    kept |= {f"GroupManager {pid}": pid for pid in managers}

    def held() -> dict[str, int]:
        found = {
            "processes": len(traces.processes()),
            "folders": sum(1 for folder in traces.folders() for _ in folder.rglob("*")),
            "shared memory": len(traces.shared_memory() | traces.abandoned()),
        }
        found |= {f"files of {k}": len(os.listdir(f"/proc/{v}/fd")) for k, v in kept.items()}
        memory = {f"MiB of {k}": traces.memory(v, "RssAnon") >> 20 for k, v in kept.items()}
        return found | memory

    before = held()
    crash(scaled(10, 1000))
    grown = {k: (before[k], v) for k, v in held().items() if v > before[k]}
    # Each crash may leave 4 KiB of what the program and the GroupManager remember.
    most = dict.fromkeys(before, 2) | {k: 2 + scaled(10, 4) for k in before if "MiB" in k}
    assert {k: v for k, v in grown.items() if v[1] - v[0] > most[k]} == {}
    print("grown:", grown)
    np.testing.assert_array_equal(A.fetch(), X)
