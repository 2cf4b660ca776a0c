"""A session's traces and profiles, of its ranks and this process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from alchemist_ray.arguments import checked_path
from alchemist_ray.attached.address import this_process
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.functions import user_code
from alchemist_ray.measures import events
from mpi_workers.matrix.sizes import readable
from mpi_workers.rank.history import Entry, collected

EARLIER_S = 3600.0
OWN = "collected"  # the call that fetches the history
SHOWN_RANKS = 16
Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RankHistory:
    """The last commands of a rank."""

    rank: int
    host: str
    entries: list[Entry]


def histories(connection: GangConnection, since: float) -> list[RankHistory]:
    """The commands of every rank since a time (seconds since the epoch)."""
    options = connection.options
    connection.options = replace(options, verbose=False)  # not a call of the user's
    try:
        found = user_code.run(connection, collected, (since,), {}, pure=True)
    finally:
        connection.options = options
    return [
        RankHistory(rank, host, [e for e in map(Entry._make, entries) if e.name != OWN])
        for rank, host, entries in found
    ]


# --- traces ---


def _process_events(since: float) -> Iterable[Body]:
    pid = os.getpid()
    yield _named("process_name", pid, 0, f"{this_process()}: session")
    threads: dict[str, int] = {}
    for span in events.since(since):
        if span.name == OWN:
            continue
        if span.thread not in threads:
            threads[span.thread] = len(threads)
            yield _named("thread_name", pid, threads[span.thread], span.thread)
        tid = threads[span.thread]
        yield _span(span.name, span.kind, span.begun, span.seconds, pid, tid, span.facts)


def _rank_events(ranks: list[RankHistory]) -> Iterable[Body]:
    hosts: dict[str, int] = {}
    for one in ranks:
        if one.host not in hosts:
            hosts[one.host] = -1 - len(hosts)  # no process of the system has it
            yield _named("process_name", hosts[one.host], 0, f"ranks on {one.host}")
        pid = hosts[one.host]
        yield _named("thread_name", pid, one.rank, f"rank {one.rank}")
        for entry in one.entries:
            facts: Body = {"mpi_s": entry.mpi_s}
            if not entry.span:
                facts["grown_nbytes"] = entry.grown_nbytes
            if entry.device_nbytes:
                facts["gpu_nbytes"] = entry.device_nbytes
            if entry.failed:
                facts["failed"] = True
            kind = "span" if entry.span else "rank"
            yield _span(entry.name, kind, entry.begun, entry.seconds, pid, one.rank, facts)


def _span(
    name: str, kind: str, begun: float, seconds: float, pid: int, tid: int, facts: Body
) -> Body:
    times = {"ts": begun * 1e6, "dur": seconds * 1e6}
    return {"name": name, "cat": kind, "ph": "X", **times, "pid": pid, "tid": tid, "args": facts}


def _named(what: str, pid: int, tid: int, name: str) -> Body:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


# --- profiles ---


@dataclass(slots=True)
class Profile:
    """Where the time of calls went; see `SessionTraces.profile`.

    Attributes
    ----------
    ranks : list of RankHistory
        What each rank did, once the ``with`` block has ended.
    """

    connection: GangConnection
    ranks: list[RankHistory] = field(default_factory=list)
    _since: float | None = None

    def __enter__(self) -> Self:
        self._since = time.time()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._since is not None:
            self.ranks = histories(self.connection, self._since)

    def __str__(self) -> str:
        """A table: for each call and rank its time, that in MPI, and the growth of memory."""
        if self._since is None:  # not used in `with`
            self.ranks = histories(self.connection, time.time() - EARLIER_S)
        entries = [entry for one in self.ranks for entry in one.entries]
        gpus = any(entry.device_nbytes for entry in entries)
        head = f"{'call':<32} {'rank':>6} {'calls':>6} {'s':>10} {'in MPI':>10} {'memory':>10}"
        head += f" {'to/from GPU':>11}" * gpus
        lines = [head, "-" * len(head)]
        entries.sort(key=lambda entry: entry.span)  # calls, then the spans in them
        for name, span in dict.fromkeys((entry.name, entry.span) for entry in entries):
            rows = [self._row(name, span, one) for one in self.ranks]
            if len(rows) > SHOWN_RANKS:  # the slowest and the fastest ones
                rows.sort(key=lambda row: -row[2])
                rows = rows[: SHOWN_RANKS // 2] + rows[-SHOWN_RANKS // 2 :]
            for rank, count, seconds, mpi_s, grown, copied in rows:
                shown = f"  {name}" if span else name
                lines.append(
                    f"{shown[:32]:<32} {rank:>6} {count:>6} {seconds:>10.4f} {mpi_s:>10.4f} "
                    f"{readable(grown):>10}" + f" {readable(copied):>11}" * gpus
                )
        return "\n".join(lines)

    @staticmethod
    def _row(name: str, span: bool, one: RankHistory) -> tuple[int, int, float, float, int, int]:
        own = [entry for entry in one.entries if (entry.name, entry.span) == (name, span)]
        return (
            one.rank,
            len(own),
            sum(entry.seconds for entry in own),
            sum(entry.mpi_s for entry in own),
            sum(entry.grown_nbytes for entry in own),
            sum(entry.device_nbytes for entry in own),
        )


class SessionTraces:
    """Traces and profiles; `AlchemistSession` has these methods."""

    connection: Any  # of the session

    def trace(self, path: str | os.PathLike[str], *, last_s: float = EARLIER_S) -> Path:
        """Write a timeline of the last commands of the ranks and of this process.

        Every rank keeps its last 10,000 commands, and this process its last 20,000 commands and
        transfers, always: a trace can be taken after something was slow.

        Parameters
        ----------
        path : path_like
            A JSON file in Chrome's trace format, as of ``ray timeline``: open it at
            https://ui.perfetto.dev or in ``chrome://tracing``. A row per rank, with the time that
            each command waited in MPI (``mpi_s``) and the spans that its library marks
            (`ali.Context.span`, ``alchemist_span_begin`` in C), and a row per thread of this
            process, in which commands include their time in the queue.
        last_s : float
            How far back, in seconds.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        GroupFailedError
            If the gang is lost: its history is too.
        OSError
            If the file cannot be written.

        Notes
        -----
        Clocks of several nodes are compared as they are: keep them synchronized. The time in MPI
        is that of waits of `ali.Context`'s communicator and of ``alchemist_wait`` and its family;
        other waits inside a native library are not measured: they are part of its own time. Cost:
        a call that gathers 100 bytes per command on rank 0; keeping the history costs 3 us per
        command and rank.
        """
        since = time.time() - last_s
        rows = [*_process_events(since), *_rank_events(histories(self.connection, since))]
        where = checked_path("path", path)
        where.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}) + "\n")
        return where

    def profile(self) -> Profile:
        """Where the time of calls goes, per rank: ``with als.profile() as p: ...; print(p)``.

        Without ``with``, ``print(als.profile())`` shows the last `EARLIER_S` seconds.

        Returns
        -------
        Profile
            Its text is a table: for each call and rank the number of calls, their time, the time
            that waited in MPI, the growth of the peak memory, and the bytes that were copied to and
            from GPUs, if there are any; then the same for spans.
            ``p.ranks`` has the numbers.

        Notes
        -----
        See `trace` for what counts as time in MPI.
        """
        return Profile(self.connection)
