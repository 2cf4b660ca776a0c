"""`als.run`: a function is enough."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import ali
from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import (
    BadArgumentError,
    CallTimeoutError,
    MatrixNotFoundError,
    RoutineError,
    SessionError,
    StaleHandleError,
)
from tests.support import traces

# Functions of a module that no rank can import travel whole.


def total(comm: Any) -> int:
    ranks: int = comm.allreduce(comm.rank)
    return ranks


def scaled(comm: Any, A: Any, k: float = 3.0) -> Any:
    B = ali.context().empty_like(A)
    B.local[...] = k * A.local
    return B


def test_a_function_runs_on_every_rank(als: AlchemistSession) -> None:
    assert als.run(total) == 0 + 1 + 2
    assert als.run(lambda comm, a, *, b: (comm.size, a, b), 1, b="two") == (3, 1, "two")


def test_handles_are_matrices_on_the_ranks_and_matrices_are_handles_here(
    als: AlchemistSession,
) -> None:
    matrix = np.arange(12.0).reshape(4, 3)
    A = als.send_matrix(matrix)
    B = als.run(scaled, A, k=2)
    assert isinstance(B, Handle)
    assert B.id in [handle.id for handle in als.list_matrices()]
    np.testing.assert_array_equal(B.fetch(), 2 * matrix)
    np.testing.assert_array_equal(als.run(scaled, B).fetch(), 6 * matrix)


def test_handles_may_be_anywhere_in_the_arguments(als: AlchemistSession) -> None:
    A, B = als.send_matrix(np.eye(3)), als.send_matrix(2 * np.eye(3))

    def sums(comm: Any, things: dict[str, Any], *more: Any) -> list[float]:
        matrices = [*things["list"], things["deep"]["B"], A]  # one from the closure
        return [comm.allreduce(float(m.local.sum())) for m in matrices]

    things = {"list": [A, B], "deep": {"B": B}}
    assert als.run(sums, things) == [3.0, 6.0, 6.0, 3.0]


def test_results_hold_values_arrays_and_matrices(als: AlchemistSession) -> None:
    def everything(comm: Any, n: int) -> dict[str, Any]:
        Z = ali.context().zeros((2, 2), "float64")
        return {"Z": Z, "twice": [Z, (1, 2.5, 1j, None, True, "x", b"y")],
                "array": np.arange(float(n)), "ints": np.eye(2, dtype="int32"),
                "scalar": np.float32(1.5)}  # fmt: skip

    for n in (5, 300_000):  # in the reply, and through the object store
        found = als.run(everything, n)
        np.testing.assert_array_equal(found["Z"].fetch(), np.zeros((2, 2)))
        assert found["twice"] == [found["Z"], (1, 2.5, 1j, None, True, "x", b"y")]
        np.testing.assert_array_equal(found["array"], np.arange(float(n)))
        assert found["ints"].dtype == np.int32
        assert isinstance(found["scalar"], np.float32)
        found["array"][0] = 7.0  # it is mine
        found["Z"].free()
    assert als.list_matrices() == []


def test_arrays_and_object_refs_are_copied_to_every_rank(als: AlchemistSession) -> None:
    def check(comm: Any, x: Any, y: Any) -> Any:
        return comm.gather(float(x.sum() + y.sum()), 0)

    for n in (10, 200_000):
        ref = ray.put(np.ones(n))
        assert als.run(check, np.ones(n), ref) == [2.0 * n] * 3
        assert als.run(check, x=ref, y=np.ones(n)) == [2.0 * n] * 3


def test_partials_methods_and_classes_of_ones_own_travel(als: AlchemistSession) -> None:
    class Adder:
        def __init__(self, n: int) -> None:
            self.n = n

        def __call__(self, comm: Any) -> int:
            return self.n + comm.rank

        def add(self, comm: Any, m: int) -> Adder:
            return Adder(self.n + m)

    assert als.run(Adder(5)) == 5
    assert als.run(functools.partial(lambda comm, a, b: a - b, b=1), 4) == 3
    found = als.run(Adder(1).add, 2)
    assert isinstance(found, Adder)
    assert found.n == 3


def test_objects_of_ones_own_classes_travel_between_ranks(als: AlchemistSession) -> None:
    @dataclasses.dataclass
    class Part:
        rank: int

        def __add__(self, other: Part) -> Part:
            return Part(self.rank + other.rank)

    def exchange(comm: Any) -> Any:
        from mpi4py import MPI  # noqa: PLC0415

        found = {}
        mine, left, right = Part(comm.rank), (comm.rank - 1) % 3, (comm.rank + 1) % 3
        for name, over in (("comm", comm), ("world", MPI.COMM_WORLD)):
            request = over.isend(mine, right)
            arrived = [over.recv(source=left), over.sendrecv(mine, right, source=left)]
            request.wait()
            assert all(isinstance(part, Part) for part in arrived)
            found[name] = [
                over.gather(mine), over.allgather(mine), over.bcast(mine, 1), over.allreduce(mine),
                over.scatter([Part(i) for i in range(3)]), over.alltoall([mine] * 3)[2], *arrived,
                over.bcast(lambda: 5)(),
            ]  # fmt: skip
        return found

    parts = [Part(0), Part(1), Part(2)]
    expected = [parts, parts, Part(1), Part(3), Part(0), Part(2), Part(2), Part(2), 5]
    assert als.run(exchange) == {"comm": expected, "world": expected}
    with pytest.raises(RoutineError, match="pickle"):
        als.run(lambda comm: comm.bcast(threading.Lock()))


def test_a_module_of_the_users_own_folder_need_not_be_on_the_nodes(
    als: AlchemistSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_helpers_of_run.py").write_text("def twice(x):\n    return 2 * x\n")
    (tmp_path / "my_module_of_run.py").write_text(
        textwrap.dedent(
            """
            import my_helpers_of_run as helpers
            from my_helpers_of_run import twice
            FACTOR = 10

            def f(comm, x):
                import sys
                assert "my_module_of_run" not in sys.modules
                return FACTOR * twice(x) + helpers.twice(comm.size)
            """
        )
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_module_of_run  # noqa: PLC0415

    assert als.run(my_module_of_run.f, 4) == 86


def test_nothing_is_kept_between_runs(als: AlchemistSession) -> None:
    def count(comm: Any, seen: list[int] = []) -> int:  # noqa: B006
        seen.append(1)
        return len(seen)

    assert [als.run(count) for _ in range(3)] == [1, 1, 1]


def test_the_context_exists_only_inside_a_run(als: AlchemistSession) -> None:
    def layouts(comm: Any, A: Any) -> Any:
        ctx = ali.context()
        ctx.check()
        ctx.progress(0.5, "half")
        return ctx.rank, ctx.size, ctx.to_layout(A, "MC_MR")

    rank, size, B = als.run(layouts, als.send_matrix(np.eye(4)))
    assert (rank, size, B.layout) == (0, 3, "MC_MR")
    with pytest.raises(RuntimeError, match=r"als\.run"):
        ali.context()


def test_progress_reaches_the_bar(cluster: str, capfd: pytest.CaptureFixture[str]) -> None:
    def steps(comm: Any) -> None:
        for i in range(4):
            ali.context().progress(i / 4, f"step {i}")
            time.sleep(0.12)

    with AlchemistSession(1, progress=True) as als:
        als.run(steps)
    assert "step 3" in capfd.readouterr().err


# --- what goes wrong --------------------------------------------------------------------


@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_an_exception_names_its_rank_and_traceback(als: AlchemistSession, rank: int) -> None:
    def broken(comm: Any, where: int) -> None:
        if where in (-1, comm.rank):
            raise ValueError("no luck")
        comm.Barrier()

    with pytest.raises(RoutineError, match="ValueError: no luck") as caught:
        als.run(broken, rank)
    assert caught.value.rank in ({0, 1, 2} if rank < 0 else {rank})  # of several: the first
    shown = caught.value.traceback or ""
    assert "in broken" in shown
    assert 'raise ValueError("no luck")' in shown
    assert "worker.py" not in shown  # our own frames tell a user nothing


def test_a_pure_function_that_changes_a_matrix_is_refused(als: AlchemistSession) -> None:
    """The gang would keep what it knows of the matrix from before."""

    def doubled(comm: Any, A: Any) -> None:
        A.local[...] *= 2

    A = als.send_matrix(np.eye(3))
    with pytest.raises(RoutineError, match="is read-only") as caught:
        als.run(doubled, A, pure=True)
    assert "changes a matrix: leave out pure=True" in (caught.value.traceback or "")
    np.testing.assert_array_equal(A.fetch(), np.eye(3))
    als.run(doubled, A)
    np.testing.assert_array_equal(A.fetch(), 2 * np.eye(3))


def test_an_exception_that_cannot_be_pickled_is_reported(als: AlchemistSession) -> None:
    def broken(comm: Any) -> None:
        class OddError(Exception):
            def __init__(self) -> None:
                super().__init__("odd")
                self.lock = threading.Lock()

        raise OddError

    with pytest.raises(RoutineError, match="OddError: odd"):
        als.run(broken)


@pytest.mark.parametrize("code", [0, 3, "enough", None])
def test_sys_exit_fails_the_call_alone(als: AlchemistSession, code: object) -> None:
    def leave(comm: Any) -> None:
        if comm.rank == 1:
            sys.exit(code)
        comm.Barrier()

    with pytest.raises(RoutineError, match="SystemExit") as caught:
        als.run(leave)
    assert caught.value.rank == 1


def test_an_object_that_cannot_be_pickled_is_named(als: AlchemistSession) -> None:
    lock = threading.Lock()

    def closes_over(comm: Any) -> Any:
        return lock

    with pytest.raises(BadArgumentError, match=r"closes_over uses .* 'lock' \(a lock\)"):
        als.run(closes_over)
    with pytest.raises(BadArgumentError, match="total: its argument number 2"):
        als.run(total, 1, lock)
    with pytest.raises(BadArgumentError, match="total: its argument 'k'"):
        als.run(total, k=[lock])
    with pytest.raises(BadArgumentError, match="ObjectRef inside"):
        als.run(total, [ray.put(1)])

    def returns_one(comm: Any) -> Any:
        return [threading.Lock()]

    with pytest.raises(RoutineError, match="returned a value that cannot be pickled on rank 0"):
        als.run(returns_one)


def test_matrices_must_be_here_and_the_same_on_all_ranks(als: AlchemistSession) -> None:
    A = als.send_matrix(np.eye(3))
    A.free()
    with pytest.raises(MatrixNotFoundError, match="freed"):
        als.run(scaled, A)
    with AlchemistSession(1) as other, pytest.raises(MatrixNotFoundError, match="session"):
        other.run(scaled, als.send_matrix(np.eye(2)))

    def uneven(comm: Any) -> Any:
        return ali.context().zeros((2 + comm.rank, 2), "float64")

    with pytest.raises(RoutineError, match="other shapes or layouts"):
        als.run(uneven)

    def some(comm: Any) -> Any:
        Z = ali.context().zeros((2, 2), "float64")
        return Z if comm.rank == 0 else None

    with pytest.raises(RoutineError, match="other shapes or layouts"):
        als.run(some)
    assert als.list_matrices() == []


def test_a_session_without_workers_refuses_calls(cluster: str) -> None:
    with AlchemistSession() as als:
        with pytest.raises(SessionError, match="no workers"):
            als.run(total)
        als.request_workers(1)
        A = als.send_matrix(np.eye(2))
        als.yield_workers()
        als.request_workers(1)
        with pytest.raises(StaleHandleError):
            als.run(scaled, A)


def test_a_call_that_takes_too_long_is_cancelled(als: AlchemistSession, tmp_path: Path) -> None:
    def hang(comm: Any, how: str) -> None:
        try:
            if how == "mpi" and comm.rank == 0:
                comm.recv(source=1)
            while how == "loop":
                pass
            time.sleep(60)
        finally:  # it is not disturbed by further signals
            time.sleep(1.2 * (how == "sleep"))
            (tmp_path / f"{how} {comm.rank}").touch()

    for how in ("mpi", "loop", "sleep"):
        start = traces.clock()
        with pytest.raises(CallTimeoutError, match=r"1\.5 s") as caught:
            als.run(hang, how, timeout_s=1.5)  # until which each rank is in it, on a busy machine
        assert isinstance(caught.value, TimeoutError)
        assert als.run(total) == 3
        assert traces.clock() - start < 7.2
    assert len(list(tmp_path.iterdir())) == 9
    sleep = als.load_library("echo").sleep.options(timeout_s=0.3)
    with pytest.raises(CallTimeoutError):
        sleep(30.0)
    with pytest.raises(BadArgumentError):
        sleep.options(timeout_s="soon")


# --- how it travels ---------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, 200_000, 3_000_001])
def test_large_arguments_and_results_are_whole_aligned_and_the_callers_own(
    als: AlchemistSession, elements: int
) -> None:
    """More than 1 MiB of them moves as a matrix, which is freed after the call."""
    x, flags = np.random.default_rng(0).random(elements), np.arange(elements) % 3 == 0
    text = "text " * (elements // 5)

    def back(comm: Any, given: Any) -> Any:
        given["x"] += comm.rank  # rank 0's copy is its own
        return {**given, "code": float(x[-1])}

    before = als.list_matrices()
    for _ in range(2):
        found = als.run(back, {"x": x, "flags": flags, "text": text})
        assert found["code"] == x[-1]
        assert found["text"] == text
        for name, array in (("x", x), ("flags", flags)):
            np.testing.assert_array_equal(found[name], array)
            assert found[name].flags.aligned
            found[name][0] = 0
    assert als.list_matrices() == before


def test_a_large_argument_is_there_again_after_the_loss_of_a_rank(cluster: str) -> None:
    def times(comm: Any, A: Any, weights: Any) -> Any:
        return scaled(comm, A, weights[0])

    with AlchemistSession(2, max_failures=2) as als:
        A = als.send_matrix(np.eye(6))
        B = als.run(times, A, np.full(300_000, 3.0), pure=True)
        os.kill(als.list_workers()[1].pid, signal.SIGKILL)
        np.testing.assert_array_equal(B.fetch(), 3 * np.eye(6))


BRINGS_MUCH = """
import ray
import sqlite3
from alchemist_ray import AlchemistSession, Executor, mpi_function

SESSIONS = []

def run(comm):
    return comm.size

def main():
    with AlchemistSession(2) as als:
        return Executor, mpi_function, ray.get(als)

def version(comm):
    sqlite3.of_this_rank = comm.rank
    return comm.allgather((sqlite3.sqlite_version, sqlite3.of_this_rank))
"""


def test_what_a_functions_module_has_imported_is_imported_on_ranks_where_it_is_used(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reference to a module brings all its functions, and what their program imports."""
    (tmp_path / "brings_much.py").write_text(BRINGS_MUCH)
    monkeypatch.syspath_prepend(tmp_path)
    import brings_much  # type: ignore[import-not-found]  # noqa: PLC0415

    def imported(comm: Any) -> list[str]:
        return [name for name in ("ray", "sqlite3", "alchemist_ray") if name in sys.modules]

    with AlchemistSession(2) as als:
        assert als.run(lambda comm: (brings_much.run(comm), brings_much.main.__name__)) == (
            2,
            "main",
        )
        assert als.run(imported) == []
        import sqlite3  # noqa: PLC0415

        found = als.run(lambda comm: brings_much.version(comm))
        assert found == [(sqlite3.sqlite_version, rank) for rank in (0, 1)]
        assert als.run(imported) == ["sqlite3"]


SLOW = """
import time
import {name}.part
time.sleep({seconds})
"""


def slow_package(folder: Path, name: str, seconds: float) -> None:
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(SLOW.format(name=name, seconds=seconds))
    (folder / name / "part.py").write_text("")


def uses(comm: Any, folder: str, name: str) -> None:
    from mpi_workers.rank import imports  # noqa: PLC0415

    sys.path.insert(0, folder)
    imports.SLOW_S = 0.0
    try:
        __import__(name)
    finally:
        imports.SLOW_S = 5.0


def test_an_import_that_takes_long_is_told_by_one_rank(
    als: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    slow_package(tmp_path, "tells_of_itself", 0)
    als.run(uses, str(tmp_path), "tells_of_itself")
    told = capfd.readouterr().err
    assert told.count("importing tells_of_itself: 0 s so far. The first call") == 1
    assert "[rank 0] importing" in told
    als.run(uses, str(tmp_path), "tells_of_itself")
    assert "importing" not in capfd.readouterr().err


def test_a_time_limit_that_ends_an_import_names_it(als: AlchemistSession, tmp_path: Path) -> None:
    slow_package(tmp_path, "sleeps_long", 60)
    with pytest.raises(CallTimeoutError, match=r"import of sleeps_long at uses \(test_run.py"):
        als.run(uses, str(tmp_path), "sleeps_long", timeout_s=1.0)


def says(comm: Any, count: int) -> None:
    for line in range(count):
        print(f"line {line} of {comm.rank}")


def test_the_output_of_calls_goes_to_a_file_for_each_rank_or_nowhere(
    als: AlchemistSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with als.output(tmp_path / "logs"):
        als.run(says, 1000)
        als.run(says, 1)
        with als.output(False):
            als.run(says, 5)
        als.run_program(["sh", "-c", "echo of a program"])
    assert capfd.readouterr().out == ""
    for rank in range(3):
        lines = (tmp_path / "logs" / f"rank{rank}.txt").read_text().splitlines()
        assert lines == [*(f"line {line} of {rank}" for line in (*range(1000), 0)), "of a program"]
    als.run(says, 1)
    assert capfd.readouterr().out.count("line 0") == 3


def part(comm: Any, A: Any, B: Any) -> Any:
    A.vector[...] += A.rows
    assert A.local.shape == (len(A.rows), 1)
    try:
        return A, B.vector
    except ValueError as error:
        return A, str(error)


def test_a_rank_has_a_vector_as_one_axis(als: AlchemistSession) -> None:
    for layout in ("VC_STAR", "VC_STAR:BLOCK", "STAR_STAR"):
        A, error = als.run(
            part, als.send_matrix(np.zeros(7), layout=layout), als.send_matrix([[1.0]])
        )
        assert A.shape == (7,)
        np.testing.assert_array_equal(A.fetch(), np.arange(7.0))
        assert "shape (1, 1) is no vector" in error
