"""The interrupt word: a number in a file that all ranks of a node map."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpi_workers.waits.interruption import InterruptWord


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
