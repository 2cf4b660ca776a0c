"""A gang moves to more or fewer ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import ali
from alchemist_ray import AlchemistSession
from tests.alchemist_ray.session.test_alchemist_session import wait_for_cpus
from tests.faults.conftest import Call
from tests.faults.named.named_gangs import Program
from tests.faults.recovery.conftest import (
    UNDER_WAY_S,
    Recovering,
    X,
    cpus,
    same_numbers,
    used_by_a_task,
)
from tests.support import traces
from tests.support.layouts import SOME_LAYOUTS

# --- more and fewer ---


def test_matrices_of_all_layouts_move(plain: Recovering) -> None:
    als, free = plain.als, cpus()
    handles = {layout: als.send_matrix(X, layout=layout) for layout in SOME_LAYOUTS}
    vector, number = als.send_matrix(np.arange(7)), als.xp.full((), 2.5)
    empty = als.xp.zeros((0, 3))
    flags = als.send_matrix(X) > 0.5
    single = als.send_matrix(X.astype("complex64"), layout="MC_MR", name="C")
    for workers in (5, 4, 1, 3):
        found = als.resize(workers)
        assert [worker.rank for worker in found] == list(range(workers))
        assert als.run(lambda comm: comm.size) == workers
        assert wait_for_cpus(free + 2 - workers)
        same_numbers(handles)
        assert [handle.layout for handle in handles.values()] == list(handles)
        np.testing.assert_array_equal(vector.fetch(), np.arange(7))
        assert float(number) == 2.5
        assert empty.fetch().shape == (0, 3)
        np.testing.assert_array_equal(flags.fetch(), X > 0.5)
        np.testing.assert_array_equal(als.matrix("C").fetch(), X.astype("complex64"))
        np.testing.assert_allclose((handles["MC_MR"] @ handles["VC_STAR"].T).fetch(), X @ X.T)
    assert {single.id, number.id, empty.id} <= {handle.id for handle in als.list_matrices()}
    assert AlchemistSession.list()[0].workers == 3
    als.close()
    assert wait_for_cpus(free + 2)


def test_large_matrices_move_in_panels(plain: Recovering) -> None:
    Y = np.random.default_rng(1).random((3000, 1500))
    wide = Y[:2].reshape(1, -1)
    handles = {layout: plain.als.send_matrix(Y, layout=layout) for layout in ("VC_STAR", "MC_MR")}
    row = plain.als.send_matrix(np.tile(wide, 800))  # 19 MB
    plain.als.resize(4)
    same_numbers(handles, Y)
    np.testing.assert_array_equal(row.fetch(), np.tile(wide, 800))


def test_matrices_that_share_memory_still_do(plain: Recovering) -> None:
    lib, A = plain.counting, plain.als.send_matrix(X)
    alias = lib.itself(A)
    plain.als.resize(3)
    lib.increment(alias, 10.0)
    np.testing.assert_allclose(A.fetch(), X + 10)


def test_functions_and_results_are_there_on_the_new_ranks(plain: Recovering) -> None:
    def scaled(comm: Any, A: Any) -> Any:
        B = ali.context().empty_like(A)
        B.local[...] = 2 * A.local
        return B

    A = plain.als.send_matrix(X)
    np.testing.assert_array_equal(plain.als.run(scaled, A).fetch(), 2 * X)
    plain.als.resize(4)
    np.testing.assert_array_equal(plain.als.run(scaled, A).fetch(), 2 * X)


def test_the_same_number_changes_nothing(plain: Recovering) -> None:
    before = plain.ranks
    plain.als.resize(2)
    assert plain.ranks == before


def test_sparse_matrices_are_used_on_the_new_ranks(gang: Recovering) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    S = sparse.random_array((61, 50), density=0.1, format="csr", rng=np.random.default_rng(0))
    few = sparse.csr_array(np.eye(2, 50))  # some ranks have no row
    A, B = gang.als.send_matrix(S, name="S", durable=True), gang.als.send_matrix(few)
    C = A * 2  # a result, which is made again on another number of ranks
    x, y = np.ones(50), np.ones(61)
    for size in (3, 4, 1):
        gang.als.resize(size)
        for _ in range(2):  # dealt out, then kept
            np.testing.assert_allclose((A @ x).fetch(), S @ x)
            np.testing.assert_allclose((B @ x).fetch(), few @ x)
        np.testing.assert_allclose((gang.als.matrix("S").T @ y).fetch(), S.T @ y)
        assert (A.fetch() != S).nnz == 0
        gang.kill()  # rebuilt, on as many ranks
        np.testing.assert_allclose((A @ x).fetch(), S @ x)
        assert (C.fetch() != 2 * S).nnz == 0
        np.testing.assert_allclose((C @ x).fetch(), 2 * (S @ x))
        assert A.norm() == pytest.approx(np.linalg.norm(S.toarray()))


# --- beside other work ---


def test_calls_run_while_the_new_ranks_start_and_then_wait(plain: Recovering) -> None:
    als = plain.als
    lib, A = plain.counting, plain.als.send_matrix(X)
    results: list[Any] = []
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            results.append(lib.doubled(A).fetch())
            B = als.send_matrix(X)
            results.append(2 * B.fetch())

    working = [Call(work) for _ in range(3)]
    later = [lib.slow.remote(A, 0.1) for _ in range(3)]
    for workers in (4, 1, 3):
        als.resize(workers)
    over.set()
    assert [call.outcome(0.0, 30).error for call in working] == [None] * 3
    for result in results:
        np.testing.assert_array_equal(result, 2 * X)
    for ref in later:
        np.testing.assert_allclose(ray.get(ref, timeout=30).fetch(), X + 1)
    als.close()


def test_a_resize_waits_for_blocks_that_are_being_sent(plain: Recovering) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def blocks() -> Any:
        yield X[:100]
        begun.set()
        assert go_on.wait(20)
        yield X[100:]

    sending = Call(lambda: plain.als.send_blocks(blocks(), shape=X.shape, dtype=X.dtype))
    assert begun.wait(20)
    start = traces.clock()
    before = traces.folders()
    resizing = Call(lambda: plain.als.resize(4))
    assert traces.wait_until(lambda: traces.folders() > before, UNDER_WAY_S) is not None
    time.sleep(1)  # the new ranks are ready
    other = Call(lambda: plain.als.send_matrix(X))  # waits for the resize
    time.sleep(0.3)
    assert resizing.under_way
    go_on.set()
    A = sending.outcome(start).result
    assert len(resizing.outcome(start).result) == 4
    same_numbers({"blocks": A, "other": other.outcome(start).result})


def test_two_resizes_at_once_come_one_after_the_other(plain: Recovering) -> None:
    A = plain.als.send_matrix(X)
    start = traces.clock()
    calls = [Call(lambda n=n: plain.als.resize(n)) for n in (3, 5)]
    assert [call.outcome(start).error for call in calls] == [None] * 2
    assert len(plain.ranks) in (3, 5)
    same_numbers({"A": A})


def test_two_programs_that_resize_at_once(clean: None) -> None:
    program = """
        with AlchemistSession.attach("both") as als:
            print("here", flush=True)
            print(len(als.resize(3)) in (3, 4), als.matrix("A").fetch().sum(), flush=True)
    """
    with AlchemistSession(2, name="both", lifetime="detached") as als:
        A = als.send_matrix(np.ones((30, 30)), name="A")
        with Program(program) as other:
            assert other.said == "here"
            assert len(als.resize(4)) in (3, 4)
            assert other.line() == "True 900.0"
        assert len(als.list_workers()) in (3, 4)
        assert A.fetch().sum() == 900
        AlchemistSession.stop_gang("both")


def test_a_task_keeps_its_handle(plain: Recovering) -> None:
    used_by_a_task(plain.als.send_matrix(X), lambda: plain.als.resize(3))


def test_attached_programs_see_the_new_ranks(clean: None) -> None:
    program = """
        with AlchemistSession.attach("sized") as als:
            A = als.matrix("A")
            print(len(als.list_workers()), flush=True)
            while len(als.list_workers()) == 2:
                time.sleep(0.05)
            print(len(als.list_workers()), als.run(lambda comm: comm.size), A.fetch().sum(),
                  als.send_matrix(A.fetch(), layout="MC_MR").fetch().sum(), flush=True)
            als.resize(1)
            print(len(als.list_workers()), flush=True)
    """
    with AlchemistSession(2, name="sized", lifetime="detached") as als:
        A = als.send_matrix(np.ones((30, 30)), name="A")
        with Program(program) as other:
            assert other.said == "2"
            als.resize(4)
            assert other.line() == "4 4 900.0 900.0"
            assert other.line() == "1"
            assert len(als.list_workers()) == 1
            assert A.fetch().sum() == 900
            (entry,) = [gang for gang in AlchemistSession.list() if gang.name == "sized"]
            assert entry.workers == 1
        AlchemistSession.stop_gang("sized")


# --- with recovery ---


def test_a_resized_gang_is_rebuilt_on_its_ranks(gang: Recovering, tmp_path: Path) -> None:
    als, lib = gang.als, gang.counting
    np.save(tmp_path / "file.npy", X)
    handles = {
        "sent": als.send_matrix(X),
        "durable": als.send_matrix(X, durable=True, layout="MC_MR"),
        "file": als.load_matrix(tmp_path / "file.npy"),
        "layout": als.send_matrix(X).to_layout("STAR_VC"),
        "doubled": lib.doubled(als.send_matrix(X / 2)),
    }
    changed = als.send_matrix(X - 1)
    lib.increment(changed)
    seeded = als.xp.random.normal((20, 3), seed=7)
    numbers = seeded.fetch()
    for workers in (4, 1):
        als.resize(workers)
        gang.kill()
        assert len(gang.ranks) == workers
        same_numbers(handles)
        np.testing.assert_allclose(changed.fetch(), X)
        np.testing.assert_array_equal(seeded.fetch(), numbers)
    assert als.connection.address.recovers


def test_a_stream_that_needs_other_matrices_and_a_resize_do_not_wait_for_each_other(
    plain: Recovering,
) -> None:
    als = plain.als
    with ThreadPoolExecutor(1) as pool:
        resizes = []

        def blocks() -> Iterator[Any]:
            for first in range(0, 300, 60):
                if first == 60:
                    resizes.append(pool.submit(als.resize, 3))
                    time.sleep(1.0)  # it waits for this stream now
                scale = als.send_matrix(np.ones((2, 2)))
                yield X[first : first + 60] * scale.fetch()[0, 0]

        A = als.send_blocks(blocks(), shape=X.shape)
        assert len(resizes[0].result(60)) == 3
    same_numbers({"streamed": A})
