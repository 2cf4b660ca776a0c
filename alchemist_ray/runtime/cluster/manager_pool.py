"""The GroupManagers of this process.

Its private gangs share one: Ray starts a Python process for each actor, which takes 0.5 s of CPU
and 140 MB. The first session waits for it; further ones find it, also while others are open. It
ends with this process, or when it has had no gang for a while. The gangs of different users (of a
gateway) have different ones, because a GroupManager's end is the end of its gangs.

It is not shared with other jobs: Ray sends an actor's output to the terminal of the job that
started it, and starts it with that job's import path.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.runtime.cluster.names import NAMESPACE, group_name
from alchemist_ray.runtime.cluster.ray_calls import GangHandle
from alchemist_ray.runtime.cluster.ray_connection import connection_id, while_connected
from alchemist_ray.runtime.driver import start_actor
from alchemist_ray.runtime.group_manager import GroupManager
from alchemist_ray.runtime.launch.gang_request import GangRequest

READY_TIMEOUT_S = 30.0
UNUSED_KEPT_S = 300.0


@dataclass(slots=True, eq=False)
class _Shared:
    """A GroupManager for the private gangs of an owner."""

    owner: str
    ident: str  # begins the ids of its gangs
    actor: ActorHandle
    connection: tuple[str, str]
    gangs: int = 0
    unused: threading.Timer | None = None  # ends it
    numbers: Iterator[int] = field(default_factory=itertools.count)


@dataclass(slots=True, eq=False)
class Manager:
    """A gang's place in a GroupManager, which it may share."""

    actor: ActorHandle
    gang: str
    connection: tuple[str, str]  # of this process to Ray at that time
    shared: _Shared | None = None
    launched: bool = False  # whether it has been asked for a gang
    ended: bool = False

    @property
    def handle(self) -> GangHandle:
        """For calls of the gang's methods."""
        return GangHandle(self.actor, self.gang)

    def launch(self, request: GangRequest) -> Any:
        """Ask for the gang; an ObjectRef of its address."""
        self.launched = True
        return self.handle.launch.remote(request)

    def alive(self) -> bool:
        """Whether it can start a gang."""
        return not self.ended and self.connection == connection_id() and self.answers()

    def answers(self, limit_s: float = READY_TIMEOUT_S) -> bool:
        """Whether its process answers within `limit_s` seconds."""
        return _answers(self.actor, limit_s)

    def kill(self) -> None:
        """End the gang at once, and the GroupManager if it has no other gang."""
        _managers.end(self, reusable=False)


def _answers(actor: ActorHandle, limit_s: float = READY_TIMEOUT_S) -> bool:
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=limit_s)
    except (ray.exceptions.RayError, TimeoutError, ValueError):
        return False
    return True


class _Managers:
    """The GroupManagers that take private gangs, by owner. Safe for use by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, _Shared] = {}

    def take(self, owner: str) -> Manager:
        """A place in the owner's GroupManager; a new one may still be starting."""
        here = connection_id()
        while True:
            with self._lock:
                shared = self._open.get(owner)
                new = shared is None or shared.connection != here
                if shared is None or new:
                    shared = self._open[owner] = _start_shared(owner, here)
                shared.gangs += 1
                if shared.unused is not None:
                    shared.unused.cancel()
                    shared.unused = None
                gang = f"{shared.ident}{next(shared.numbers):04x}"
            manager = Manager(shared.actor, gang, here, shared)
            try:
                if new or _answers(shared.actor):
                    return manager
            except BaseException:  # Ctrl-C: its place is not left occupied
                self.end(manager, reusable=True)
                raise
            with self._lock:
                self._close(shared)
            manager.kill()

    def end(self, manager: Manager, *, reusable: bool) -> None:
        """A gang is not needed any more; a GroupManager that is reusable is kept for a while."""
        with self._lock:
            if manager.ended:
                return
            manager.ended = True
            shared = manager.shared
            others = False
            if shared is not None:
                shared.gangs -= 1
                others = shared.gangs > 0
                kept = reusable and self._open.get(shared.owner) is shared
                if not others and kept:
                    shared.unused = threading.Timer(UNUSED_KEPT_S, self._end_unused, [shared])
                    shared.unused.daemon = True
                    shared.unused.start()
                    others = True
                elif not others:
                    self._close(shared)
        with while_connected() as connected, contextlib.suppress(Exception):
            if connected:  # else `ray.kill` would start Ray
                if others:
                    manager.actor.forget.remote(manager.gang)
                else:
                    ray.kill(manager.actor)

    def _close(self, shared: _Shared) -> None:
        """Give it no more gangs."""
        if self._open.get(shared.owner) is shared:
            del self._open[shared.owner]

    def _end_unused(self, shared: _Shared) -> None:
        with self._lock:
            if shared.gangs or self._open.get(shared.owner) is not shared:
                return
            self._close(shared)
        with while_connected() as connected, contextlib.suppress(Exception):
            if connected:
                ray.kill(shared.actor)


_managers = _Managers()


def take(owner: str) -> Manager:
    """A place for a private gang in the GroupManager of its owner; see `GangRequest`."""
    return _managers.take(owner)


def give_back(manager: Manager) -> None:
    """The gang has ended: keep its GroupManager for further sessions."""
    _managers.end(manager, reusable=True)


def take_named(name: str, *, detached: bool) -> Manager:
    """A GroupManager for a gang with a name. Raises `ValueError` if the name is in use."""
    actor = _start(name, f"g{uuid.uuid4().hex[:10]}", detached=detached)
    manager = Manager(actor, name, connection_id())
    if detached:
        manager.handle.expect_launch.remote()
    return manager


def _start_shared(owner: str, here: tuple[str, str]) -> _Shared:
    ident = f"g{uuid.uuid4().hex[:8]}"
    return _Shared(owner, ident, _start(ident), here)


def _start(name: str, ident: str = "", *, detached: bool = False) -> ActorHandle:
    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "name": group_name(name),
        "namespace": NAMESPACE,
        "lifetime": "detached" if detached else None,
        "num_cpus": 0,
        "max_concurrency": 10_000,
        # On the session's node: commands take the Unix socket, and a network cut separates neither.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    return start_actor(GroupManager, options, ident)
