"""The matrices of a gang as the dispatcher knows them, and the commands that made them.

After a failure the live matrices are rebuilt by repeating these commands, in order, from their
sources: files, blocks in the object store, arrays that were kept, checkpoints.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import command_name, matrices_of
from mpi_workers.wire.frames import Body

LOSSES = 2  # a command during which ranks were lost so often is not run again
FILES = "files"  # the library that reads and writes files
DEPTH_LIMIT = 100_000
FREE_DELAY_S = 0.02  # in which the next command may take a free along
SHARED_CODES = 64  # functions whose code commands share
NOT_KEPT = (
    "it was sent from the memory of a process: send_matrix(..., durable=True) keeps a copy in the "
    "object store"
)
TOO_LONG = (
    f"it results from more than {DEPTH_LIMIT} commands in a row: use "
    "AlchemistSession(..., checkpoint_folder=...), and call als.checkpoint() more often"
)


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
        What the ranks run; ``create`` for a matrix that was sent.
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
    cost_s: float = 0.0
    depth: int = 0
    losses: int = 0

    @property
    def name(self) -> str:
        """The command for messages: ``linalg.svd``, or the name of a function."""
        return command_name(self.body)

    @property
    def used(self) -> list[int]:
        """Ids of the matrices that it takes."""
        return matrices_of(self.body)

    def obstacle(self) -> str:
        """Why it is not repeated; else empty."""
        if self.losses >= LOSSES:
            return f"{self.name}, which is needed to rebuild it, has lost ranks {LOSSES} times"
        return self.reason


@dataclass(slots=True, eq=False, weakref_slot=True)
class Record:
    """A matrix of the gang: its facts, its origin, and which processes refer to it.

    Attributes
    ----------
    sealed : bool
        Whether every element has arrived.
    becomes : str
        While it is being sent: the layout with copies that it gets when it is sealed, if any.
    copied : bool
        Whether the ranks have that copy already, as matrix ``-id``.
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
    changes : int
        Raised when a command that may change it begins, and when that ends.
    undefined : str
        Why its elements are undefined: a call that was writing them was interrupted.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    sealed: bool = True
    becomes: str = ""
    copied: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    holders: set[str] = field(default_factory=set)
    pinned: bool = False
    columns: list[str] = field(default_factory=list)
    kept: Any = None
    made_by: LoggedCommand | None = None
    aliases: set[int] = field(default_factory=set)
    changes: int = 1
    undefined: str = ""

    def check_defined(self) -> None:
        """Raise a `Failure`, a MatrixError, if an interrupted call has left it half written."""
        if self.undefined:
            raise Failure("MatrixError", self.undefined)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix, each element counted once."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def shares_with(self, other: Record) -> None:
        """It has the memory of another matrix: a routine returned its argument."""
        other.aliases.update((other.id, self.id))
        self.aliases = other.aliases

    def described(self) -> Body:
        """The record as it travels: handles are made of it (`attached.matrix_ref`)."""
        return {
            "matrix": self.id,
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "layout": self.layout,
            "pinned": self.pinned,
            **({"columns": self.columns} if self.columns else {}),
            **({"aliases": sorted(self.aliases)} if self.aliases else {}),
        }


class DeadMatrices:
    """Matrices to which no process refers, until the ranks have been told.

    The next command takes them along. If none comes soon, they have one of their own.

    Parameters
    ----------
    flush : callable()
        Sends a command to the ranks.
    """

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush
        self._idents: set[int] = set()
        self._first: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, idents: Iterable[int]) -> None:
        """Free these soon."""
        self._idents.update(idents)
        self._begin()

    def add_results(self, first: int) -> None:
        """A call has failed: free what some ranks have made, under this id and later ones."""
        self._first = first
        self._begin()

    def _begin(self) -> None:
        if self and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FREE_DELAY_S, self._late)

    def _late(self) -> None:
        self._timer = None
        if self:
            self._flush()

    def __bool__(self) -> bool:
        return bool(self._idents) or self._first is not None

    @property
    def fields(self) -> Body:
        """The fields of the command that takes them along; call `told` when it is encoded."""
        discard = {} if self._first is None else {"discard": self._first}
        return {"unreferenced": sorted(self._idents), **discard} if self else {}

    def told(self) -> None:
        """A command to all ranks has taken them along."""
        self._idents.clear()
        self._first = None


class CommandLog:
    """The log of one gang.

    Parameters
    ----------
    enabled : bool
        Whether the gang recovers. Otherwise nothing is kept.

    Attributes
    ----------
    seconds : float
        Time of all commands since the last checkpoint.
    count : int
        Of commands so far.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        # One copy of the code of a function that is called often.
        self._code = lru_cache(SHARED_CODES)(lambda code: code)
        self.seconds = 0.0
        self.count = 0

    def add(
        self,
        body: Body,
        used: Iterable[Record] = (),
        made: Sequence[Record] = (),
        changed: Sequence[Record] = (),
        *,
        source: Any = None,
        code: Any = None,
        seconds: float = 0.0,
        reason: str = "",
    ) -> None:
        """A command has made some matrices, and may have changed others in place."""
        if not self.enabled or not (made or changed):
            return
        parents = {r.made_by: None for r in (*used, *changed) if r.made_by is not None}
        depth = 1 + max((parent.depth for parent in parents), default=0)
        if body["op"] == "run":
            parts = body.get("code")  # a list, unless it is a matrix
            body = {**body, "code": [*map(self._code, parts)] if type(parts) is list else parts}
        reason = reason or next((parent.reason for parent in parents if parent.reason), "")
        self.count += 1
        self.seconds += seconds
        command = LoggedCommand(
            self.count,
            body,
            tuple(parents) if depth <= DEPTH_LIMIT else (),
            tuple(record.id for record in made),
            tuple(record.id for record in changed),
            source=source,
            code=code,
            cost_s=seconds + max((parent.cost_s for parent in parents), default=0.0),
            depth=depth,
            reason=reason if depth <= DEPTH_LIMIT else TOO_LONG,
        )
        for record in (*made, *changed):
            record.made_by = command

    def copied(self, record: Record, array: NDArray[Any]) -> None:
        """A copy of a matrix is kept: what led to it is no longer needed."""
        self.add(sent(record), made=[record], source=np.atleast_1d(array))

    def loaded(self, record: Record, path: str, stamp: str, code: Any) -> None:
        """It is in a file: what led to it is no longer needed. `code`: see `LoggedCommand`."""
        arguments = {"path": path, "layout": record.layout}
        again = {"op": "call", "library": FILES, "routine": "load", "arguments": arguments}
        self.add(again, made=[record], code=code)
        self.stamp(record, stamp)

    def shared(self, record: Record, owner: Record) -> None:
        """A matrix has the memory of another one, which can be rebuilt."""
        again = {"op": "redistribute", "source": owner.id, "layout": owner.layout}
        self.add(again, [owner], [record])

    def stamp(self, record: Record, stamp: str) -> None:
        """The file that a matrix was loaded from: it is loaded again if it is still the same."""
        if record.made_by is not None:
            record.made_by.stamp = stamp


def history(records: Iterable[Record]) -> list[LoggedCommand]:
    """The commands that led to some matrices, in order."""
    found: dict[LoggedCommand, None] = {}
    left = [record.made_by for record in records if record.made_by is not None]
    while left:
        command = left.pop()
        if command not in found:
            found[command] = None
            left.extend(command.parents)
    return sorted(found, key=lambda command: command.number)


def sent(record: Record) -> Body:
    """The command that sends a matrix (again)."""
    about: Body = {"shape": list(record.shape), "dtype": record.dtype, "layout": record.layout}
    return {"op": "create", **about}
