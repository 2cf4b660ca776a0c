"""The GroupManager's part in what ranks print: passed on to the caller, or logged."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from alchemist_ray.gang.rank_output import as_text
from mpi_workers.node.output_lines import Line, dropped_note
from mpi_workers.wire.asynchronous import FrameProtocol
from mpi_workers.wire.frames import Kind

BACKLOG_NBYTES = 8 << 20  # 8 MiB that a process has not read yet; further lines are dropped


def log(lines: Iterable[Line]) -> None:
    """Write output that no call waits for to this process's log, which Ray shows to the user."""
    sys.stdout.write(as_text(lines))
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
        if transport is not None and transport.get_write_buffer_size() > BACKLOG_NBYTES:
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
