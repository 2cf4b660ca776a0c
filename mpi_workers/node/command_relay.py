"""Relays commands to a node's ranks, and combines their replies into one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpi_workers.node.processes import RankProcess
from mpi_workers.node.stacks import of_main_thread
from mpi_workers.protocol.commands import COMMANDS
from mpi_workers.protocol.replies import Replies
from mpi_workers.waits.interruption import InterruptWord
from mpi_workers.wire.frames import Body, Frame, Kind

SIGNAL_S = 0.5  # between signals to a rank that still runs a cancelled call


class Uplink(Protocol):
    """The proxy's connection to the GroupManager, as the relay uses it."""

    def send_event(self, op: str, **fields: Any) -> None:
        """Send an event."""

    def send_reply(self, body: Body) -> None:
        """Send a combined reply."""

    def send_output(self, rank: int | None = None) -> None:
        """Read and send what a rank (or all) printed before its reply."""

    def tail_of_call(self, rank: int) -> str:
        """The end of a rank's output in the call under way."""


class Pending(Replies):
    """A command under way on this node."""

    def __init__(self, ranks: Iterable[int], *, prints: bool) -> None:
        super().__init__()
        self.left = set(ranks)
        self.prints = prints


@dataclass(eq=False)
class CommandRelay:
    """The commands under way on one node.

    Attributes
    ----------
    node : int
        Number of this node.
    ranks : mapping of int to RankProcess
        The ranks of this node.
    word : InterruptWord
        Ends calls on this node.
    uplink : Uplink
    """

    node: int
    ranks: Mapping[int, RankProcess]
    word: InterruptWord
    uplink: Uplink
    _pending: dict[int, Pending] = field(default_factory=dict)
    _closed: bool = False
    _reporting: asyncio.Future[None] | None = None

    @property
    def newest(self) -> int | None:
        """Number of the newest command under way whose code may print, or None."""
        return max((seq for seq, pending in self._pending.items() if pending.prints), default=None)

    def close(self) -> None:
        """Send no more signals: the ranks are exiting."""
        self._closed = True

    def clear(self) -> None:
        """The ranks have ended: no command is under way."""
        self._pending.clear()

    def relay(self, body: Body, encoded: bytes) -> None:
        """Send a command's frame to all ranks (`RankLoop.run`)."""
        command = COMMANDS.get(body["op"])
        prints = command is not None and command.prints
        self._pending[body["seq"]] = Pending(self.ranks, prints=prints)
        for process in self.ranks.values():
            if process.control is not None:
                process.control.send_encoded(encoded)

    def interrupt(self, seq: int, *, with_signal: bool) -> None:
        """End the calls up to this number; with SIGINT for code that does not read the word."""
        self.word.raise_to(seq)
        if with_signal:
            self._signal_ranks(seq)

    def report_waits(self, question: int) -> None:
        """Send in which MPI calls the ranks wait at this moment."""
        waits: dict[str, list[int]] = {}
        first = min(self.ranks)
        for rank in self.ranks:
            if name := self.word.waits_in(rank - first):
                waits.setdefault(f"MPI_{name}", []).append(rank)
        self.uplink.send_event("waits", question=question, waits=waits)

    def report_running(self, seq: int) -> None:
        """Send the ranks that have not come back from a call, then their stacks."""
        pending = self._pending.get(seq)
        ranks = sorted(pending.left) if pending is not None else []
        self.uplink.send_event("ranks_running", seq=seq, ranks=ranks, stacks={})
        if ranks:
            self._reporting = asyncio.ensure_future(self._report_stacks(seq, ranks))

    async def _report_stacks(self, seq: int, ranks: list[int]) -> None:
        """Send stacks, of as many ranks at a time as there are cores."""
        at_once = len(os.sched_getaffinity(0))
        for first in range(0, len(ranks), at_once):
            pending = self._pending.get(seq)
            if pending is None:
                return
            pids = {
                rank: pid
                for rank in ranks[first : first + at_once]
                if rank in pending.left and (pid := self.ranks[rank].pid)
            }
            found = await asyncio.gather(
                *(asyncio.to_thread(of_main_thread, pid) for pid in pids.values())
            )
            stacks = {str(rank): stack for rank, stack in zip(pids, found, strict=True) if stack}
            self.uplink.send_event("ranks_running", seq=seq, ranks=[], stacks=stacks)

    def _signal_ranks(self, seq: int) -> None:
        """Signal the ranks that have not come back from a cancelled call, until they have."""
        pending = self._pending.get(seq)
        if pending is None or self._closed:
            return
        for rank in pending.left:
            pid = self.ranks[rank].pid
            if pid:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGINT)
        asyncio.get_running_loop().call_later(SIGNAL_S, self._signal_ranks, seq)

    def receive(self, rank: int, frame: Frame) -> None:
        """Process a rank's reply, or its report of progress."""
        body = frame.body
        if frame.kind == Kind.EVENT:
            self.uplink.send_event("progress", **body)
            return
        pending = self._pending.get(body.get("seq", -1))
        if frame.kind != Kind.REPLY or pending is None:
            return
        pending.left.discard(rank)
        first = not pending.errors
        for error in body.get("errors", ()):
            if "exit_code" in error["facts"]:  # of a program or script, whose output says why
                error["facts"]["output"] = self.uplink.tail_of_call(rank)
        pending.add(body, f"rank {rank}")
        if first and pending.errors:
            if pending.left:  # the others may wait for this rank in MPI
                self.word.raise_to(body["seq"])
            self.uplink.send_output(rank)
            self.uplink.send_event("rank_failed", seq=body["seq"], error=pending.errors[0])
        if not pending.left:
            self.uplink.send_output()
            del self._pending[body["seq"]]
            combined = {"seq": body["seq"], "node": self.node, **pending.combined()}
            self.uplink.send_reply(combined)
