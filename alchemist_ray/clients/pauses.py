"""Ray's workers live longer than gangs: what they have mapped is let go of when it is not used.

A chunk that is fetched maps the ranks' memory, and the next one finds it mapped. But a mapping
keeps its pages, also those of a gang that is gone.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from alchemist_ray.gang.connection import gang_of

if TYPE_CHECKING:
    from alchemist_ray.arrays.handle import Handle
    from alchemist_ray.gang.connection import GangConnection

IDLE_S = 1.0

_lock = threading.Lock()
_used: dict[GangConnection, float] = {}  # when last


def fetch(handle: Handle, rows: slice, cols: slice) -> NDArray[Any]:
    """A part of a matrix. But for the gang's owner, none of its memory stays mapped for long."""
    client = gang_of(handle)
    try:
        return client.fetch(handle, rows, cols)
    finally:
        if not client._owner:
            _note(client)


def _note(client: GangConnection) -> None:
    with _lock:
        if not _used:
            threading.Thread(target=_watch, name="alchemist-idle", daemon=True).start()
        _used[client] = time.monotonic()


def _watch() -> None:
    while True:
        time.sleep(IDLE_S / 4)
        with _lock:
            for client, when in list(_used.items()):
                if time.monotonic() - when > IDLE_S:
                    client.ranks.trim()
                    del _used[client]
            if not _used:
                return
