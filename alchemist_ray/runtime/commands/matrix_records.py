"""The matrices of a gang as the dispatcher knows them: records, and locks of those being read.

Commands of a gang run one at a time; fetches go directly to the ranks beside them. On a gang that
several programs use, a fetch asks for a read lock first. When it ends it asks whether the lock
was held all the time: a lock ends with its control connection, not with the data connections.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

LOSSES = 2  # a command during which ranks were lost so often is not run again


@dataclass(slots=True, eq=False)
class LoggedCommand:
    """A command and the commands whose results it used.

    A live matrix refers to the last command that made or changed it, and that command to those
    before it: a command is forgotten when no live matrix descends from it.

    Attributes
    ----------
    number : int
        Commands are repeated in this order.
    body : dict
        What the ranks run; ``"op": "sent"`` for a matrix that was sent.
    parents : tuple of LoggedCommand
    made, changed : tuple of int
        Matrices that it made, and that it may have changed in place.
    source : object
        Data that can be sent again: an array, or blocks in the object store.
    code : object
        What tells its library from another one of that name.
    stamp : str
        State of the file that it reads; another one makes the matrix a different one.
    reason : str
        Why it cannot be repeated; else empty.
    seconds : float
        How long it took.
    cost_s : float
        Time of the commands on the longest way from a source to here.
    depth : int
        Commands on the longest way from a source to here.
    losses : int
        How often ranks were lost while it ran.
    """

    number: int
    body: Body
    parents: tuple[LoggedCommand, ...] = ()
    made: tuple[int, ...] = ()
    changed: tuple[int, ...] = ()
    source: Any = None
    code: Any = None
    stamp: str = ""
    reason: str = ""
    seconds: float = 0.0
    cost_s: float = 0.0
    depth: int = 0
    losses: int = 0

    @property
    def name(self) -> str:
        """The command for messages: ``linalg.svd``, or the name of a function."""
        match self.body:
            case {"op": "call", "library": library, "routine": routine}:
                return f"{library}.{routine}"
            case {"op": "run", "name": name}:
                return str(name)
            case {"op": "load", "library": library}:
                return f"load_library({library!r})"
        return str(self.body["op"])

    @property
    def used(self) -> list[int]:
        """Ids of the matrices that it takes."""
        return matrices_of(self.body)

    def obstacle(self) -> str:
        """Why it is not repeated; else empty."""
        if self.losses >= LOSSES:
            return f"{self.name}, which is needed to rebuild it, has lost ranks {LOSSES} times"
        return self.reason


def matrices_of(body: Body) -> list[int]:
    """Ids of the matrices that a command takes."""
    match body:
        case {"op": "call", "arguments": arguments}:
            return [value["matrix"] for value in arguments.values() if isinstance(value, dict)]
        case {"op": "run", "uses": uses}:
            return list(uses)
        case {"op": "redistribute", "source": source}:
            return [source]
    return []


@dataclass(slots=True)
class Record:
    """A matrix of the gang: its facts, its origin, and which processes refer to it.

    Attributes
    ----------
    sealed : bool
        Whether every element has arrived.
    source : dict
        Provenance.
    holders : set of str
        Ids of the attached processes, and tokens of results under way, that refer to it.
    pinned : bool
        It stays until it is freed by name, whatever holders there are.
    columns : list of str
        Names of the columns, if the data had names.
    kept : object
        While it is being sent: data that can be sent again after a failure, if there are any.
    made_by : LoggedCommand or None
        The last command that made or changed it, on a gang that recovers.
    aliases : set of int
        Matrices with the same memory, itself included.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    sealed: bool
    source: dict[str, Any]
    holders: set[str] = field(default_factory=set)
    pinned: bool = False
    columns: list[str] = field(default_factory=list)
    kept: Any = None
    made_by: LoggedCommand | None = None
    aliases: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, each element counted once."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def version(self) -> int:
        """Number of the last command that made or changed it; 0: not logged."""
        return self.made_by.number if self.made_by is not None else 0

    def shares_with(self, other: Record) -> None:
        """It has the memory of another matrix: a routine returned its argument."""
        other.aliases.update((other.id, self.id))
        self.aliases = other.aliases

    def described(self) -> Body:
        """The record as it travels: handles are made of it (`gang.matrix_ref`)."""
        return {
            "matrix": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
            "pinned": self.pinned,
            **({"columns": self.columns} if self.columns else {}),
            **({"version": self.version} if self.version else {}),
        }


def check_unused(
    records: Iterable[Record], holder: str, users: Callable[[set[str]], list[str]]
) -> None:
    """Raise `Failure` if a matrix is used by programs other than the one of `holder`."""
    for record in records:
        if found := users(record.holders - {holder}):
            raise Failure(
                "MatrixError",
                f"{record.name} was not freed: {', '.join(found)} still uses it. Free it after "
                "that program drops its handles or detaches",
            )


class MatrixLocks:
    """Reads that are under way, and the matrices that the running command changes."""

    def __init__(self) -> None:
        self._reads: dict[int, tuple[Any, int]] = {}  # by number: connection, matrix
        self._last = 0
        self._written: frozenset[int] = frozenset()
        self._waiting: list[tuple[Any, int, Callable[[int], None]]] = []
        self._changed = asyncio.Event()

    def begin_read(self, connection: Any, matrix: int, granted: Callable[[int], None]) -> None:
        """Call `granted` with the read's number: at once, or after the running command."""
        if matrix in self._written:
            self._waiting.append((connection, matrix, granted))
            return
        self._last += 1
        self._reads[self._last] = connection, matrix
        granted(self._last)

    def end_read(self, number: int) -> bool:
        """A read has ended; whether its lock was held until now."""
        self._changed.set()
        return self._reads.pop(number, None) is not None

    def lost(self, connection: Any) -> None:
        """A connection is gone: its locks end. Its transfers may go on, see `end_read`."""
        self._reads = {n: read for n, read in self._reads.items() if read[0] is not connection}
        self._waiting = [entry for entry in self._waiting if entry[0] is not connection]
        self._changed.set()

    async def begin_write(self, matrices: Iterable[int], wanted: Callable[[], bool]) -> None:
        """Wait until no process reads the matrices; new readers wait until `end_write`.

        Returns early when the command is no longer `wanted`; see `interrupt`.
        """
        self._written = frozenset(matrices)
        while wanted() and any(matrix in self._written for _, matrix in self._reads.values()):
            self._changed.clear()
            await self._changed.wait()

    def interrupt(self) -> None:
        """The command that waits for readers has been cancelled."""
        self._changed.set()

    def end_write(self) -> None:
        """The command has ended."""
        if not self._written:
            return
        self._written = frozenset()
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            self.begin_read(*entry)
