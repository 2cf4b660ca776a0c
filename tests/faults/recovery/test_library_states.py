"""States of libraries with `save_state` and `load_state`: after losses, resizes, checkpoints."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LibraryLoadError, LibraryNotFoundError, RoutineError
from alchemist_ray.runtime.recovery import snapshots
from tests.faults.conftest import variables
from tests.faults.recovery.conftest import Recovering
from tests.support import traces
from tests.support.build import needs_compiler, shared_object

HERE = Path(__file__).parent
X = np.random.default_rng(0).random((50, 4))


def walker(gang: Recovering) -> Any:
    return gang.als.load_library("walking", HERE / "walking.py")


def stands(lib: Any, steps: int, wanted: np.ndarray[Any, Any]) -> None:
    found, F = lib.look()
    assert found == steps
    np.testing.assert_allclose(F.fetch(), wanted)


def repeated(gang: Recovering) -> list[str]:
    """The commands that would rebuild the state."""
    name = gang.als.connection.address.gang
    return ray.get(gang.manager.__ray_call__.remote(_history, name))


def _history(manager: Any, gang: str) -> list[str]:
    from alchemist_ray.runtime.commands.matrix_records import history  # noqa: PLC0415 - in the manager

    state = manager.gang(gang).dispatcher.commands.libraries.state("walking")
    return [command.name for command in history([state])]


def test_a_state_is_rebuilt_by_its_calls(gang: Recovering) -> None:
    lib, A = walker(gang), gang.als.send_matrix(X)
    for _ in range(2):
        lib.step(A)
    steps, F = lib.look()  # depends on the state at this time
    A *= 10  # a change between two steps is repeated between them
    lib.step(A)
    for _ in range(2):
        gang.kill()
        stands(lib, 3, 12 * X)
        np.testing.assert_allclose(F.fetch(), 2 * X)
    assert steps == 2
    assert lib.step(A) == 4
    assert lib.notes() == [0] * 4 + [1] * 4


def test_a_library_that_is_loaded_again_starts_with_an_empty_state(gang: Recovering) -> None:
    lib, A = walker(gang), gang.als.send_matrix(X)
    lib.step(A)
    _, F = lib.look()
    stands(walker(gang), 1, X)
    lib = gang.als.load_library("walking", HERE / "walking.py", reload=True)
    stands(lib, 0, 0 * X)
    lib.step(A)
    gang.kill()
    np.testing.assert_allclose(F.fetch(), X)
    stands(lib, 1, X)


def test_a_copy_of_the_state_is_kept_when_repeating_would_take_long(gang: Recovering) -> None:
    lib, A = walker(gang), gang.als.send_matrix(X)
    with variables(gang.manager, snapshots, COPY_FACTOR=0.0):  # also where a copy is slow
        for _ in range(3):
            lib.step(A, 0.3)
        assert traces.wait_until(lambda: "walking.step" not in repeated(gang), 10) is not None
    assert "walking.load_state" in repeated(gang)
    lib.step(A)
    assert repeated(gang)[-2:] == ["walking.load_state", "walking.step"]
    begin = time.monotonic()
    gang.kill()
    stands(lib, 4, 4 * X)
    assert lib.notes() == [0] * 4 + [1] * 4, time.monotonic() - begin


def test_a_failed_call_ends_what_can_be_repeated_until_the_state_is_saved(gang: Recovering) -> None:
    lib, A = walker(gang), gang.als.send_matrix(X)
    lib.step(A)
    with pytest.raises(RoutineError, match="half done"):
        lib.stumble()
    assert traces.wait_until(lambda: repeated(gang) == ["create", "walking.load_state"], 10)
    gang.kill()
    stands(lib, 1000, X)  # as the call has left it on rank 0


def test_a_state_that_cannot_be_rebuilt(gang: Recovering) -> None:
    with variables(gang.manager, snapshots, COPY_INTERVAL_S=1000.0):  # nothing is copied
        time.sleep(3 * snapshots.COPY_INTERVAL_S)
        lib, A = walker(gang), gang.als.send_matrix(X)
        lib.step(A)
        with pytest.raises(RoutineError, match="half done"):
            lib.stumble()
        gang.back_s(gang.kill)
    with pytest.raises(LibraryNotFoundError, match=r"'walking' must be loaded again: its state"):
        lib.look()
    np.testing.assert_array_equal(A.fetch(), X)
    stands(walker(gang), 0, 0 * X)
    gang.kill()
    stands(gang.als.library("walking"), 0, 0 * X)


def lose_rank(gang: Recovering) -> None:
    """Kill a rank, and wait until others have taken the place of all, in the same memory."""
    before, losses = gang.ranks, gang.losses
    gang.kill(before[1])
    assert traces.wait_until(lambda: not set(before) & set(gang.ranks or before), 30) is not None
    assert gang.losses == losses


def test_a_state_is_rebuilt_after_the_loss_of_a_rank(gang: Recovering) -> None:
    with variables(gang.manager, snapshots, COPY_INTERVAL_S=1000.0):  # nothing is copied
        time.sleep(3 * snapshots.COPY_INTERVAL_S)
        lib, A = walker(gang), gang.als.send_matrix(X)
        lib.step(A)
        lib.step(A)
        _, F = lib.look()
        lose_rank(gang)
        stands(lib, 2, 2 * X)
        assert lib.step(A) == 3
        A.free()  # it is sent again for the state alone
        lose_rank(gang)
        stands(lib, 3, 3 * X)
        np.testing.assert_allclose(F.fetch(), 2 * X)
        B = gang.als.send_matrix(X)
        lib.step(B)
        B *= 10
        lose_rank(gang)
        with pytest.raises(LibraryNotFoundError, match=r"'walking' must be .*step had, has chang"):
            lib.look()
        np.testing.assert_allclose(B.fetch(), 10 * X)
        stands(walker(gang), 0, 0 * X)


def test_a_copied_state_is_loaded_after_the_loss_of_a_rank(gang: Recovering) -> None:
    lib, A = walker(gang), gang.als.send_matrix(X)
    with variables(gang.manager, snapshots, COPY_FACTOR=0.0):  # also where a copy is slow
        lib.step(A, 0.3)
        assert traces.wait_until(lambda: "walking.step" not in repeated(gang), 10) is not None
    A *= 10
    lose_rank(gang)
    stands(lib, 1, X)


def test_a_state_moves_to_other_ranks(plain: Recovering) -> None:
    lib, A = walker(plain), plain.als.send_matrix(X)
    for steps, size in enumerate((4, 3, 1, 2), 1):
        assert lib.step(A) == steps
        plain.als.resize(size)
        stands(lib, steps, steps * X)
    assert len(lib.notes()) == 2 + 4 + 3 + 1
    assert len(plain.als.list_matrices()) == 1  # those of the state are not the user's


def test_a_resize_fails_with_the_state_that_cannot_be_saved(
    plain: Recovering, tmp_path: Path
) -> None:
    path = tmp_path / "walking.py"
    text = (HERE / "walking.py").read_text()
    path.write_text(text.replace("notes = ctx.comm.allgather", "raise OSError('no room')\n    #"))
    lib, A = plain.als.load_library("walking", path), plain.als.send_matrix(X)
    lib.step(A)
    with pytest.raises(RoutineError, match=r"goes on with its 2 workers.*no room"):
        plain.als.resize(3)
    stands(lib, 1, X)


def test_a_state_is_part_of_checkpoints(clean: None, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    gang = Recovering(checkpoint_folder=folder)
    lib, A = walker(gang), gang.als.send_matrix(np.tile(X, (1, 1)), name="A")
    lib.step(A)
    gang.als.checkpoint()
    assert repeated(gang) == ["files.load", "walking.load_state"]
    lib.step(A)
    for _ in range(2):
        gang.kill()
        stands(lib, 2, 2 * X)
    assert [handle.name for handle in gang.als.list_matrices()] == ["A"]
    gang.als.close()
    with AlchemistSession.restore(folder, 3) as als:
        lib = als.library("walking")
        stands(lib, 1, X)
        assert lib.notes() == [0, 1]
        assert [handle.name for handle in als.list_matrices()] == ["A"]


@needs_compiler
def test_a_library_in_c(gang: Recovering, tmp_path: Path) -> None:
    path = shared_object(HERE / "counting.c", tmp_path / "libcounting.so")
    lib = gang.als.load_library("ccounting", path)
    assert [lib.add(5), lib.add()] == [5, 6]
    gang.back_s(gang.kill)
    assert lib.add() == 7
    gang.als.resize(3)
    assert lib.add(3) == 10


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("steps: int, notes: bytes", "notes: bytes, steps: int"),
        ("def save_state(ctx: Context)", "def save_state(ctx: Context, a: int = 1)"),
    ],
)
def test_routines_that_do_not_fit_together_are_refused(
    plain: Recovering, tmp_path: Path, old: str, new: str
) -> None:
    path = tmp_path / "walking.py"
    path.write_text((HERE / "walking.py").read_text().replace(old, new))
    with pytest.raises(LibraryLoadError, match="load_state must take what save_state returns"):
        plain.als.load_library("walking", path)
