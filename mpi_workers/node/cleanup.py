"""A gang's files on a node: a private folder, and names in /dev/shm.

The owners of a gang's folders (its proxies and its GroupManager) hold a lock on them while they
run. A folder without a lock belongs to a gang whose processes were all killed: `sweep` removes it
and its segments.

Folder names contain the machine's boot id, because nodes may share TMPDIR on a file system whose
locks are local to a node: a folder of another node is never touched. All functions ignore folders
of other users, and symbolic links.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path

from mpi_workers.matrix.available_memory import ALLOCATIONS
from mpi_workers.waits.interruption import InterruptWord
from mpi_workers.wire.pmi import segment_names
from mpi_workers.wire.sockets import boot_id

PREFIX = "alchemist-"
ANY_GANG = "g*"  # ids of gangs begin like this; GroupManagers' folders do not
SHM = Path("/dev/shm")
BOOT_ID_LENGTH = 8  # characters of it in names: a Unix socket's path has at most 107 bytes
SEGMENTS = "segments"  # a folder: an empty file for each name in /dev/shm
PID = "pid"  # kuberay/ knows this name
PID_FILE = "pid-"  # with a pid: a process of a rank that its proxy has not forked
# MPICH and UCX create these briefly, until all ranks of the node have mapped them. Their names do
# not tell the gang.
TRANSIENT = ("mpich_shar_tmp*", "ucx_shm_posix_*")
TRANSIENT_S = 60.0


@cache
def machine_tag() -> str:
    """A short word for this machine and boot, for names of files."""
    return re.sub(r"\W", "", boot_id())[:BOOT_ID_LENGTH] or "node"


def is_private(path: Path) -> bool:
    """Whether a path is a folder of this user that others can neither read nor write."""
    try:
        about = path.lstat()
    except OSError:
        return False
    private = stat.S_IMODE(about.st_mode) & 0o077 == 0
    return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and private


def local_folders(name: str) -> Iterator[Path]:
    """This user's folders of this name (or pattern) that were made on this machine."""
    pattern = f"{PREFIX}{name}-{machine_tag()}-*"
    return filter(is_private, Path(tempfile.gettempdir()).glob(pattern))


def abandoned(folders: Iterable[Path]) -> Iterator[Path]:
    """The folders whose owner does not run; each is locked until the next one is asked for."""
    for path in folders:
        with contextlib.suppress(OSError):
            lock = _lock(path, fcntl.LOCK_EX)
            if lock is not None:
                try:
                    yield path
                finally:
                    os.close(lock)


class PrivateFolder:
    """A folder of mode 700, locked by this process while it runs."""

    def __init__(self, name: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-{machine_tag()}-"))
            lock = self.path / "lock"
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if lock.exists():
                return
            os.close(self._lock)  # swept before it was locked

    def socket(self, name: str) -> str:
        """Path for a Unix socket."""
        return str(self.path / f"{name}.sock")

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


class GangFolder(PrivateFolder):
    """A gang's folder on a node: sockets, interrupt word, and the names of its segments."""

    def __init__(self, gang: str, kvs_name: str, node: int) -> None:
        super().__init__(gang)
        note_segments(self.path, segment_names(kvs_name, node))
        # SIGTERM to this process announces that the node is leaving.
        (self.path / PID).write_text(f"{os.getpid()}\n")

    @cached_property
    def word(self) -> InterruptWord:
        return InterruptWord(self.path / "interrupt")

    def unlink_segments(self) -> None:
        """Remove MPICH's names from /dev/shm. Mapped memory stays mapped."""
        _unlink(segments_in(self.path))

    def clear(self) -> None:
        """Remove what ranks that have ended have left: numbers, names and pids."""
        self.word.clear()
        forget_segments(self.path, segments_in(self.path))
        for path in (self.path / ALLOCATIONS, *self.path.glob(f"{PID_FILE}*")):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, and the gang's names in /dev/shm."""
        self.unlink_segments()
        super().remove()


def note_segments(folder: Path, names: Iterable[str]) -> None:
    """Record names in /dev/shm that the gang of this folder is to remove at its end."""
    (folder / SEGMENTS).mkdir(exist_ok=True)
    for name in names:
        (folder / SEGMENTS / Path(name).name).touch()


def learn_segments(folder: Path, pids: Iterable[int]) -> None:
    """Record the segments that processes have mapped: a launcher chooses other names."""
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            note_segments(folder, segments_of(pid))


def segments_in(folder: Path) -> list[str]:
    """The names that are recorded in a gang's folder."""
    with contextlib.suppress(OSError):
        return os.listdir(folder / SEGMENTS)
    return []


def forget_segments(folder: Path, names: Sequence[str]) -> None:
    """Remove these names from /dev/shm, then from the record."""
    _unlink(names)
    for name in names:
        (folder / SEGMENTS / name).unlink(missing_ok=True)


def segments_of(pid: int | str = "self") -> set[str]:
    """MPICH's names in /dev/shm that a process has mapped. Raises `OSError` if access is denied."""
    return set(re.findall(rf"{SHM}/(mpich\S+)", Path(f"/proc/{pid}/maps").read_text()))


def _lock(folder: Path, how: int) -> int | None:
    """Lock a folder; None if its owner runs. Raises `OSError` if it is no folder of ours."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        return lock
    except OSError:
        os.close(lock)
        return None


def runs_here(gang: str) -> bool:
    """Whether a gang's proxy runs on this node."""
    for path in local_folders(gang):
        with contextlib.suppress(OSError):
            lock = _lock(path, fcntl.LOCK_SH)
            if lock is None:
                return True
            os.close(lock)
    return False


def _unlink(segments: Iterable[str]) -> None:
    for name in segments:
        with contextlib.suppress(OSError):
            (SHM / Path(name).name).unlink()


def unused(patterns: Sequence[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """This user's files in /dev/shm of these names that no process has mapped or open."""
    found = {}
    for path in (each for pattern in patterns for each in SHM.glob(pattern)):
        with contextlib.suppress(OSError):  # it has gone
            about = path.lstat()
            if about.st_uid == os.getuid():
                found[str(path)] = about
    used: set[str] = set()
    for process in Path("/proc").glob("[0-9]*") if found else ():
        with contextlib.suppress(OSError):  # another user's, or it has ended
            used.update(re.findall(rf"{SHM}/\S+", (process / "maps").read_text()))
            used.update(os.readlink(fd) for fd in (process / "fd").iterdir())
    yield from ((Path(name), about) for name, about in found.items() if name not in used)


def sweep() -> int:
    """Remove the files of this user's dead gangs on this node; how many folders there were."""
    now = time.time()
    _unlink(path.name for path, at in unused(TRANSIENT) if now - at.st_mtime > TRANSIENT_S)
    swept = 0
    for path in abandoned(local_folders("*")):
        _unlink(segments_in(path))
        shutil.rmtree(path, ignore_errors=True)
        swept += 1
    return swept
