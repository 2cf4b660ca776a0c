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
from collections.abc import Callable

from alchemist_ray.errors import AlchemistError

IDLE_S = 0.2  # how long the thread leaves a release to the next command


class MatrixLease:
    """Shared by the handles of one matrix in this process.

    Attributes
    ----------
    elements : bytes or None
        The elements of a small matrix, C-ordered and little-endian, if they are known here and
        no other process or library can have changed them: never on a gang that is shared.
    kept : bool
        Whether the matrix stays when no handle refers to it.
    originals : tuple of (str, weak reference or None)
        Name and lease of the matrices of which NumPy would make this one a view; None: of a
        matrix that other programs may know.
    """

    __slots__ = ("__weakref__", "_elements", "_leases", "_matrix", "kept", "originals")

    def __init__(self, matrix: int, leases: MatrixLeases, *, kept: bool) -> None:
        self._matrix = matrix
        self._leases = leases
        self._elements: bytes | None = None
        self.kept = kept
        self.originals: tuple[tuple[str, weakref.ref[MatrixLease] | None], ...] = ()

    @property
    def part_of(self) -> str:
        """Name of one of the originals to which a handle still refers, or an empty string."""
        alive = (name for name, lease in self.originals if lease is None or lease() is not None)
        return next(alive, "")

    @property
    def elements(self) -> bytes | None:
        return self._elements

    @elements.setter
    def elements(self, value: bytes | None) -> None:
        self._elements = None if self.kept or self._leases.shared else value

    def keep(self) -> None:
        """Have the matrix stay until it is freed by name, or its gang ends."""
        self._elements = None  # other processes may refer to it from now on
        if not self.kept:
            self.kept = True
            self._leases.pin(self._matrix)

    def __del__(self) -> None:
        self._leases.over(self._matrix)


class ResultLease:
    """Of a handle that a GroupManager made for its caller, who takes a `MatrixLease` instead."""

    kept = False
    elements: bytes | None = None
    part_of = ""

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
