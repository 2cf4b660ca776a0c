"""`mpi_function`: a Ray-style remote function that runs on a gang of its own."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import Any, overload

import ray

from alchemist_ray.arguments import positive_int
from alchemist_ray.attached.address import this_process
from alchemist_ray.attached.libraries import call_limits
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.attached.options import START_TIMEOUT_S, GangOptions, with_options
from alchemist_ray.cluster.driver import find_driver
from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.cluster.ray_connection import connection_id, while_connected
from alchemist_ray.errors import BadArgumentError
from alchemist_ray.functions.user_code import pack
from alchemist_ray.plural import counted
from alchemist_ray.ray_access import manager_pool
from alchemist_ray.ray_access.manager_pool import OwnGang
from alchemist_ray.runtime.launch.gang_request import GangRequest
from mpi_workers.wire.frames import Body

IDLE_S = 10.0  # default: an idle gang is kept for the next call
POLL_INTERVAL_S = 0.2  # between checks for calls that have ended
YOUNG_S = 3.0  # until this age of a gang, Ray may report its CPUs as free


@dataclass(frozen=True, kw_only=True)
class FunctionOptions:
    """The gang that a function runs on. Raises `ValueError`, `ResourceError`."""

    num_workers: int
    threads_per_worker: int = 1
    env: Mapping[str, str] | None = field(default=None, hash=False, repr=False)
    cpus_per_worker: float | None = None
    gpus_per_worker: float = 0
    launcher: str = "auto"
    start_timeout_s: float = START_TIMEOUT_S
    timeout_s: float | None = None
    idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        positive_int("num_workers", self.num_workers)
        idle_s = self.idle_s
        number = isinstance(idle_s, Real) and not isinstance(idle_s, bool)
        if not number or not idle_s >= 0:
            raise ValueError(f"idle_s={idle_s!r}: it must be a number of seconds, at least 0")
        call_limits(self.timeout_s)
        self.gang  # noqa: B018 - checks the other options

    @functools.cached_property
    def gang(self) -> GangOptions:
        """The options that a session has, too."""
        shared = (
            "threads_per_worker", "env", "cpus_per_worker", "gpus_per_worker", "launcher",
            "start_timeout_s",
        )  # fmt: skip
        return GangOptions(self.num_workers, **{name: getattr(self, name) for name in shared})


FunctionOptions.__init__.__qualname__ = "mpi_function"  # which Python's errors name


class MpiFunction:
    """A function that runs on every rank of a gang; see `mpi_function`.

    Attributes
    ----------
    function : callable
        The function itself.
    """

    def __init__(self, function: Callable[..., Any], options: FunctionOptions) -> None:
        if not callable(function):
            raise BadArgumentError(
                f"mpi_function takes a function f(comm, ...), not a {type(function).__name__}"
            )
        self.function = function
        self._options = options
        functools.update_wrapper(self, function)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``function(comm, *args, **kwargs)`` on every rank; returns an ObjectRef at once.

        `ray.get` returns the result of rank 0, or raises the error; `ray.cancel` cancels the call
        (`ray.exceptions.TaskCancelledError`).

        Raises
        ------
        BadArgumentError
            If something cannot be pickled, or for a handle: its matrix is on another gang.
        """
        task, refs = packed(self._options, self.function, args, kwargs)
        body: Body = {"op": "run", "task": task, "uses": [], "timeout_s": self._options.timeout_s}
        return _pool.submit(self._options, body, refs)

    def options(self, **changed: Any) -> MpiFunction:
        """The same function with other options of `mpi_function`."""
        return mpi_function(self.function, **{**asdict(self._options), **changed})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self.function, "__name__", "it")
        raise TypeError(
            f"an MPI function cannot be called directly: {name}.remote(...) returns a Ray "
            f"ObjectRef at once, and ray.get waits for it. {name}.function is the plain function"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return MpiFunction, (self.function, self._options)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", repr(self.function))
        return f"<mpi_function {name} on {counted(self._options.num_workers, 'worker')}>"


def packed(
    options: FunctionOptions,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[Body, list[Any]]:
    """The task of a call that a gang of these options can run, and the ObjectRefs that it needs."""
    refs: list[Any] = []
    task, _ = pack(function, args, kwargs, _no_handle, refs)
    if not ray.is_initialized():
        join_ray(options.num_workers)
    return task, refs


def _no_handle(handle: MatrixRef) -> int:
    raise BadArgumentError(
        f"{handle.name} is on the gang of session {handle.session}, and an mpi_function has a gang "
        "of its own: pass the array, or call the function with als.run in that session"
    )


@overload
def mpi_function(**options: Any) -> Callable[[Callable[..., Any]], MpiFunction]: ...
@overload
def mpi_function(function: Callable[..., Any], /, **options: Any) -> MpiFunction: ...
@with_options(FunctionOptions, "mpi_function")  # type: ignore[misc]  # the function has a default
def mpi_function(
    function: Callable[..., Any] | None, /, options: FunctionOptions
) -> MpiFunction | Callable[[Callable[..., Any]], MpiFunction]:
    """Turn a function of ``(comm, ...)`` into a Ray-style remote function on MPI ranks.

    ::

        @alchemist_ray.mpi_function(num_workers=4)
        def pi(comm, n): ...

        ray.get(pi.remote(10**6))

    Parameters
    ----------
    num_workers : int
        Number of MPI ranks.
    threads_per_worker, env, cpus_per_worker, gpus_per_worker, launcher, start_timeout_s
        As for `AlchemistSession`. `start_timeout_s` also limits the wait for CPUs.
    timeout_s : float, optional
        Time limit of a call after its gang has started; then `CallTimeoutError`.
    idle_s : float
        Seconds that an idle gang is kept for the next call.

    Returns
    -------
    MpiFunction
        With ``remote(...)`` and ``options(...)``.

    Notes
    -----
    The first call starts a gang. It is reused by functions with the same options, and returns its
    CPUs after `idle_s` without a call, or when the program ends. If all gangs are busy, a call
    starts another one if the cluster has free CPUs; otherwise it waits for the gang with the
    fewest queued calls. If a rank dies, its call raises `GroupRecoveredError`, and the
    next call gets other ranks.

    Arguments and results are as in `AlchemistSession.run`; ObjectRefs, also inside of lists and
    dicts, become their values. Matrices are not supported, because the gang is temporary and
    handles belong to other gangs. Ray shows the output of the ranks like that of actors.
    """
    if function is None:
        return lambda function: MpiFunction(function, options)
    return MpiFunction(function, options)


# --- the gangs of this process's functions ----------------------------------------------


@dataclass(slots=True, eq=False)
class Host:
    """A gang that runs functions, and the calls that it has not answered.

    Attributes
    ----------
    users : int
        Executors that have it. They give it calls through connections of their own.
    """

    own: OwnGang
    request: GangRequest
    idle_s: float = 0.0
    users: int = 0
    calls: list[Any] = field(default_factory=list)
    born: float = field(default_factory=time.monotonic)
    idle_since: float = field(default_factory=time.monotonic)

    @property
    def load(self) -> int:
        return len(self.calls) + self.users

    def stays(self, here: tuple[str, str]) -> bool:
        """Forget the calls that are over; end the gang if it has been idle for long enough.

        Ray has ended those of an earlier connection than `here`.
        """
        if self.own.connection != here:
            return False
        if self.calls:
            _, self.calls = ray.wait(
                self.calls, num_returns=len(self.calls), timeout=0, fetch_local=False
            )
            self.idle_since = time.monotonic()
        if self.load or time.monotonic() - self.idle_since <= self.idle_s:
            return True
        self.own.end()
        self.own.give_up(reusable=True)
        return False


class _Pool:
    """Hosts by the options of their gangs. A thread ends those that are idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[FunctionOptions, list[Host]] = {}
        self._watched = False
        self._others = 0.0  # CPUs that others have taken

    def submit(self, options: FunctionOptions, body: Body, refs: list[Any]) -> Any:
        """Give a call to a host. `idle_s` and `timeout_s` make no difference to a gang."""
        with self._lock:
            host = self._host(options) or self._another(options)
            host.idle_s = options.idle_s
            ref: Any = host.own.function(host.request, body, *refs)
            host.calls.append(ref)
        return ref

    def take(self, options: FunctionOptions, *, first: bool) -> Host | None:
        """A gang for an `Executor`, until it gives it back; None if there is no room for it.

        `first`: the executor has no other one, so it shares one, or waits for room.
        """
        with self._lock:
            host = self._host(options)
            if not first and (host is None or host.load):
                return None
            host = host or self._another(options)
            host.users += 1
        return host

    def give_back(self, host: Host) -> None:
        """End the gang when it has no calls."""
        with self._lock:
            host.users -= 1
            host.idle_s = 0.0

    def _settle(self) -> None:
        here = connection_id()
        for hosts in self._hosts.values():
            hosts[:] = [host for host in hosts if host.stays(here)]

    def _host(self, options: FunctionOptions) -> Host | None:
        """The gang with the fewest calls, or another one if all have some and there is room.

        None if there is neither.
        """
        self._settle()
        key = gang_key(options)
        hosts = self._hosts.setdefault(key, [])
        for host in [host for host in hosts if not host.load and not host.own.alive()]:
            hosts.remove(host)
            host.own.give_up()
        free = min(hosts, key=lambda host: host.load, default=None)
        if free is None or free.load:
            room = self._room()  # also for the first gang: the next call compares with it
            gpus = ray.available_resources().get("GPU", 0.0)
            if key.gang.each.room({"CPU": room, "GPU": gpus}) >= key.num_workers:
                free = self._another(options)
        return free

    def _another(self, options: FunctionOptions) -> Host:
        """A gang more, which starts when its CPUs are free."""
        key = gang_key(options)
        find_driver().prewarm.remote()
        request = GangRequest.of(key.gang, key.num_workers, f"f{uuid.uuid4().hex[:10]}")
        host = Host(manager_pool.take(this_process()), request)
        self._hosts[key].append(host)
        if not self._watched:
            self._watched = True
            threading.Thread(target=self._watch, name="mpi_function", daemon=True).start()
        return host

    def _room(self) -> float:
        """Free CPUs.

        Ray may report the CPUs of a young gang as taken or as free, so what others have taken is
        known within limits only. Within them it is assumed to be unchanged since the last call.
        """
        now = time.monotonic()
        ours, young = 0.0, 0.0
        for key, hosts in self._hosts.items():
            cpus = key.num_workers * key.gang.each.cpus
            ours += cpus * len(hosts)
            young += cpus * sum(now - host.born < YOUNG_S for host in hosts)
        total: float = ray.cluster_resources().get("CPU", 0.0)
        taken: float = total - ray.available_resources().get("CPU", 0.0)
        self._others = min(max(self._others, taken - ours), taken - ours + young)
        return total - ours - self._others

    def _watch(self) -> None:
        while self._watched:
            time.sleep(POLL_INTERVAL_S)
            with self._lock, while_connected() as connected:
                with contextlib.suppress(Exception):  # the cluster does not answer
                    if connected:
                        self._settle()
                    else:
                        self._hosts.clear()
                self._watched = any(self._hosts.values())


def gang_key(options: FunctionOptions) -> FunctionOptions:
    """The options that must be equal for calls to share gangs."""
    return replace(options, timeout_s=None, idle_s=0.0)


_pool = _Pool()
take, give_back = _pool.take, _pool.give_back
