"""Named and detached gangs: attached to by several processes, left and found again."""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.attached.libraries import Library
from alchemist_ray.cluster.actors import NAMESPACE, find_gang, group_name
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.errors import (
    CancelledError,
    LibraryLoadError,
    LibraryNotFoundError,
    SessionError,
)
from alchemist_ray.ray_access.catalogue import connect
from mpi_workers.data.transfers import MatrixReader
from tests.faults.conftest import Call
from tests.faults.named.named_gangs import Program, actors, gangs
from tests.support import traces
from tests.support.suite import scaled

CLIENTS, CALLS = 32, 100
QUEUED = 24  # calls of one process that wait
LIBRARY = """
from ali import Context, routine

calls = 0


@routine("calls")
def count(ctx: Context) -> int:
    global calls
    calls += 1
    return 1000 * {number} + calls
"""

# --- found by name ---


def test_an_attached_process_finds_all_that_is_there(climate: AlchemistSession) -> None:
    text = """
        with AlchemistSession.attach("climate") as als:
            A = als.matrix("A")
            assert als.list_libraries() == ["linalg"]
            total = als.library("linalg").norm(A)
            als.send_matrix(np.ones((2, 2)), name="B")
            print(A.shape, round(total, 9), als.run_task("linalg", "norm", A) == total, flush=True)
    """
    with Program(text) as program:
        assert program.said == f"(4, 3) {np.linalg.norm(np.arange(12.0)):.9f} True"
        assert program.process.wait(30) == 0
    np.testing.assert_array_equal(climate.matrix("B").fetch(), np.ones((2, 2)))
    with pytest.raises(LibraryNotFoundError, match="echo"):
        climate.library("echo")


def test_it_outlives_the_session_and_the_program_that_started_it(nothing_of_it_left: None) -> None:
    text = """
        als = AlchemistSession(2, name="made", lifetime="detached")
        A = als.send_matrix(np.eye(3), name="A")
        als.stop()
        print("stopped", flush=True)
    """
    with Program(text) as program:
        assert program.said == "stopped"
        assert program.process.wait(30) == 0
    with AlchemistSession.attach("made") as als:
        np.testing.assert_array_equal(als.matrix("A").fetch(), np.eye(3))
        assert als.run(lambda comm: comm.size) == 2
    assert gangs()["made"] == "ready"


@pytest.mark.cell("program", "idle", "named", "goes on")
def test_a_killed_kernel_has_its_handles_back(nothing_of_it_left: None) -> None:
    text = """
        als = AlchemistSession(2, name="kernel", lifetime="detached")
        A = als.send_matrix(np.arange(6.0).reshape(2, 3), name="A")
        B = A + 1
        print(B.id, flush=True)
        als.run(lambda comm: time.sleep(60))
    """
    with Program(text) as program:
        time.sleep(0.3)
        program.kill()
        with AlchemistSession.attach("kernel") as als:
            A = als.matrix("A")
            found = {handle.id: handle for handle in als.list_matrices()}
            B = found[int(program.said)]
            np.testing.assert_array_equal(B.fetch(), A.fetch() + 1)


def test_a_look_for_one_matrix_does_not_hold_the_others(climate: AlchemistSession) -> None:
    """The others could not be freed by their own program until the garbage was swept."""
    other = climate.send_matrix(np.eye(3), name="other")
    text = """
        with AlchemistSession.attach("climate") as als:
            als.matrix("A")
            print("found", flush=True)
            time.sleep(30)
    """
    with Program(text) as program:
        assert program.said == "found"
        other.free()


def test_sessions_of_one_process_do_not_end_each_other(climate: AlchemistSession) -> None:
    first, second = AlchemistSession.attach("climate"), AlchemistSession.attach("climate")
    A = first.matrix("A")
    first.stop()
    with pytest.raises(SessionError, match="closed"):
        first.list_matrices()
    np.testing.assert_array_equal(A.fetch(), second.matrix("A").fetch())
    second.detach()
    climate.detach()
    np.testing.assert_array_equal(A.fetch(), np.arange(12.0).reshape(4, 3))  # connects again


def test_a_private_gang_with_a_name_ends_with_its_session(nothing_of_it_left: None) -> None:
    with AlchemistSession(1, name="mine") as als:
        A = als.send_matrix(np.eye(2), name="A")
        with AlchemistSession.attach("mine") as other:
            assert other.matrix("A").id == A.id
            assert not next(g for g in AlchemistSession.list() if g.name == "mine").detached
            with pytest.raises(SessionError, match="stop_gang"):
                other.yield_workers()
        with pytest.raises(SessionError, match="private"):
            als.detach()
    assert "mine" not in gangs()
    with AlchemistSession(1, name="mine") as als:
        assert als.list_matrices() == []


def test_the_environment_of_a_job_stays_with_its_gang(nothing_of_it_left: None) -> None:
    text = """
        with AlchemistSession(2, name="other", lifetime="detached"):
            print("started", flush=True)
    """
    for manager_killed in scaled((True,), (False, True)):
        with Program(text, runtime_env={"env_vars": {"OF_THIS_JOB": "yes"}}) as program:
            assert program.said == "started"
            assert program.process.wait(60) == 0
        time.sleep(1.0)  # Ray ends the job's own actors
        with AlchemistSession.attach("other") as als:
            assert als.run(lambda comm: os.environ["OF_THIS_JOB"]) == "yes"
            traces.note_segments()
        own = {name for name in actors() if name.endswith(("-gang-other", "-other"))}
        assert any(name.startswith("alchemist-driver-") for name in own)
        if manager_killed:
            ray.kill(ray.get_actor(group_name("other"), namespace=NAMESPACE))
        else:
            AlchemistSession.stop_gang("other")
        gone = traces.wait_until(lambda: not any("-gang-other" in name for name in actors()), 10)
        assert gone is not None, actors()


# --- the catalogue ---


@pytest.mark.cell("Driver", "idle", "named", "goes on")
def test_the_catalogue_survives_the_driver(climate: AlchemistSession) -> None:
    ray.kill(find_driver())
    (about,) = [gang for gang in AlchemistSession.list() if gang.name == "climate"]
    assert (about.state, about.workers, about.detached) == ("ready", 2, True)
    assert about.nodes == (os.uname().nodename,)
    assert f"(pid {os.getpid()})" in about.owner
    assert about.processes == (about.owner,)
    assert (about.matrices, about.nbytes, about.libraries) == (1, 96, ("linalg",))
    assert time.time() - 60 < about.created <= about.last_used <= time.time()
    with AlchemistSession.attach("climate") as als:
        assert als.matrix("A").shape == (4, 3)


def test_running_calls_are_listed(climate: AlchemistSession) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        echo = als.load_library("echo")
        print("here", flush=True)
        echo.sleep(60.0)
    """
    with Program(text) as program:
        seen = traces.wait_until(lambda: bool(climate.list_calls()), 10)
        assert seen is not None
        (call,) = climate.list_calls()
        assert (call.name, call.state) == ("echo.sleep", "running")
        assert f"(pid {program.process.pid})" in call.caller
        assert 0 <= call.age_s < 20
    # its caller is gone, so the call is cancelled
    assert climate.run(lambda comm: comm.size) == 2
    assert climate.list_calls() == []


def test_a_call_of_another_process_can_be_cancelled(climate: AlchemistSession) -> None:
    text = """
        from alchemist_ray.errors import CancelledError
        als = AlchemistSession.attach("climate")
        print("here", flush=True)
        try:
            als.run(lambda comm: time.sleep(60))
        except CancelledError:
            print("cancelled", als.run(lambda comm: comm.size), flush=True)
    """
    with Program(text) as program:
        assert traces.wait_until(lambda: bool(climate.list_calls()), 10) is not None
        assert climate.cancel() == 0  # this process waits for no call
        assert len(climate.list_calls()) == 1
        assert climate.cancel(everyone=True) == 1
        assert program.line() == "cancelled 2"


def test_a_thread_cancels_the_calls_of_its_process(climate: AlchemistSession) -> None:
    calls = [Call(lambda: climate.run(lambda comm: time.sleep(60))) for _ in range(3)]
    assert traces.wait_until(lambda: len(climate.list_calls()) == 3, 10) is not None
    states = [call.state for call in climate.list_calls()]
    assert states == ["running", "queued", "queued"]
    assert climate.cancel() == 3
    assert {type(call.outcome(0.0, 10).error) for call in calls} == {CancelledError}
    assert climate.run(lambda comm: comm.size) == 2


def _call_often(number: int, lib: Library, A: Handle, start: Any, made: Any, least: Any) -> None:
    """One of many processes. Notes how far the last of them is when this one has ended."""
    start.wait(60)
    for _ in range(CALLS):
        lib.norm(A)
        made[number] += 1
    least[number] = min(made)


def test_many_processes_are_served_in_turn(climate: AlchemistSession) -> None:
    context = multiprocessing.get_context("fork")
    start, made, least = context.Barrier(CLIENTS), *(context.Array("i", CLIENTS) for _ in range(2))
    shared = climate.library("linalg"), climate.matrix("A"), start, made, least
    # Forked children have connections of their own.
    clients = [context.Process(target=_call_often, args=(k, *shared)) for k in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for client in clients:
            ended = traces.wait_until(lambda client=client: client.exitcode is not None, 60.0)
            assert ended is not None
            assert client.exitcode == 0
    finally:
        for client in clients:
            client.kill()
            client.join()
    assert list(made) == [CALLS] * CLIENTS
    # In the order of arrival a process would have had none when the first one had all.
    assert min(least) > CALLS / 10, list(least)


def test_a_process_with_many_calls_delays_no_other(climate: AlchemistSession) -> None:
    manager = find_gang("climate")
    sleep = climate.load_library("echo").sleep
    (_, echo) = climate.connection.request({"op": "list_libraries"})["libraries"]
    ended, over = [], threading.Event()

    def call() -> None:
        while not over.is_set():
            sleep(0.01)
            ended.append(None)

    calling = [Call(call) for _ in range(QUEUED)]
    try:
        assert traces.wait_until(lambda: len(climate.list_calls()) > QUEUED / 2, 10) is not None
        connection = connect(climate.connection.address, manager)
        other = Library(connection, echo)
        before = len(ended)
        for _ in range(20):
            other.sleep(0.01)
        meanwhile = len(ended) - before
        connection.close()
    finally:
        over.set()
        assert [each.outcome(0.0, 30).error for each in calling] == [None] * QUEUED
    assert meanwhile < 20 * QUEUED / 3, "in turn it is 20, in the order of arrival 20 x QUEUED"


def test_a_library_is_loaded_once_and_not_replaced_by_others(
    climate: AlchemistSession, tmp_path: Path
) -> None:
    first, second, third = (tmp_path / f"{name}.py" for name in ("first", "second", "third"))
    for number, path in enumerate((first, second, third), 1):
        path.write_text(LIBRARY.format(number=number))
    lib = climate.load_library("mine", first)
    climate.load_library("theirs", third)
    assert [lib.count() for _ in range(2)] == [1001, 1002]
    text = f"""
        from alchemist_ray.errors import LibraryLoadError
        als = AlchemistSession.attach("climate")
        lib = als.load_library("mine", {str(first)!r})
        print(lib.count(), flush=True)  # the same instance
        try:
            als.load_library("mine", {str(second)!r})
        except LibraryLoadError as error:
            print(error, flush=True)
        print(als.load_library("mine2", {str(second)!r}).count(), flush=True)
        print(als.library("theirs").count(), flush=True)
        time.sleep(60)
    """
    with Program(text) as program:
        assert program.said == "1003"
        assert re.search(rf"pid {os.getpid()}.* still uses .*first.py", program.line())
        assert program.line() == "2001"
        assert lib.count() == 1004
        assert climate.load_library("mine", first).count() == 1005
        assert program.line() == "3001"  # of "theirs" it is a caller only
        for name, path in (("mine", first), ("theirs", third)):
            with pytest.raises(LibraryLoadError, match=rf"was not loaded.*{program.process.pid}"):
                climate.load_library(name, path, reload=True)
        assert climate.list_libraries() == ["linalg", "mine", "theirs", "mine2"]
        first.write_text(LIBRARY.format(number=4))
        with pytest.raises(LibraryLoadError, match=rf"was not loaded.*pid {program.process.pid}"):
            climate.load_library("mine", first)
    assert traces.wait_until(lambda: len(AlchemistSession.list()[0].processes) == 1, 5) is not None
    assert climate.load_library("mine", first).count() == 4001


def busy(als: AlchemistSession) -> bool:
    """Wait for a call to begin on the ranks."""
    return traces.wait_until(lambda: als.list_workers()[0].status == "busy", 20) is not None


def test_a_matrix_is_not_fetched_while_a_call_changes_it(climate: AlchemistSession) -> None:
    def step_by_step(comm: Any, A: Any) -> None:
        A.local[...] += 1 + comm.rank
        time.sleep(1.0)
        A.local[...] += 1 - comm.rank

    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")
        start = A.fetch()
        print("here", flush=True)
        seen = {0.0}
        while 4.0 not in seen:
            change = A.fetch() - start
            assert (change == change[0, 0]).all(), change
            seen.add(float(change[0, 0]))
        print(sorted(seen), flush=True)
    """
    A = climate.matrix("A")
    with Program(text) as program:
        assert program.said == "here"
        climate.run(step_by_step, A)
        time.sleep(0.5)  # no call waits for a fetch: one at once would overtake it
        climate.run(step_by_step, A)
        assert program.line() == "[0.0, 2.0, 4.0]"
    before = A.fetch()
    running = Call(lambda: climate.run(lambda comm, A: time.sleep(60), A, pure=True))
    assert busy(climate)
    np.testing.assert_array_equal(A.fetch(), before)
    assert running.under_way  # a call that changes nothing holds up no fetch
    climate.cancel()
    assert isinstance(running.outcome(0.0).error, CancelledError)
    running = Call(lambda: climate.run(step_by_step, A))
    assert busy(climate)
    np.testing.assert_array_equal(A.fetch(), before + 2)
    assert running.outcome(0.0).error is None


@pytest.mark.cell("network", "fetching", "named", "goes on")
def test_a_fetch_whose_control_connection_breaks_is_whole(
    climate: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data connections go on, and a call changes the matrix in between."""
    A = climate.send_matrix(np.zeros((4000, 3)), name="whole")
    whole = MatrixReader.read_block
    broken: list[float] = []

    def in_halves(self: MatrixReader, out: Any, origin: tuple[int, int]) -> None:
        whole(self, out[:2000], origin)
        if not broken:
            broken.append(out[:2000].max())
            climate.connection._channel._connection.hang_up()
            climate.run(lambda comm, A: A.local.fill(7), A)
        whole(self, out[2000:], (2000, 0))

    monkeypatch.setattr(MatrixReader, "read_block", in_halves)
    found = A.fetch()
    assert broken == [0.0]
    assert found.min() == found.max() == 7


@pytest.mark.cell("client", "fetching", "named", "goes on")
def test_a_reader_that_stops_does_not_hold_up_calls(climate: AlchemistSession) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")

        def read(of):
            print("reading", flush=True)
            time.sleep(60)

        als.connection.read(A, read)
    """
    A = climate.matrix("A")
    with Program(text) as program:
        assert program.said == "reading"
        climate.run(lambda comm, A: None, A, timeout_s=10.0)
        program.kill()
        climate.run(lambda comm, A: None, A, timeout_s=10.0)
