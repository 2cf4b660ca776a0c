"""What a gang owns on a node besides memory: a private folder and names in /dev/shm.

A gang's folders are locked by their owners (its proxies, its GroupManager) for
as long as they live. A folder that nobody locks belongs to a gang that was
killed together with everything that could have cleaned up after it: `sweep`
removes it and its segments.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

import numpy as np

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import local_nbytes
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.memory import available_bytes, readable
from mpi_workers.node.pmi import segment_names
from mpi_workers.rank.interruption import InterruptWord

PREFIX = "alchemist-"
ANY_GANG = "g*"  # as their ids begin; GroupManagers' folders do not
SHM = Path("/dev/shm")
SEGMENTS = "segments.json"
PID = "pid"  # kuberay/ knows this name
# What MPICH makes for a moment, until all ranks of the node have mapped it; its name says nothing.
PASSING = "mpich_shar_tmp*"
PASSING_S = 60.0


class PrivateFolder:
    """A folder of mode 700, locked by this process for as long as it lives."""

    def __init__(self, name: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-"))
            lock = self.path / "lock"
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if lock.exists():
                return
            os.close(self._lock)  # swept before it was locked

    def socket(self, name: str) -> str:
        """Path for a Unix socket."""
        return str(self.path / f"{name}.sock")

    def remove_files(self, names: Iterable[str]) -> None:
        """Remove files that others have put here; those that are gone already do not matter."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.path / Path(name).name).unlink()

    def remove(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


class GangFolder(PrivateFolder):
    """A gang's folder on a node: sockets, interrupt word, and the names of its segments."""

    def __init__(self, gang: str, kvs_name: str, node: int) -> None:
        super().__init__(gang)
        self._segments = set(segment_names(kvs_name, node))
        self._note_segments()

    def _note_segments(self) -> None:
        (self.path / SEGMENTS).write_text(json.dumps(sorted(self._segments)))

    def note_pid(self) -> None:
        """Say whose folder this is: SIGTERM to it announces that the node is going."""
        (self.path / PID).write_text(f"{os.getpid()}\n")

    def learn_segments(self, pids: Iterable[int]) -> None:
        """Note what these processes have mapped: another launcher's job has names of its own."""
        for pid in pids:
            with contextlib.suppress(OSError):
                self._segments.update(segments_of(pid))
        self._note_segments()

    def add_segments(self, names: Iterable[str]) -> None:
        """Note what a rank says that it has mapped: in a namespace of its own we cannot look."""
        self._segments.update(names)
        self._note_segments()

    @cached_property
    def word(self) -> InterruptWord:
        return InterruptWord(self.path / "interrupt")

    def unlink_segments(self) -> None:
        """Remove MPICH's names from /dev/shm; what is mapped stays mapped."""
        _unlink(self._segments)

    def remove(self) -> None:
        """Remove every trace of the gang on this node."""
        self.unlink_segments()
        super().remove()


def segments_of(pid: int | str = "self") -> set[str]:
    """MPICH's names in /dev/shm that a process has mapped. Raises `OSError` if we must not know."""
    return set(re.findall(rf"{SHM}/(mpich\S+)", Path(f"/proc/{pid}/maps").read_text()))


def folders_of(gang: str) -> Iterator[Path]:
    """The folders of a gang's proxies that live on this node: only they lock one of that name."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}{gang}-*"):
        try:
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            yield path
        finally:
            os.close(lock)


def runs_here(gang: str) -> bool:
    """Whether a gang's proxy lives on this node."""
    return any(True for _ in folders_of(gang))


def _unlink(segments: Iterable[str]) -> None:
    for name in segments:
        with contextlib.suppress(OSError):
            (SHM / Path(name).name).unlink()


def _unlink_passing() -> None:
    """Remove this user's names of that kind that a killed rank has left.

    Of another job's they are not needed any more either: what is mapped stays mapped.
    """
    for path in SHM.glob(PASSING):
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_uid == os.getuid() and time.time() - about.st_mtime > PASSING_S:
                path.unlink()


def sweep() -> int:
    """Remove what gangs of this user that are dead have left on this node; how many there were."""
    _unlink_passing()
    swept = 0
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(OSError, ValueError):
                _unlink(map(str, json.loads((path / SEGMENTS).read_text())))
            shutil.rmtree(path, ignore_errors=True)
            swept += 1
        except OSError:
            continue  # its proxy is alive
        finally:
            os.close(lock)
    return swept


def memory_shortage(
    distribution: Distribution, dtype: str, ranks: Iterable[int], idle_bytes: int
) -> Failure | None:
    """Whether this node lacks the memory for its ranks' parts of a matrix: the error, or None."""
    needed = sum(local_nbytes(distribution, rank, np.dtype(dtype)) for rank in ranks)
    spare = available_bytes() + idle_bytes
    if needed <= spare:
        return None
    m, n = distribution.shape
    return Failure(
        "ResourceError",
        f"a {m} x {n} {dtype} matrix in {distribution.layout} needs {readable(needed)} on node "
        f"{os.uname().nodename}, which has {readable(spare)} left: free handles, ask for "
        "workers on more nodes, or take a layout without copies",
    )
