"""Ray's workers live longer than gangs: what they have mapped is let go of when it is not used.

A chunk that is fetched maps the ranks' memory, and the next one finds it mapped. But a mapping
keeps its pages, also those of a gang that is gone.
"""

from __future__ import annotations

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
_used: dict[GangConnection, float] = {}  # when last


def fetch(handle: MatrixRef, rows: slice, cols: slice) -> NDArray[Any]:
    """A part of a matrix. But for the gang's owner, none of its memory stays mapped for long."""
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
                    connection.ranks.trim()
                    del _used[connection]
            if not _used:
                return
