"""Checkpoints of gangs that are started again."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    FileError,
    GroupRecoveredError,
    StaleHandleError,
)
from alchemist_ray.runtime.recovery import snapshots
from tests.faults.conftest import variables
from tests.faults.recovery.conftest import LARGE, Recovering, X
from tests.support import traces


@pytest.fixture
def saving(clean: None, tmp_path: Path) -> Iterator[Recovering]:
    """A gang with a checkpoint folder."""
    gang = Recovering(checkpoint_folder=tmp_path / "checkpoint")
    yield gang
    gang.als.close()


@pytest.mark.parametrize("kept", ["in files", "in memory", "not"])
def test_matrices_that_share_memory_share_it_when_they_are_rebuilt(
    saving: Recovering, kept: str
) -> None:
    als = saving.als
    A = als.send_matrix(X)
    B = als.run(_returned, A, 1.0 if kept == "in memory" else 0.0, pure=True)
    if kept == "in files":
        als.checkpoint()
    elif kept == "in memory":
        time.sleep(2)  # the gang copies the result of a long command within 0.1 s
    saving.kill()
    A *= 2
    np.testing.assert_array_equal(A.fetch(), 2 * X)
    np.testing.assert_array_equal(B.fetch(), 2 * X)


def _returned(comm: Any, A: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return A


def test_matrices_are_rebuilt_from_a_checkpoint(saving: Recovering, tmp_path: Path) -> None:
    als, lib = saving.als, saving.counting
    A = als.send_matrix(LARGE)  # in no other place
    v = als.send_matrix(np.arange(5))
    flags = A[:, 0] > 0.5
    als.checkpoint()
    lib.increment(A)
    B = als.send_matrix(LARGE)
    for _ in range(2):
        saving.kill()
        np.testing.assert_array_equal(A.fetch(), LARGE + 1)
        np.testing.assert_array_equal(v.fetch(), np.arange(5))
        np.testing.assert_array_equal(flags.fetch(), LARGE[:, 0] > 0.5)
    with pytest.raises(StaleHandleError, match="durable=True"):
        B.fetch()
    als.checkpoint()  # replaces the first one
    lib.increment(A)
    saving.kill()
    np.testing.assert_array_equal(A.fetch(), LARGE + 2)
    als.close()
    with AlchemistSession.restore(tmp_path / "checkpoint") as restored:
        assert sorted(handle.shape for handle in restored.list_matrices()) == [
            (5,),
            (1000,),
            (1000, 200),
        ]


def test_a_checkpoint_elsewhere_is_a_copy(saving: Recovering, tmp_path: Path) -> None:
    A = saving.als.send_matrix(LARGE)
    saving.als.checkpoint(tmp_path / "other")
    saving.kill()
    with pytest.raises(StaleHandleError):
        A.fetch()


def test_a_checkpoint_that_is_gone_or_changed_is_not_used(saving: Recovering) -> None:
    A, B = saving.als.send_matrix(LARGE), saving.als.send_matrix(X)
    saving.als.checkpoint()
    folder = Path(saving.als.connection.address.checkpoint_folder or "")
    np.save(folder / f"{A.id}.npy", LARGE + 1)
    saving.kill()
    np.testing.assert_array_equal(B.fetch(), X)
    with pytest.raises(StaleHandleError, match="has changed since"):
        A.fetch()


def test_a_failed_checkpoint_leaves_the_old_one(saving: Recovering) -> None:
    A = saving.als.send_matrix(LARGE)
    saving.als.checkpoint()
    folder = Path(saving.als.connection.address.checkpoint_folder or "")
    large = saving.als.xp.zeros((2000, 1000))
    limit = 4 << 20  # bytes of a file: the disk is full in the middle
    saving.als.run(_limit_files, limit)
    with pytest.raises(FileError, match=rf"{large.id}.npy"):
        saving.als.checkpoint()
    assert not [name for name in os.listdir(folder.parent) if name.endswith(".part")]
    saving.kill()
    np.testing.assert_array_equal(A.fetch(), LARGE)
    assert large.fetch().sum() == 0


def _limit_files(comm: Any, nbytes: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def test_a_checkpoint_is_written_when_repeating_would_cost_more(
    saving: Recovering, tmp_path: Path
) -> None:
    lib, A = saving.counting, saving.als.send_matrix(LARGE, durable=True)
    with variables(saving.manager, snapshots, CHECKPOINT_LEAST_S=1.0):
        B = lib.slow(A, 0.1)
        time.sleep(1.5)
        assert not list(tmp_path.iterdir())  # 0.1 s are repeated
        wrote = tmp_path / "checkpoint.automatic" / "manifest.json"
        calls = 1
        while not wrote.exists() and calls < 8:
            B, calls = lib.slow(B, 0.5), calls + 1
            traces.wait_until(wrote.exists, 1.0)  # so that no call runs meanwhile
        assert wrote.exists()
    time.sleep(0.5)
    saving.kill()
    np.testing.assert_allclose(B.fetch(), LARGE + calls)
    name = saving.als.connection.address.gang
    log: list[str] = ray.get(saving.manager.__ray_call__.remote(_made_by, name), timeout=30)
    assert log == ["files.load"] * 2


def _made_by(manager: Any, gang: str) -> list[str]:
    matrices = manager.gang(gang).dispatcher.commands.matrices.values()
    return [record.made_by.name for record in matrices]


def test_a_folder_that_not_all_nodes_see_is_refused(clean: None, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "missing" / "checkpoint", file / "checkpoint"):
        with pytest.raises(FileError, match=r"missing|file"):
            AlchemistSession(2, max_failures=1, checkpoint_folder=folder)
    with pytest.raises(ValueError, match="URL"):
        AlchemistSession(2, max_failures=1, checkpoint_folder="s3://bucket/x")


def test_a_checkpoint_needs_a_folder(gang: Recovering) -> None:
    with pytest.raises(BadArgumentError, match="checkpoint_folder"):
        gang.als.checkpoint()


def test_a_matrix_that_is_changed_all_the_time_is_rebuilt_from_the_last_checkpoint(
    saving: Recovering, tmp_path: Path
) -> None:
    """One that was cut at a checkpoint and changed during the next one became stale."""
    lib = saving.counting
    A, B = (saving.als.send_matrix(LARGE, durable=True) for _ in range(2))
    wrote = tmp_path / "checkpoint.automatic" / "manifest.json"
    steps, begin = 0, traces.clock()
    with variables(
        saving.manager, snapshots, CHECKPOINT_LEAST_S=0.05, CHECKPOINT_INTERVAL_S=0.1,
        CHECKPOINT_FACTOR=0.1,
    ):  # fmt: skip
        time.sleep(1.1)  # the interval before
        # A checkpoint is due after 0.05 s of commands, which are many on a fast machine.
        while steps < 40 or not wrote.exists():
            lib.increment(A)
            lib.increment(B)
            steps += 1
            time.sleep(0.03)
            if steps in (15, 30):
                saving.back_s(saving.kill)
            assert traces.clock() - begin < 60, steps
        saving.back_s(saving.kill)
    for handle in (A, B):
        np.testing.assert_allclose(handle.fetch(), LARGE + steps)


def test_automatic_checkpoints_are_of_one_moment_and_replace_no_other(
    saving: Recovering, tmp_path: Path
) -> None:
    als = saving.als
    A, B = als.send_matrix(0 * LARGE, name="A"), als.send_matrix(0 * LARGE, name="B")
    als.checkpoint()
    folder = tmp_path / "checkpoint"
    automatic = tmp_path / "checkpoint.automatic" / "manifest.json"
    with variables(
        saving.manager, snapshots, CHECKPOINT_LEAST_S=0.05, CHECKPOINT_INTERVAL_S=0.1,
        CHECKPOINT_FACTOR=0.1,
    ):  # fmt: skip
        time.sleep(1.1)  # the interval before
        begin, first = time.monotonic(), 0.0
        while time.monotonic() < begin + 3:
            als.run(_both, A, B)
            first = first or (automatic.exists() and A.fetch()[0, 0])
    assert first
    als.close()
    for where, most in ((folder, 0.0), (tmp_path / "checkpoint.automatic", 1e9)):
        with AlchemistSession.restore(where) as restored:
            found = [restored.matrix(name).fetch() for name in "AB"]
            np.testing.assert_array_equal(*found)
            assert found[0].min() == found[0].max() <= most
    (folder / "manifest.json").unlink()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with AlchemistSession.restore(folder) as restored:  # there is no other
        assert len(restored.list_matrices()) == 2


def _both(comm: Any, A: Any, B: Any) -> None:
    time.sleep(0.02)
    A.local[...] += 1
    B.local[...] += 1


@pytest.mark.parametrize("replaced", [False, True])
def test_ranks_that_are_lost_while_a_checkpoint_is_replaced(
    saving: Recovering, tmp_path: Path, replaced: bool
) -> None:
    """Matrices are rebuilt from the old or the new files, whichever are there."""
    lib, A = saving.counting, saving.als.send_matrix(LARGE)  # in no other place
    saving.als.checkpoint()
    lib.increment(A)
    saving.als.run(_die_when_it_is_replaced, replaced)
    with pytest.raises(GroupRecoveredError):
        saving.als.checkpoint()
    np.testing.assert_array_equal(A.fetch(), LARGE + 1)
    name = saving.als.connection.address.gang
    log = ray.get(saving.manager.__ray_call__.remote(_made_by, name), timeout=30)
    assert log == ["counting.increment"]  # the ranks' memory has outlived them
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    saving.als.checkpoint()
    saving.kill()
    np.testing.assert_array_equal(A.fetch(), LARGE + 1)


def _die_when_it_is_replaced(comm: Any, replaced: bool) -> None:
    from ali.files import paths  # noqa: PLC0415 - on the ranks

    swap = paths._swap

    def swap_and_die(*ends: str) -> None:
        if replaced:
            swap(*ends)
        os.kill(os.getpid(), signal.SIGKILL)

    paths._swap = swap_and_die


def test_a_checkpoint_that_fails_is_followed_by_others(saving: Recovering, tmp_path: Path) -> None:
    als, lib = saving.als, saving.counting
    A = als.send_matrix(LARGE, durable=True)
    place = tmp_path / "checkpoint.automatic"
    place.write_text("in the way")
    with variables(saving.manager, snapshots, CHECKPOINT_LEAST_S=0.1, CHECKPOINT_INTERVAL_S=0.1):
        time.sleep(1.1)  # the interval before
        lib.slow(A, 0.3)
        time.sleep(1.0)
        place.unlink()
        begin = time.monotonic()
        while not place.is_dir() and time.monotonic() < begin + 20:
            lib.slow(A, 0.3)
        assert (place / "manifest.json").exists()


def test_matrices_that_are_released_while_a_checkpoint_is_written(saving: Recovering) -> None:
    """The ranks had freed them with a message of the checkpoint, which then saved them."""
    als = saving.als
    kept = als.send_matrix(X)
    dropped = [als.send_matrix(X) for _ in range(400)]
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(als.checkpoint)
        del dropped  # their leases end 0.2 s later, and the checkpoint takes longer
        writing.result(60)
    saving.kill()
    np.testing.assert_array_equal(kept.fetch(), X)
