"""RayChannel: commands to a gang as calls of its GroupManager actor."""

from __future__ import annotations

import threading
from typing import Any

import ray

from alchemist_ray.errors import AlchemistError
from alchemist_ray.gang.control_channel import OnProgress
from alchemist_ray.runtime.gang_handle import GangHandle
from alchemist_ray.runtime.ray_calls import ask_manager
from mpi_workers.wire.frames import Body


class RayChannel:
    """A `ControlChannel` for a process that no socket of the dispatcher reaches. Thread-safe."""

    def __init__(self, manager: GangHandle, epoch: int, process: str) -> None:
        self._manager = manager
        self._epoch = epoch
        self._process = process
        self._lock = threading.Lock()
        self._under_way: set[Any] = set()

    def request(self, body: Body, on_progress: OnProgress | None = None) -> Body:
        ref: Any = self._manager.command.remote(self._epoch, body, self._process)
        with self._lock:
            self._under_way.add(ref)
        try:
            result: Body = ask_manager(ref)
        except BaseException as error:
            if not isinstance(error, AlchemistError):  # Ctrl-C, or another signal's handler raised
                ray.cancel(ref)
            raise
        finally:
            with self._lock:
                self._under_way.discard(ref)
        return result

    def cancel(self) -> None:
        with self._lock:
            refs = list(self._under_way)
        for ref in refs:
            ray.cancel(ref)

    def tell(self, body: Body) -> None:
        self._manager.command.remote(self._epoch, body, self._process)

    def close(self) -> None:
        """Nothing to close."""
