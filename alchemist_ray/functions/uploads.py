"""The user's end of uploads: files of user functions, sent to a gang's nodes and removed.

Ray carries the files between this process, the GroupManager and the nodes' agents
(`node_files`); the gang's own sockets only carry their names.
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
from ray.exceptions import RayActorError

from alchemist_ray.errors import AlchemistError, TransferError
from alchemist_ray.functions.node_files import carried
from alchemist_ray.functions.packing import new_name
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.runtime.ray_calls import ask, ask_manager
from alchemist_ray.transfer.object_location import agent_of

KEPT = 64  # functions
KEPT_BYTES = 64 << 20  # 64 MiB of them


@dataclass(slots=True)
class _Kept:
    name: str
    nbytes: int
    users: int = 0


class Uploads:
    """This process's files on a gang. Thread-safe.

    Functions are kept for the next call, by their content; arguments and results are
    there for one call.
    """

    def __init__(self, connection: GangConnection) -> None:
        self._connection = connection
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
        epoch = self._connection.address.epoch
        ask_manager(self._connection.manager.stage.remote(epoch, name, carried(content)))

    def collect(self, name: str) -> list[NDArray[np.uint8]]:
        """The parts of a result that rank 0 has left on its node."""
        agent = agent_of(self._connection.address.workers[0]["node_id"])
        collecting = agent.parts.options(max_task_retries=-1)
        try:
            found: list[NDArray[np.uint8]] = ask(
                collecting.remote(self._connection.address.incarnation, name)
            )
        except RayActorError as error:
            raise TransferError(
                f"the agent on rank 0's node has ended, so the result was not read: {error}"
            ) from error
        return found

    def remove(self, names: list[str]) -> None:
        """Remove files; if the gang is gone, so are they."""
        with contextlib.suppress(AlchemistError):
            self._connection.request({"op": "remove_files", "names": names})
