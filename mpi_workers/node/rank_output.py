"""The output of a node's ranks: read from their pipes by the proxy, cut into lines, kept in files.

Lines are whole, and a limited number of bytes waits until they are passed on; the log files have
all of them. A log file that has grown to `FILE_LIMIT` becomes ``rank3.log.1``, and a new one
begins. A line in it is its time (UTC), its stream (``out`` or ``err``) and its text.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

from mpi_workers.node.cleanup import runs_here
from mpi_workers.protocol.proxy_messages import STDERR, STDOUT, Line

LINE_LIMIT = 16 << 10  # 16 KiB: a longer line is cut
HELD_LIMIT = 1 << 20  # 1 MiB of lines are held; further lines are dropped
FILE_LIMIT = 10 << 20  # 10 MiB
FOLDERS_KEPT = 100  # of gangs, on a node


class OutputLines:
    """Lines that ranks have printed and that were not passed on yet.

    Parameters
    ----------
    log : callable(lines), optional
        Called with all lines as they arrive, also with those that are not kept.
    """

    def __init__(self, log: Callable[[list[Line]], None] = lambda _: None) -> None:
        self._log = log
        self._unfinished: dict[tuple[int, int], bytearray] = {}
        self._whole: list[Line] = []
        self._dropped: dict[int, int] = {}  # bytes, by rank
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._whole or self._dropped)

    def add(self, rank: int, stream: int, data: bytes) -> None:
        """Add bytes that a rank has written."""
        unfinished = self._unfinished.setdefault((rank, stream), bytearray())
        unfinished += data
        found = []
        if (end := unfinished.rfind(b"\n")) >= 0:
            found += bytes(unfinished[:end]).split(b"\n")
            del unfinished[: end + 1]
        while len(unfinished) > LINE_LIMIT:
            found.append(bytes(unfinished[:LINE_LIMIT]))
            del unfinished[:LINE_LIMIT]
        self._keep(rank, stream, found)

    def finish(self, rank: int | None = None) -> None:
        """End the unfinished lines of a rank, or of all ranks."""
        for source in [s for s in self._unfinished if rank in (None, s[0])]:
            unfinished = self._unfinished.pop(source)
            if unfinished:
                self._keep(*source, [bytes(unfinished)])

    def _keep(self, rank: int, stream: int, found: list[bytes]) -> None:
        lines = [(rank, stream, line.decode(errors="replace")) for line in found]
        if lines:
            self._log(lines)
        for line, raw in zip(lines, found, strict=True):
            if self.nbytes + len(raw) > HELD_LIMIT:
                self._dropped[rank] = self._dropped.get(rank, 0) + len(raw) + 1
            else:
                self.nbytes += len(raw) + 1
                self._whole.append(line)

    def take(self) -> list[Line]:
        """Remove and return the lines so far, in order, and a note for each rank's dropped ones."""
        taken = self._whole
        taken += [dropped_note(rank, nbytes) for rank, nbytes in sorted(self._dropped.items())]
        self._whole, self._dropped, self.nbytes = [], {}, 0
        return taken


def dropped_note(rank: int, nbytes: int) -> Line:
    """The line that replaces output which a rank printed faster than it could be shown."""
    words = (
        f"... {nbytes} bytes of output dropped: printed faster than shown; `alchemist logs` reads "
    )
    return (rank, STDERR, f"{words}{_log_name(rank)}, which has them ...")


def _log_name(rank: int) -> str:
    return "launcher.log" if rank == LAUNCHER else f"rank{rank}.log"


def rank_pipe(folder: str | Path, rank: int, stream: int) -> str:
    """Path of the named pipe into which a rank prints that a launcher has started."""
    return f"{folder}/rank{rank}.{'out' if stream == STDOUT else 'err'}"


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

    def write(self, lines: Iterable[Line]) -> None:
        """Append lines. A disk that fails ends the logging, not the gang."""
        if not self._folder:
            return
        stamp = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]  # milliseconds
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
        path = Path(self._folder) / _log_name(rank)
        if rank not in self._files:
            make_folder(path.parent)
            flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            self._files[rank] = os.open(path, flags, 0o600)
        os.write(self._files[rank], data)
        if os.fstat(self._files[rank]).st_size > FILE_LIMIT:
            os.close(self._files.pop(rank))
            path.replace(f"{path}.1")


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


TAIL_LIMIT = 4 << 10  # 4 KiB of a rank's last output are part of the error
READ_BYTES = 64 << 10  # 64 KiB: the capacity of a pipe
READS = 4  # from one pipe before others have their turn
LAUNCHER = -1  # source of the output of ranks that have no pipes of their own yet
# Messages of MPI_Abort in MPICH (and its relatives) and Open MPI: code and rank, rank and code.
MPICH_ABORT = re.compile(rb"Abort\((-?\d+)\) on node (\d+)( [^\n]*called MPI_Abort)?")
OPEN_MPI_ABORT = re.compile(
    rb"MPI_ABORT was invoked on rank (\d+) in.{1,99}?with errorcode (-?\d+)", re.DOTALL
)

Source = tuple[int, int]  # rank (or LAUNCHER) and stream


class RankOutput:
    """The output of this node's ranks.

    Parameters
    ----------
    log_folder : str
        Where it is logged; empty: nowhere.

    Attributes
    ----------
    pipes : dict of (int, int) to int
        File descriptors by rank and stream. A site's launcher has a pipe of its own, for the
        output of its ranks until they have opened theirs.
    lines : OutputLines
        Lines that were not passed on yet.
    """

    def __init__(self, log_folder: str = "") -> None:
        self._logs = RankLogs(log_folder)
        self.pipes: dict[Source, int] = {}
        self.lines = OutputLines(self._logs.write)
        self._held: list[Line] = []  # printed between calls; they are in the log files
        self._held_nbytes = self._dropped = 0
        self._tails: defaultdict[int, bytearray] = defaultdict(bytearray)  # the ends of outputs
        self._printed: defaultdict[int, int] = defaultdict(int)  # bytes, by rank
        self._printed_before: dict[int, int] = {}  # the call under way
        self._explained: dict[int, int] = {}  # what was printed when a program had failed
        self._poll: select.poll | None = None

    def read(self, source: Source) -> bool:
        """Read from a non-blocking pipe, with a limit; whether the pipe is still open."""
        rank, stream = source
        for _ in range(READS):
            try:
                data = os.read(self.pipes[source], READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                return False
            self._printed[rank] += len(data)
            self._tails[rank] += data
            del self._tails[rank][:-TAIL_LIMIT]
            self.lines.add(rank, stream, data)
            if len(data) < READ_BYTES:
                break
        return True

    def read_all(self, rank: int | None = None) -> None:
        """Read all that was printed so far, and end unfinished lines of a rank (or of all)."""
        if self._poll is None:
            self._poll = select.poll()
            for pipe in self.pipes.values():
                self._poll.register(pipe, select.POLLIN)
        if ready := dict(self._poll.poll(0)):  # one system call for all of them
            for source, pipe in self.pipes.items():
                if pipe in ready:
                    self.read(source)
        self.lines.finish(rank)

    def end(self, *, kept: bool) -> None:
        """The ranks have ended: read the rest, and close their pipes; `kept`: named ones stay."""
        self.read_all()
        for source, pipe in list(self.pipes.items()):
            if not kept or source[0] == LAUNCHER:
                os.close(pipe)
                del self.pipes[source]
        self._tails.clear()
        self._poll = None

    def take(self) -> list[Line]:
        """Remove and return the lines so far."""
        lines = self._held + self.lines.take()
        if self._dropped:
            text = (
                f"... {self._dropped} bytes of output between calls are only in the log files ..."
            )
            lines.append((LAUNCHER, STDERR, text))
        self._held, self._held_nbytes, self._dropped = [], 0, 0
        return lines

    def hold(self) -> None:
        """Keep the lines so far for the next call."""
        for line in self.lines.take():
            if self._held_nbytes + len(line[2]) > HELD_LIMIT:
                self._dropped += len(line[2])
            else:
                self._held_nbytes += len(line[2])
                self._held.append(line)

    def tail(self, rank: int) -> str:
        """The end of a rank's output, or of its launcher's if the rank has printed nothing."""
        for source in list(self.pipes):
            if source[0] in (rank, LAUNCHER):
                with contextlib.suppress(OSError):
                    self.read(source)
        texts = (self._tails[each].decode(errors="replace").strip() for each in (rank, LAUNCHER))
        return next(filter(None, texts), "")

    def begin_call(self) -> None:
        """A call begins: its output is what `tail_of_call` is about."""
        self._printed_before = dict(self._printed)

    def tail_of_call(self, rank: int) -> str:
        """The end of what a rank has printed in the call under way."""
        self.tail(rank)  # reads
        self._explained[rank] = self._printed[rank]
        return self._since(rank, self._printed_before).decode(errors="replace").strip()

    def _since(self, rank: int, printed: dict[int, int]) -> bytes:
        nbytes = self._printed[rank] - printed.get(rank, 0)
        return bytes(self._tails[rank][-nbytes:]) if nbytes else b""

    def aborted(self) -> tuple[int, str] | None:
        """The rank that MPI says, in what ranks have printed, has ended all others; and why.

        A program that failed has printed the same: what `tail_of_call` has told is its own.
        """
        for data in (self._since(rank, self._explained) for rank in list(self._tails)):
            if found := MPICH_ABORT.search(data):
                code = int(found[1])
                why = f"called MPI_Abort({code})" if found[3] else f"had a fatal MPI error ({code})"
                return int(found[2]), why
            if found := OPEN_MPI_ABORT.search(data):
                return int(found[1]), f"called MPI_Abort({int(found[2])})"
        return None
