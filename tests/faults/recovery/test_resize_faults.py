"""A gang that cannot be resized goes on as it was."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    AlchemistError,
    CancelledError,
    GroupError,
    GroupFailedError,
    LibraryLoadError,
    ResourceError,
    SessionError,
)
from tests.faults.conftest import Call, assert_clean, left
from tests.faults.recovery.conftest import UNDER_WAY_S, Recovering, X, cpus, same_numbers
from tests.support import traces

HERE = Path(__file__).parent


def trapped(gang: Recovering, folder: Path, order: str) -> Any:
    """Load the library `trap`, which does as it is told when it is loaded again."""
    path = folder / "trap.py"
    shutil.copy(HERE / "trap.py", path)
    library = gang.als.load_library("trap", path)
    (folder / "trap.order").write_text(order)
    return library


@pytest.fixture
def unharmed(plain: Recovering) -> Iterator[Recovering]:
    """Afterwards: the same ranks and matrices; nothing of others is left; it can be resized."""
    A, ranks, before = plain.als.send_matrix(X), plain.ranks, left()
    yield plain
    assert plain.ranks == ranks
    same_numbers({"A": A})
    assert_clean(before)
    assert len(plain.als.resize(3)) == 3
    same_numbers({"A": A})


@pytest.mark.cell("rank", "resizing", "private", "goes on (new rank)")
@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        ("raise", LibraryLoadError, "not today"),
        ("die", GroupError, r"rank 3 .*SIGKILL"),
        ("", LibraryLoadError, r"trap.py has changed"),
    ],
)
def test_new_ranks_that_fail(
    unharmed: Recovering, tmp_path: Path, order: str, error: type[Exception], words: str
) -> None:
    lib = trapped(unharmed, tmp_path, order)
    assert lib.calls() == 1
    if not order:
        with (tmp_path / "trap.py").open("a") as file:
            file.write("\n")
    with pytest.raises(error, match=words) as caught:
        unharmed.als.resize(4)
    assert "goes on with its 2 workers" in str(caught.value)
    assert not isinstance(caught.value, GroupFailedError)
    assert lib.calls() == 2  # the old ranks have their state
    if not order:
        unharmed.als.load_library("trap", tmp_path / "trap.py")
    (tmp_path / "trap.order").unlink()


def during_the_move(gang: Recovering, folder: Path, fault: Callable[[], Any]) -> Any:
    trapped(gang, folder, "wait")
    resizing = Call(lambda: gang.als.resize(4))
    assert traces.wait_until(lambda: not (folder / "trap.order").exists(), UNDER_WAY_S)
    start = traces.clock()
    fault()
    return resizing.outcome(start)


@pytest.mark.parametrize("how", ["manager", "all calls"])
def test_a_resize_that_is_cancelled(unharmed: Recovering, tmp_path: Path, how: str) -> None:
    manager = unharmed.als.connection.transport.manager
    cancel = manager.stop_resize if how == "manager" else manager.cancel
    outcome = during_the_move(unharmed, tmp_path, lambda: ray.get(cancel()))
    assert isinstance(outcome.error, CancelledError)
    assert outcome.seconds < 5


def test_ctrl_c_ends_a_resize(unharmed: Recovering, tmp_path: Path) -> None:
    trapped(unharmed, tmp_path, "wait")

    def interrupt() -> None:
        if traces.wait_until(lambda: not (tmp_path / "trap.order").exists(), UNDER_WAY_S):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        unharmed.als.resize(4)
    thread.join()


@pytest.mark.cell("rank", "resizing", "private", "renewed")
def test_old_ranks_that_are_lost_are_started_again(plain: Recovering, tmp_path: Path) -> None:
    A, pid = plain.als.send_matrix(X), plain.ranks[0]
    outcome = during_the_move(plain, tmp_path, lambda: plain.kill(pid))
    assert isinstance(outcome.error, GroupError)
    assert "SIGKILL" in str(outcome.error)
    same_numbers({"A": A})
    assert len(plain.ranks) == 2
    plain.als.resize(3)
    same_numbers({"A": A})


@pytest.mark.cell("proxy", "resizing", "max_failures", "goes on")
def test_an_old_node_that_is_lost_is_recovered(gang: Recovering, tmp_path: Path) -> None:
    A = gang.als.send_matrix(X)
    outcome = during_the_move(gang, tmp_path, gang.kill)
    assert isinstance(outcome.error, GroupError)
    same_numbers({"A": A})
    assert len(gang.ranks) == 2
    gang.als.resize(3)
    same_numbers({"A": A})


@pytest.mark.cell("program", "resizing", "private", "ends")
@pytest.mark.parametrize("how", ["close", "kill"])
def test_a_gang_that_is_ended_meanwhile(plain: Recovering, tmp_path: Path, how: str) -> None:
    end = plain.als.close if how == "close" else plain.als.kill_workers
    outcome = during_the_move(plain, tmp_path, end)
    assert isinstance(outcome.error, AlchemistError)


@pytest.mark.cell("GroupManager", "resizing", "private", "lost")
def test_a_manager_that_dies_leaves_nothing(plain: Recovering, tmp_path: Path) -> None:
    manager = plain.als.connection.transport.manager
    outcome = during_the_move(plain, tmp_path, lambda: ray.kill(manager.actor))
    assert isinstance(outcome.error, GroupFailedError)


def test_more_than_the_cluster_has(unharmed: Recovering) -> None:
    with pytest.raises(ResourceError, match=r"goes on with its 2 workers: .*100"):
        unharmed.als.resize(100)


def test_cpus_that_do_not_become_free(clean: None) -> None:
    gang = Recovering(max_failures=0, start_timeout_s=6)  # of starts too: 2 s is short under load
    A, ranks = gang.als.send_matrix(X), gang.ranks
    with AlchemistSession(int(cpus())):
        with pytest.raises(ResourceError, match="not enough free CPUs for 2 workers"):
            gang.als.resize(4)
        assert gang.ranks == ranks
        same_numbers({"A": A})
        gang.als.resize(1)  # always possible
        same_numbers({"A": A})
    gang.als.close()


def test_a_session_without_a_gang(clean: None) -> None:
    als = AlchemistSession()
    with pytest.raises(SessionError, match="no workers"):
        als.resize(2)
    als.close()
    with pytest.raises(SessionError, match="closed"):
        als.resize(2)


def test_a_gang_on_the_cpus_of_a_task_can_only_shrink(clean: None) -> None:
    @ray.remote(num_cpus=2, max_calls=1)
    def task() -> tuple[int, str]:
        with AlchemistSession(2, placement="inherit") as als:
            A = als.send_matrix(np.ones((20, 20)))
            try:
                als.resize(3)
            except ResourceError as error:
                words = str(error)
            als.resize(1)
            assert A.fetch().sum() == 400
            return len(als.list_workers()), words

    count, words = ray.get(task.remote(), timeout=60)
    assert count == 1
    assert "placement='own'" in words
