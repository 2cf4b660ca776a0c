"""A gang to break, another that must not notice, and the table of what was measured."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, GroupFailedError, StaleHandleError
from alchemist_ray.runtime.driver import NAMESPACE, find_driver
from tests.support import report, traces

NEWS_S = 3.0  # the caller knows of a fault within
CLEAN_S = 3.0  # and nothing of the gang is left within
LIBRARY = Path(__file__).with_name("breaking.py")
MATRIX = np.arange(600.0).reshape(60, 10)

_measured: list[tuple[str, float, float | None, str]] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Attach the test's measurements to its report: the table is printed by another process."""
    made = yield
    if call.when == "call":
        made.user_properties.extend((report.FAULT, row) for row in _measured)
        _measured.clear()
    return made


def record(fault: str, error_s: float, clean_s: float | None, error: BaseException | str) -> None:
    """Add a row to the table: seconds to the error, seconds from there to a clean machine."""
    name = error if isinstance(error, str) else type(error).__name__
    _measured.append((fault, error_s, clean_s, name))


# --- what a gang leaves ---------------------------------------------------------------


def left() -> set[str]:
    """What gangs have on this machine and in the cluster now."""
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
    """Wait until nothing is left but what was there `before`; seconds until it was so."""
    now: set[str] = set()

    def clean() -> bool:
        now.clear()
        now.update(left() - before)
        return not now

    took = traces.wait_until(clean, CLEAN_S)
    assert took is not None, f"left behind: {', '.join(sorted(now))}"
    return took


def agent_pids(node_id: str | None = None) -> dict[str, int]:
    """Process ids of a node's agent and its fork server."""
    node_id = node_id or ray.get_runtime_context().get_node_id()
    agent = ray.get_actor(f"alchemist-agent-{node_id}", namespace=NAMESPACE)
    # It may be restarting, and its fork server may be dead.
    ray.get(agent.ready.options(max_task_retries=-1).remote(), timeout=30)
    pids: dict[str, int] = ray.get(agent.pids.remote(), timeout=30)
    return pids


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()), timeout=10)
    return pid


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


# --- how to strike --------------------------------------------------------------------


@dataclass
class Told:
    """What a call came back with, and how long after the blow."""

    seconds: float
    result: Any = None
    error: BaseException | None = None


class Call:
    """A call in a thread of its own, so that something can happen to it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._ended = 0.0
        self._told = Told(0.0)
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._told.result = call()
        except BaseException as error:
            self._told.error = error
        self._ended = time.monotonic()

    @property
    def under_way(self) -> bool:
        return self._thread.is_alive()

    def told(self, since: float, limit_s: float = 20.0) -> Told:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), f"the call did not end in {limit_s} s"
        self._told.seconds = self._ended - since
        return self._told


def strike(blow: Callable[[], Any], call: Callable[[], Any], after_s: float = 0.3) -> Told:
    """Begin a call, let the blow fall while it is under way, and see what comes of the call."""
    under = Call(call)
    time.sleep(after_s)
    assert under.under_way, "the call ended before the blow"
    start = time.monotonic()
    blow()
    return under.told(start)


def until_told(blow: Callable[[], Any], call: Callable[[], Any]) -> Told:
    """Let the blow fall, then call and call again until the call fails."""
    start = time.monotonic()
    blow()
    while time.monotonic() - start < 20:
        try:
            call()
        except AlchemistError as error:
            return Told(time.monotonic() - start, error=error)
        time.sleep(0.005)
    raise AssertionError("no call has failed")


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
        """Request workers (again) and give them something to keep."""
        self.ranks = [worker.pid for worker in self.session.request_workers(self.workers)]
        traces.note_segments()
        self.proxy = traces.parent_of(self.ranks[0])
        self.lib = self.session.load_library("breaking", LIBRARY)
        self.A = self.session.send_matrix(MATRIX)

    @property
    def manager(self) -> Any:
        """The actor of the gang's GroupManager."""
        return self.session._manager.actor

    def works(self) -> bool:
        """Whether it is whole and gives right answers."""
        assert [worker.pid for worker in self.session.list_workers()] == self.ranks
        assert self.lib.total() == sum(range(self.workers))
        B = self.lib.twice(self.A)
        assert np.array_equal(B.fetch(), 2 * MATRIX)
        B.free()
        return True

    def lost(self, fault: str, told: Told, *words: str) -> None:
        """It was lost as it should be: told in time and in words, clean, and it can go on."""
        error = told.error
        assert isinstance(error, GroupFailedError), repr(error)
        for word in words:
            assert word in str(error), str(error)
        assert told.seconds < NEWS_S, f"told after {told.seconds:.2f} s"
        gone_s = assert_clean(self.before)
        record(fault, told.seconds, gone_s, error)
        with pytest.raises(GroupFailedError):
            self.session.send_matrix(MATRIX)
        with pytest.raises(GroupFailedError):
            self.A.fetch()
        self.again()

    def again(self) -> None:
        """The session of a lost gang starts the next; what it had is stale."""
        lib, old = self.lib, self.A
        self.start()
        assert self.works()
        with pytest.raises(StaleHandleError):
            self.session.fetch_matrix(old)
        with pytest.raises(StaleHandleError):
            old.fetch()
        with pytest.raises(StaleHandleError):
            self.lib.twice(old)
        with pytest.raises(AlchemistError):
            lib.total()

    def kill_agent(self) -> None:
        """Kill this node's agent. Its fork server stays while another gang's proxy lives."""
        pids = agent_pids()
        self.before.add(f"process {pids['fork-server']}")
        kill(pids["agent"])

    def close(self) -> None:
        self.session.close()
        assert_clean(self.before)


@pytest.fixture(scope="package")
def gangs(cluster: str) -> Iterator[tuple[Gang, Gang]]:
    """One gang of 3 to be broken again and again, and one of 2 beside it."""
    second = Gang(2)
    first = Gang(3)
    yield first, second
    first.session.close()
    second.close()


@pytest.fixture
def bystander(gangs: tuple[Gang, Gang]) -> Iterator[Gang]:
    """Another session's gang, which must not notice anything."""
    yield gangs[1]
    assert gangs[1].works()


@pytest.fixture
def gang(gangs: tuple[Gang, Gang], bystander: Gang) -> Iterator[Gang]:
    """A gang of 3 to be broken; a test that leaves it broken has failed."""
    gang = gangs[0]
    if not gang.session._alive():
        gang.start()
    yield gang
    assert gang.works()
