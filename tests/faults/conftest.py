"""A gang to break, a second gang that must not be affected, and the measured times."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.cluster.actors import NAMESPACE, agent_name, edition
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.errors import (
    AlchemistError,
    GroupFailedError,
    GroupRecoveredError,
    StaleHandleError,
)
from mpi_workers.node.processes import descendants
from tests.faults.hosts import why_not
from tests.mpi_workers.cgroups import limited_memory
from tests.support import suite, traces

CLOCK_S = 0.01  # by which two processes' measures of a limit may differ
ERROR_LIMIT_S = 3.0  # from a fault to the error that the caller gets
CLEANUP_LIMIT_S = 10.0  # from there until nothing of the gang is left: alone in 3 s
LIBRARY = Path(__file__).with_name("breaking.py")
MATRIX = np.arange(600.0).reshape(60, 10)

HOSTLESS = why_not()  # why there can be no hosts here, or None


def needs_hosts(limit_s: float, reason: str | None = HOSTLESS) -> list[pytest.MarkDecorator]:
    """Marks of tests on hosts of their own, each of which may take this long."""
    return [
        pytest.mark.root,
        pytest.mark.skipif(reason is not None, reason=reason or ""),
        pytest.mark.timeout(limit_s, func_only=True),
    ]


_measured: list[tuple[str, float, float | None, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the test's measurements to its report: the table is printed by another process."""
    made = yield
    if call.when == "call":
        made.user_properties.extend((suite.FAULT, row) for row in _measured)
        _measured.clear()
    return made


def record(fault: str, error_s: float, clean_s: float | None, error: BaseException | str) -> None:
    """Add a row to the table: seconds to the error, seconds from there to a clean machine."""
    name = error if isinstance(error, str) else type(error).__name__
    _measured.append((fault, error_s, clean_s, name))


# --- leftovers of a gang ----------------------------------------------------------------


def left() -> set[str]:
    """Return the processes, files and placement groups of all gangs."""
    parts = [pid for pid, line in traces.processes().items() if traces.PART in line]
    found = {f"process {pid}" for pid in parts if not _stands(pid)}
    found |= set(map(str, traces.folders() | traces.shared_memory()))
    table = ray.util.placement_group_table()
    return found | {f"placement group {k}" for k, v in table.items() if v["state"] != "REMOVED"}


def _stands(pid: int) -> bool:
    """Whether a process is the fork server of a live agent; only those stay between gangs."""
    try:
        return traces.command_line(traces.parent_of(pid)).startswith("ray::")
    except OSError:
        return False


def assert_clean(before: set[str]) -> float:
    """Wait until nothing is left that was not in `before`; return the seconds that took."""
    now: set[str] = set()

    def clean() -> bool:
        now.clear()
        now.update(left() - before)
        return not now

    took = traces.wait_until(clean, CLEANUP_LIMIT_S)
    assert took is not None, f"left behind: {', '.join(sorted(now))}"
    return took


def agent_pids() -> dict[str, int]:
    """Process ids of this node's agent and its fork server."""
    node_id = ray.get_runtime_context().get_node_id()
    agent = ray.get_actor(agent_name(edition(), node_id), namespace=NAMESPACE)
    # It may be restarting, and its fork server may be dead.
    ray.get(agent.ready.options(max_task_retries=-1).remote(), timeout=30)
    return ray.get(agent.pids.remote(), timeout=30)


@contextlib.contextmanager
def limited_gangs(nbytes: int) -> Iterator[None]:
    """Put the fork server of this node, and all processes it forks, in a memory cgroup."""
    with limited_memory(nbytes) as folder:
        processes = folder / "cgroup.procs"
        with AlchemistSession(1):  # starts the agent
            fork_server = agent_pids()["fork-server"]
        processes.write_text(f"{fork_server}\n")
        try:
            yield
        finally:
            (folder.parent / "cgroup.procs").write_text(f"{fork_server}\n")
            traces.wait_until(lambda: not processes.read_text(), 5.0, 0.05)


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    return ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=10)


@contextlib.contextmanager
def variables(actor: Any, module: ModuleType, **wanted: Any) -> Iterator[None]:
    """Set variables of a module in an actor's process, which serves later tests too."""

    def swap(_: Any, values: dict[str, Any]) -> dict[str, Any]:
        before = {name: getattr(module, name) for name in values}
        vars(module).update(values)
        return before

    before = ray.get(actor.__ray_call__.remote(swap, wanted), timeout=10)
    try:
        yield
    finally:
        ray.get(actor.__ray_call__.remote(swap, before), timeout=10)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


# --- how to inject a fault ------------------------------------------------------------


@dataclass
class Outcome:
    """The result or error of a call, and the seconds from the fault to its end."""

    seconds: float
    result: Any = None
    error: BaseException | None = None


class Call:
    """A call in its own thread, so that a fault can be injected meanwhile."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._ended = 0.0
        self._outcome = Outcome(0.0)
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.result = call()
        except BaseException as error:
            self._outcome.error = error
        self._ended = traces.clock()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def outcome(self, since: float, limit_s: float = 20.0) -> Outcome:
        ended = traces.wait_until(lambda: not self.under_way, limit_s)
        assert ended is not None, f"the call did not end in {limit_s} s"
        self._outcome.seconds = self._ended - since
        return self._outcome


def inject_during(
    cause: Callable[[], Any], call: Callable[[], Any], after_s: float = 0.3
) -> Outcome:
    """Start a call, cause the fault while it runs, and return its outcome."""
    under = Call(call)
    time.sleep(after_s)
    assert under.under_way, "the call ended before the fault"
    start = traces.clock()
    cause()
    return under.outcome(start)


def inject_and_retry(cause: Callable[[], Any], call: Callable[[], Any]) -> Outcome:
    """Cause the fault, then repeat the call until it fails."""
    start = traces.clock()
    cause()
    while traces.clock() - start < 20:
        try:
            call()
        except AlchemistError as error:
            return Outcome(traces.clock() - start, error=error)
        time.sleep(0.005)
    raise AssertionError("no call has failed")


@contextlib.contextmanager
def refused(
    fault: str,
    error: type[Exception],
    match: str = "",
    least_s: float = 0.0,
    most_s: float = ERROR_LIMIT_S,
    before: set[str] | None = None,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Check the error of the block and its time, and that nothing is left but `before`."""
    start, begun = traces.clock(), time.monotonic()
    with pytest.raises(error, match=match) as caught:
        yield caught
    seconds = traces.clock() - start
    assert time.monotonic() - begun >= least_s - CLOCK_S
    assert seconds < most_s
    gone_s = None if before is None else assert_clean(before)
    record(fault, seconds, gone_s, caught.value)


def until_replaced(session: AlchemistSession, killed: set[int], limit_s: float) -> float:
    """Wait until the session lists none of these ranks any more; the seconds that took.

    It pauses between two looks: a client that asks without pause can keep the kernel from running
    the killed ranks for seconds, without which they do not end.
    """
    start = traces.clock()

    def replaced() -> bool:
        return killed.isdisjoint(worker.pid for worker in session.list_workers())

    assert traces.wait_until(replaced, limit_s) is not None, f"ranks {killed} are still listed"
    return traces.clock() - start


# --- gangs ----------------------------------------------------------------------------


class Gang:
    """A session with a gang, a library and a matrix."""

    def __init__(self, workers: int, **options: Any) -> None:
        self.workers = workers
        self.session = AlchemistSession(**options)
        ray.get(find_driver().prewarm.remote())
        self.before = left()
        self.start()

    def start(self) -> None:
        """Request workers (again), load the library and send a matrix."""
        self.ranks = [worker.pid for worker in self.session.request_workers(self.workers)]
        traces.note_segments()
        self.proxy = traces.parent_of(self.ranks[0])
        self.lib = self.session.load_library("breaking", LIBRARY)
        self.A = self.session.send_matrix(MATRIX)

    @property
    def manager(self) -> Any:
        """The actor of the gang's GroupManager."""
        return self.session._gangs._own.actor

    @property
    def endpoint(self) -> int:
        """The pid of the data endpoint: the one child of the ranks' proxy that is no rank."""
        (found,) = descendants([self.proxy]) - set(self.ranks)
        return found

    def works(self, *, renewed: bool = False) -> bool:
        """Check that it has all its ranks and gives correct results.

        `renewed`: after a call that failed in native code, which has other ranks.
        """
        if renewed:
            # The limit includes the wait for a call that has not ended as it should.
            assert self.session.run(lambda comm: comm.size, timeout_s=60.0) == self.workers
            self.ranks = [worker.pid for worker in self.session.list_workers()]
        assert [worker.pid for worker in self.session.list_workers()] == self.ranks
        assert self.lib.total() == sum(range(self.workers))
        B = self.lib.twice(self.A)
        assert np.array_equal(B.fetch(), 2 * MATRIX)
        B.free()
        return True

    def lost(self, fault: str, outcome: Outcome, *words: str) -> None:
        """Check that it ended as specified: error in time, nothing left, and a new gang works."""
        error = outcome.error
        assert isinstance(error, GroupFailedError), repr(error)
        for word in words:
            assert word in str(error), str(error)
        assert outcome.seconds < ERROR_LIMIT_S, f"the error came after {outcome.seconds:.2f} s"
        gone_s = assert_clean(self.before)
        record(fault, outcome.seconds, gone_s, error)
        with pytest.raises(GroupFailedError):
            self.session.send_matrix(MATRIX)
        with pytest.raises(GroupFailedError):
            self.A.fetch()
        self.again()

    def renewed(self, fault: str, outcome: Outcome, *words: str) -> None:
        """Check that the ranks were started again with their matrices: one call has failed."""
        error = outcome.error
        assert isinstance(error, GroupRecoveredError), repr(error)
        for word in words:
            assert word in str(error), str(error)
        assert outcome.seconds < ERROR_LIMIT_S, f"the error came after {outcome.seconds:.2f} s"
        self.goes_on(fault, outcome.seconds, error)

    def goes_on(self, fault: str, seconds: float, error: BaseException | str = "-") -> None:
        """Check that other ranks have the matrices."""
        begin = traces.clock()
        before, self.ranks = self.ranks, [worker.pid for worker in self.session.list_workers()]
        assert not set(before) & set(self.ranks)
        assert traces.wait_until(lambda: not any(map(traces.alive, before)), ERROR_LIMIT_S)
        assert np.array_equal(self.A.fetch(), MATRIX)
        assert self.works()
        record(fault, seconds, traces.clock() - begin, error)

    def again(self) -> None:
        """Start the next gang of the session; the handles of the lost gang are stale."""
        lib, old = self.lib, self.A
        self.start()
        assert self.works()
        for use in (self.session.fetch_matrix, Handle.fetch, self.lib.twice):
            with pytest.raises(StaleHandleError):
                use(old)
        with pytest.raises(AlchemistError):
            lib.total()

    def kill_agent(self) -> None:
        """Kill this node's agent. Its fork server stays while another gang has a proxy."""
        pids = agent_pids()
        self.before.add(f"process {pids['fork-server']}")
        kill(pids["agent"])

    def close(self) -> None:
        self.session.close()
        assert_clean(self.before)


@pytest.fixture(scope="package")
def gangs(cluster: str) -> Iterator[tuple[Gang, Gang]]:
    """A gang of 3 for all faults, and a gang of 2 that must not be affected.

    The second one has a name, and so a GroupManager of its own.
    """
    second = Gang(2, name="bystander")
    first = Gang(3)
    yield first, second
    first.session.close()
    second.close()


@pytest.fixture
def bystander(gangs: tuple[Gang, Gang]) -> Iterator[Gang]:
    """A gang of another session; afterwards it must work as before."""
    yield gangs[1]
    assert gangs[1].works()


@pytest.fixture
def gang(gangs: tuple[Gang, Gang], bystander: Gang) -> Iterator[Gang]:
    """A gang of 3 for one fault; after the test the session must have a working gang."""
    gang = gangs[0]
    if not gang.session._alive():
        gang.start()
    yield gang
    assert gang.works(renewed=True)


NewGang = Callable[..., Gang]


@pytest.fixture
def new_gang(cluster: str) -> Iterator[NewGang]:
    """Start gangs that end with the test, also if it fails: the next one needs their CPUs."""
    started: list[Gang] = []

    def start(workers: int, **options: Any) -> Gang:
        started.append(Gang(workers, **options))
        return started[-1]

    yield start
    for gang in started:
        gang.session.close()
