"""Folders of a job: the shared one with its secrets, and each node's own."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from alchemist_ray.cluster import batch_job
from alchemist_ray.cluster.batch_job import JobCluster, JobFolder
from alchemist_ray.deploy.slurm.node import PREFIX, SEGMENT_S, NodeFolder
from alchemist_ray.errors import JobError
from alchemist_ray.launchers import VARIABLE as LAUNCHER
from mpi_workers.node.cleanup import SHM
from tests.support import commands

ADDRESS = JobCluster(
    "10.0.0.1:10240", "7", "nid1", ["nid1", "nid2"], 8, "login1", 99, [], {LAUNCHER: "srun"}
)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder for a node's, of which nothing must be left; sockets need a short path."""
    folder = Path("/tmp") / f"s{os.getpid()}"
    folder.mkdir()
    yield folder
    left = list(folder.iterdir())
    shutil.rmtree(folder)
    assert left == []


def test_a_jobs_secrets_are_its_users_alone(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "jobs" / "7")
    folder.make()
    secret = folder.new_token()
    assert mode(folder.path) == 0o700
    assert mode(folder.token) == 0o600
    assert folder.token.read_text() == secret
    assert len(secret) == 64
    assert folder.new_token() != secret
    assert folder.cluster() is None
    folder.write_cluster(ADDRESS)
    assert folder.cluster() == ADDRESS
    assert mode(folder.path / batch_job.CLUSTER_FILE) == 0o600
    folder.clear()
    assert not folder.path.exists()
    folder.clear()


def test_a_folder_that_others_can_enter_is_closed_first(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "7")
    folder.path.mkdir(mode=0o777)
    stranger = (folder.path / "token.new").open("w+")
    folder.make()
    secret = folder.new_token()
    assert mode(folder.path) == 0o700
    assert secret not in stranger.read()
    stranger.close()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give a folder to another user")
def test_a_folder_of_another_user_is_neither_written_nor_read(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "7")
    folder.make()
    folder.write_cluster(ADDRESS)
    os.chown(folder.path, 65534, 65534)
    with pytest.raises(JobError, match="belongs to another user"):
        folder.make()
    env = {batch_job.FOLDER_VARIABLE: str(folder.path)}
    assert not batch_job.adopt(env)
    assert "RAY_ADDRESS" not in env


def test_a_log_is_left(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "7")
    folder.make()
    folder.new_token()
    (folder.path / "log.txt").touch()
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["log.txt"]


def test_a_process_finds_its_jobs_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(batch_job.HOME_VARIABLE, str(tmp_path))
    folder = JobFolder(tmp_path / "7")
    folder.make()
    env = {"SLURM_JOB_ID": "7"}
    assert not batch_job.adopt(env)
    assert env == {"SLURM_JOB_ID": "7"}  # it has none yet
    folder.write_cluster(ADDRESS)
    assert batch_job.adopt(env)
    assert env["RAY_ADDRESS"] == ADDRESS.address
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == str(folder.token)
    assert env[LAUNCHER] == "srun"  # as the site's fabric needs it
    told = {"SLURM_JOB_ID": "7", LAUNCHER: "pmi"}
    batch_job.adopt(told)
    assert told[LAUNCHER] == "pmi"
    chosen = {"SLURM_JOB_ID": "7", "RAY_ADDRESS": "other:1"}
    batch_job.adopt(chosen)
    assert chosen["RAY_ADDRESS"] == "other:1"
    outside = {"HOME": "/"}
    batch_job.adopt(outside)
    assert outside == {"HOME": "/"}
    (folder.path / batch_job.CLUSTER_FILE).write_text(
        json.dumps({"address": 1})
    )  # of another version
    assert folder.cluster() is None


def test_segments_that_nobody_has_mapped_go_with_the_node(tmp: Path) -> None:
    """Of ranks that another's launcher has started, and that died in MPI_Init."""
    left, used, fresh = (SHM / f"mpich_shm_test{os.getpid()}_{i}" for i in range(3))
    try:
        for path in (left, used):
            path.write_bytes(b"x" * 4096)
        with open(used, "r+b") as file, mmap.mmap(file.fileno(), 4096):
            time.sleep(SEGMENT_S + 0.1)
            fresh.write_bytes(b"x")
            NodeFolder(str(tmp), "9").remove()
        assert [path.exists() for path in (left, used, fresh)] == [False, True, True]
    finally:
        for path in (left, used, fresh):
            path.unlink(missing_ok=True)


def test_a_nodes_folder_is_its_jobs_alone(tmp: Path) -> None:
    folder = NodeFolder(str(tmp), "123.server")
    assert folder.path == tmp / "alch-123"
    assert mode(folder.path) == 0o700
    with pytest.raises(JobError, match="another Ray of this job"):
        NodeFolder(str(tmp), "123.server")
    other = NodeFolder(str(tmp), "124")  # which leaves its neighbour alone
    assert folder.path.exists()
    other.remove()
    folder.remove()


def test_what_a_killed_supervisor_has_left_goes_with_the_next_job(tmp: Path) -> None:
    code = (
        "import os; from alchemist_ray.deploy.slurm.node import NodeFolder\n"
        f"NodeFolder({str(tmp)!r}, '1').log.write_text('x'); os._exit(9)"
    )
    commands.python(code, code=9)
    assert (tmp / f"{PREFIX}1" / "ray.log").exists()
    NodeFolder(str(tmp), "2").remove()


def test_a_path_that_no_socket_fits_in(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"too long for the Unix sockets.*nodes\.tmp"):
        NodeFolder(str(tmp_path / ("x" * 60)), "1")
    with pytest.raises(JobError, match=r"cannot create a folder for the job's sockets.*nodes\.tmp"):
        NodeFolder("/proc", "1")
