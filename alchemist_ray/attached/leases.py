"""Leases: which matrices the handles of this process refer to.

The handles of one matrix share a `MatrixLease`. When the last of them is gone, its number goes
into a queue, and that is all that the finalizer does: garbage may be collected in the middle of
a command, in any thread. The queue is emptied before the next command to the gang, or by a
thread if none comes. The dispatcher frees a matrix when no process refers to it.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from alchemist_ray.errors import AlchemistError

IDLE_S = 0.2  # how long the thread leaves a release to the next command


class MatrixLease:
    """Shared by the handles of one matrix in this process.

    Attributes
    ----------
    elements : bytes or None
        The elements of a small matrix, C-ordered and little-endian, if they are known here.
    kept : bool
        Whether the matrix stays when no handle refers to it.
    shared : bool
        Whether others may change it: another process, a call for which nothing here waits, or a
        call with another matrix that has the same memory. Then only the gang knows its version.
    originals : tuple of (str, weak reference or None)
        Name and lease of the matrices of which NumPy would make this one a view; None: of a
        matrix that other programs may know.
    """

    __slots__ = (
        "__weakref__", "_changes", "_changing", "_elements", "_leases", "_matrix", "_shared",
        "holder", "kept", "originals",
    )  # fmt: skip

    def __init__(self, matrix: int, leases: MatrixLeases, *, kept: bool) -> None:
        self._matrix = matrix
        self._leases = leases
        self._elements: bytes | None = None
        self._shared = False
        self._changes = 0  # raised at the begin and the end of each command that may change it
        self._changing = 0  # such commands of this process, under way
        self.holder: object = None  # of the gang; see `GangConnection`
        self.kept = kept
        self.originals: tuple[tuple[str, weakref.ref[MatrixLease] | None], ...] = ()

    @property
    def part_of(self) -> str:
        """Name of one of the originals to which a handle still refers, or an empty string."""
        alive = (name for name, lease in self.originals if lease is None or lease() is not None)
        return next(alive, "")

    @property
    def shared(self) -> bool:
        return self._shared or self.kept or self._leases.shared

    def share(self) -> None:
        """Others may change it from now on."""
        with self._leases.changes:
            self._shared, self._elements = True, None

    def change(self, under_way: int) -> None:
        """A command of this process that may change it begins (1) or has ended (-1)."""
        with self._leases.changes:
            self._elements = None
            self._changes += 1
            self._changing += under_way

    @property
    def version(self) -> int | None:
        """A number that each change raises; None if only the gang knows, or it changes now."""
        with self._leases.changes:
            return None if self._changing or self.shared else self._changes

    @property
    def elements(self) -> bytes | None:
        return None if self.shared else self._elements

    def remember(self, elements: bytes | None, version: int | None) -> None:
        """These are the elements of a version."""
        with self._leases.changes:
            if version == self._changes and not (self._changing or self.shared):
                self._elements = elements

    def keep(self) -> None:
        """Have the matrix stay until it is freed by name, or its gang ends."""
        self.share()  # other processes may refer to it from now on
        if not self.kept:
            self.kept = True
            self._leases.pin(self._matrix)

    def __del__(self) -> None:
        self._leases.over(self._matrix)


class ResultLease:
    """Of a handle that a GroupManager made for its caller, who takes a `MatrixLease` instead."""

    kept = False
    version: int | None = None
    elements: bytes | None = None
    part_of = ""

    def remember(self, elements: bytes | None, version: int | None) -> None:
        """Not here: the caller takes the handle."""

    def keep(self) -> None:
        """The dispatcher keeps the matrix as long as the ObjectRef of the call."""


class MatrixLeases:
    """The leases of this process on one gang. Thread-safe.

    Parameters
    ----------
    lock : RLock
        Of the connection: it sends nothing while another thread connects it again.
    tell : callable(op, matrices)
        Sends ``"release"`` or ``"pin"`` for some matrices, and does not wait for an answer.
    shared : bool
        Whether other programs may change the matrices.
    """

    def __init__(
        self, lock: threading.RLock, tell: Callable[[str, list[int]], None], *, shared: bool = False
    ) -> None:
        self._lock = lock
        self._tell = tell
        self.shared = shared
        self._table = threading.Lock()  # guards `_live`; never held while something is sent
        self.changes = threading.Lock()  # guards what leases know of elements and versions
        self._live: weakref.WeakValueDictionary[int, MatrixLease] = weakref.WeakValueDictionary()
        self._over: deque[int] = deque()
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._watched = False
        self._abandoned = False

    def lease(self, matrix: int, *, kept: bool = False) -> MatrixLease:
        """The lease on a matrix: that of other handles of this process, if there are any."""
        with self._table:
            if not self._watched:
                self._watched = True
                threading.Thread(target=self._watch, name="alchemist-leases", daemon=True).start()
            found = self._live.get(matrix)
            if found is None:
                found = self._live[matrix] = MatrixLease(matrix, self, kept=kept)
            found.kept = found.kept or kept
            return found

    @contextlib.contextmanager
    def changing(self, matrices: Iterable[int]) -> Iterator[None]:
        """While a command is under way that may change these matrices."""
        with self._table:
            changed = [lease for m in matrices if (lease := self._live.get(m)) is not None]
        for lease in changed:
            lease.change(1)
        try:
            yield
        except BaseException:
            for lease in changed:
                lease.share()  # only the gang knows whether ranks still change it, or left it so
            raise
        finally:
            for lease in changed:
                lease.change(-1)

    def share(self, matrices: Iterable[int]) -> None:
        """Others may change these matrices from now on."""
        with self._table:
            shared = [lease for m in matrices if (lease := self._live.get(m)) is not None]
        for lease in shared:
            lease.share()

    def over(self, matrix: int) -> None:
        """Called by finalizers: takes no lock that another thread could hold."""
        if self._abandoned:
            return
        self._over.append(matrix)
        self._news.put(True)  # SimpleQueue.put is reentrant, for finalizers

    def pin(self, matrix: int) -> None:
        """Have a matrix stay when no handle refers to it."""
        if not self._abandoned:
            with contextlib.suppress(AlchemistError):  # the gang is gone, and the matrix with it
                self._tell("pin", [matrix])

    def sweep(self) -> None:
        """Tell the gang which matrices this process no longer refers to."""
        if not self._over:
            return
        with self._lock:
            found = []
            while self._over:
                matrix = self._over.popleft()
                with self._table:
                    if matrix not in self._live:  # another handle came since
                        found.append(matrix)
            if found:
                with contextlib.suppress(AlchemistError):  # the gang is gone, and they with it
                    self._tell("release", found)

    def live(self) -> list[int]:
        """The matrices to which handles of this process refer."""
        with self._table:
            return list(self._live)

    def close(self) -> None:
        """The connection is closed."""
        self._abandoned = True
        self._news.put(False)

    def abandon(self) -> None:
        """In a forked child: the leases are the parent's, and the child ends none of them."""
        self._abandoned = True

    def _watch(self) -> None:
        while self._news.get():
            time.sleep(IDLE_S)
            with contextlib.suppress(queue.Empty):
                while self._news.get_nowait():
                    pass
                return
            self.sweep()
