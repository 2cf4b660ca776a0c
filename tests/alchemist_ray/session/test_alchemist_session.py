"""Sessions: the public methods and options."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import ray
from threadpoolctl import threadpool_info

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster import actors
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.errors import (
    GroupError,
    LibraryNotFoundError,
    MatrixNotFoundError,
    ResourceError,
    SessionError,
    StaleHandleError,
)
from tests.support import commands, traces


def free_cpus() -> float:
    return float(ray.available_resources().get("CPU", 0.0))


def wait_for_cpus(wanted: float, timeout_s: float = 10.0) -> bool:
    """Wait until this many CPUs are free: Ray reports them late."""
    return traces.wait_until(lambda: free_cpus() == wanted, timeout_s, 0.05) is not None


def test_the_ten_lines_of_the_design(cluster: str) -> None:
    als = AlchemistSession()
    als.request_workers(4)
    matrix = np.random.default_rng(0).random((300, 200))
    A = als.send_matrix(matrix, layout="VC_STAR", print_times=True)
    lib = als.load_library("linalg")
    S, U, V = lib.truncated_svd(A, rank=10)
    exact = np.linalg.svd(matrix, compute_uv=False)[:10]
    assert S.shape == (10,)
    np.testing.assert_allclose(als.fetch_matrix(S), exact, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(S), exact, rtol=1e-10)
    assert U.fetch(rows=slice(0, 20)).shape == (20, 10)
    assert V.shape == (200, 10)
    als.stop()


def test_workers_run_on_the_hosts_they_report(session: AlchemistSession) -> None:
    workers = session.list_workers()
    assert [w.rank for w in workers] == [0, 1]
    assert all(os.path.exists(f"/proc/{w.pid}") for w in workers)
    assert {w.hostname for w in workers} == {os.uname().nodename}
    assert {w.node_id for w in workers} == {ray.get_runtime_context().get_node_id()}
    assert all(w.address.startswith("tcp:") for w in workers)
    assert {w.status for w in workers} == {"idle"}


def test_two_sessions_have_separate_gangs(session: AlchemistSession) -> None:
    with AlchemistSession(3) as other:
        mine, theirs = session.list_workers(), other.list_workers()
        assert not {w.pid for w in mine} & {w.pid for w in theirs}
        x = session.send_matrix(np.eye(4))
        y = other.send_matrix(2 * np.eye(4))
        np.testing.assert_array_equal(x.fetch() @ y.fetch(), 2 * np.eye(4))
        with pytest.raises(MatrixNotFoundError, match=r"is in gang .*copies it there"):
            other.fetch_matrix(x)
    np.testing.assert_array_equal(x.fetch(), np.eye(4))


def test_yielding_gives_the_cpus_back_and_the_session_goes_on(cluster: str) -> None:
    assert wait_for_cpus(8)
    with AlchemistSession(3) as als:
        assert wait_for_cpus(5)
        pids = [w.pid for w in als.list_workers()]
        old = als.send_matrix(np.eye(3))
        linalg = als.load_library("linalg")
        als.yield_workers()
        assert wait_for_cpus(8)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert als.list_workers() == []
        with pytest.raises(SessionError, match="no workers"):
            als.send_matrix(np.eye(3))
        als.request_workers(2)
        with pytest.raises(StaleHandleError, match="earlier gang"):
            old.fetch()
        new = als.send_matrix(np.eye(3))
        assert new.epoch == old.epoch + 1
        with pytest.raises(SessionError, match=r"ended, with its libraries.*load_library"):
            linalg.norm(new)


def test_workers_are_requested_once(session: AlchemistSession) -> None:
    with pytest.raises(GroupError, match="has 2 workers already"):
        session.request_workers(2)
    assert len(session.list_workers()) == 2


def test_calls_of_a_closed_session_are_refused(cluster: str) -> None:
    als = AlchemistSession(1)
    handle = als.send_matrix(np.eye(2))
    als.close()
    als.close()
    for use in (als.list_workers, als.list_matrices, lambda: als.send_matrix(np.eye(2))):
        with pytest.raises(SessionError, match="closed"):
            use()
    with pytest.raises(StaleHandleError, match="has ended"):
        handle.fetch()
    assert "closed" in repr(als)
    with AlchemistSession(1) as other:  # on the manager that the first has left
        mine = other.send_matrix(np.eye(3))
        with pytest.raises(StaleHandleError, match="has ended"):
            handle.fetch()
        with pytest.raises(MatrixNotFoundError, match=r"is in gang .*copies it there"):
            other.fetch_matrix(handle)
        np.testing.assert_array_equal(mine.fetch(), np.eye(3))


def test_a_process_outside_of_the_cluster_is_told_to_join(session: AlchemistSession) -> None:
    program = "import pickle, sys; pickle.load(sys.stdin.buffer).fetch()"
    pickled = pickle.dumps(session.send_matrix(np.eye(2)))
    run = [sys.executable, "-c", program]
    ended = subprocess.run(run, input=pickled, capture_output=True, timeout=60, check=False)
    assert b"this process is in no Ray cluster" in ended.stderr


def test_libraries_are_listed_and_run_by_name(session: AlchemistSession) -> None:
    echo = session.load_library("echo")
    assert session.list_libraries() == ["echo"]
    assert session.run_task(echo, "who") == [0, 1]
    assert session.run_task("echo", "who") == [0, 1]
    with pytest.raises(LibraryNotFoundError, match="not loaded"):
        session.run_task("linalg", "norm")


def test_matrices_are_listed(session: AlchemistSession) -> None:
    a = session.send_matrix(np.eye(3), name="identity")
    b = session.send_matrix(np.ones((2, 5)), layout="MC_MR", dtype="float32")
    assert [repr(handle) for handle in session.list_matrices()] == [repr(a), repr(b)]
    a.free()
    a.free()
    assert [handle.id for handle in session.list_matrices()] == [b.id]


def test_threads_per_worker_sets_the_blas_threads(cluster: str) -> None:
    def blas(comm: Any) -> set[int]:
        pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
        return {pool["num_threads"] for pool in pools}

    for threads in (1, 2):
        with AlchemistSession(2, threads_per_worker=threads) as als:
            assert als.run(blas) == {threads}
            assert wait_for_cpus(8 - 2 * threads)


def test_inherit_runs_inside_the_callers_bundle(cluster: str) -> None:
    @ray.remote(num_cpus=3)
    def inside() -> tuple[list[int], bool]:
        with AlchemistSession(3, placement="inherit") as als:
            return als.load_library("echo").who(), wait_for_cpus(5)

    assert wait_for_cpus(8)
    ranks, only_its_own = ray.get(inside.remote(), timeout=60)
    assert ranks == [0, 1, 2]
    assert only_its_own  # the task's own three CPUs are in use, and no more

    @ray.remote(num_cpus=1)
    def too_many() -> str:
        with AlchemistSession(placement="inherit") as als:
            try:
                als.request_workers(3)
            except ResourceError as error:
                return str(error)
        return "no error"

    assert "has 1 CPU," in ray.get(too_many.remote(), timeout=60)


def test_inherit_outside_of_ray_is_refused(cluster: str) -> None:
    with AlchemistSession(placement="inherit") as als, pytest.raises(ResourceError, match="own"):
        als.request_workers(1)


def test_mpiexec_is_the_second_launcher(cluster: str) -> None:
    with AlchemistSession(2, launcher="mpiexec") as als:
        assert als.load_library("echo").who() == [0, 1]
        matrix = np.random.default_rng(1).random((30, 7))
        handle = als.send_matrix(matrix, layout="MC_MR")
        np.testing.assert_array_equal(handle.to_layout("VR_STAR").fetch(), matrix)
        pids = [w.pid for w in als.list_workers()]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_connecting_by_the_papers_spelling(cluster: str) -> None:
    host, _, port = cluster.rpartition(":")
    program = f"""
        import os
        from alchemist_ray import AlchemistSession
        from mpi_workers.node.processes import descendants
        als = AlchemistSession()  # starts a cluster, as none is known
        started = descendants([os.getpid()])
        als.connect_to_alchemist({host!r}, {port})
        assert started and not started & descendants([os.getpid()])  # it is not left behind
        als.request_workers(2)
        print(als.load_library("echo").who())
        als.stop()
    """
    done = commands.python(program, RAY_ADDRESS="local")
    assert done.stdout.splitlines()[-1:] == ["[0, 1]"], done.stderr


def test_gangs_of_another_version_in_the_cluster_are_told(
    cluster: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(actors, "__version__", "0.0.9")
        driver = find_driver()
    try:
        AlchemistSession().close()
        assert "alchemist-on-ray 0.0.9 has gangs in this Ray cluster too" in caplog.text
    finally:
        ray.kill(driver)


def test_another_cluster_cannot_be_joined_from_within_one(cluster: str) -> None:
    with AlchemistSession() as als, pytest.raises(SessionError, match=r"ray\.init"):
        als.connect_to_alchemist("192.0.2.1", 6379)


def test_buffer_bytes_bounds_the_steps_of_transfers(cluster: str) -> None:
    A = np.random.default_rng(0).random((40, 30))
    with AlchemistSession(2, name="buffered", buffer_bytes=1000) as als:
        assert als.connection.options.buffer_bytes == 1000
        handle = als.send_matrix(A, name="A", layout="MC_MR")
        np.testing.assert_array_equal(handle.fetch(), A)
        with AlchemistSession.attach("buffered", buffer_bytes=200) as other:
            np.testing.assert_array_equal(other.matrix("A").fetch(), A)
