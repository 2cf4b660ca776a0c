"""The GroupManagers of this process. One is kept when its session closes: actors start slowly.

A process's first session waits for its manager (Ray starts a Python process for it); the next
ones find it warm. It ends with this process.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.runtime.driver import start_actor
from alchemist_ray.runtime.group_manager import GroupManager
from alchemist_ray.runtime.names import NAMESPACE, group_name

READY_TIMEOUT_S = 10.0


@dataclass(slots=True)
class Manager:
    """A GroupManager actor and the gangs it has had."""

    actor: ActorHandle
    gang: str
    ident: str
    home: str  # node of this process at that time: another node means another cluster
    launched: bool = False  # whether it has been asked for a gang

    @property
    def unnamed(self) -> bool:
        """Whether it can manage a gang of any session."""
        return self.ident == self.gang

    def alive(self) -> bool:
        """Whether it answers."""
        try:
            ray.get(self.actor.__ray_ready__.remote(), timeout=READY_TIMEOUT_S)
        except (ray.exceptions.RayError, TimeoutError, ValueError):
            return False
        return True

    def kill(self) -> None:
        """End it, and its gang with it."""
        if not ray.is_initialized():  # `ray.kill` would start Ray
            return
        with contextlib.suppress(Exception):
            ray.kill(self.actor)


_lock = threading.Lock()
_spare: list[Manager] = []


def take() -> Manager:
    """The spare manager if it answers, else a new one (which may still be starting)."""
    here = ray.get_runtime_context().get_node_id()
    with _lock:
        found = _spare.pop() if _spare else None
    if found is not None and found.home == here and found.alive():
        return found
    return _start(None, here)


def take_named(name: str, *, detached: bool) -> Manager:
    """A new manager for a gang with a name. Raises `ValueError` if the name is in use."""
    manager = _start(name, ray.get_runtime_context().get_node_id(), detached=detached)
    if detached:
        manager.actor.expect_launch.remote()
    return manager


def _start(name: str | None, here: str, *, detached: bool = False) -> Manager:
    ident = f"g{uuid.uuid4().hex[:10]}"
    gang = name or ident
    options: dict[str, Any] = {
        "name": group_name(gang),
        "namespace": NAMESPACE,
        "lifetime": "detached" if detached else None,
        "num_cpus": 0,
        "max_concurrency": 1000,
        # On the session's node: commands take the Unix socket, and a network cut separates neither.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    return Manager(start_actor(GroupManager, options, gang, ident), gang, ident, here)


def give_back(manager: Manager) -> None:
    """Keep a manager without a gang for the next session, or end it."""
    with _lock:
        if not _spare and manager.unnamed:
            _spare.append(manager)
            return
    manager.kill()
