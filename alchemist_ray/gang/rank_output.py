"""What ranks print, on its way to the user's own stdout and stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from tqdm import tqdm

from mpi_workers.node.output import STDERR, Line, dropped_note
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Kind

BACKLOG = 8 << 20  # 8 MiB that a client has not read yet; what comes on top is dropped


def _written(lines: Iterable[Line]) -> str:
    return "".join(
        f"[rank {rank}] {text}\n" if rank >= 0 else f"{text}\n" for rank, _, text in lines
    )


def show(lines: Iterable[Line]) -> None:
    """Write lines to this process's stdout and stderr, around a progress bar if one stands."""
    together: list[Line] = []
    for line in lines:
        if together and together[-1][1] != line[1]:
            _show(together)
            together = []
        together.append(line)
    if together:
        _show(together)


def _show(lines: list[Line]) -> None:
    stream: TextIO = sys.stderr if lines[0][1] == STDERR else sys.stdout
    with tqdm.external_write_mode(file=stream):
        stream.write(_written(lines))
        stream.flush()


def log(lines: Iterable[Line]) -> None:
    """Write what nobody waits for to this process's log; Ray shows it to the user's program."""
    sys.stdout.write(_written(lines))
    sys.stdout.flush()


class Relay:
    """A command's output, passed on to the client that waits for the command."""

    def __init__(self, client: FrameProtocol, ident: int) -> None:
        self._client = client
        self._ident = ident
        self._dropped: dict[int, int] = {}  # bytes, by rank

    def pass_on(self, lines: list[Line]) -> None:
        """Send lines, or drop them while the client is far behind with reading."""
        transport = self._client.transport
        if transport is not None and transport.get_write_buffer_size() > BACKLOG:
            for rank, _, text in lines:
                self._dropped[rank] = self._dropped.get(rank, 0) + len(text) + 1
            return
        self.end()
        self._send(lines)

    def end(self) -> None:
        """Say what was dropped."""
        if self._dropped:
            dropped, self._dropped = self._dropped, {}
            self._send([dropped_note(rank, nbytes) for rank, nbytes in sorted(dropped.items())])

    def _send(self, lines: list[Line]) -> None:
        self._client.send(Kind.EVENT, {"id": self._ident, "output": lines})
