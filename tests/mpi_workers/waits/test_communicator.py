"""A GangComm does what mpi4py does, and lets go where mpi4py would hang."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpi_workers.testing import local_gang
from mpi_workers.waits.interruption import InterruptWord
from tests.support import launches

RANKS = "tests.mpi_workers.waits.ranks_communicator:"
GIVEN_UP = "tests.mpi_workers.waits.ranks_given_up:"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_method_agrees_with_mpi4py(ranks: int) -> None:
    found = launches.run(RANKS + "agreement", ranks)
    assert len(found) >= 30
    assert [name for name, same in found.items() if not same] == []


@pytest.mark.parametrize("ranks", [2, 5])
def test_reductions_of_objects_along_trees_agree_with_mpi4py(ranks: int) -> None:
    found = local_gang.run(RANKS + "trees", ranks)
    assert [name for name, same in found.items() if not same] == []


def test_communicators_made_from_it_can_be_interrupted_too() -> None:
    assert local_gang.run(RANKS + "derived", 2) == [True] * 5


def test_wrong_numbers_of_objects_are_refused_on_the_spot() -> None:
    said = launches.run(RANKS + "bad_calls", 2)
    assert said == [
        f"{name} needs 2 objects, one for each rank; got 3" for name in ("scatter", "alltoall")
    ]


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_interrupt_frees_every_wait_and_the_renewed_communicator_works(
    ranks: int, tmp_path: Path
) -> None:
    found = local_gang.run(RANKS + "interrupts", ranks, str(tmp_path / "word"))
    assert len(found) >= 13
    assert [name for name, (freed, _, _) in found.items() if not freed] == []
    assert [name for name, (_, late, _) in found.items() if not 0 < late < 2] == []
    assert [name for name, (_, _, right) in found.items() if not right] == []


def test_what_is_given_up_keeps_its_buffers_until_mpi_is_done_with_them(tmp_path: Path) -> None:
    found = local_gang.run(GIVEN_UP + "given_up", 2, str(tmp_path / "word"))
    assert len(found) >= 10
    assert [name for name, (kept, _) in found.items() if not kept] == []
    assert [name for name, (_, gone) in found.items() if not gone] == []


def test_messages_that_nobody_waits_for_are_let_go_of() -> None:
    assert local_gang.run(GIVEN_UP + "never_waited_for", 2) < 200


def test_only_calls_that_have_spoken_use_up_a_communicator(tmp_path: Path) -> None:
    same, other, count, said, total = local_gang.run(
        GIVEN_UP + "communicators", 2, str(tmp_path / "word")
    )
    assert same
    assert other
    assert 1500 < count < 2100
    assert "ResourceError" in said
    assert "open another session" in said
    assert total == 2  # the last one still works


def test_an_interrupt_ends_the_calls_up_to_its_number_only(tmp_path: Path) -> None:
    assert local_gang.run(RANKS + "not_yet", 2, str(tmp_path / "word")) == [False, 2, True]


def test_the_word_is_shared_by_everyone_who_opens_the_file(tmp_path: Path) -> None:
    mine, theirs = InterruptWord(tmp_path / "word"), InterruptWord(tmp_path / "word")
    assert not mine.ends(1)
    theirs.raise_to(3)
    assert mine.ends(3)
    assert not mine.ends(4)
    assert (tmp_path / "word").stat().st_mode & 0o777 == 0o600


def test_a_word_behind_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"data of the user")
    (tmp_path / "word").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic"):
        InterruptWord(tmp_path / "word")
    assert (tmp_path / "target").read_bytes() == b"data of the user"


@pytest.mark.root
def test_a_word_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make another user's file")
    (tmp_path / "word").touch()
    os.chown(tmp_path / "word", 65534, 65534)
    with pytest.raises(PermissionError, match="not a file of this user"):
        InterruptWord(tmp_path / "word")
