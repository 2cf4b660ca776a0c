"""The libraries of a gang: which file each is from, which processes use it, what state it keeps.

Libraries declare the effects of their routines, so this module also tells what a command changes,
and whether it can be repeated.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from alchemist_ray.background import in_time
from alchemist_ray.runtime.commands.matrix_records import Record
from mpi_workers.failures import Failure
from mpi_workers.protocol.commands import COMMANDS, Rerun, matrices_of
from mpi_workers.protocol.libraries import LOAD_STATE, SAVE_STATE
from mpi_workers.protocol.signature import SPARSE
from mpi_workers.wire.frames import Body

STAT_LIMIT_S = 2.0  # to read the file of a library

Stamp = tuple[str | None, str | None]  # path, hash of the content; None: not known


def same(stamp: Stamp, other: Stamp) -> bool:
    """Whether both are of one version of a file, as far as is known."""
    return stamp == other or (stamp[0] == other[0] and None in (stamp[1], other[1]))


@dataclass(slots=True)
class LoadedLibrary:
    """A library that all ranks have loaded.

    Attributes
    ----------
    described : dict
        As the ranks describe it.
    stamp : (str or None, str)
        Its file.
    state : Record or None
        Its state, if that can be saved; the log treats it like a matrix.
    holders : set of str
        Ids of the processes that use it.
    routines : dict of str to dict
        Declarations, by name.
    """

    described: Body
    stamp: Stamp
    holders: set[str]
    state: Record | None = None
    routines: dict[str, Body] = field(init=False)

    def __post_init__(self) -> None:
        self.routines = {fields["name"]: fields for fields in self.described["routines"]}
        if {SAVE_STATE, LOAD_STATE} <= self.routines.keys():
            name = f"the state of library {self.described['name']!r}"
            self.state = Record(0, name, (), "bool", "")


class LoadedLibraries(dict[str, LoadedLibrary]):
    """The libraries of a gang, by name.

    Parameters
    ----------
    users : callable(holders)
        Descriptions of the other programs among these holders.
    """

    def __init__(self, users: Callable[[set[str]], list[str]]) -> None:
        super().__init__()
        self._users = users
        self._lost: dict[str, str] = {}  # libraries whose state could not be rebuilt, and why

    def described(self) -> list[Body]:
        """The libraries with their signatures."""
        return [loaded.described for loaded in self.values()]

    def in_use(self, name: str, stamp: Stamp, holder: str, *, replace: bool) -> Body | None:
        """The library if it is loaded from the same file; None: load it.

        `replace`: load it again in any case, with a new state.

        Raises
        ------
        Failure
            LibraryLoadError, if it would be replaced while another program uses it.
        """
        known = self.get(name)
        if known is None:
            return None
        if same(known.stamp, stamp) and not replace:
            known.holders.add(holder)
            return known.described
        if users := self._users(known.holders - {holder}):
            where = known.stamp[0] or "the shipped library"
            raise Failure(
                "LibraryLoadError",
                f"library {name!r} was not loaded: {', '.join(users)} still uses the version "
                f"loaded from {where}. Load this one under another name: "
                f"load_library('{name}2', path)",
            )
        return None

    def add(self, name: str, stamp: Stamp, described: Body, holder: str) -> None:
        """A library has been loaded on all ranks."""
        holders = self[name].holders if name in self else set()
        self[name] = LoadedLibrary(described, stamp, holders | {holder})
        self._lost.pop(name, None)

    def stamp(self, name: str) -> Stamp | None:
        """The file of a library; None if it is not loaded."""
        loaded = self.get(name)
        return None if loaded is None else loaded.stamp

    def state(self, name: str) -> Record | None:
        """The state of a library, if it can be saved."""
        loaded = self.get(name)
        return None if loaded is None else loaded.state

    def states(self) -> dict[str, Record]:
        """The states that can be saved, by library."""
        return {n: loaded.state for n, loaded in self.items() if loaded.state is not None}

    def remove(self, name: str, reason: str = "") -> None:
        """A library, or its state, could not be had again; `reason`: for those that call it."""
        del self[name]
        if reason:
            self._lost[name] = reason

    def check(self, name: str, holder: str) -> None:
        """A process calls a library. Raise `Failure` (LibraryNotFoundError): its state was lost."""
        if name in self._lost:
            raise Failure("LibraryNotFoundError", self._lost[name])
        if name in self:
            self[name].holders.add(holder)  # also one that got it by `als.library`

    def lost(self, holder: str) -> None:
        """A process is gone."""
        for loaded in self.values():
            loaded.holders.discard(holder)

    # --- effects of commands ---

    def _called(self, body: Body) -> Body:
        """The declaration of the routine that a command calls; empty if it is unknown."""
        loaded = self.get(body["library"])
        return {} if loaded is None else loaded.routines.get(body["routine"], {})

    def pure(self, body: Body) -> bool:
        """Whether a command has no effects but its results and the matrices that it writes."""
        declared = self._called(body) if body["op"] == "call" else body
        return bool(declared.get("pure"))

    def changed(self, body: Body) -> list[int]:
        """The matrices that a command may change: all that it gets, where nothing is declared."""
        match body:
            case {"op": "resize", "matrices": matrices}:  # the old ranks end
                return list(matrices)
            case {"op": "run", "uses": uses} if not self.pure(body):
                return list(uses)
            case {"op": "call", "arguments": arguments}:
                written = self.written(body)
                if written is None:  # but sparse matrices, which no routine changes
                    parameters = self._called(body).get("parameters", ())
                    kept = {name for name, kind, *_ in parameters if kind == SPARSE}
                    some = {name: value for name, value in arguments.items() if name not in kept}
                    return [] if self.pure(body) else matrices_of({**body, "arguments": some})
                return written
        return []

    def written(self, body: Body) -> list[int] | None:
        """The matrices that a routine declares to write in place; None: it declares nothing."""
        writes = self._called(body).get("writes") if body["op"] == "call" else None
        if writes is None:
            return None
        given = [body["arguments"].get(name) for name in writes]
        return [value["matrix"] for value in given if isinstance(value, dict)]

    def repeatable(self, body: Body) -> bool:
        """Whether a command that was lost with a rank can be run again: no other effects."""
        command = COMMANDS[body["op"]]
        if command.rerun is Rerun.NEVER:
            return False
        return command.rerun is Rerun.ALWAYS or self.pure(body)


async def stamp_of(path: str | None) -> Stamp:
    """Identifies one version of a library's file."""
    if path is None:
        return None, ""
    try:
        return path, await in_time(asyncio.to_thread(_digest, path), STAT_LIMIT_S)
    except TimeoutError:  # a slow file system
        return path, None
    except OSError:  # the ranks report what is wrong with it
        return path, ""


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
