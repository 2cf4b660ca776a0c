"""Output of ranks: bytes from their pipes, cut into whole lines, with a limit on their size."""

from __future__ import annotations

from pathlib import Path

STDOUT, STDERR = 1, 2


LINE_LIMIT = 16 << 10  # 16 KiB: a longer line is cut


HELD_LIMIT = 1 << 20  # 1 MiB of lines are held; further lines are dropped


Line = tuple[int, int, str]  # rank, stream, text without its newline


class OutputLines:
    """Lines that ranks have printed and that were not passed on yet."""

    def __init__(self) -> None:
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
        if (end := unfinished.rfind(b"\n")) >= 0:
            for line in bytes(unfinished[:end]).split(b"\n"):
                self._keep(rank, stream, line)
            del unfinished[: end + 1]
        while len(unfinished) > LINE_LIMIT:
            self._keep(rank, stream, bytes(unfinished[:LINE_LIMIT]))
            del unfinished[:LINE_LIMIT]

    def finish(self, rank: int | None = None) -> None:
        """End the unfinished lines of a rank, or of all ranks."""
        for source in [s for s in self._unfinished if rank in (None, s[0])]:
            unfinished = self._unfinished.pop(source)
            if unfinished:
                self._keep(*source, bytes(unfinished))

    def _keep(self, rank: int, stream: int, line: bytes) -> None:
        if self.nbytes + len(line) > HELD_LIMIT:
            self._dropped[rank] = self._dropped.get(rank, 0) + len(line) + 1
            return
        self.nbytes += len(line) + 1
        self._whole.append((rank, stream, line.decode(errors="replace")))

    def take(self) -> list[Line]:
        """Remove and return the lines so far, in order, and a note for each rank's dropped ones."""
        taken = self._whole
        taken += [dropped_note(rank, nbytes) for rank, nbytes in sorted(self._dropped.items())]
        self._whole, self._dropped, self.nbytes = [], {}, 0
        return taken


def dropped_note(rank: int, nbytes: int) -> Line:
    """The line that replaces output which a rank printed faster than it could be shown."""
    return (rank, STDERR, f"... {nbytes} bytes of output dropped: printed faster than shown ...")


def rank_pipe(folder: str | Path, rank: int, stream: int) -> str:
    """Path of the named pipe into which a rank prints that a launcher has started."""
    return f"{folder}/rank{rank}.{'out' if stream == STDOUT else 'err'}"
