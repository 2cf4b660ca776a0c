"""GroupManagers: the private gangs of a process share one, and it does not stay for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from inspect import signature
from types import CodeType, FrameType
from typing import Any

import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.attached.address import this_process
from alchemist_ray.attached.options import GangOptions
from alchemist_ray.cluster.actors import GangHandle, group_name, reservation_name
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.errors import GroupFailedError, GroupRecoveredError
from alchemist_ray.ray_access import catalogue, manager_pool
from alchemist_ray.runtime.gang import Gang
from alchemist_ray.runtime.gang_slot import GangSlot
from alchemist_ray.runtime.group_manager import STARTS, WITHOUT_GANG
from alchemist_ray.runtime.launch.gang_request import GangRequest
from tests.faults.conftest import agent_pids, pid_of
from tests.faults.named.named_gangs import managers
from tests.support import traces

START_LIMIT_S = 30.0
CPUS_WAIT_S = 50.0


def without_unused() -> set[str]:
    """End this process's manager if it has no gang; the names of those that are left."""
    manager = manager_pool.take(this_process())
    manager.give_up()
    shared = {group_name(manager.gang)}
    assert traces.wait_until(lambda: not shared & managers(), START_LIMIT_S, 0.1) is not None
    return managers()


@pytest.fixture
def wait_for(cluster: str) -> Iterator[Callable[[int], set[str]]]:
    """Wait until there is a number of managers that other tests have not; their names."""
    others = without_unused()

    def wait(count: int) -> set[str]:
        def there() -> bool:
            return len(managers() - others) == count

        assert traces.wait_until(there, START_LIMIT_S, 0.1) is not None, managers() - others
        return managers() - others

    yield wait
    without_unused()


def manager_pid(als: AlchemistSession) -> int:
    """The process of a session's GroupManager."""
    return pid_of(als.connection.transport.manager.actor)


def sizes(als: AlchemistSession) -> list[int]:
    found: list[int] = als.run(lambda comm: comm.allgather(comm.size))
    return found


def test_the_sessions_of_a_process_share_a_manager(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession(2) as first:
        with AlchemistSession(1) as second:
            wait_for(1)
            assert manager_pid(first) == manager_pid(second)
            assert second.list_workers()[0].pid != first.list_workers()[0].pid
            listed = {gang.name: gang.workers for gang in AlchemistSession.list()}
            assert listed[first.connection.address.gang] == 2
            assert listed[second.connection.address.gang] == 1
            assert sizes(second) == [1]
        assert sizes(first) == [2, 2]
        with AlchemistSession(1, name="apart") as third:
            assert manager_pid(third) != manager_pid(first)
            wait_for(2)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process does nothing in the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def interrupted(action: Callable[[], Any]) -> None:
    """Ctrl-C during an action that waits."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        action()


def starts_again_beside(first: AlchemistSession, second: AlchemistSession) -> None:
    """The first gang is unharmed, and the next one of the second session has the same manager."""
    assert sizes(first) == [1]
    second.request_workers(1)
    assert sizes(second) == [1]
    assert manager_pid(first) == manager_pid(second)


def test_a_gang_in_a_shared_manager_is_stopped_alone(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession(1) as first, AlchemistSession(1) as second:
        AlchemistSession.stop_gang(second.connection.address.gang)
        starts_again_beside(first, second)


def test_a_gang_in_a_shared_manager_is_lost_alone(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession(1) as first, AlchemistSession(1) as second:
        pids = [als.list_workers()[0].pid for als in (first, second)]
        os.kill(pids[1], signal.SIGKILL)
        with contextlib.suppress(GroupRecoveredError):  # the call may come after the renewal
            sizes(second)
        assert sizes(first) == sizes(second) == [1]
        assert first.list_workers()[0].pid == pids[0]
        assert second.list_workers()[0].pid != pids[1]


def test_the_end_of_a_manager_is_the_end_of_its_gangs(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession(1) as first, AlchemistSession(1) as second:
        os.kill(manager_pid(first), signal.SIGKILL)
        for als in (first, second):
            with pytest.raises(GroupFailedError):
                sizes(als)
        for als in (first, second):
            als.request_workers(1)
            assert sizes(als) == [1]
        assert manager_pid(first) == manager_pid(second)
        wait_for(1)


def test_a_start_that_is_given_up_leaves_the_other_gangs(
    wait_for: Callable[[int], set[str]],
) -> None:
    cpus = int(ray.cluster_resources()["CPU"])
    with AlchemistSession(1) as als:
        options = GangOptions(start_timeout_s=CPUS_WAIT_S)
        manager = manager_pool.take(this_process())
        assert manager.actor == als.connection.transport.manager.actor
        launch = manager.launch(GangRequest.of(options, cpus, "s0"))

        def reserved() -> bool:
            table: dict[str, Any] = ray.util.placement_group_table()
            begin = reservation_name(manager.gang, manager.gang)
            found = [group for group in table.values() if group["name"].startswith(begin)]
            return any(group["state"] != "REMOVED" for group in found)

        assert traces.wait_until(reserved, START_LIMIT_S, 0.1) is not None
        manager.give_up()
        with pytest.raises(ray.exceptions.RayError):
            ray.get(launch, timeout=START_LIMIT_S)
        assert traces.wait_until(lambda: not reserved(), START_LIMIT_S, 0.1) is not None
        assert not manager.alive()
        assert sizes(als) == [1]


def test_owners_have_managers_of_their_own(wait_for: Callable[[int], set[str]]) -> None:
    found = [manager_pool.take(owner) for owner in ("anna@host", "ben@host", "anna@host")]
    assert len(wait_for(2)) == 2
    assert found[0].actor == found[2].actor
    for manager in found:
        manager.give_up()
    wait_for(0)


def test_an_unused_manager_ends(
    wait_for: Callable[[int], set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_pool, "UNUSED_KEPT_S", 1.0)
    with AlchemistSession(1) as als:
        with AlchemistSession(1):
            pass
        wait_for(1)
    with AlchemistSession(1) as als:  # in time
        assert traces.wait_until(lambda: not managers(), 2.0, 0.1) is None
        assert sizes(als) == [1]
    wait_for(0)


def test_each_gang_has_its_own_lines_in_the_log(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession(2) as first, AlchemistSession(1) as second:
        node = ray.get_runtime_context().get_node_id()
        ((agent, _),) = ray.get(find_driver().agents.remote([node]), timeout=60)
        for als, ranks in ((first, "2 ranks"), (second, "1 rank ")):
            found = ray.get(agent.log_lines.remote(als.connection.address.gang, {}), timeout=60)
            (line,) = [line for line in found.lines["manager.log"] if "gang started" in line]
            assert ranks in line


def test_a_task_with_a_session_starts_one_manager(wait_for: Callable[[int], set[str]]) -> None:
    @ray.remote(num_cpus=0)
    def work() -> int:
        before = without_unused()  # the process may have run another test's task
        with AlchemistSession(1) as als:
            als.list_workers()
            return len(managers() - before)

    assert ray.get(work.remote()) == 1


# --- Ctrl-C ---


def test_ctrl_c_during_close_ends_the_gang(wait_for: Callable[[int], set[str]]) -> None:
    als = AlchemistSession(1)
    with stopped(manager_pid(als)):
        interrupted(als.close)
    wait_for(0)


def test_ctrl_c_while_a_manager_does_not_answer_takes_no_place_in_it(
    wait_for: Callable[[int], set[str]],
) -> None:
    with AlchemistSession(1) as als, stopped(manager_pid(als)):
        interrupted(AlchemistSession)
    without_unused()
    wait_for(0)


def interrupted_in(code: CodeType) -> Callable[[FrameType, str, Any], None]:
    """For `sys.setprofile`: Ctrl-C when the function begins."""

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code is code:
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    return profile


def test_ctrl_c_before_the_connection_leaves_no_gang(wait_for: Callable[[int], set[str]]) -> None:
    with AlchemistSession() as als:
        sys.setprofile(interrupted_in(catalogue.connect.__code__))
        try:
            with pytest.raises(KeyboardInterrupt):
                als.request_workers(1)
        finally:
            sys.setprofile(None)
        als.request_workers(1)
        assert sizes(als) == [1]


# --- the catalogue ---


def test_gangs_on_a_node_that_does_not_answer_are_listed(
    wait_for: Callable[[int], set[str]],
) -> None:
    with AlchemistSession(1), AlchemistSession(1), AlchemistSession(1) as als:
        begun = traces.clock()
        with stopped(agent_pids()["agent"]):
            found = {gang.name: gang for gang in catalogue.list_gangs(memory=True)}
        assert traces.clock() - begun < catalogue.ANSWER_S
        assert len(found) == 3
        about = found[als.connection.address.gang]
        assert (about.state, about.free_nbytes) == ("ready", None)


@pytest.mark.parametrize("name", [name for name in vars(GangHandle) if not name.startswith("_")])
def test_a_handle_has_methods_of_the_gang_with_its_parameters(name: str) -> None:
    owner = GangSlot if name in STARTS else Gang
    of_handle, of_gang = (signature(getattr(kind, name)) for kind in (GangHandle, owner))
    positional = [p for p in of_handle.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    of_gang.bind(*positional)
    assert list(of_gang.parameters)[: len(positional)] == [p.name for p in positional]


def test_only_methods_of_a_handle_are_answered_without_a_gang() -> None:
    assert {*STARTS, *WITHOUT_GANG} <= vars(GangHandle).keys()
