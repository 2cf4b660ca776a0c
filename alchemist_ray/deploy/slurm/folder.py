"""A job's folder on a node, for Ray's sockets and logs and the gangs' folders."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from alchemist_ray.errors import JobError
from mpi_workers.node import cleanup

PREFIX = "alch-"
# Ray's sockets: <temp-dir>/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store
RAY_TAIL = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
UNIX_LIMIT = 107
SEGMENT = "mpich_shm_*"
SEGMENT_S = 5.0  # processes that need a segment have mapped it by this age


class NodeFolder:
    """``<tmp>/alch-<job>``, of mode 700, locked while its supervisor runs.

    Raises
    ------
    JobError
        If it cannot be created, exists already, or its path is too long for Unix sockets.
    """

    def __init__(self, tmp: str, job: str) -> None:
        number = job.partition(".")[0]  # PBS: 123.server
        self.path = Path(os.path.expandvars(tmp)) / f"{PREFIX}{number}"
        self.ray = self.path / "r"
        self.log = self.path / "ray.log"
        if len(str(self.ray)) + RAY_TAIL > UNIX_LIMIT:
            raise JobError(
                f"{self.ray} is too long for the Unix sockets in it (at most "
                f"{UNIX_LIMIT - RAY_TAIL} bytes): set nodes.tmp of the site file to a shorter one"
            )
        self._lock = -1
        self._sweep()
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise JobError(
                f"{self.path} on {os.uname().nodename} exists already: another Ray of this job "
                "runs there, or another user's job has the same number"
            ) from None
        except OSError as error:
            raise JobError(
                f"cannot create a folder for the job's sockets on {os.uname().nodename}: {error}; "
                "set nodes.tmp of the site file to another place"
            ) from None
        self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _sweep(self) -> None:
        """Remove folders of this user's jobs whose supervisor was killed."""
        for path in self.path.parent.glob(f"{PREFIX}*"):
            try:
                if path.is_symlink() or path.stat().st_uid != os.getuid():
                    continue
                lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _clear(path)
            except OSError:
                continue  # its supervisor runs
            finally:
                os.close(lock)

    def shared_memory(self) -> int:
        """Return the bytes of free shared memory on this node."""
        about = os.statvfs(cleanup.SHM)
        return int(about.f_bavail * about.f_frsize * 0.9)

    def remove(self) -> None:
        """Remove the folder, and segments that the job's gangs left in /dev/shm."""
        _clear(self.path)
        _unlink_unused()
        os.close(self._lock)


def _clear(path: Path) -> None:
    before, tempfile.tempdir = tempfile.tempdir, str(path)
    try:
        cleanup.sweep()
    finally:
        tempfile.tempdir = before
    shutil.rmtree(path, ignore_errors=True)


def _unlink_unused() -> None:
    """Remove this user's segments that no process has mapped: of ranks that died in MPI_Init.

    A gang's proxy knows the names of its segments. Under another launcher it learns them when its
    ranks connect, which these never did.
    """
    old = time.time() - SEGMENT_S
    with suppress(OSError):
        for path, about in cleanup.unused([SEGMENT]):
            if about.st_ctime < old:
                path.unlink()
