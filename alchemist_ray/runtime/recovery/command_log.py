"""The log of a gang's commands: how each of its matrices was made.

After a failure the live matrices are rebuilt by repeating these commands, in order, from their
sources: files, blocks in the object store, arrays that were kept, checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.runtime.commands.loaded_libraries import LoadedLibraries
from alchemist_ray.runtime.commands.matrix_records import LoggedCommand, Record, matrices_of
from mpi_workers.wire.frames import Body
from mpi_workers.wire.names import LOAD_STATE

FILES = "files"  # the library that reads and writes files
DEPTH_LIMIT = 100_000
CODES = 64  # functions whose code commands share
NOT_KEPT = (
    "it was sent from the memory of a process: send_matrix(..., durable=True) keeps a copy in the "
    "object store"
)
TOO_LONG = (
    f"it results from more than {DEPTH_LIMIT} commands in a row: use "
    "AlchemistSession(..., checkpoint_folder=...), and call als.checkpoint() more often"
)


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
        self._code = lru_cache(CODES)(lambda code: code)
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

    def state_kept(
        self, libraries: LoadedLibraries, library: str, arguments: Body, records: Iterable[Record]
    ) -> None:
        """Keep the arguments of a library's `load_state`, not the calls that led to its state."""
        again = {"op": "call", "library": library, "routine": LOAD_STATE, "arguments": arguments}
        if (state := libraries.state(library)) is not None:
            state.made_by = None
            self.add(again, records, changed=[state], code=libraries.stamp(library))

    def checkpointed(
        self, body: Body, matrices: Mapping[int, Record], libraries: LoadedLibraries
    ) -> None:
        """Matrices and states of these versions are in files."""
        for ident, version, path, stamp in body["matrices"]:
            record = matrices.get(ident)
            if record is not None and record.version == version:
                arguments = {"path": path, "layout": record.layout}
                again = {"op": "call", "library": FILES, "routine": "load", "arguments": arguments}
                self.add(again, made=[record], code=libraries.stamp(FILES))
                self.stamp(record, stamp)
        for library, version, arguments in body.get("states", []):
            if (state := libraries.state(library)) is not None and state.version == version:
                used = matrices_of({"op": "call", "arguments": arguments})
                self.state_kept(libraries, library, arguments, [matrices[i] for i in used])
        self.seconds = 0.0

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
    return {"op": "sent", **about}
