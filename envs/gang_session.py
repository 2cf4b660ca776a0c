"""Opens and closes the session of an environment: which cluster, whose CPUs, which process."""

from __future__ import annotations

import contextlib
import gc
import queue
import threading
import warnings
import weakref
from collections.abc import Mapping

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, AuthError, ResourceError, SessionError
from alchemist_ray.runtime.cluster.placement import (
    Reservation,
    inherited,
    not_free,
    reserved,
    within,
)
from alchemist_ray.runtime.cluster.ray_cluster import check, join_ray
from alchemist_ray.runtime.cluster.ray_connection import forked, while_connected
from envs.config import EnvConfig
from envs.errors import EnvError

RELEASE_S = 5.0  # for collected sessions to close

# Bundles on chosen nodes, which their session does not return.
_chosen: weakref.WeakKeyDictionary[AlchemistSession, PlacementGroup] = weakref.WeakKeyDictionary()


def check_process() -> None:
    """Raise `EnvError` in a forked child of a process that uses Ray: Ray's threads are not here."""
    if forked():
        raise EnvError(
            "this process was forked from one that uses Ray, and Ray does not work after a fork. "
            "Start it with context='spawn', for example "
            'gymnasium.vector.AsyncVectorEnv(env_fns, context="spawn")'
        )


def open_session(owner: object, config: EnvConfig) -> AlchemistSession:
    """A session without workers, which is closed when `owner` is collected.

    Raises
    ------
    EnvError
        In a forked child of a process that uses Ray.
    AlchemistError
        If Ray or the driver cannot be reached, or the chosen nodes have too few CPUs.
    """
    check_process()
    _join_cluster(config)
    group = None
    placement: str | Reservation
    if isinstance(config.placement, Mapping):
        group, placement = _on_chosen_nodes(config.placement, config)
    else:
        placement = _placement(config.placement, config)
    session = AlchemistSession(
        placement=placement,
        cpus_per_worker=config.cpus_per_worker,
        start_timeout_s=config.start_timeout_s,
        progress=False,
    )
    if group is not None:
        _chosen[session] = group
    # At exit, sessions close themselves.
    weakref.finalize(owner, _dropped.put, session).atexit = False
    _reaper.start()
    if config.hostname is not None and config.port is not None:
        try:
            session.connect_to_alchemist(config.hostname, config.port)
        except (AuthError, SessionError) as error:
            warnings.warn(f"config['hostname'] and config['port'] are ignored: {error}",
                          stacklevel=2)  # fmt: skip
    return session


def close_session(session: AlchemistSession) -> None:
    """Close a session of `open_session`, and return its CPUs."""
    try:
        session.close()
    finally:
        group = _chosen.pop(session, None)
        if group is not None:
            remove_placement_group(group)


def release_dropped(workers: int, cpus_per_worker: float) -> None:
    """Close environments that nothing refers to any more, if too few CPUs are free.

    Environments in the frames of an old traceback hold their CPUs until they are collected.
    """
    if ray.available_resources().get("CPU", 0.0) + 1e-9 < workers * cpus_per_worker:
        gc.collect()
        _reaper.wait(RELEASE_S)


def _join_cluster(config: EnvConfig) -> None:
    """Connect Ray to the cluster of the config, if this process is in none."""
    if config.hostname is None or ray.is_initialized():
        return
    host = "127.0.0.1" if config.hostname == "0.0.0.0" else config.hostname
    address = f"{host}:{config.port or 0}"
    try:
        check(address, address)
        ray.init(address=address)
    except (AlchemistError, ConnectionError) as error:
        warnings.warn(
            f"no Ray cluster at {address} ({error}): the environment uses the cluster "
            "that runs on this machine, or starts one",
            stacklevel=3,
        )


def _on_chosen_nodes(
    wanted: Mapping[str, Mapping[str, object]], config: EnvConfig
) -> tuple[PlacementGroup, Reservation]:
    """Bundles of the ranks on nodes with certain labels and resources. Raises `ResourceError`."""
    if not ray.is_initialized():
        join_ray(None)
    workers, cpus = config.num_workers, config.cpus_per_worker or 1.0
    labels = [dict(wanted["labels"])] * workers if wanted.get("labels") else None
    group = placement_group(
        [{**wanted.get("resources", {}), "CPU": cpus}] * workers, bundle_label_selector=labels
    )
    if reserved(group, [1] * workers, config.start_timeout_s) is None:
        error = not_free(workers, cpus, config.start_timeout_s)
        raise ResourceError(f"{error} (config['placement'] is {dict(wanted)})")
    return group, within(group, range(workers), cpus)


def _placement(placement: str | Reservation, config: EnvConfig) -> str | Reservation:
    """Resolve "auto": the CPUs of this task or actor, if they hold the ranks and one more."""
    if placement != "auto":
        return placement
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return "own"  # a driver
    try:
        inherited(1, 1 + config.num_workers * (config.cpus_per_worker or 1.0))
    except ResourceError:
        return "own"
    return "inherit"


class _Reaper:
    """Closes the sessions of collected simulations, in a thread of its own.

    The garbage collector can run in the middle of a call to Ray, where closing is not possible.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float) -> None:
        """Wait until the sessions that were dropped so far are closed."""
        done = threading.Event()
        _dropped.put(done)
        self.start()
        done.wait(timeout_s)

    def _run(self) -> None:
        while True:
            item = _dropped.get()
            if isinstance(item, threading.Event):
                item.set()
            else:
                with while_connected(), contextlib.suppress(AlchemistError, RayError):
                    close_session(item)
            del item


_dropped: queue.SimpleQueue[AlchemistSession | threading.Event] = queue.SimpleQueue()
_reaper = _Reaper()
