"""The user's end of uploads: files of user functions, sent to a gang's nodes and removed.

The gang's own sockets only carry their names. The files travel through Ray
(`runtime.commands.ray_uploads`), or through a gateway.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.errors import AlchemistError
from alchemist_ray.functions.packing import new_name
from alchemist_ray.gang.connection import GangConnection

KEPT = 64  # functions
KEPT_BYTES = 64 << 20  # 64 MiB of them


@dataclass(slots=True)
class _Kept:
    name: str
    nbytes: int
    users: int = 0


class Uploads:
    """This process's files on a gang. Thread-safe. The base of the ways that they travel.

    Functions are kept for the next call, by their content; arguments and results are
    there for one call.
    """

    def __init__(self, connection: GangConnection) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()

    @contextlib.contextmanager
    def code(self, content: bytes) -> Iterator[str]:
        """Have a function's or a script's file on every node; its name."""
        key = hashlib.sha256(content).digest()
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                name = new_name("code")
                self.put(name, content)
                kept = self._kept[key] = _Kept(name, len(content))
            self._kept.move_to_end(key)
            kept.users += 1
        try:
            yield kept.name
        finally:
            with self._lock:
                kept.users -= 1
                old = self._surplus()
            if old:
                self.remove(old)

    def _surplus(self) -> list[str]:
        """Forget the functions that were called longest ago, where there are too many."""
        names = []
        nbytes = sum(kept.nbytes for kept in self._kept.values())
        for key, kept in list(self._kept.items()):
            if len(self._kept) <= KEPT and nbytes <= KEPT_BYTES:
                break
            if not kept.users:
                del self._kept[key]
                nbytes -= kept.nbytes
                names.append(kept.name)
        return names

    def put(self, name: str, content: bytes) -> None:
        """Put a file into the gang's folder on every node."""
        raise NotImplementedError

    def collect(self, name: str) -> list[NDArray[np.uint8]]:
        """The parts of a result that rank 0 has left on its node."""
        raise NotImplementedError

    def remove(self, names: list[str]) -> None:
        """Remove files; if the gang is gone, so are they."""
        with contextlib.suppress(AlchemistError):
            self.connection.request({"op": "remove_files", "names": names})
