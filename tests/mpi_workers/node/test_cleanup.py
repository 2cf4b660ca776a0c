"""What gangs that were killed have left on a node is removed; what lives is not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mpi_workers.node import cleanup
from mpi_workers.node.cleanup import SEGMENTS, TRANSIENT_S, PrivateFolder, sweep


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders and segments of this test alone."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(cleanup, "SHM", shm)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return shm


def test_a_folder_that_nobody_locks_goes_with_its_segments(places: Path) -> None:
    living, dead = PrivateFolder("living"), PrivateFolder("dead")
    for folder, name in ((living, "mpich_shm_1_0"), (dead, "mpich_shm_2_0")):
        (folder.path / SEGMENTS).write_text(json.dumps([name]))
        (places / name).touch()
    os.close(dead._lock)  # as the kernel does when its owner is killed
    assert sweep() == 1
    assert living.path.is_dir()
    assert not dead.path.exists()
    assert [path.name for path in places.iterdir()] == ["mpich_shm_1_0"]
    living.remove()


def test_what_mpich_makes_for_a_moment_goes_when_the_moment_is_over(places: Path) -> None:
    old, new, other = (places / n for n in ("mpich_shar_tmpA", "mpich_shar_tmpB", "someone_elses"))
    for path in (old, new, other):
        path.touch()
    past = time.time() - 2 * TRANSIENT_S
    for path in (old, other):
        os.utime(path, (past, past))
    sweep()
    assert sorted(places.iterdir()) == [new, other]
