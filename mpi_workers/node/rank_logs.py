"""The output of a node's ranks, in files: ``rank3.log`` in a folder per gang, of mode 700.

A file that has grown to `FILE_LIMIT` becomes ``rank3.log.1``, and a new one begins. A line is its
time (UTC), its stream (``out`` or ``err``) and its text.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from mpi_workers.node.cleanup import runs_here
from mpi_workers.node.output_lines import STDERR, Line

FILE_LIMIT = 10 << 20  # 10 MiB
FOLDERS_KEPT = 100  # of gangs, on a node


class RankLogs:
    """The log files of a gang's ranks on this node.

    Parameters
    ----------
    folder : str
        Where they go; empty: nowhere. It is made for the first line.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}  # descriptors
        self._sizes: dict[int, int] = {}

    def write(self, lines: Iterable[Line]) -> None:
        """Append lines. A disk that fails ends the logging, not the gang."""
        if not self._folder:
            return
        now = time.time()
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}"
        texts: dict[int, list[str]] = {}
        for rank, stream, text in lines:
            name = "err" if stream == STDERR else "out"
            texts.setdefault(rank, []).append(f"{stamp} {name} {text}\n")
        try:
            for rank, own in texts.items():
                self._append(rank, "".join(own).encode(errors="replace"))
        except OSError as error:
            print(f"the output of ranks is no longer written to {self._folder}: {error}")
            self._folder = ""

    def _append(self, rank: int, data: bytes) -> None:
        if rank not in self._files:
            self._open(rank)
        os.write(self._files[rank], data)
        self._sizes[rank] += len(data)
        if self._sizes[rank] > FILE_LIMIT:
            os.close(self._files.pop(rank))
            path = log_file(self._folder, rank)
            path.replace(f"{path}.1")

    def _open(self, rank: int) -> None:
        make_folder(Path(self._folder))
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._files[rank] = os.open(log_file(self._folder, rank), flags, 0o600)
        self._sizes[rank] = os.fstat(self._files[rank]).st_size


def log_file(folder: str, rank: int) -> Path:
    """The file of a rank; of what belongs to no rank (-1), that of the launcher."""
    return Path(folder) / ("launcher.log" if rank < 0 else f"rank{rank}.log")


def make_folder(folder: Path) -> None:
    """Make a gang's folder, and remove those of the oldest that have ended if there are many."""
    if folder.is_dir():
        return
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    if folder.parent.stat().st_uid != os.getuid():
        raise PermissionError(
            f"{folder.parent} belongs to another user: remove it, or start Ray with --temp-dir"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.suppress(OSError):  # another gang that starts removes them, too
        others = sorted(folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
        for old in others[:-FOLDERS_KEPT]:
            gang = old.name.rpartition(".")[2]  # after a name
            if not any(runs_here(f"{own}{gang}.*") for own in ("", "manager-")):
                for file in old.iterdir():
                    file.unlink(missing_ok=True)
                old.rmdir()
