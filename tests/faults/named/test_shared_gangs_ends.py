"""Named and detached gangs: wrong use, their ends, and faults."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.cluster.actors import NAMESPACE, ask_manager, find_gang, group_name
from alchemist_ray.errors import (
    GroupError,
    GroupFailedError,
    MatrixError,
    MatrixNotFoundError,
    ResourceError,
    SessionError,
    TransferError,
)
from mpi_workers.data.transfers import MatrixReader
from tests.faults.conftest import Call, pid_of
from tests.faults.named.named_gangs import Program, gangs
from tests.support import traces

# --- wrong use ---


def test_a_name_in_use_is_refused(climate: AlchemistSession) -> None:
    with pytest.raises(GroupError, match=r"attach\('climate'\)"):
        AlchemistSession(1, name="climate")
    with pytest.raises(GroupError, match=r"stop_gang\('climate'\)"):
        AlchemistSession(1, name="climate", lifetime="detached")
    assert climate.matrix("A").shape == (4, 3)


def test_one_of_two_that_take_a_name_at_once_gets_it(nothing_of_it_left: None) -> None:
    calls = [Call(lambda: AlchemistSession(1, name="both", lifetime="detached")) for _ in range(2)]
    got = [call.outcome(0.0, 60) for call in calls]
    assert [type(each.error) for each in got if each.result is None] == [GroupError]
    assert sum(isinstance(each.result, AlchemistSession) for each in got) == 1


def test_an_unknown_name_lists_the_names_that_exist(climate: AlchemistSession) -> None:
    for call in (AlchemistSession.attach, AlchemistSession.stop_gang):
        with pytest.raises(SessionError, match=r"'weather'.*climate"):
            call("weather")


def test_a_gang_without_a_name_is_private(nothing_of_it_left: None) -> None:
    with AlchemistSession(1) as als:
        its = als.connection.address.gang
        (about,) = (one for one in AlchemistSession.list() if one.name == its)
        assert not about.named
        with pytest.raises(SessionError, match="is private"):
            AlchemistSession.attach(about.name)
        AlchemistSession.stop_gang(about.name)
        with pytest.raises(SessionError, match="was stopped"):
            als.list_matrices()
        als.request_workers(1)
        assert als.list_matrices() == []


def test_attaching_waits_for_a_gang_that_starts(nothing_of_it_left: None) -> None:
    starting = Call(lambda: AlchemistSession(2, name="starting", lifetime="detached"))
    assert traces.wait_until(lambda: "starting" in gangs(), 20) is not None
    with AlchemistSession.attach("starting") as als:
        assert len(als.list_workers()) == 2
    starting.outcome(0.0, 60).result.close()


def test_a_gang_that_does_not_start_leaves_nothing(nothing_of_it_left: None) -> None:
    with AlchemistSession(6, name="first", lifetime="detached"):
        with pytest.raises(ResourceError, match="not enough free CPUs"):
            AlchemistSession(4, name="second", lifetime="detached", start_timeout_s=1.0)
        with pytest.raises(SessionError, match="'second'"):
            AlchemistSession.attach("second")


def test_a_gang_of_another_version_is_refused(climate: AlchemistSession) -> None:
    manager: Any = ray.get_actor(group_name("climate"), namespace=NAMESPACE)

    def set_version(actor: Any, version: str) -> None:
        sys.modules[type(actor.gang("climate")).__module__].__version__ = version

    ray.get(manager.__ray_call__.remote(set_version, "0.0.1"))
    with pytest.raises(SessionError, match=r"0\.0\.1"):
        AlchemistSession.attach("climate")

    @ray.remote
    def use(handle: Any) -> Any:
        return handle[0].fetch()

    with pytest.raises(SessionError, match=r"0\.0\.1"):  # its elements, too, are not read
        ray.get(use.remote([climate.matrix("A")]))


def test_a_change_by_another_process_is_seen(climate: AlchemistSession) -> None:
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
    with Program(text) as program:
        assert program.said == "done"
    np.testing.assert_array_equal(small.fetch(), 2 * before)


def test_a_matrix_that_another_program_uses_is_not_freed(climate: AlchemistSession) -> None:
    text = """
        als = AlchemistSession.attach("climate")
        A = als.matrix("A")
        print("here", flush=True)
        time.sleep(60)
    """
    with Program(text) as program:
        with pytest.raises(MatrixError, match=rf"A was not freed.*pid {program.process.pid}"):
            climate.matrix("A").free()
        np.testing.assert_array_equal(climate.matrix("A").fetch(), np.arange(12.0).reshape(4, 3))
    # the program is gone: its leases last, but it no longer uses the matrix
    freed = climate.matrix("A")
    assert traces.wait_until(lambda: len(AlchemistSession.list()[0].processes) == 1, 5) is not None
    freed.free()
    with pytest.raises(MatrixNotFoundError):
        climate.matrix("A")


# --- the end ---


def test_stopping_a_gang_ends_it_for_all(climate: AlchemistSession) -> None:
    call = Call(lambda: climate.run(lambda comm: time.sleep(30)))
    assert traces.wait_until(lambda: bool(climate.list_calls()), 10) is not None
    AlchemistSession.stop_gang("climate")
    assert str(call.outcome(0.0, 10).error) == "gang climate was stopped (stop_gang)"
    assert "climate" not in gangs()
    with pytest.raises(SessionError, match="was stopped"):
        climate.list_matrices()
    with AlchemistSession(1, name="climate", lifetime="detached") as again:
        assert again.list_matrices() == []


def test_attaching_to_a_gang_that_ends(climate: AlchemistSession) -> None:
    """Some come in time and are told by their calls; the others are told that it is not there."""
    outcomes: list[str] = []
    ended = threading.Event()

    def attach() -> None:
        while not ended.is_set():
            try:
                with AlchemistSession.attach("climate") as als:
                    als.list_matrices()
                outcomes.append("attached")
            except (SessionError, GroupError) as error:  # GroupError: it has ended since
                outcomes.append(str(error))

    attaching = [Call(attach) for _ in range(3)]
    assert traces.wait_until(lambda: "attached" in outcomes, 20) is not None
    AlchemistSession.stop_gang("climate")
    before = len(outcomes)
    assert traces.wait_until(lambda: len(outcomes) >= before + 6, 20) is not None
    ended.set()
    assert [call.outcome(0.0).error for call in attaching] == [None] * 3
    assert outcomes[-1].startswith("there is no gang 'climate'"), outcomes[-1]
    told = {words for words in outcomes if words != "attached"}
    assert all("climate" in words for words in told), told


def test_a_gang_without_commands_ends(nothing_of_it_left: None) -> None:
    als = AlchemistSession(1, name="short", lifetime="detached", idle_timeout_s=3.0)
    A = als.send_matrix(np.eye(2), name="A")
    for _ in range(8):  # fetching is use, too
        time.sleep(0.5)
        A.fetch()
    assert "short" in gangs()
    assert traces.wait_until(lambda: "short" not in gangs(), 20) is not None
    with pytest.raises(SessionError, match=r"after 3 s without a command \(idle_timeout_s\)"):
        als.list_matrices()


def test_a_long_call_is_no_idleness(nothing_of_it_left: None) -> None:
    with AlchemistSession(1, name="busy", lifetime="detached", idle_timeout_s=3.0) as als:
        als.run(lambda comm: time.sleep(5.0))
        assert als.run(lambda comm: comm.size) == 1


def test_the_wait_for_cpus_and_transfers_are_no_idleness(
    nothing_of_it_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = AlchemistSession(8)
    threading.Timer(3.5, rest.close).start()
    block, read = np.ones((100, 10)), MatrixReader.read_block

    def blocks() -> Iterator[Any]:
        for _ in range(7):
            time.sleep(0.5)
            yield block

    def slowly(self: MatrixReader, out: Any, origin: tuple[int, int]) -> None:
        time.sleep(4.0)
        read(self, out, origin)

    with AlchemistSession(1, name="slow", lifetime="detached", idle_timeout_s=2.0) as als:
        A = als.send_blocks(blocks(), shape=(700, 10), name="A")
        with monkeypatch.context() as patch:
            patch.setattr(MatrixReader, "read_block", slowly)
            assert A.fetch().sum() == 7000
        assert als.run(lambda comm: comm.size) == 1


def test_a_resize_that_waits_is_no_idleness(nothing_of_it_left: None) -> None:
    rest = AlchemistSession(7)
    with AlchemistSession(1, name="waits", lifetime="detached", idle_timeout_s=3.0) as als:
        thread = threading.Timer(5.0, rest.close)
        thread.start()
        assert len(als.resize(2)) == 2
        thread.join()


# --- faults ---


@pytest.mark.cell("network", "idle", "named", "goes on")
def test_a_lost_connection_is_resumed_with_its_matrices(climate: AlchemistSession) -> None:
    B = climate.matrix("A") + 1
    ident = B.id
    climate.connection._channel._connection.hang_up()
    assert ident in {handle.id for handle in climate.list_matrices()}
    np.testing.assert_array_equal(B.fetch(), np.arange(12.0).reshape(4, 3) + 1)
    thread = threading.Timer(0.5, lambda: climate.connection._channel._connection.hang_up())
    thread.start()
    with pytest.raises(TransferError, match=r"restored.*unless it had just completed: check what"):
        climate.run(lambda comm: time.sleep(5))
    thread.join()
    assert climate.run(lambda comm: comm.size) == 2
    del B
    assert climate.run(lambda comm: comm.size) == 2
    assert ident not in {handle.id for handle in climate.list_matrices()}


@pytest.mark.cell("network", "recovering", "max_failures", "goes on")
def test_a_lost_connection_is_resumed_when_the_gang_is_elsewhere(nothing_of_it_left: None) -> None:
    """Each incarnation has other sockets: the address of before is of no use."""
    with AlchemistSession(2, name="moved", lifetime="detached", max_failures=3) as als:
        A = als.send_matrix(np.eye(3))
        victim = traces.parent_of(als.list_workers()[1].pid)
        als.connection._channel._connection.hang_up()
        os.kill(victim, signal.SIGKILL)

        def moved() -> bool:
            return ask_manager(find_gang("moved").gang_address(), 20.0).epoch > 1

        assert traces.wait_until(moved, 20) is not None
        np.testing.assert_array_equal(A.fetch(), np.eye(3))


@pytest.mark.cell("proxy", "idle", "named", "lost")
def test_a_lost_node_is_told_to_all_and_the_name_can_be_used_again(
    climate: AlchemistSession,
) -> None:
    os.kill(traces.parent_of(climate.list_workers()[1].pid), signal.SIGKILL)
    assert traces.wait_until(lambda: gangs().get("climate") == "failed", 5) is not None
    with pytest.raises(GroupFailedError, match="was lost"):
        climate.list_matrices()
    with pytest.raises(GroupFailedError, match="was lost"):
        AlchemistSession.attach("climate")
    with AlchemistSession(1, name="climate", lifetime="detached") as again:
        assert again.run(lambda comm: comm.size) == 1


@pytest.mark.cell("GroupManager", "stopping", "named", "lost")
def test_owner_and_manager_die_at_once(nothing_of_it_left: None) -> None:
    text = """
        als = AlchemistSession(2, name="both", lifetime="detached")
        print(*[worker.pid for worker in als.list_workers()], flush=True)
        time.sleep(60)
    """
    with Program(text) as program:
        ranks = list(map(int, program.said.split()))
        traces.note_segments()
        manager = ray.get_actor(group_name("both"), namespace=NAMESPACE)
        os.kill(pid_of(manager), signal.SIGKILL)
        program.kill()
        assert traces.wait_until(lambda: not any(map(traces.alive, ranks)), 3) is not None
    with pytest.raises(
        (SessionError, GroupFailedError), match=r"no gang 'both'|gang both was lost"
    ):
        AlchemistSession.attach("both")
    with AlchemistSession(2, name="both", lifetime="detached") as als:
        assert als.run(lambda comm: comm.size) == 2
