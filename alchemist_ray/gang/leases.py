"""Leases of temporary matrices: noted where garbage is collected, freed elsewhere.

A result of an expression has a `MatrixLease`. When the last handle that shares it is gone, its
number goes into a queue, and that is all that the finalizer does: garbage may be collected in the
middle of a command, in any thread. The queue is emptied before the next command to the gang, or
by a thread if none comes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from alchemist_ray.errors import AlchemistError

IDLE_S = 0.2  # for so long a thread leaves it to the next command


class MatrixLease:
    """Held by the handles of one temporary matrix."""

    __slots__ = ("_leases", "_matrix")

    def __init__(self, matrix: int, leases: MatrixLeases) -> None:
        self._matrix = matrix
        self._leases: MatrixLeases | None = leases

    @property
    def kept(self) -> bool:
        """Whether the matrix is not temporary any more."""
        return self._leases is None

    def keep(self) -> None:
        """The matrix is not temporary any more."""
        self._leases = None

    def __del__(self) -> None:
        if self._leases is not None:
            self._leases.over(self._matrix)


class MatrixLeases:
    """The temporaries of one gang that this process has made. Thread-safe.

    Parameters
    ----------
    free : callable(matrices, wait)
        Tells the gang to free matrices, and waits until it has if `wait`.
    """

    def __init__(self, free: Callable[[list[int], bool], None]) -> None:
        self._free = free
        self._over: deque[int] = deque()
        self._news: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: the end
        self._sweeping = threading.Lock()
        self._watched = False
        self._abandoned = False

    def lease(self, matrix: int) -> MatrixLease:
        """A lease on a new matrix."""
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._watch, name="temporaries", daemon=True).start()
        return MatrixLease(matrix, self)

    def over(self, matrix: int) -> None:
        """Called by finalizers: takes no lock that another thread could hold."""
        if self._abandoned:
            return
        self._over.append(matrix)
        self._news.put(True)  # which is made for this: it is reentrant

    def sweep(self, *, wait: bool) -> None:
        """Have the gang free what is over, and wait until it has if `wait`."""
        if not self._over and not wait:
            return
        with self._sweeping:
            found = []
            while self._over:
                found.append(self._over.popleft())
            if found:
                with contextlib.suppress(AlchemistError):  # it is gone, and they with it
                    self._free(found, wait)

    def close(self) -> None:
        """There is no gang any more."""
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
            self.sweep(wait=True)
