"""Files of dead gangs are removed; those of running gangs, other users and nodes are not."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from mpi_workers.node import cleanup, specs
from mpi_workers.node.cleanup import (
    TRANSIENT_S,
    PrivateFolder,
    machine_tag,
    note_segments,
    runs_here,
    sweep,
)
from mpi_workers.node.specs import RankConfig, RankOptions


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders and segments of this test only."""
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(cleanup, "SHM", shm)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return shm


def test_a_folder_that_nobody_locks_goes_with_its_segments(places: Path) -> None:
    living, dead = PrivateFolder("living"), PrivateFolder("dead")
    for folder, name in ((living, "mpich_shm_1_0"), (dead, "mpich_shm_2_0")):
        note_segments(folder.path, [name])
        (places / name).touch()
    os.close(dead._lock)  # as the kernel does when its owner is killed
    assert sweep() == 1
    assert living.path.is_dir()
    assert not dead.path.exists()
    assert [path.name for path in places.iterdir()] == ["mpich_shm_1_0"]
    living.remove()


def test_transient_names_are_removed_when_they_are_old(places: Path) -> None:
    old, new, other = (places / n for n in ("mpich_shar_tmpA", "mpich_shar_tmpB", "someone_elses"))
    for path in (old, new, other):
        path.touch()
    past = time.time() - 2 * TRANSIENT_S
    for path in (old, other):
        os.utime(path, (past, past))
    sweep()
    assert sorted(places.iterdir()) == [new, other]


def test_a_name_that_a_process_has_mapped_is_kept(places: Path) -> None:
    path = places / "ucx_shm_posix_1"
    path.write_bytes(bytes(mmap.PAGESIZE))
    past = time.time() - 2 * TRANSIENT_S
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        os.utime(path, (past, past))
        sweep()
        assert path.exists()
    sweep()
    assert not path.exists()


def unlocked(folder: Path, *, mode: int = 0o700) -> Path:
    """A folder such as a killed proxy leaves."""
    folder.mkdir(mode=0o700)
    (folder / "lock").touch()
    folder.chmod(mode)
    return folder


def test_a_folder_of_another_node_that_shares_tmpdir_is_kept(tmp_path: Path) -> None:
    ours = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-abc")
    theirs = unlocked(tmp_path / "alchemist-g1-0ther0ne-abc")
    assert sweep() == 1
    assert not ours.exists()
    assert theirs.exists()


def test_folders_that_others_can_enter_and_links_are_ignored(tmp_path: Path) -> None:
    open_to_all = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-open", mode=0o777)
    target = unlocked(tmp_path / "target")
    link = tmp_path / f"alchemist-g1-{machine_tag()}-link"
    link.symlink_to(target)
    for lock in (open_to_all / "lock", target / "lock"):  # they look like those of a live proxy
        fd = os.open(lock, os.O_RDWR)
        fcntl.flock(fd, fcntl.LOCK_EX)
    assert not runs_here("g1")
    assert sweep() == 0
    assert target.exists()


@pytest.mark.root
def test_a_folder_of_another_user_neither_delays_nor_is_removed(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make another user's folder")
    folder = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-foreign")
    fd = os.open(folder / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.chown(folder, 65534, 65534)
    assert not runs_here("g1")
    os.close(fd)
    assert sweep() == 0
    assert folder.exists()


CONFIG = RankConfig("secret", "/d", "unix:x", "unix:y", 1, None, False, 0, RankOptions())


def test_a_rank_finds_the_file_of_its_own_proxy_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "FIND_S", 0.1)
    forged = json.dumps(asdict(CONFIG) | {"control": "tcp:203.0.113.9:1"})
    (unlocked(tmp_path / "alchemist-g1-0ther0ne-a") / "rank.json").write_text(forged)
    enterable = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-b", mode=0o755)
    (enterable / "rank.json").write_text(forged)
    (tmp_path / "forged.json").write_text(forged)
    linked = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-c")
    (linked / "rank.json").symlink_to(tmp_path / "forged.json")
    pattern = str(tmp_path / "alchemist-g1-*" / "rank.json")
    with pytest.raises(FileNotFoundError, match="no proxy of this gang"):
        RankConfig.find(pattern)
    own = unlocked(tmp_path / f"alchemist-g1-{machine_tag()}-z")
    (own / "rank.json").write_text(json.dumps(asdict(CONFIG)))
    assert asdict(RankConfig.find(pattern)) == json.loads(json.dumps(asdict(CONFIG)))
