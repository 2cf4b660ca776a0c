"""The libraries of a gang: which file each is from, which processes use it, what state it keeps."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from alchemist_ray.runtime.commands.matrix_records import Record
from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body
from mpi_workers.wire.names import LOAD_STATE, SAVE_STATE

STAT_LIMIT_S = 2.0  # to read the file of a library

Stamp = tuple[str | None, str]  # path, hash of the content


@dataclass(slots=True)
class _Loaded:
    described: Body
    stamp: Stamp
    writes: dict[str, list[str]]
    pure: frozenset[str]
    state: Record | None  # if it can be saved; the log treats it like a matrix
    holders: set[str] = field(default_factory=set)


class LoadedLibraries:
    """The libraries of a gang, by name.

    Parameters
    ----------
    users : callable(holders)
        Descriptions of the other programs among these holders.
    """

    def __init__(self, users: Callable[[set[str]], list[str]]) -> None:
        self._users = users
        self._loaded: dict[str, _Loaded] = {}
        self._lost: dict[str, str] = {}  # libraries whose state could not be rebuilt, and why

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __getitem__(self, name: str) -> Body:
        return self._loaded[name].described

    def described(self) -> list[Body]:
        """The libraries with their signatures; file and version of a state that can be saved."""
        return [
            {**loaded.described, "path": loaded.stamp[0], "version": loaded.state.version}
            if loaded.state is not None
            else loaded.described
            for loaded in self._loaded.values()
        ]

    def in_use(self, name: str, stamp: Stamp, holder: str, *, replace: bool) -> Body | None:
        """The library if it is loaded from the same file; None: load it.

        `replace`: load it again in any case, with a new state.

        Raises
        ------
        Failure
            LibraryLoadError, if it would be replaced while another program uses it.
        """
        known = self._loaded.get(name)
        if known is None:
            return None
        if known.stamp == stamp and not replace:
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
        holders = self._loaded[name].holders if name in self._loaded else set()
        routines = described["routines"]
        writes = {r["name"]: r["writes"] for r in routines if r.get("writes") is not None}
        pure = frozenset(r["name"] for r in routines if r.get("pure"))
        state = None
        if {SAVE_STATE, LOAD_STATE} <= {r["name"] for r in routines}:
            state = Record(0, f"the state of library {name!r}", (), "bool", "", True, {})
        self._loaded[name] = _Loaded(described, stamp, writes, pure, state, holders | {holder})
        self._lost.pop(name, None)

    def writes(self, name: str, routine: str) -> Sequence[str]:
        """Parameters that a routine changes in place, as its library has declared."""
        loaded = self._loaded.get(name)
        return () if loaded is None else loaded.writes.get(routine, ())

    def result_names(self, name: str, routine: str) -> list[str]:
        """Names of the results of a routine."""
        routines = self[name]["routines"]
        found = next(fields for fields in routines if fields["name"] == routine)
        return [result for result, _ in found["results"]]

    def pure(self, name: str, routine: str) -> bool:
        """Whether a routine has no effects but its results and the matrices that it writes."""
        loaded = self._loaded.get(name)
        return loaded is not None and routine in loaded.pure

    def declares(self, name: str, routine: str) -> bool:
        """Whether it is known which matrices a routine changes."""
        loaded = self._loaded.get(name)
        return self.pure(name, routine) or (loaded is not None and routine in loaded.writes)

    def stamps(self) -> dict[str, Stamp]:
        """The file of each library."""
        return {name: loaded.stamp for name, loaded in self._loaded.items()}

    def stamp(self, name: str) -> Stamp | None:
        """The file of a library; None if it is not loaded."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.stamp

    def state(self, name: str) -> Record | None:
        """The state of a library, if it can be saved."""
        loaded = self._loaded.get(name)
        return None if loaded is None else loaded.state

    def states(self) -> dict[str, Record]:
        """The states that can be saved, by library."""
        return {n: loaded.state for n, loaded in self._loaded.items() if loaded.state is not None}

    def remove(self, name: str, reason: str = "") -> None:
        """A library, or its state, could not be had again; `reason`: for those that call it."""
        del self._loaded[name]
        if reason:
            self._lost[name] = reason

    def check(self, name: str, holder: str) -> None:
        """A process calls a library. Raise `Failure` (LibraryNotFoundError): its state was lost."""
        if name in self._lost:
            raise Failure("LibraryNotFoundError", self._lost[name])
        if name in self._loaded:
            self._loaded[name].holders.add(holder)  # also one that got it by `als.library`

    def lost(self, holder: str) -> None:
        """A process is gone."""
        for loaded in self._loaded.values():
            loaded.holders.discard(holder)


async def stamp_of(path: str | None) -> Stamp:
    """Identifies one version of a library's file."""
    if path is None:
        return None, ""
    try:
        return path, await asyncio.wait_for(asyncio.to_thread(_digest, path), STAT_LIMIT_S)
    except (OSError, TimeoutError):  # the ranks report what is wrong with it
        return path, ""


def _digest(path: str) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
