"""Gangs with `max_failures` come back after a loss, with their matrices and libraries."""

from __future__ import annotations

import gc
import operator
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray

import ali
from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    GroupFailedError,
    GroupRecoveredError,
    LibraryNotFoundError,
    MatrixError,
    RoutineError,
    StaleHandleError,
)
from alchemist_ray.measures import logs
from alchemist_ray.runtime.commands.matrix_records import LoggedCommand
from alchemist_ray.transfer.sources import NumPySource
from alchemist_ray.transfer.tables import TableSource
from mpi_workers.data.transfers import MatrixReader
from mpi_workers.matrix.storage import Storage
from tests.faults.conftest import Call, inject_and_retry, inject_during
from tests.faults.named.named_gangs import Program
from tests.faults.recovery.conftest import LARGE, LIBRARY, Recovering, X, used_by_a_task
from tests.support import traces
from tests.support.suite import scaled

# --- back ---


def test_a_rank_that_was_killed_is_named_whatever_is_sent_meanwhile(clean: None) -> None:
    """A command that arrives between a rank's end and its report costs no report."""
    kills = scaled(20, 60)
    with AlchemistSession(1, name="named-loss") as als:
        for _ in range(kills):
            os.kill(als.list_workers()[0].pid, signal.SIGKILL)
            als.run(lambda comm: comm.size, pure=True)
        log = logs.read("named-loss", {}).lines["manager.log"]
    causes = [line.split("ranks lost: ")[1] for line in log if "ranks lost: " in line]
    assert len(causes) == kills
    assert [cause for cause in causes if not cause.startswith("rank 0 (pid ")] == []


def test_losses_are_counted(gang: Recovering) -> None:
    other = Recovering(1, max_failures=1)
    A = other.als.send_matrix(X)
    other.kill()
    np.testing.assert_array_equal(A.fetch(), X)
    outcome = inject_and_retry(other.kill, other.als.list_workers)
    assert isinstance(outcome.error, GroupFailedError)
    assert "was lost" in str(outcome.error)
    with pytest.raises(GroupFailedError):
        A.fetch()
    other.als.request_workers(1)
    with pytest.raises(StaleHandleError):
        A.fetch()
    other.als.close()


def test_a_gang_without_max_failures_ends(clean: None) -> None:
    gang = Recovering(1, max_failures=0)
    A = gang.als.send_matrix(X)
    with pytest.raises(MatrixError, match="max_failures"):
        gang.als.send_matrix(X, durable=True)
    gang.kill()
    with pytest.raises(GroupFailedError):
        A.fetch()
    gang.als.close()


@pytest.mark.cell("program", "idle", "max_failures", "goes on")
def test_a_gang_comes_back_after_a_program_that_ran_a_function_has_ended(clean: None) -> None:
    """Its function is an object of that program's: it went with it, and the gang hung."""
    program = """
        als = AlchemistSession.attach("outlives")
        large = bytes(200_000)
        als.matrix("A").fetch()
        print(als.run(lambda comm, A: A.local.fill(len(large)), als.matrix("A")), flush=True)
    """
    with AlchemistSession(2, name="outlives", max_failures=3) as als:
        A = als.send_matrix(X, name="A", durable=True)
        B = als.send_matrix(X)
        with Program(program) as other:
            assert other.said == "None"
            other.process.wait(30)
        os.kill(traces.parent_of(als.list_workers()[1].pid), signal.SIGKILL)
        np.testing.assert_array_equal(A.fetch(), np.full(X.shape, 200_000.0))  # it was repeated
        np.testing.assert_array_equal(B.fetch(), X)
        # Pure: the fetches may have come before the loss was noticed.
        assert als.run(lambda comm: comm.size, pure=True) == 2


def test_what_a_call_that_was_lost_with_ranks_may_have_changed_is_rebuilt(
    gang: Recovering,
) -> None:
    """From what the other matrices are now; no other one is touched."""
    als = gang.als
    A = als.send_matrix(LARGE, durable=True)
    lost = als.send_matrix(LARGE)
    gang.counting.increment(A)
    B = A * 2
    view = als.run(lambda comm, B: B, B, pure=True)
    C = B + 1

    def spoil(comm: Any, *matrices: Any) -> None:
        for matrix in matrices:
            matrix.local[...] = -1
        comm.Barrier()
        os._exit(3)

    before = gang.ranks
    with pytest.raises(GroupRecoveredError, match="not declared pure") as caught:
        als.run(spoil, B)
    assert "undefined" not in str(caught.value)
    assert not set(before) & set(gang.ranks)
    assert gang.losses == 0
    for handle in (B, view):
        np.testing.assert_array_equal(handle.fetch(), 2 * (LARGE + 1))
    np.testing.assert_array_equal(C.fetch(), 2 * LARGE + 3)
    als.run(lambda comm, V: V.local.fill(7), view)
    assert (B.fetch() == 7).all()  # they share memory again
    with pytest.raises(GroupRecoveredError, match="undefined"):
        als.run(spoil, A, lost)
    np.testing.assert_array_equal(A.fetch(), LARGE + 1)
    with pytest.raises(MatrixError, match="undefined"):
        lost.fetch()


def test_what_a_failed_call_left_is_not_freed_on_the_next_ranks(gang: Recovering) -> None:
    """There the last call is another one, and its results were lost without a word."""
    A = gang.als.send_matrix(X)
    B = A + 1.0
    stopped = gang.ranks[0]

    def half(comm: Any, A: Any) -> Any:
        if comm.rank:
            raise ValueError("this rank only")
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(RoutineError, match="this rank only"):
        gang.als.run(half, A, pure=True)
    os.kill(stopped, signal.SIGKILL)
    np.testing.assert_array_equal(B.fetch(), X + 1)
    np.testing.assert_array_equal((A + B).fetch(), X + (X + 1))


@pytest.mark.cell("rank", "recovering", "max_failures", "lost")
def test_starts_that_fail_are_losses_until_none_is_left(clean: None, tmp_path: Path) -> None:
    gang = Recovering(max_failures=3)
    A = gang.als.send_matrix(np.ones((20, 20)))
    shutil.copy(LIBRARY.with_name("trap.py"), tmp_path)
    gang.als.load_library("trap", tmp_path / "trap.py")
    (tmp_path / "trap.order").write_text("die")  # all further ranks, when they load it
    gang.kill()
    with pytest.raises(GroupFailedError, match="was not started again, after 3 failures"):
        A.fetch()
    (tmp_path / "trap.order").unlink()
    gang.als.request_workers(2)
    with pytest.raises(StaleHandleError):
        A.fetch()
    assert gang.als.send_matrix(np.ones((20, 20))).fetch().sum() == 400
    gang.als.close()


# --- calls and transfers under way ---


def test_a_pure_call_under_way_is_repeated(gang: Recovering) -> None:
    lib, A = gang.counting, gang.als.send_matrix(X)
    outcome = inject_during(gang.kill, lambda: lib.slow(A, 1.0))
    assert outcome.error is None
    np.testing.assert_allclose(outcome.result.fetch(), X + 1)
    run = inject_during(
        gang.kill,
        lambda: gang.als.run(lambda comm, A: [time.sleep(1), A.shape][1], A, pure=True),
    )
    assert tuple(run.result) == X.shape


def test_another_call_under_way_fails_and_changes_nothing(gang: Recovering) -> None:
    lib, A = gang.counting, gang.als.send_matrix(X)
    outcome = inject_during(gang.kill, lambda: lib.slow_impure(A, 1.0))
    assert isinstance(outcome.error, GroupRecoveredError)
    assert "counting.slow_impure" in str(outcome.error)
    assert "all its matrices (1)" in str(outcome.error)
    np.testing.assert_array_equal(A.fetch(), X)


def test_waiting_calls_of_all_processes_go_on(gang: Recovering) -> None:
    lib, A = gang.counting, gang.als.send_matrix(X)
    later = lib.slow.remote(A, 0.2)
    calls = [Call(lambda: lib.slow(A, 0.2).fetch()) for _ in range(5)]
    time.sleep(0.3)
    gang.kill()
    for call in calls:
        np.testing.assert_allclose(call.outcome(0.0, 30).result, X + 1)
    np.testing.assert_allclose(ray.get(later).fetch(), X + 1)


@pytest.mark.cell("proxy", "sending", "max_failures", "goes on")
@pytest.mark.cell("proxy", "fetching", "max_failures", "goes on")
@pytest.mark.parametrize(("end", "method"), [(NumPySource, "send"), (MatrixReader, "read_block")])
def test_a_transfer_under_way_is_repeated(
    gang: Recovering, monkeypatch: pytest.MonkeyPatch, end: Any, method: str
) -> None:
    large = np.arange(16e6).reshape(4000, 4000)
    A = gang.als.send_matrix([(ray.put(large), 0, 0)])
    lost, transfer, proxy = gang.ranks[1:], getattr(end, method), gang.proxy

    def broken(*arguments: Any) -> Any:
        while lost:  # a stopped rank takes and gives nothing until its node is lost
            os.kill(lost.pop(), signal.SIGSTOP)
            threading.Timer(0.2, gang.kill, [proxy]).start()
        return transfer(*arguments)

    monkeypatch.setattr(end, method, broken)
    if end is NumPySource:
        np.testing.assert_array_equal(gang.als.send_matrix(large).fetch(), large)
    np.testing.assert_array_equal(A.fetch(), large)
    assert gang.losses == 1


def test_a_stream_that_can_be_read_once_arrives_whole_after_a_loss(
    gang: Recovering, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"a": np.arange(5000.0), "b": np.arange(5000.0) ** 2})
    lost, send = [gang.proxy], TableSource.send

    def broken(*arguments: Any) -> Any:
        while lost:
            gang.kill(lost.pop())
        return send(*arguments)

    monkeypatch.setattr(TableSource, "send", broken)
    A = gang.als.send_matrix(table.to_reader(max_chunksize=1000))
    assert gang.losses == 1
    np.testing.assert_array_equal(A.fetch(), np.column_stack([table["a"], table["b"]]))


def test_a_handle_in_a_ray_task_goes_on(gang: Recovering) -> None:
    used_by_a_task(gang.als.send_matrix(X), gang.kill)


# --- sources ---


def test_matrices_are_rebuilt_from_their_sources(gang: Recovering, tmp_path: Path) -> None:
    als = gang.als
    np.save(tmp_path / "file.npy", X)
    large = np.random.default_rng(1).random((1000, 200))
    vector = np.arange(10.0)
    handles = {
        "blocks": (als.send_matrix([(ray.put(X[:30]), 0, 0), (ray.put(X[30:]), 30, 0)]), X),
        "durable": (als.send_matrix(large, durable=True, layout="MC_MR"), large),
        "small": (als.send_matrix(vector), vector),
        "copies": (als.send_matrix(X, layout="STAR_STAR"), X),
        "file": (als.load_matrix(tmp_path / "file.npy"), X),
        "created": (als.xp.ones((4, 5)), np.ones((4, 5))),
        "random": (als.xp.random.normal((20, 3), seed=7), None),
        "function": (als.run(_made, 5.0), np.full((8, 2), 5.0)),
        "layout": (als.send_matrix(X).to_layout("STAR_VC"), X),
    }
    first = {what: handle.fetch() for what, (handle, _) in handles.items()}
    gang.kill()
    for what, (handle, wanted) in handles.items():
        got = handle.fetch()
        np.testing.assert_array_equal(got, first[what], err_msg=what)
        if wanted is not None:
            np.testing.assert_array_equal(got, wanted, err_msg=what)
    assert als.run(_made, 6.0).fetch()[0, 0] == 6  # the function is there again


@pytest.mark.parametrize("layout", ["STAR_STAR", "VC_STAR", "MC_STAR"])
def test_small_results_of_long_commands_are_kept(
    gang: Recovering, layout: str, tmp_path: Path
) -> None:
    als, calls = gang.als, tmp_path / "calls"
    B = als.run(_slowly, layout, str(calls), pure=True)
    first = B.fetch()
    time.sleep(2)  # the gang copies it within 0.1 s
    gang.kill()
    np.testing.assert_array_equal((B + 1).fetch(), first + 1)
    assert B.layout == layout
    assert calls.read_text() == "called\n" * 2  # by both ranks, and not again


def _slowly(comm: Any, layout: str, calls: str) -> Any:
    with open(calls, "a") as file:
        file.write("called\n")
    time.sleep(0.5)
    return ali.context().new_replicated(np.arange(12000.0).reshape(300, 40), layout)


def _made(comm: Any, value: float) -> Any:
    B = ali.context().empty((8, 2), "float64")
    B.local[...] = value
    return B


def test_a_matrix_that_cannot_be_rebuilt_is_stale_with_the_reason(
    gang: Recovering, tmp_path: Path
) -> None:
    als = gang.als
    np.save(tmp_path / "file.npy", LARGE)
    A = als.send_matrix(LARGE, name="memory")
    B = A + 1
    F = als.load_matrix(tmp_path / "file.npy")
    kept = als.send_matrix(X)
    np.save(tmp_path / "file.npy", X + 1)
    gang.kill()
    np.testing.assert_array_equal(kept.fetch(), X)
    with pytest.raises(StaleHandleError, match=r"memory .*sent from.*durable=True"):
        A.fetch()
    with pytest.raises(StaleHandleError, match="durable=True"):
        A + 1  # a call finds it too
    with pytest.raises(StaleHandleError, match=r"matrix \d+.*durable=True"):
        B.fetch()
    with pytest.raises(StaleHandleError, match=r"file.npy has changed since"):
        F.fetch()
    assert [handle.id for handle in als.list_matrices()] == [kept.id]


def test_changes_in_place_are_repeated_in_order(gang: Recovering) -> None:
    als, lib = gang.als, gang.counting
    A = als.send_matrix(X)
    before = lib.doubled(A)
    lib.increment(A)
    between = A * 3
    A[0, 0] = 9.0
    als.run(_add, A, 2.0)
    alias = lib.itself(A)
    lib.increment(alias, 10.0)  # changes A too
    del alias
    wanted = X + 1
    wanted[0, 0] = 9
    wanted += 12
    for _ in range(2):
        gang.kill()
        np.testing.assert_allclose(A.fetch(), wanted)
        np.testing.assert_allclose(before.fetch(), 2 * X)
        np.testing.assert_allclose(between.fetch(), 3 * (X + 1))


def _add(comm: Any, A: Any, value: float) -> None:
    A.local[...] += value


def test_a_call_that_failed_half_way_makes_its_matrix_stale(gang: Recovering) -> None:
    lib = gang.counting
    large = np.arange(200_000.0).reshape(1000, 200)
    A, B = (gang.als.send_matrix(large, durable=True) for _ in range(2))
    small = gang.als.send_matrix(X)
    for one in (A, small):
        with pytest.raises(RoutineError, match="half done"):
            lib.half(one)
    left = small.fetch()
    time.sleep(1)  # small ones are copied
    gang.kill()
    np.testing.assert_array_equal(B.fetch(), large)
    np.testing.assert_array_equal((small + 0).fetch(), left)
    with pytest.raises(StaleHandleError, match="failed may have changed it"):
        A.fetch()


def test_bad_input_does_not_make_a_matrix_stale(gang: Recovering) -> None:
    whole = np.arange(200_000).reshape(1000, 200)
    A = gang.als.send_matrix(whole, durable=True)
    for wrong in (
        lambda: operator.iadd(A, 1.5), lambda: operator.iadd(A, np.ones(3, int)),
        lambda: A.__setitem__(0, 1e30), lambda: A.__setitem__(np.s_[:2], np.ones((3, 7))),
        lambda: A.__setitem__(A > 5, np.arange(3)), lambda: A.__setitem__(([0], [0]), np.nan),
    ):  # fmt: skip
        with pytest.raises((MatrixError, ValueError)):
            wrong()
    gang.kill()
    np.testing.assert_array_equal((A + 0).fetch(), whole)


def test_files_are_written_once(gang: Recovering, tmp_path: Path) -> None:
    lib, A = gang.counting, gang.als.send_matrix(X)
    lib.note(str(tmp_path / "notes"), A)
    A.save(tmp_path / "A.npy")
    lib.increment(A)
    (tmp_path / "A.npy").unlink()
    gang.kill()
    np.testing.assert_allclose(A.fetch(), X + 1)
    assert (tmp_path / "notes").read_text() == "line\n"
    assert not (tmp_path / "A.npy").exists()


def test_a_command_that_loses_its_rank_twice_is_not_repeated(
    gang: Recovering, tmp_path: Path
) -> None:
    lib, A = gang.counting, gang.als.send_matrix(LARGE, durable=True)
    trap = tmp_path / "trap"
    trap.touch()
    with pytest.raises(GroupRecoveredError, match="lost in 2 runs"):
        lib.deadly(A, str(trap))
    assert trap.read_text() == 2 * "death\n"
    assert gang.losses == 0  # the nodes are there
    trap.unlink()
    B = lib.deadly(A, str(trap))
    trap.touch()
    gang.kill()  # repeating it loses rank 0, twice
    np.testing.assert_array_equal(A.fetch(), LARGE)
    with pytest.raises(StaleHandleError, match=r"counting.deadly.* lost ranks 2 times"):
        B.fetch()
    assert trap.read_text() == 2 * "death\n"


def test_unreferenced_matrices_are_not_rebuilt(gang: Recovering) -> None:
    als, lib = gang.als, gang.counting
    A = als.send_matrix(X)
    B = A + 1
    for _ in range(20):
        B = lib.doubled(B) / 2
    del A
    gang.kill()
    np.testing.assert_allclose(B.fetch(), X + 1)
    assert als.run(_held, pure=True) == [1, 1]
    assert 1 <= _history(gang) <= 42  # 1: the commands took so long that a copy was kept
    B.free()
    assert _history(gang) == 0


def _held(comm: Any) -> Any:
    """How many matrices each rank stores."""
    (storage,) = [o for o in gc.get_objects() if isinstance(o, Storage)]
    return comm.allgather(len(storage._entries))


def _history(gang: Recovering) -> int:
    """Commands that the GroupManager remembers."""

    def count(manager: Any) -> int:
        gc.collect()
        return sum(isinstance(o, LoggedCommand) for o in gc.get_objects())

    return ray.get(gang.manager.__ray_call__.remote(count), timeout=30)


# --- libraries ---


def test_a_library_that_has_changed_is_not_loaded_again(gang: Recovering, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(LIBRARY.read_text())
    lib = gang.als.load_library("mine", path)
    A = gang.als.send_matrix(LARGE, durable=True)
    B = lib.slow(A, 0.0)
    path.write_text(LIBRARY.read_text().replace("2 * A.local", "3 * A.local"))
    gang.kill()
    np.testing.assert_array_equal(A.fetch(), LARGE)
    with pytest.raises(StaleHandleError, match="library 'mine' has changed"):
        B.fetch()
    with pytest.raises(LibraryNotFoundError, match="mine"):
        lib.doubled(A)
    assert gang.als.load_library("mine", path).doubled(A).fetch()[0, 0] == 3 * LARGE[0, 0]
