"""The GroupManagers of this process, and one that is kept ready: actors start slowly.

A process's first session waits for its manager (Ray starts a Python process for it). A user's
program then starts a spare one in the background, so that the next session finds it ready, also
while the first is open. Tasks and actors rarely have a second session: they keep the manager of
a session that closes, and start none beforehand.

The spare belongs to this process and ends with it, or when no session takes it. It is not shared
with other jobs: Ray sends an actor's output to the terminal of the job that started it, and
starts it with that job's import path.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.runtime.driver import start_actor
from alchemist_ray.runtime.group_manager import GroupManager
from alchemist_ray.runtime.names import NAMESPACE, group_name

READY_TIMEOUT_S = 10.0
SPARE_KEPT_S = 300.0  # each takes 140 MB
MOST_SPARES = 2  # one was started beforehand, one comes back from a session that closes


@dataclass(slots=True, eq=False)
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


class _Spares:
    """Managers without a gang. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timers: dict[Manager, threading.Timer] = {}  # the newest is last

    def take(self) -> Manager | None:
        """The manager that was kept last; it may still be starting."""
        with self._lock:
            if not self._timers:
                return None
            manager, timer = self._timers.popitem()
        timer.cancel()
        return manager

    def keep(self, make: Callable[[], Manager], limit: int) -> bool:
        """Keep another manager, if fewer than `limit` are kept; whether that is so."""
        with self._lock:
            if len(self._timers) >= limit:
                return False
            manager = make()
            timer = threading.Timer(SPARE_KEPT_S, self._end, [manager])
            timer.daemon = True
            timer.start()
            self._timers[manager] = timer
        return True

    def _end(self, unused: Manager) -> None:
        with self._lock:
            if self._timers.pop(unused, None) is None:
                return
        unused.kill()


_spares = _Spares()


def take() -> Manager:
    """A spare manager that answers, else a new one (which may still be starting)."""
    here = ray.get_runtime_context().get_node_id()
    while (found := _spares.take()) is not None:
        if found.home == here and found.alive():
            return found
    return _start(None, here)


def prepare() -> None:
    """Start the manager of the next session in the background, in a user's program."""
    context = ray.get_runtime_context()
    if context.worker.mode == ray.SCRIPT_MODE:
        _spares.keep(lambda: _start(None, context.get_node_id()), 1)


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
    if not (manager.unnamed and _spares.keep(lambda: manager, MOST_SPARES)):
        manager.kill()
