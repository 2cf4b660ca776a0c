"""The libraries of a rank: a library is loaded on all ranks of the gang, or on none."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from mpi4py import MPI

from mpi_workers.failures import Failure, Interrupted
from mpi_workers.rank.gang import Gang
from mpi_workers.wire.frames import Body


class Library(Protocol):
    """A loaded library, as `ali` provides it."""

    def describe(self) -> Body:
        """Name, documentation and signatures, as a map."""

    def call(self, gang: Gang, routine: str, arguments: Mapping[str, Any]) -> Sequence[Any]:
        """Run a routine; one value per declared result."""

    def close(self) -> None:
        """Release the library's resources."""


Loader = Callable[[str, str | None], Library]


class Libraries:
    """The libraries of one rank, by name.

    Parameters
    ----------
    loader : Loader
        Loads a library on this rank.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._by_name: dict[str, Library] = {}
        self._replaced: tuple[str, Library | None] | None = None  # by the last load

    def __getitem__(self, name: str) -> Library:
        library = self._by_name.get(name)
        if library is None:
            raise Failure("LibraryNotFoundError", f"library {name!r} is not loaded")
        return library

    def load(self, gang: Gang, name: str, path: str | None) -> Library:
        """Load a library, and use it when it has loaded on every rank. Collective.

        The library that it replaces is kept until `settle`.

        Raises
        ------
        BaseException
            The loader's error, on the ranks on which it failed.
        Interrupted
            On the other ranks.
        """
        library, error = None, None
        try:
            library = self._loader(name, path)
        except BaseException as caught:  # a module may call sys.exit
            error = caught
        try:
            everywhere = gang.comm.allreduce(library is not None, MPI.LAND)
        except BaseException:
            _close(library)
            raise
        if error is not None:
            raise error
        if library is None or not everywhere:
            _close(library)
            raise Interrupted
        self._replaced = (name, self._by_name.get(name))
        self._by_name[name] = library
        return library

    def settle(self, *, failed: bool) -> None:
        """Close the library that the last load has replaced.

        `failed`: the load was cancelled when some ranks had finished it. They go back to the
        library that was replaced.
        """
        if self._replaced is None:
            return
        (name, old), self._replaced = self._replaced, None
        if not failed:
            _close(old)
            return
        _close(self._by_name.pop(name))
        if old is not None:
            self._by_name[name] = old

    def close(self) -> None:
        """Close all libraries; their errors are ignored."""
        self.settle(failed=False)
        for library in self._by_name.values():
            with contextlib.suppress(Exception):
                library.close()


def _close(library: Library | None) -> None:
    """Close a library that is not used any more; an error goes to the rank's output."""
    if library is not None:
        try:
            library.close()
        except Exception:
            traceback.print_exc()
