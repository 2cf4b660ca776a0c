"""The gangs of a session in the Ray cluster of its process: a `SessionGangs`."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from alchemist_ray.attached import registry
from alchemist_ray.attached.address import GangAddress, this_process
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.control_channel import MANAGER_GONE
from alchemist_ray.attached.info import GangInfo
from alchemist_ray.attached.options import AttachOptions, GangOptions, Workers, least_of
from alchemist_ray.background import in_thread
from alchemist_ray.cluster.actors import GangHandle, ask_manager, other_versions
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.cluster.ray_cluster import (
    check,
    join_named,
    join_ray,
    shared_cpus,
    warn_of_shared_cores,
)
from alchemist_ray.errors import AlchemistError, GroupFailedError, LaunchError, SessionError
from alchemist_ray.ray_access import catalogue, manager_pool
from alchemist_ray.ray_access.catalogue import connect, connect_to_gang_of, start_named
from alchemist_ray.ray_access.manager_pool import OwnGang
from alchemist_ray.runtime.launch.gang_request import GangRequest, check_in_cluster
from alchemist_ray.session.owner import MANAGER_TIMEOUT_S
from alchemist_ray.version import __version__
from mpi_workers import build_native
from mpi_workers.deadlines import GANG_END_S, KILL_TIMEOUT_S
from mpi_workers.wire import sockets

__all__ = ["RayGangs", "attach", "connect_to_gang_of", "list_gangs", "open_gangs", "stop_gang"]

IDLE = "main_loop"  # the function of Ray in which the main thread of a worker waits for a task
TASK_INTERVAL_S = 1.0  # between two looks whether a task has ended
HANGS_S = 30.0  # a GroupManager starts in a few seconds

log = logging.getLogger(__name__)
_collecting = threading.Lock()  # held while a thread waits for the end of this process's task


class RayGangs:
    """See the module, and `session.owner.SessionGangs`.

    Parameters
    ----------
    session : str
        Id of the session.
    options : GangOptions or AttachOptions
    owner : str
        Who asks for gangs, if not this process.
    """

    def __init__(self, session: str, options: GangOptions | AttachOptions, owner: str = "") -> None:
        self._session = session
        self._shown = options
        # A session that is attached starts no gang.
        self._options = options if isinstance(options, GangOptions) else GangOptions()
        self._owner = owner or this_process()
        self._own: OwnGang | None = None
        self._last: GangConnection | None = None
        self._started_ray = False
        self._driver: ActorHandle | None = None
        self.detached = self._options.detached
        self.start_timeout_s = self._options.start_timeout_s

    def join(self, num_workers: int | None) -> None:
        """Join Ray, or start it; have the actors ready that a gang needs."""
        self._started_ray = join_ray(num_workers, limit_s=self.start_timeout_s)
        if self.detached and self._started_ray:
            log.warning(
                "this process has started Ray itself: the detached gang ends with it. Run "
                "`ray start --head` first to keep gangs"
            )
        self._find_actors().prewarm.remote()
        context = ray.get_runtime_context()
        # Ray warns of the question for an actor in other processes.
        in_task = context.worker.mode == ray.WORKER_MODE and context.get_actor_id() is None
        if in_task and _collecting.acquire(blocking=False):  # else a thread waits already
            in_thread(_collect_after_task)
        if others := other_versions():
            log.warning(
                "alchemist-on-ray %s has gangs in this Ray cluster too, and this program has %s: "
                "their gangs share the CPUs and cannot be attached to from here (docs/upgrades.md)",
                " and ".join(others), __version__,
            )  # fmt: skip
        _tell_of_missing_parts()

    def _find_actors(self) -> ActorHandle:
        self._driver = find_driver()  # without a reference, one that is not detached ends
        if self._options.name is None:
            self._own = manager_pool.take(self._owner)
        return self._driver

    def move(self, address: str, port: int, *, in_use: bool) -> None:
        wanted = f"{address}:{port}"
        current = ray.get_runtime_context().gcs_address
        if current == wanted or (
            wanted.startswith("127.") and current.rpartition(":")[2] == str(port)
        ):
            return
        if not self._started_ray or in_use:
            raise SessionError(
                f"this process is in the Ray cluster at {current}, not at {wanted}: call "
                f"ray.shutdown() and ray.init(address={wanted!r}) before making the session"
            )
        check(wanted, f"the address {wanted}")
        ray.shutdown()
        ray.init(address=wanted, log_to_driver=True)
        self._started_ray = False
        self._find_actors()

    def start(self, num_workers: Workers, env: Mapping[str, str] | None = None) -> GangConnection:
        after = 0 if self._last is None else self._last.address.epoch
        options = self._options.with_env(env)
        if options.cpus_per_worker is None and isinstance(num_workers, int):
            cpus = shared_cpus(num_workers, options.each.cpus)
            options = replace(options, cpus_per_worker=cpus)
        request = GangRequest.of(options, num_workers, self._session, self._owner, after)
        limit_s = self._options.start_timeout_s + MANAGER_TIMEOUT_S
        try:
            manager = self._live_gang()
            address: GangAddress = ask_manager(manager.launch(request), limit_s)
        except AlchemistError:
            if self.detached:
                self._own = None  # it ends itself
            raise
        except BaseException as error:  # no answer, Ctrl-C, or another signal's handler raised
            self._give_up()
            if not isinstance(error, GetTimeoutError):
                raise
            raise LaunchError(
                f"the gang's GroupManager did not answer within {limit_s:.0f} s: check "
                "with `ray status` whether this node can start another process"
            ) from None
        try:
            self._last = self.connect(address, manager, owner=not self.detached)
        except BaseException:  # the session would neither have the gang nor be able to start one
            self._give_up()
            raise
        here = [n.count for n in address.nodes if any(map(sockets.reachable_here, n.addresses))]
        warn_of_shared_cores(sum(here), self._options.threads_per_worker)
        return self._last

    def _give_up(self) -> None:
        manager, self._own = self._own, None
        if manager is not None:
            manager.give_up()

    def connect(self, address: GangAddress, manager: GangHandle, *, owner: bool) -> GangConnection:
        """This process's connection to a gang, for one more session."""
        return registry.join(address, lambda: connect(address, manager, self._shown, owner=owner))

    def resize(self, connection: GangConnection, num_workers: int) -> None:
        manager = connection.transport.manager
        try:
            ask_manager(manager.resize(connection.address.epoch, num_workers))
        except BaseException as error:
            if not isinstance(error, AlchemistError):  # Ctrl-C, or another signal's handler raised
                self.stop_resize(connection)
            raise

    def stop_resize(self, connection: GangConnection) -> None:
        """End a resize that is under way; the gang goes on as it was."""
        connection.transport.manager.stop_resize()

    def _live_gang(self) -> OwnGang:
        """The session's GroupManager; another one if it has ended, or does not answer.

        A process that Ray starts may hang before its first call, for example in an import from a
        file system that hangs. That is tried once more.
        """
        options = self._options
        for last in (False, True):
            manager = self._own or (
                manager_pool.take(self._owner) if options.name is None else start_named(options)
            )
            self._own = manager
            if last or manager.alive(HANGS_S):
                break
            log.warning("the GroupManager has ended or does not answer: another one is started")
            if self.detached:  # others may have gangs there
                self._own = None
            else:
                self._give_up()
        return manager

    def end(self, *, running: bool) -> bool:
        if self._own is None or not ray.is_initialized():
            return False
        try:
            if running:
                ray.get(self._own.end(), timeout=GANG_END_S)
        except Exception:  # the manager is shutting down; errors are ignored
            return False
        return True

    def kill(self, why: str) -> None:
        if self._own is None:
            return
        try:
            ask_manager(self._own.kill(why), KILL_TIMEOUT_S)
        except (AlchemistError, GetTimeoutError, ray.exceptions.RayError):
            self._give_up()  # ranks end with it

    def close(self, *, reusable: bool) -> None:
        if self.detached:
            self._own = None
        elif reusable and self._own is not None:
            self._own.give_up(reusable=True)
            self._own = None
        else:
            self._give_up()

    def serve(self, **options: Any) -> Any:
        return registry.gateway_actor().serve(**options)


def open_gangs(session: str, options: GangOptions, owner: str = "") -> RayGangs:
    """The gangs of a session. `owner`: who asks, if not this process."""
    check_in_cluster(options)
    join_named(options.address)
    opened = RayGangs(session, options, owner)
    opened.join(None if options.num_workers is None else least_of(options.num_workers))
    return opened


def _join(address: str | None) -> None:
    join_named(address)
    join_ray(None, start=False)


def attach(options: AttachOptions) -> tuple[RayGangs, GangConnection]:
    """A gang of another session, and a connection to it; see `AlchemistSession.attach`."""
    _join(options.address)
    manager = catalogue.find_manager(options.name)
    try:
        found: GangAddress = ask_manager(manager.gang_address(), options.timeout_s)
    except GetTimeoutError:
        raise SessionError(
            f"gang {options.name} was not ready in {options.timeout_s:g} s: see "
            "AlchemistSession.list()"
        ) from None
    except GroupFailedError as error:
        if error.facts.get("cause") != MANAGER_GONE:
            raise
        raise SessionError(f"gang {options.name} has just ended: start another one") from None
    own = RayGangs(found.session, options)
    return own, own.connect(found, manager, owner=False)


def list_gangs(*, address: str | None, token: str | None) -> list[GangInfo]:
    """See `AlchemistSession.list`."""
    _join(address)
    return catalogue.list_gangs()


def stop_gang(name: str, *, address: str | None, token: str | None) -> None:
    """See `AlchemistSession.stop_gang`."""
    _join(address)
    catalogue.stop(name)


@cache
def _tell_of_missing_parts() -> None:
    if lacking := build_native.missing():
        log.warning("%s. To mend it, %s", lacking, build_native.ADVICE)


def _collect_after_task() -> None:
    """Collect what a Ray task leaves in cycles: a session in one would keep its gang."""
    try:
        main = threading.main_thread().ident
        while main is not None and sys._current_frames()[main].f_code.co_name != IDLE:
            time.sleep(TASK_INTERVAL_S)
    finally:
        _collecting.release()
    gc.collect()
