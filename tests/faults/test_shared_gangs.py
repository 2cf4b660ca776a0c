"""Named and detached gangs: attached to by several processes, left and found again."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    CallTimeoutError,
    CancelledError,
    GroupError,
    GroupFailedError,
    LibraryLoadError,
    LibraryNotFoundError,
    MatrixError,
    MatrixNotFoundError,
    SessionError,
    TransferError,
)
from alchemist_ray.gang.libraries import Library
from alchemist_ray.runtime.attach import connect
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.names import GROUP_PREFIX, NAMESPACE, group_name
from tests.faults.conftest import assert_clean, left
from tests.support import traces

ROOT = Path(__file__).parents[2]
END_LIMIT_S = 5.0
CLIENTS, CALLS = 32, 100
LIBRARY = """
from ali import Context, routine

calls = 0


@routine("calls")
def count(ctx: Context) -> int:
    global calls
    calls += 1
    return 1000 * {number} + calls
"""


def actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def managers() -> set[str]:
    return {name for name in actors() if name.startswith(GROUP_PREFIX)}


def gangs() -> dict[str, str]:
    return {gang.name: gang.state for gang in AlchemistSession.list()}


@pytest.fixture
def nothing_of_it_left(cluster: str) -> Iterator[None]:
    """After a test no process, file, reservation or manager of its gangs is left."""
    ray.get(find_driver().prewarm.remote())
    with AlchemistSession():  # the manager that the process keeps
        before, known = left(), managers()
    yield
    for name in gangs():
        with contextlib.suppress(SessionError):  # it has just ended
            AlchemistSession.stop_gang(name)
    assert traces.wait_until(lambda: managers() <= known, END_LIMIT_S) is not None, managers()
    assert_clean(before)


@pytest.fixture
def climate(nothing_of_it_left: None) -> Iterator[AlchemistSession]:
    """A detached gang with a matrix and a library, and the session that has started it."""
    with AlchemistSession(2, name="climate", lifetime="detached") as session:
        session.send_matrix(np.arange(12.0).reshape(4, 3), name="A")
        session.load_library("linalg")
        yield session


class Program:
    """A program of its own on the cluster, that prints one line when it is ready."""

    def __init__(self, address: str, text: str, **init: Any) -> None:
        begin = f"import ray\nray.init(address={address!r}, log_to_driver=False, **{init!r})\n"
        begin += "from alchemist_ray import AlchemistSession\nimport numpy as np, time\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + textwrap.dedent(text)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.said = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


# --- found by name ---


def test_an_attached_process_finds_all_that_is_there(
    cluster: str, climate: AlchemistSession
) -> None:
    text = """
        with AlchemistSession.attach("climate") as als:
            A = als.matrix("A")
            assert als.list_libraries() == ["linalg"]
            total = als.library("linalg").norm(A)
            als.send_matrix(np.ones((2, 2)), name="B")
            print(A.shape, round(total, 9), als.run_task("linalg", "norm", A) == total, flush=True)
    """
    with Program(cluster, text) as program:
        assert program.said == f"(4, 3) {np.linalg.norm(np.arange(12.0)):.9f} True"
        assert program.process.wait(30) == 0
    np.testing.assert_array_equal(climate.matrix("B").fetch(), np.ones((2, 2)))
    with pytest.raises(LibraryNotFoundError, match="echo"):
        climate.library("echo")


def test_it_outlives_the_session_and_the_program_that_started_it(
    cluster: str, nothing_of_it_left: None
) -> None:
    text = """
        als = AlchemistSession(2, name="made", lifetime="detached")
        A = als.send_matrix(np.eye(3), name="A")
        als.stop()
        print("stopped", flush=True)
    """
    with Program(cluster, text) as program:
        assert program.said == "stopped"
        assert program.process.wait(30) == 0
    with AlchemistSession.attach("made") as als:
        np.testing.assert_array_equal(als.matrix("A").fetch(), np.eye(3))
        assert als.run(lambda comm: comm.size) == 2
    assert gangs()["made"] == "ready"


def test_a_killed_kernel_has_its_handles_back(cluster: str, nothing_of_it_left: None) -> None:
    text = """
        als = AlchemistSession(2, name="kernel", lifetime="detached")
        A = als.send_matrix(np.arange(6.0).reshape(2, 3), name="A")
        B = A + 1
        print(B.id, flush=True)
        als.run(lambda comm: time.sleep(60))
    """
    with Program(cluster, text) as program:
        time.sleep(0.3)
        program.kill()
        begin = time.monotonic()
        with AlchemistSession.attach("kernel") as als:
            A = als.matrix("A")
            found = {handle.id: handle for handle in als.list_matrices()}
            took = time.monotonic() - begin
            B = found[int(program.said)]
            np.testing.assert_array_equal(B.fetch(), A.fetch() + 1)
    assert took < 2.0, f"it took {took:.2f} s"


def test_attaching_is_quick(climate: AlchemistSession) -> None:
    times = []
    for _ in range(5):
        begin = time.monotonic()
        AlchemistSession.attach("climate").detach()
        times.append(time.monotonic() - begin)
    assert sorted(times)[2] < 0.3, times


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


def test_the_environment_of_a_job_stays_with_its_gang(
    cluster: str, nothing_of_it_left: None
) -> None:
    text = """
        with AlchemistSession(2, name="other", lifetime="detached"):
            print("started", flush=True)
    """
    for manager_killed in (False, True):
        with Program(cluster, text, runtime_env={"env_vars": {"OF_THIS_JOB": "yes"}}) as program:
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


def test_running_calls_are_listed(cluster: str, climate: AlchemistSession) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        echo = als.load_library("echo")
        print("here", flush=True)
        echo.sleep(60.0)
    """
    with Program(cluster, text) as program:
        seen = traces.wait_until(lambda: bool(climate.list_calls()), 10)
        assert seen is not None
        (call,) = climate.list_calls()
        assert (call.name, call.state) == ("echo.sleep", "running")
        assert f"(pid {program.process.pid})" in call.caller
        assert 0 <= call.age_s < 20
    # its caller is gone, so the call is cancelled
    assert climate.run(lambda comm: comm.size) == 2
    assert climate.list_calls() == []


def test_a_call_of_another_process_can_be_cancelled(
    cluster: str, climate: AlchemistSession
) -> None:
    text = """
        from alchemist_ray.errors import CancelledError
        als = AlchemistSession.attach("climate")
        print("here", flush=True)
        try:
            als.run(lambda comm: time.sleep(60))
        except CancelledError:
            print("cancelled", als.run(lambda comm: comm.size), flush=True)
    """
    with Program(cluster, text) as program:
        assert traces.wait_until(lambda: bool(climate.list_calls()), 10) is not None
        assert climate.cancel() == 0  # this process waits for no call
        assert len(climate.list_calls()) == 1
        assert climate.cancel(everyone=True) == 1
        assert program.line() == "cancelled 2"


def test_a_thread_cancels_the_calls_of_its_process(climate: AlchemistSession) -> None:
    errors: list[Exception] = []

    def call() -> None:
        try:
            climate.run(lambda comm: time.sleep(60))
        except CancelledError as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert traces.wait_until(lambda: len(climate.list_calls()) == 3, 10) is not None
    states = [call.state for call in climate.list_calls()]
    assert states == ["running", "queued", "queued"]
    assert climate.cancel() == 3
    for thread in threads:
        thread.join(10)
    assert len(errors) == 3
    assert climate.run(lambda comm: comm.size) == 2


def test_many_processes_are_served_in_turn(climate: AlchemistSession) -> None:
    manager: Any = ray.get_actor(group_name("climate"), namespace=NAMESPACE)
    (linalg,) = climate.connection.request({"op": "list_libraries"})["libraries"]
    A = climate.matrix("A")
    start = threading.Barrier(CLIENTS)
    waits: list[float] = []

    def call() -> None:
        connection = connect(climate.connection.address, manager)
        lib = Library(connection, linalg)
        start.wait(60)
        begin = time.monotonic()
        for _ in range(CALLS):
            lib.norm(A)
        waits.append(time.monotonic() - begin)
        connection.close()

    threads = [threading.Thread(target=call) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(waits) == CLIENTS
    fair_s = sum(waits) / CLIENTS
    assert max(waits) < 3 * fair_s, f"fair: {fair_s:.2f} s, longest: {max(waits):.2f} s"


def test_a_library_is_loaded_once_and_not_replaced_by_others(
    cluster: str, climate: AlchemistSession, tmp_path: Path
) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    for path, number in ((first, 1), (second, 2)):
        path.write_text(LIBRARY.format(number=number))
    lib = climate.load_library("mine", first)
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
        time.sleep(60)
    """
    with Program(cluster, text) as program:
        assert program.said == "1003"
        assert re.search(rf"first.py, not .*second.py, and .*pid {os.getpid()}", program.line())
        assert program.line() == "2001"
        assert lib.count() == 1004
        assert climate.list_libraries() == ["linalg", "mine", "mine2"]
        first.write_text(LIBRARY.format(number=3))
        with pytest.raises(LibraryLoadError, match=rf"changed since.*pid {program.process.pid}"):
            climate.load_library("mine", first)
    assert traces.wait_until(lambda: len(AlchemistSession.list()[0].processes) == 1, 5) is not None
    assert climate.load_library("mine", first).count() == 3001


def test_a_matrix_is_not_fetched_while_a_call_changes_it(
    cluster: str, climate: AlchemistSession
) -> None:
    def step_by_step(comm: Any, A: Any) -> None:
        A.local[...] += 1 + comm.rank
        time.sleep(1.0)
        A.local[...] += 1 - comm.rank

    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")
        start = A.fetch()
        print("here", flush=True)
        times = {}
        begin = time.monotonic()
        while time.monotonic() - begin < 4:
            change = A.fetch() - start
            assert (change == change[0, 0]).all(), change
            times.setdefault(float(change[0, 0]), 0)
        print(sorted(times), flush=True)
    """
    A = climate.matrix("A")
    with Program(cluster, text) as program:
        assert program.said == "here"
        climate.run(step_by_step, A)
        climate.run(step_by_step, A)
        assert program.line() == "[0.0, 2.0, 4.0]"
    waits: list[float] = []

    def fetch() -> None:
        begin = time.monotonic()
        A.fetch()
        waits.append(time.monotonic() - begin)

    for pure in (True, False):
        thread = threading.Timer(0.4, fetch)
        thread.start()
        climate.run(lambda comm, A: time.sleep(1.5), A, pure=pure)
        thread.join()
    assert waits[0] < 0.5 < waits[1], waits


def test_a_reader_that_dies_does_not_hold_up_calls(cluster: str, climate: AlchemistSession) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")
        with als.connection.reading(A):
            print("reading", flush=True)
            time.sleep(60)
    """
    A = climate.matrix("A")
    with Program(cluster, text) as program:
        assert program.said == "reading"
        with pytest.raises(CallTimeoutError):
            climate.run(lambda comm, A: None, A, timeout_s=1.0)
        assert climate.library("linalg").norm(A) > 0  # changes nothing
        program.kill()
        climate.run(lambda comm, A: None, A, timeout_s=10.0)


# --- wrong use ---


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"lifetime": "detached"}, ValueError, "needs a name"),
        ({"lifetime": "forever"}, ValueError, "'detached'"),
        ({"name": "a/b"}, SessionError, "letters"),
        ({"name": ""}, SessionError, "letters"),
        ({"name": "x", "idle_timeout_s": 0}, ValueError, "idle_timeout_s .*got 0"),
        ({"name": "x", "lifetime": "detached", "placement": "inherit"}, ValueError, "placement"),
    ],
)
def test_wrong_options_are_refused(
    cluster: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        AlchemistSession(1, **options)


def test_a_name_in_use_is_refused(climate: AlchemistSession) -> None:
    with pytest.raises(GroupError, match=r"attach\('climate'\)"):
        AlchemistSession(1, name="climate")
    with pytest.raises(GroupError, match=r"stop_gang\('climate'\)"):
        AlchemistSession(1, name="climate", lifetime="detached")
    assert climate.matrix("A").shape == (4, 3)


def test_one_of_two_that_take_a_name_at_once_gets_it(nothing_of_it_left: None) -> None:
    got: list[Any] = []

    def start() -> None:
        try:
            got.append(AlchemistSession(1, name="both", lifetime="detached"))
        except GroupError as error:
            got.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(type(x).__name__ for x in got) == ["AlchemistSession", "GroupError"]


def test_an_unknown_name_lists_the_names_that_exist(climate: AlchemistSession) -> None:
    for call in (AlchemistSession.attach, AlchemistSession.stop_gang):
        with pytest.raises(SessionError, match=r"'weather'.*climate"):
            call("weather")


def test_a_gang_without_a_name_is_private(nothing_of_it_left: None) -> None:
    with AlchemistSession(1) as als:
        (about,) = AlchemistSession.list()
        assert not about.named
        with pytest.raises(SessionError, match="is private"):
            AlchemistSession.attach(about.name)
        AlchemistSession.stop_gang(about.name)
        with pytest.raises(SessionError, match="was stopped"):
            als.list_matrices()
        als.request_workers(1)
        assert als.list_matrices() == []


def test_attaching_waits_for_a_gang_that_starts(nothing_of_it_left: None) -> None:
    started: list[AlchemistSession] = []

    def start() -> None:
        started.append(AlchemistSession(2, name="starting", lifetime="detached"))

    thread = threading.Thread(target=start)
    thread.start()
    assert traces.wait_until(lambda: "starting" in gangs(), 20) is not None
    with AlchemistSession.attach("starting") as als:
        assert len(als.list_workers()) == 2
    thread.join(60)
    started[0].close()


def test_a_gang_that_does_not_start_leaves_nothing(nothing_of_it_left: None) -> None:
    with AlchemistSession(6, name="first", lifetime="detached"):
        with pytest.raises(Exception, match="no room"):
            AlchemistSession(4, name="second", lifetime="detached", start_timeout_s=1.0)
        with pytest.raises(SessionError, match="'second'"):
            AlchemistSession.attach("second")


def test_a_gang_of_another_version_is_refused(climate: AlchemistSession) -> None:
    manager: Any = ray.get_actor(group_name("climate"), namespace=NAMESPACE)

    def set_version(actor: Any, version: str) -> None:
        sys.modules[type(actor).__module__].__version__ = version  # type: ignore[attr-defined]

    ray.get(manager.__ray_call__.remote(set_version, "0.0.1"))
    with pytest.raises(SessionError, match=r"0\.0\.1"):
        AlchemistSession.attach("climate")


def test_a_change_by_another_process_is_seen(cluster: str, climate: AlchemistSession) -> None:
    small = climate.matrix("A").sum(axis=0)  # its elements came with the answer
    before = small.fetch()
    text = f"""
        def double(comm, x):
            x.local[...] *= 2
        with AlchemistSession.attach("climate") as als:
            (x,) = [h for h in als.list_matrices() if h.id == {small.id}]
            als.run(double, x)
            print("done", flush=True)
    """
    with Program(cluster, text) as program:
        assert program.said == "done"
    np.testing.assert_array_equal(small.fetch(), 2 * before)


def test_a_matrix_that_another_program_uses_is_not_freed(
    cluster: str, climate: AlchemistSession
) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")
        print("here", flush=True)
        time.sleep(60)
    """
    with Program(cluster, text) as program:
        with pytest.raises(MatrixError, match=rf"A is not freed.*pid {program.process.pid}"):
            climate.matrix("A").free()
        np.testing.assert_array_equal(climate.matrix("A").fetch(), np.arange(12.0).reshape(4, 3))
    # the program is gone: its leases last, but it no longer uses the matrix
    freed = climate.matrix("A")
    assert traces.wait_until(lambda: len(AlchemistSession.list()[0].processes) == 1, 5) is not None
    freed.free()
    with pytest.raises(MatrixNotFoundError):
        climate.matrix("A")


# --- the end ---


def test_stopping_a_gang_ends_it_for_all(cluster: str, climate: AlchemistSession) -> None:
    errors: list[BaseException] = []

    def call() -> None:
        try:
            climate.run(lambda comm: time.sleep(30))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert traces.wait_until(lambda: bool(climate.list_calls()), 10) is not None
    AlchemistSession.stop_gang("climate")
    thread.join(10)
    assert [str(error) for error in errors] == ["gang climate was stopped (stop_gang)"]
    assert "climate" not in gangs()
    with pytest.raises(SessionError, match="was stopped"):
        climate.list_matrices()
    with AlchemistSession(1, name="climate", lifetime="detached") as again:
        assert again.list_matrices() == []


def test_a_gang_without_commands_ends(nothing_of_it_left: None) -> None:
    als = AlchemistSession(1, name="short", lifetime="detached", idle_timeout_s=1.0)
    A = als.send_matrix(np.eye(2), name="A")
    for _ in range(8):  # fetching is use, too
        time.sleep(0.25)
        A.fetch()
    assert "short" in gangs()
    assert traces.wait_until(lambda: "short" not in gangs(), 5) is not None
    with pytest.raises(SessionError, match=r"after 1 s without a command \(idle_timeout_s\)"):
        als.list_matrices()


def test_a_long_call_is_no_idleness(nothing_of_it_left: None) -> None:
    with AlchemistSession(1, name="busy", lifetime="detached", idle_timeout_s=2.0) as als:
        als.run(lambda comm: time.sleep(4.0))
        assert als.run(lambda comm: comm.size) == 1


# --- faults ---


def test_a_lost_connection_is_resumed_with_its_matrices(climate: AlchemistSession) -> None:
    B = climate.matrix("A") + 1
    ident = B.id
    climate.connection._channel._connection.hang_up()
    assert ident in {handle.id for handle in climate.list_matrices()}
    np.testing.assert_array_equal(B.fetch(), np.arange(12.0).reshape(4, 3) + 1)

    def cut() -> None:
        time.sleep(0.5)
        climate.connection._channel._connection.hang_up()

    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(TransferError, match="restored"):
        climate.run(lambda comm: time.sleep(5))
    thread.join()
    assert climate.run(lambda comm: comm.size) == 2
    del B
    assert climate.run(lambda comm: comm.size) == 2
    assert ident not in {handle.id for handle in climate.list_matrices()}


def test_a_lost_rank_is_told_to_all_and_the_name_can_be_used_again(
    climate: AlchemistSession,
) -> None:
    os.kill(climate.list_workers()[1].pid, signal.SIGKILL)
    assert traces.wait_until(lambda: gangs().get("climate") == "failed", 5) is not None
    with pytest.raises(GroupFailedError, match="rank 1"):
        climate.list_matrices()
    with pytest.raises(GroupFailedError, match="rank 1"):
        AlchemistSession.attach("climate")
    with AlchemistSession(1, name="climate", lifetime="detached") as again:
        assert again.run(lambda comm: comm.size) == 1


def test_owner_and_manager_die_at_once(cluster: str, nothing_of_it_left: None) -> None:
    text = """
        als = AlchemistSession(2, name="both", lifetime="detached")
        print(*[worker.pid for worker in als.list_workers()], flush=True)
        time.sleep(60)
    """
    with Program(cluster, text) as program:
        ranks = list(map(int, program.said.split()))
        traces.note_segments()
        manager: Any = ray.get_actor(group_name("both"), namespace=NAMESPACE)
        pid = ray.get(manager.__ray_call__.remote(lambda actor: os.getpid()))
        os.kill(pid, signal.SIGKILL)
        program.kill()
        assert traces.wait_until(lambda: not any(map(traces.alive, ranks)), 3) is not None
    with pytest.raises(SessionError, match="no gang 'both'"):
        AlchemistSession.attach("both")
    with AlchemistSession(2, name="both", lifetime="detached") as als:
        assert als.run(lambda comm: comm.size) == 2
