"""The libraries of a gang: which file each is from, and which processes use it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from mpi_workers.failures import Failure
from mpi_workers.wire.frames import Body

STAT_LIMIT_S = 2.0  # for the file system of a library

Stamp = tuple[str | None, int, int]  # path, time of modification in ns, size


@dataclass(slots=True)
class _Loaded:
    described: Body
    stamp: Stamp
    writes: dict[str, list[str]]
    holders: set[str] = field(default_factory=set)


class LoadedLibraries:
    """The libraries of one incarnation of a gang, by name.

    Parameters
    ----------
    users : callable(holders)
        Descriptions of the other programs among these holders.
    """

    def __init__(self, users: Callable[[set[str]], list[str]]) -> None:
        self._users = users
        self._loaded: dict[str, _Loaded] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaded)

    def __getitem__(self, name: str) -> Body:
        return self._loaded[name].described

    def described(self) -> list[Body]:
        """The libraries with their signatures."""
        return [loaded.described for loaded in self._loaded.values()]

    def in_use(self, name: str, stamp: Stamp, holder: str) -> Body | None:
        """The library if another process has loaded it from the same file; None: load it.

        Loading a library once more in the process that has loaded it replaces it.

        Raises
        ------
        Failure
            LibraryLoadError, if another program uses a library of this name from another file.
        """
        known = self._loaded.get(name)
        if known is None:
            return None
        if known.stamp == stamp and holder not in known.holders:
            known.holders.add(holder)
            return known.described
        users = self._users(known.holders - {holder})
        if known.stamp != stamp and users:
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
        writes = {r["name"]: r["writes"] for r in described["routines"] if r.get("writes")}
        self._loaded[name] = _Loaded(described, stamp, writes, holders | {holder})

    def writes(self, name: str, routine: str) -> Sequence[str]:
        """Parameters that a routine changes in place, as its library has declared."""
        loaded = self._loaded.get(name)
        return () if loaded is None else loaded.writes.get(routine, ())

    def lost(self, holder: str) -> None:
        """A process is gone."""
        for loaded in self._loaded.values():
            loaded.holders.discard(holder)


async def stamp_of(path: str | None) -> Stamp:
    """Identifies one version of a library's file."""
    if path is None:
        return None, 0, 0
    try:
        about = await asyncio.wait_for(asyncio.to_thread(os.stat, path), STAT_LIMIT_S)
    except (OSError, TimeoutError):  # the ranks report what is wrong with it
        return path, 0, 0
    return path, about.st_mtime_ns, about.st_size
