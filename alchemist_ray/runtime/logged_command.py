"""LoggedCommand: a command that made or changed matrices, as it is repeated after a failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    files : dict
        Uploaded files of a user's function, by name.
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
    files: dict[str, Any] = field(default_factory=dict)
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
