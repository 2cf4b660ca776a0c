"""GangOwner: requests the gang of a session, lists its workers, and ends it."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError

from alchemist_ray.errors import AlchemistError, GroupError, LaunchError, SessionError
from alchemist_ray.gang import registry
from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.launchers import AUTO
from alchemist_ray.runtime import attach as connecting
from alchemist_ray.runtime import manager_pool
from alchemist_ray.runtime.driver import find_driver
from alchemist_ray.runtime.gang_lifetime import PROCESS, GangLifetime
from alchemist_ray.runtime.gang_options import START_TIMEOUT_S, GangOptions, positive_int
from alchemist_ray.runtime.gangs import start_named
from alchemist_ray.runtime.manager_pool import Manager
from alchemist_ray.runtime.placement import Reservation
from alchemist_ray.runtime.ray_calls import ask_manager
from alchemist_ray.runtime.ray_cluster import check, join_ray
from alchemist_ray.runtime.worker_info import WorkerInfo, workers_of

END_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 8.0  # nodes may take 5 of them to clean up
MANAGER_TIMEOUT_S = 30.0  # for a GroupManager to start, and to clean up after a failed launch

log = logging.getLogger(__name__)


class GangOwner:
    """Owns a gang until it is closed. `AlchemistSession` adds the methods that use the gang."""

    _manager: Manager | None
    _connection: GangConnection | None

    def __init__(
        self,
        num_workers: int | None = None,
        *,
        name: str | None = None,
        lifetime: str = PROCESS,
        idle_timeout_s: float | None = None,
        max_failures: int = 0,
        checkpoint_folder: str | os.PathLike[str] | None = None,
        placement: str | Reservation = "own",
        strategy: str = "PACK",
        threads_per_worker: int = 1,
        cpus_per_worker: float | None = None,
        launcher: str = AUTO,
        start_timeout_s: float = START_TIMEOUT_S,
        progress: bool | None = None,
        output: bool = True,
    ) -> None:
        options = GangOptions.checked(
            placement,
            threads_per_worker,
            cpus_per_worker,
            launcher,
            start_timeout_s,
            strategy,
            GangLifetime.checked(name, lifetime, idle_timeout_s),
            max_failures=max_failures,
            checkpoint_folder=checkpoint_folder,
        )
        self._begin(options, progress, output)
        self._started_ray = join_ray(num_workers)
        if options.lifetime.detached and self._started_ray:
            log.warning(
                "this process has started Ray itself: the detached gang ends with it. Run "
                "`ray start --head` first to keep gangs"
            )
        self._driver = find_driver()  # without a reference, one that is not detached ends
        self._driver.prewarm.remote()
        if name is None:
            self._manager = manager_pool.take()
        if num_workers is not None:
            try:
                self.request_workers(num_workers)
            except BaseException:
                self.close()
                raise

    def _begin(self, options: GangOptions, progress: bool | None, output: bool) -> None:
        self._options = options
        self.id = f"s{uuid.uuid4().hex[:10]}"
        self._progress = progress
        self._output = output
        self._manager = None
        self._connection = None
        self._closed = False
        self._attached = False  # to a gang that another session has started
        self._changing = threading.RLock()  # one thread at a time starts or ends the gang
        self._pid = os.getpid()
        self._started_ray = False
        _sessions.add(self)

    def connect_to_alchemist(self, address: str, port: int) -> None:
        """Join the Ray cluster whose head listens at ``address:port`` (its GCS port).

        Raises
        ------
        SessionError
            If this process has joined another cluster and cannot leave it, or if no cluster that
            fits this process is there.
        AuthError
            If that cluster wants a token that this process does not have.
        """
        self._check_open()
        wanted = f"{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"
        current = ray.get_runtime_context().gcs_address
        if current == wanted or (
            wanted.startswith("127.") and current.rpartition(":")[2] == str(port)
        ):
            return
        if not self._started_ray or self._connection is not None:
            raise SessionError(
                f"this process is in the Ray cluster at {current}, not at {wanted}: call "
                f"ray.shutdown() and ray.init(address={wanted!r}) before making the session"
            )
        check(wanted, f"the address {wanted}")
        ray.shutdown()
        ray.init(address=wanted, log_to_driver=True)
        self._started_ray = False
        self._driver = find_driver()
        if self._options.lifetime.name is None:
            self._manager = manager_pool.take()

    # --- workers ---

    def request_workers(self, num_workers: int) -> list[WorkerInfo]:
        """Start a gang of `num_workers` MPI ranks and wait until it is ready.

        Returns
        -------
        list of WorkerInfo
            One per rank.

        Raises
        ------
        ResourceError
            If the cluster does not have the CPUs; nothing was started.
        LaunchError
            If the ranks do not start in time; nothing is left of them.
        GroupError
            If the session already has workers, or the name of its gang is in use.
        SessionError
            If the session is attached to a gang of another session.

        Notes
        -----
        After the loss of a gang this starts the next one; handles of the lost gang are stale.
        """
        self._check_open()
        positive_int("num_workers", num_workers)
        with self._changing_workers():
            if self._connection is not None and self._alive():
                raise GroupError(
                    f"the session has {len(self._connection.address.workers)} workers already: "
                    "yield_workers() first, or open another session"
                )
            if self._attached:
                raise SessionError(
                    "this session was attached to a gang of another session, which has ended: "
                    "start a gang with AlchemistSession(num_workers, ...)"
                )
            options = self._options
            options.check_capacity(num_workers)
            self._drop_client()
            manager = self._live_manager()
            manager.launched = True
            request = options.request(num_workers, self.id)
            limit_s = options.start_timeout_s + MANAGER_TIMEOUT_S
            try:
                address: GangAddress = ask_manager(manager.actor.launch.remote(request), limit_s)
            except (KeyboardInterrupt, GetTimeoutError) as error:
                self._manager = None
                # The launch goes on there: all that it starts ends with the manager.
                manager.kill()
                if isinstance(error, KeyboardInterrupt):
                    raise
                raise LaunchError(
                    f"the gang's GroupManager did not answer within {limit_s:.0f} s: check "
                    "with `ray status` whether this node can start another process"
                ) from None
            except AlchemistError:
                if options.lifetime.detached:
                    self._manager = None  # it ends itself
                raise
            self._connect(address, manager.actor)
            try:
                self._check_started()
            except BaseException:
                self._end_gang()
                raise
            if self._closed:  # by another thread, which did not wait for this start
                self._drop_client()
                if not self._detaches:
                    manager.kill()
            return self.list_workers()

    def _check_started(self) -> None:
        """Check what only a gang that is ready can tell."""

    def _connect(self, address: GangAddress, manager: ActorHandle) -> None:
        self._connection = registry.join(
            address,
            lambda: connecting.connect(
                address,
                manager,
                owner=not self._detaches,
                progress=self._progress,
                output=self._output,
            ),
        )

    @property
    def _detaches(self) -> bool:
        """Whether the gang outlives the session."""
        return self._attached or self._options.lifetime.detached

    def _check_own(self) -> None:
        self._check_open()
        if self._detaches and self._connection is not None:
            name = self._connection.address.gang
            raise SessionError(
                f"gang {name} may have other attached processes: detach() leaves it, and "
                f"AlchemistSession.stop_gang({name!r}) ends it"
            )

    def yield_workers(self) -> None:
        """End the gang and return its CPUs. Its matrices are freed; the session stays open.

        Raises `SessionError` for a detached gang, and in an attached session.
        """
        self._check_own()
        with self._changing_workers():
            self._end_gang()

    def kill_workers(self, why: str = "its session ended it") -> None:
        """End the gang at once, also if its ranks hang; otherwise like `yield_workers`."""
        self._check_own()
        if self._connection is not None and self._manager is not None:
            try:
                ask_manager(self._manager.actor.kill.remote(why), KILL_TIMEOUT_S)
            except (AlchemistError, GetTimeoutError, ray.exceptions.RayError):
                self._manager.kill()  # ranks end with it
                self._manager = None
        self._drop_client()

    def list_workers(self) -> list[WorkerInfo]:
        """The ranks of the gang: where each runs, and whether it is idle or busy."""
        self._check_open()
        if self._connection is None:
            return []
        return workers_of(self._connection)

    # --- the end ---

    def close(self) -> None:
        """End the session, and its gang unless that is detached. A second call does nothing."""
        if self._closed or self._pid != os.getpid():  # a forked child does not own the gang
            return
        self._closed = True
        _sessions.discard(self)
        reusable = self._changing.acquire(timeout=END_TIMEOUT_S)
        if reusable:
            try:
                if self._detaches:
                    self._drop_client()
                reusable = self._end_gang()
            finally:
                self._changing.release()
        # Else another thread still starts workers: they end with the manager.
        manager, self._manager = self._manager, None
        if manager is None or self._detaches:
            return
        if reusable:
            manager_pool.give_back(manager)
        else:
            manager.kill()

    stop = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "no workers"
        if self._connection is not None:
            address = self._connection.address
            state = f"{len(address.workers)} workers, epoch {address.epoch}"
        return f"<AlchemistSession {self.id}: {state}>"

    # --- inside ---

    @contextmanager
    def _changing_workers(self) -> Iterator[None]:
        """Start or end workers in this thread only. Raises `GroupError` if another one does not
        finish in the time that a start may take.
        """
        limit_s = self._options.start_timeout_s + MANAGER_TIMEOUT_S + END_TIMEOUT_S
        if not self._changing.acquire(timeout=limit_s):
            raise GroupError(
                "another thread has been starting or ending workers of this session for "
                f"{limit_s:.0f} s: let one thread call request_workers() and yield_workers()"
            )
        try:
            self._check_open()
            yield
        finally:
            self._changing.release()

    def _check_open(self) -> None:
        if self._closed:
            raise SessionError("the session is closed: open another AlchemistSession()")

    @property
    def connection(self) -> GangConnection:
        """The connection to the gang, for clients. Raises `SessionError` if there is no gang."""
        self._check_open()
        if self._connection is None:
            raise SessionError("the session has no workers: request_workers(n) starts a gang")
        return self._connection

    @property
    def has_workers(self) -> bool:
        """Whether the session has a gang (which may have failed since)."""
        return self._connection is not None

    def _alive(self) -> bool:
        try:
            self.connection.ping(wait=True)
        except AlchemistError:
            return False
        return True

    def _live_manager(self) -> Manager:
        """The session's GroupManager; another one if it died."""
        manager, lifetime = self._manager, self._options.lifetime
        # One that has had no gang may still be starting, which `launch` waits for.
        if manager is None or (manager.launched and not manager.alive()):
            manager = manager_pool.take() if lifetime.name is None else start_named(lifetime)
            self._manager = manager
        return manager

    def _drop_client(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            leave = registry.leave if self._detaches else registry.detach
            leave(connection)

    def _end_gang(self) -> bool:
        """End the gang, if there is one; whether the manager is fit for another."""
        fit = self._manager is not None and ray.is_initialized()
        if self._connection is not None and self._manager is not None and fit:
            try:
                ray.get(self._manager.actor.end.remote(), timeout=END_TIMEOUT_S)
            except Exception:  # the manager is shutting down; errors are ignored
                fit = False
        self._drop_client()
        return fit


_sessions: weakref.WeakSet[GangOwner] = weakref.WeakSet()


def open_sessions() -> list[GangOwner]:
    """The sessions of this process that have workers."""
    return [session for session in _sessions if session.has_workers]


@atexit.register
def _close_all() -> None:
    for session in list(_sessions):
        session.close()
