"""Fetches in Ray workers, which unmap the ranks' memory when they have not used it for a second.

A fetch maps the ranks' memory, and the next fetch reuses the mapping. But Ray's workers outlive
gangs, and a mapping keeps its pages allocated, even those of a gang that has ended.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from numpy.typing import NDArray

from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.matrix_ref import MatrixRef
from alchemist_ray.gang.registry import gang_of
from alchemist_ray.transfer import fetching

IDLE_S = 1.0

_lock = threading.Lock()
_used: dict[GangConnection, float] = {}  # time of the last use


def fetch(handle: MatrixRef, rows: slice | None = None, cols: slice | None = None) -> NDArray[Any]:
    """Fetch a part of a matrix. Only the gang's owner keeps its memory mapped when idle."""
    connection = gang_of(handle)
    try:
        return fetching.fetch(connection, handle, rows, cols)
    finally:
        if not connection.owner:
            _note(connection)


def _note(connection: GangConnection) -> None:
    with _lock:
        if not _used:
            threading.Thread(target=_watch, name="alchemist-idle", daemon=True).start()
        _used[connection] = time.monotonic()


def _watch() -> None:
    while True:
        time.sleep(IDLE_S / 4)
        with _lock:
            for connection, when in list(_used.items()):
                if time.monotonic() - when > IDLE_S:
                    connection.nodes.trim()
                    del _used[connection]
            if not _used:
                return


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _used.clear()  # no thread watches it here


os.register_at_fork(after_in_child=_after_fork_in_child)
