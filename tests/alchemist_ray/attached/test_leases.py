"""Results of expressions are freed when no handle refers to them, and not before."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import signal
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import GroupFailedError, MatrixNotFoundError
from alchemist_ray.ray_access import ray_transport
from tests.faults.conftest import Call, pid_of
from tests.support.suite import scaled
from tests.support.traces import memory, wait_until

WAIT_S = 10.0


def held(session: AlchemistSession) -> set[int]:
    return {handle.id for handle in session.list_matrices()}


def test_temporaries_of_an_expression_are_freed(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((4, 3)))
    B = (A + 1) * 2 - A.mean(axis=0, keepdims=True)
    assert held(session) == {A.id, B.id}
    C = B
    del B
    assert held(session) == {A.id, C.id}
    C = C + 1
    assert held(session) == {A.id, C.id}
    del A, C
    assert held(session) == set()


def test_garbage_of_an_idle_process_is_freed_too(session: AlchemistSession) -> None:
    @ray.remote
    def total(handle: Handle) -> float:
        return float((handle + 1).sum())

    A = session.send_matrix(np.ones((4, 3)))
    assert ray.get(total.remote(A)) == 24  # and nothing more comes from that process
    assert wait_until(lambda: held(session) == {A.id}, WAIT_S, 0.05) is not None


def resident(session: AlchemistSession) -> int:
    """Bytes of memory of the ranks."""
    return sum(memory(worker.pid) for worker in session.list_workers())


def test_a_loop_runs_in_memory_for_a_few(session: AlchemistSession) -> None:
    A = session.xp.ones((1000, 1000))  # 8 MB
    for turn in range(45):
        A = A * 0.5 + 1
        assert held(session) == {A.id}
        if turn == 4:
            before = resident(session)
    assert resident(session) - before < 64 << 20  # of 80 matrices, 640 MB
    np.testing.assert_allclose(A.fetch(rows=0), 2.0)


def test_sent_matrices_and_results_of_routines_are_freed_in_a_loop(
    session: AlchemistSession,
) -> None:
    X = np.random.default_rng(0).standard_normal((20_000, 50))  # 8 MB
    lib = session.load_library("linalg")
    sizes = []
    for _ in range(25):
        A = session.send_matrix(X)
        S, U, V = lib.truncated_svd(A, 5)
        sizes.append(resident(session))
        assert len(held(session)) <= 8  # this turn's, and those that the next results replace
    assert held(session) == {handle.id for handle in (A, S, U, V)}
    assert sizes[-1] - sizes[8] < 32 << 20  # of 16 turns, 140 MB


def test_a_matrix_that_is_replaced_by_another_one_gives_its_memory_to_it(
    session: AlchemistSession,
) -> None:
    X = np.random.default_rng(0).standard_normal((20_000, 50))  # 8 MB
    sizes = []
    for _ in range(20):
        A = session.send_matrix(X)
        sizes.append(resident(session))
        del A  # the next command is for memory
    assert sizes[-1] - sizes[2] < 32 << 20  # of 17 turns, 136 MB


def test_a_kept_matrix_is_not_freed(session: AlchemistSession) -> None:
    A = session.xp.ones((2, 2))
    assert A.temporary
    number = A.keep().id
    assert not A.temporary
    del A
    assert held(session) == {number}
    B = session.xp.ones((2, 2)) + 1
    B.free()
    B.free()
    assert held(session) == {number}
    with pytest.raises(MatrixNotFoundError, match="holds no matrix"):
        B.fetch()


def test_one_rule_holds_for_every_handle(session: AlchemistSession) -> None:
    """Sent, returned by a routine, in another layout: freed with its last handle."""
    linalg = session.load_library("linalg")
    A = session.send_matrix(np.ones((4, 3)))
    Q, R = linalg.qr(A)
    B = A.to_layout("MC_MR")
    assert held(session) == {A.id, B.id, Q.id, R.id}
    del Q, B
    assert held(session) == {A.id, R.id}
    named = session.send_matrix(np.ones((4, 3)), name="named").id
    assert held(session) == {A.id, R.id, named}
    again = session.matrix("named")
    again.free()
    assert held(session) == {A.id, R.id}


def test_results_of_remote_calls_stay_with_their_reference(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_transport, "RESULTS_INTERVAL_S", 0.05)
    linalg = session.load_library("linalg")
    A = session.send_matrix(np.ones((4, 3)))
    ref = linalg.qr.remote(A)
    Q, R = ray.get(ref)
    numbers = {Q.id, R.id}
    del Q, R
    time.sleep(0.3)  # several looks at the references
    assert held(session) == {A.id, *numbers}
    Q, R = ray.get(ref)
    assert Q.fetch().shape == (4, 3)
    del ref, R
    assert wait_until(lambda: held(session) == {A.id, Q.id}, WAIT_S, 0.05) is not None


def test_results_of_a_remote_call_that_is_dropped_before_it_runs_are_freed(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_transport, "RESULTS_INTERVAL_S", 0.05)
    linalg = session.load_library("linalg")
    A = session.send_matrix(np.ones((4, 3)))
    busy = Call(lambda: session.run(lambda comm: time.sleep(4.0)))
    assert wait_until(lambda: bool(session.list_calls()), WAIT_S) is not None
    del_me = linalg.qr.remote(A)
    del del_me
    gc.collect()
    time.sleep(0.3)  # several looks at the references, while the call still waits
    assert len(session.list_calls()) == 2
    busy.outcome(0.0)
    done = lambda: held(session) == {A.id} and not session.list_calls()  # noqa: E731
    assert wait_until(done, WAIT_S, 0.05) is not None


def test_commands_that_are_not_waited_for_have_no_answers(session: AlchemistSession) -> None:
    """Answers that nobody reads would pile up in the GroupManager: 115 MB after a million."""
    A = session.send_matrix(np.ones((4, 3)))
    for _ in range(1000):
        session.connection.tell({"op": "hold", "matrices": [A.id]})
    channel = session.connection._channel
    assert channel is not None
    time.sleep(0.2)
    assert not channel._connection.readable(0.0)
    assert A.fetch().sum() == 12


def test_the_error_of_a_lost_gang_keeps_no_frames_alive(session: AlchemistSession) -> None:
    """It is raised by each further use, also by finalizers, which run in any frame."""
    A = session.send_matrix(np.ones((4, 3)))
    channel: Any = session.connection._channel
    channel._connection.hang_up()

    class Held:
        pass

    def use(held: Held) -> None:
        with contextlib.suppress(GroupFailedError):
            A.fetch()
        session.connection.tell({"op": "hold", "matrices": [A.id]})

    held = Held()
    alive = weakref.ref(held)
    use(held)
    del held
    assert alive() is None


@pytest.mark.timeout(scaled(300, 900))
def test_the_memory_of_the_group_manager_is_flat(session: AlchemistSession) -> None:
    """Over tells, whose answers piled up there, and over calls, whose records must end."""
    A = session.send_matrix(np.ones((4, 3)))

    def used(tells: int, calls: int) -> int:
        for _ in range(tells):
            session.connection.tell({"op": "hold", "matrices": [A.id]})
        for _ in range(calls):
            A + 1.0
        session.run(lambda comm: comm.size)
        return memory(pid_of(session._gangs._own.actor))  # type: ignore[attr-defined]

    before = used(20_000, 500)
    assert used(scaled(80_000, 1_000_000), scaled(1_000, 10_000)) - before < 8 << 20


@ray.remote(num_cpus=0)
class Receiver:
    """A process that has not used the gang before."""

    def take(self, refs: list[Any]) -> None:
        self.result = ray.get(refs[0])

    def sum(self) -> float:
        return float(self.result.fetch().sum())

    def drop(self) -> None:
        del self.result
        gc.collect()


def test_a_result_of_a_remote_call_stays_with_the_process_that_gets_it(
    session: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_transport, "RESULTS_INTERVAL_S", 0.05)
    linalg = session.load_library("linalg")
    A = session.send_matrix(np.ones((4, 4)))
    receiver = Receiver.remote()
    ref = linalg.matmul.remote(A, A)
    ray.get(receiver.take.remote([ref]))
    del ref
    time.sleep(0.5)  # several looks at the references
    assert len(held(session)) == 2
    assert ray.get(receiver.sum.remote()) == 64
    ray.get(receiver.drop.remote())
    assert wait_until(lambda: held(session) == {A.id}, WAIT_S, 0.05) is not None


def test_a_task_that_is_killed_gives_its_matrices_back(session: AlchemistSession) -> None:
    @ray.remote(max_retries=0)
    def make(handle: Handle) -> None:
        kept = [handle + i for i in range(5)]
        assert len(kept) == 5
        os.kill(os.getpid(), signal.SIGKILL)

    A = session.send_matrix(np.ones((4, 3)))
    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(make.remote(A))
    assert wait_until(lambda: held(session) == {A.id}, WAIT_S, 0.05) is not None


def test_copies_are_matrices_of_their_own(session: AlchemistSession) -> None:
    A = session.xp.ones((2, 2))
    for B in (copy.copy(A), copy.deepcopy(A)):
        assert B.id != A.id
        assert A.temporary
        assert B.temporary
        B[0] = 2
        assert A.fetch().max() == 1


def test_a_temporary_that_is_pickled_stays_valid(session: AlchemistSession) -> None:
    @ray.remote
    def doubled(handle: Handle) -> Handle:
        return 2 * handle  # computed on the gang, from the task's own process

    @ray.remote
    def total(handle: Handle) -> float:
        return float((handle + np.ones(3)).sum())

    A = session.xp.ones((4, 3))
    there = pickle.dumps(A)
    number = A.id
    del A
    assert held(session) == {number}
    A = pickle.loads(there)
    np.testing.assert_array_equal(A.fetch(), np.ones((4, 3)))
    ref = total.remote(A + 1)
    assert ray.get(ref) == 36
    B = ray.get(doubled.remote(A))
    np.testing.assert_array_equal(B.fetch(), 2 * np.ones((4, 3)))
    number = B.id
    del B
    assert number in held(session)  # pinned by the task that pickled it


def test_an_asynchronous_call_keeps_its_arguments(session: AlchemistSession) -> None:
    lib = session.load_library("linalg")
    echo = session.load_library("echo")
    A = session.send_matrix(np.ones((50, 3)))
    later = echo.sleep.remote(0.3)
    norms = [lib.norm.remote(A + i) for i in range(5)]
    del later
    held(session)
    expected = [(1 + i) * np.sqrt(150) for i in range(5)]
    np.testing.assert_allclose(ray.get(norms), expected)

    def freed() -> bool:
        gc.collect()
        return held(session) == {A.id}

    assert wait_until(freed, WAIT_S, 0.05) is not None


def test_handles_can_be_dropped_in_any_thread(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((4, 3)))

    def work(i: int) -> None:
        B = A
        for _ in range(20):
            B = (B + i) - i
        np.testing.assert_array_equal(B.fetch(), np.ones((4, 3)))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert held(session) == {A.id}


def test_handles_of_an_ended_gang_are_collected_without_harm(cluster: str) -> None:
    with AlchemistSession(1) as als:
        A = als.xp.ones((2, 2))
        B = A + 1
        als.yield_workers()
        als.request_workers(2)
        del B
        gc.collect()
        assert als.list_matrices() == []
        C = als.xp.ones((2, 2))
        del A
        assert C.sum() == 4
    del C
