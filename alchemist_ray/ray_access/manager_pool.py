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

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from alchemist_ray.cluster.actors import GangHandle, group_name
from alchemist_ray.cluster.driver import start_actor
from alchemist_ray.cluster.ray_connection import connection_id, while_connected
from alchemist_ray.runtime.group_manager import GroupManager

READY_TIMEOUT_S = 30.0
UNUSED_KEPT_S = 300.0


@dataclass(slots=True, eq=False)
class _PooledManager:
    """A GroupManager for the private gangs of an owner."""

    owner: str
    ident: str  # begins the ids of its gangs
    actor: ActorHandle
    connection: tuple[str, str]
    gangs: int = 0
    unused: threading.Timer | None = None  # ends it
    numbers: Iterator[int] = field(default_factory=itertools.count)


_lock = threading.Lock()
_open: dict[str, _PooledManager] = {}  # GroupManagers that take private gangs, by owner


@dataclass(eq=False)
class OwnGang(GangHandle):
    """A gang of this process, in a GroupManager that it may share with others."""

    connection: tuple[str, str]  # of this process to Ray at that time
    shared: _PooledManager | None = None
    ended: bool = False

    def alive(self, limit_s: float = READY_TIMEOUT_S) -> bool:
        """Whether it can start a gang: its process answers within `limit_s` seconds."""
        if self.ended or self.connection != connection_id():
            return False
        try:
            ray.get(self.actor.__ray_ready__.remote(), timeout=limit_s)
        except (ray.exceptions.RayError, TimeoutError, ValueError):
            return False
        return True

    def give_up(self, *, reusable: bool = False) -> None:
        """End the gang at once, and the GroupManager if it has no other gang.

        `reusable`: the gang has ended, and its GroupManager is kept for further sessions.
        """
        with _lock:
            if self.ended:
                return
            self.ended = True
            shared = self.shared
            kept = False
            if shared is not None:
                shared.gangs -= 1
                kept = shared.gangs > 0 or (reusable and _open.get(shared.owner) is shared)
                if not kept:
                    _close(shared)
                elif not shared.gangs:
                    shared.unused = threading.Timer(UNUSED_KEPT_S, _end_unused, [shared])
                    shared.unused.daemon = True
                    shared.unused.start()
        if kept:
            with while_connected() as connected, contextlib.suppress(Exception):
                if connected:
                    self.actor.forget.remote(self.gang)
        else:
            _kill(self.actor)


def _close(shared: _PooledManager) -> None:
    """Give it no more gangs. The caller holds the lock."""
    if _open.get(shared.owner) is shared:
        del _open[shared.owner]


def _end_unused(shared: _PooledManager) -> None:
    with _lock:
        if shared.gangs or _open.get(shared.owner) is not shared:
            return
        _close(shared)
    _kill(shared.actor)


def _kill(actor: ActorHandle) -> None:
    with while_connected() as connected, contextlib.suppress(Exception):
        if connected:  # else `ray.kill` would start Ray
            ray.kill(actor)


def take(owner: str) -> OwnGang:
    """A place for a private gang in the GroupManager of its owner; see `GangRequest`.

    A new GroupManager may still be starting.
    """
    here = connection_id()
    while True:
        with _lock:
            shared = _open.get(owner)
            new = shared is None or shared.connection != here
            if shared is None or new:
                ident = f"g{uuid.uuid4().hex[:8]}"
                shared = _open[owner] = _PooledManager(owner, ident, _start(ident), here)
            shared.gangs += 1
            if shared.unused is not None:
                shared.unused.cancel()
                shared.unused = None
            gang = f"{shared.ident}{next(shared.numbers):04x}"
        own = OwnGang(shared.actor, gang, here, shared)
        try:
            if new or own.alive():
                return own
        except BaseException:  # Ctrl-C: its place is not left occupied
            own.give_up(reusable=True)
            raise
        with _lock:
            _close(shared)
        own.give_up()


def take_named(name: str, *, detached: bool) -> OwnGang:
    """A GroupManager for a gang with a name. Raises `ValueError` if the name is in use."""
    actor = _start(name, f"g{uuid.uuid4().hex[:10]}", detached=detached)
    own = OwnGang(actor, name, connection_id())
    if detached:
        own.expect_launch()
    return own


def _start(name: str, ident: str = "", *, detached: bool = False) -> ActorHandle:
    here = ray.get_runtime_context().get_node_id()
    return start_actor(
        GroupManager,
        ident,
        name=group_name(name),
        lifetime="detached" if detached else None,
        max_concurrency=10_000,
        # On the session's node: commands take the Unix socket, and a network cut separates neither.
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    )
