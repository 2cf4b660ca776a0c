"""A simulator on a gang: starts it, steps it, and replaces it after a loss."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import queue
import secrets
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray.util.placement_group import placement_group, remove_placement_group

from alchemist_ray import AlchemistSession
from alchemist_ray.attached.options import RankResources
from alchemist_ray.attached.rank_channel import RankChannel
from alchemist_ray.cluster.placement import (
    Reservation,
    inherited,
    not_free,
    reserved,
    within,
)
from alchemist_ray.cluster.ray_cluster import check, join_ray
from alchemist_ray.cluster.ray_connection import forked, while_connected
from alchemist_ray.errors import (
    AlchemistError,
    AuthError,
    BadArgumentError,
    CallTimeoutError,
    GroupError,
    GroupFailedError,
    GroupRecoveredError,
    LibraryNotFoundError,
    ResourceError,
    RoutineError,
    SessionError,
    advising,
)
from envs.config import EnvConfig
from envs.errors import (
    BadActionError,
    EnvError,
    GangLostError,
    RestartLimitError,
    SimulationError,
    StepTimeoutError,
)
from envs.losses import DROPPED, RESTARTS, TIMEOUTS, Losses, RestartRate
from envs.spec import Records, SimulatorSpec, records_of

RELEASE_S = 5.0  # for collected sessions to close


def check_process() -> None:
    """Raise `EnvError` in a forked child of a process that uses Ray: Ray's threads are not here."""
    if forked():
        raise EnvError(
            "this process was forked from one that uses Ray, and Ray does not work after a fork. "
            "Start it with context='spawn', for example "
            'gymnasium.vector.AsyncVectorEnv(env_fns, context="spawn")'
        )


def open_session(owner: object, config: EnvConfig) -> tuple[AlchemistSession, Callable[[], None]]:
    """A session without workers, and a function that closes it and returns its CPUs.

    When `owner` is collected, a thread calls that function. Calling it twice is allowed.

    Raises
    ------
    EnvError
        In a forked child of a process that uses Ray.
    AlchemistError
        If Ray or the driver cannot be reached, or the chosen nodes have too few CPUs.
    """
    check_process()
    _join_cluster(config)
    with contextlib.ExitStack() as cleanup:
        session = AlchemistSession(
            placement=_placement(config, cleanup),
            cpus_per_worker=config.cpus_per_worker,
            gpus_per_worker=config.gpus_per_worker,
            env=config.env,
            start_timeout_s=config.start_timeout_s,
            progress=False,
        )
        cleanup.callback(session.close)
        if config.hostname is not None and config.port is not None:
            try:
                session.connect_to_alchemist(config.hostname, config.port)
            except (AuthError, SessionError) as error:
                warnings.warn(f"config['hostname'] and config['port'] are ignored: {error}",
                              stacklevel=2)  # fmt: skip
        close = cleanup.pop_all().close
    # At exit, sessions close themselves.
    weakref.finalize(owner, _dropped().put, close).atexit = False
    return session, close


def release_dropped(workers: int, cpus_per_worker: float) -> None:
    """Close environments that nothing refers to any more, if too few CPUs are free.

    Environments in the frames of an old traceback hold their CPUs until they are collected.
    """
    if ray.available_resources().get("CPU", 0.0) + 1e-9 < workers * cpus_per_worker:
        gc.collect()
        done = threading.Event()
        _dropped().put(done.set)
        done.wait(RELEASE_S)


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


def _placement(config: EnvConfig, cleanup: contextlib.ExitStack) -> str | Reservation:
    """Where the ranks get their CPUs: "own", "inherit", or existing bundles.

    Bundles on chosen nodes are reserved here, and `cleanup` returns them.

    Raises
    ------
    ResourceError
        If the chosen nodes have too few CPUs.
    """
    wanted, workers = config.placement, config.num_workers
    each = RankResources(config.cpus_per_worker or 1.0, config.gpus_per_worker)
    if isinstance(wanted, Mapping):
        join_ray(None)
        labels = [dict(wanted["labels"])] * workers if wanted.get("labels") else None
        bundles = [{**wanted.get("resources", {}), **each.times(1)}] * workers
        group = placement_group(bundles, bundle_label_selector=labels)
        if reserved(group, [1] * workers, each, config.start_timeout_s) is None:
            error = not_free(workers, each, config.start_timeout_s)
            raise ResourceError(f"{error} (config['placement'] is {dict(wanted)})")
        cleanup.callback(remove_placement_group, group)
        return within(group, range(workers), *each)
    if wanted != "auto":
        return wanted
    if not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return "own"  # a driver
    try:
        # The CPUs of this task or actor: the ranks and one more.
        inherited(1, RankResources(1 + workers * each.cpus, workers * each.gpus))
    except ResourceError:
        return "own"
    return "inherit"


@cache
def _dropped() -> queue.SimpleQueue[Callable[[], object]]:
    """Functions that a thread calls: they close the sessions of collected simulations.

    The garbage collector can run in the middle of a call to Ray, where closing is not possible.
    """
    dropped: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def close() -> None:
        while True:
            call = dropped.get()
            with while_connected(), contextlib.suppress(Exception):  # nobody can be told
                call()
            del call

    threading.Thread(target=close, name="close-environments", daemon=True).start()
    return dropped


HEADER_NBYTES = 64  # bytes before the data in shared memory, as in ali/simulator/spec.py
MARK = 16  # bytes at its beginning, by which a rank recognises it
CHANNEL_S = 10.0  # for the ranks to connect
RETURN_S = 2.0  # for all ranks to leave a step in which one has raised
HOST = "simulator"  # the library on the ranks that runs simulators
NEXT_RESET = "reset() starts a new one"
NEXT_EPISODE = "reset() begins the next one"
# The ranks were started again: during the call, or before it, so that they have no simulator.
RENEWED = (GroupRecoveredError, LibraryNotFoundError)
NEXT_START = "the next reset(), or another environment, starts a new one"
NAMES = {"begin": "reset", "advance": "step"}  # of routines, for users
NO_SEEDS: Mapping[int, int] = {}

_specs: dict[tuple[Any, ...], SimulatorSpec] = {}  # of the simulators that this process has used
# Of simulations that were closed with a lost gang, for those that replace them: RLlib closes a
# failed environment and makes a new one, and both count as one.
unreplaced: dict[tuple[Any, ...], list[RestartRate]] = defaultdict(list)


class Simulation:
    """One or more copies of a simulator on a gang of ranks.

    Parameters
    ----------
    config : EnvConfig
    losses : Losses, optional
        Where losses are counted. Default: a new one.

    Attributes
    ----------
    spec : SimulatorSpec
    copies : int
        Number of independent simulations. May be set before the first `begin`.
    steps : ndarray of int, shape (copies,)
        Steps of the copies in their episodes.
    running : bool
        Whether an episode is in progress. Set it to False to end it on this side: `begin` must
        come next.

    Raises
    ------
    AlchemistError
        If the gang or the simulator does not start.

    Notes
    -----
    If this process has used the simulator before, its spec is known, and the first `begin` starts
    the gang. Otherwise the constructor starts it to ask for the spec.
    """

    def __init__(self, config: EnvConfig, losses: Losses | None = None) -> None:
        self.config = config
        self.copies = config.copies or 1
        self.losses = losses or Losses(config.lib_name)
        self._session: AlchemistSession | None = None
        self._close_session: Callable[[], None]
        self._library: Any = None  # on the gang; None: there is no gang
        self._channel: RankChannel | None = None
        self._shared: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._begun = False  # an episode on this gang
        self._raised = False  # the last call, so ranks may stay in it
        self._goes_on = False  # the gang, on ranks that do not have the simulator
        self.running = False
        self.steps = np.zeros(0, np.int64)
        self._closed = False
        self._lost = False  # a gang, so that the next start is a restart
        self._rate = RestartRate()
        with contextlib.suppress(IndexError):
            self._rate = unreplaced[config.simulator()].pop()
            self._lost = True
        known = _specs.get(config.simulator())
        if known is None:
            try:
                self._start()
            except BaseException:
                self.close()
                raise
            known = _specs[config.simulator()]
        self.spec: SimulatorSpec = known

    # --- episodes and steps ---

    def begin(self, seeds: Mapping[int, int]) -> Records:
        """Begin an episode in the copies of `seeds`. Starts a gang if none is running.

        Raises
        ------
        SimulationError, GangLostError, StepTimeoutError, RestartLimitError
        AlchemistError
            If a gang cannot be started.
        """
        if self._closed:
            raise EnvError("the environment is closed: make another one")
        check_process()
        if self._raised and self._library is not None:
            self._give_up_stuck()
        if self._library is None:
            self._start()
        elif len(self.steps) != self.copies:
            self._attach()
        if self._channel is None:
            self._open_channel()
        raw = self._call("begin", list(seeds), list(seeds.values()))
        self.steps[list(seeds)] = 0
        records = self._records(raw, seeds)
        self._begun = self.running = True
        return records

    def advance(self, actions: NDArray[np.float64], seeds: Mapping[int, int] = NO_SEEDS) -> Records:
        """Advance every copy by a time step; those of `seeds` begin an episode instead.

        Raises
        ------
        BadActionError, SimulationError, GangLostError, StepTimeoutError
        """
        try:
            raw = self._call("advance", actions.tobytes(), list(seeds), list(seeds.values()))
            self.steps += 1
            self.steps[list(seeds)] = 0
            records = self._records(raw, range(self.copies))
        except (SimulationError, GangLostError) as error:
            self.losses.add(DROPPED, self.copies, type(error).__name__)
            raise
        if records.failures:
            cause = next(iter(records.failures.values()))
            self.losses.add(DROPPED, len(records.failures), cause)
        self.losses.stepped(self.copies)
        return records

    def _records(self, raw: bytes, which: Iterable[int]) -> Records:
        # Nothing is returned where the records are in shared memory, until the next step.
        table = np.frombuffer(raw, np.uint8) if raw else self._shared
        return records_of(table, self.spec, self.config, which, self.steps)

    def interrupt(self) -> None:
        """Cancel the order in progress, from another thread."""
        if (channel := self._channel) is not None:
            with contextlib.suppress(AlchemistError):
                channel.cancel()

    def picture(self, copy: int) -> NDArray[np.float32]:
        """The rendered field of a copy, shape (height, width); the first row is the top."""
        self._need_episode("render")
        height, width, raw = self._call("render", copy)
        return np.frombuffer(raw, np.float32).reshape(height, width)

    def save_state(self, copy: int = 0) -> NDArray[Any]:
        """The state of a copy, as its library returns it.

        Raises
        ------
        EnvError
            If there is no episode.
        AlchemistError
            If the simulator has no routine for it.
        """
        self._need_episode("save_state")
        if self.copies > 1:
            shape, dtype, elements = self._call("save_copy", copy)
            return np.frombuffer(elements, dtype).reshape(shape).copy()
        with self._without_channel():
            handle = self._call("save_state")
            state: NDArray[Any] = handle.fetch()
            handle.free()
        return state

    def load_state(self, state: NDArray[Any], copy: int = 0) -> None:
        """Restore in a copy a state that `save_state` of this or another gang returned."""
        self._need_episode("load_state")
        array = np.asarray(state)
        if array.dtype.kind not in "biufc":
            raise EnvError(
                f"load_state takes an array of numbers, as save_state() returns it, not a "
                f"{type(state).__name__}"
            )
        if self.copies > 1:
            self._call("load_copy", copy, list(array.shape), array.dtype.str, array.tobytes())
            return
        with self._without_channel():
            assert self._session is not None
            handle = self._session.send_matrix(state)
            self._call("load_state", handle)
            handle.free()

    @contextlib.contextmanager
    def _without_channel(self) -> Iterator[None]:
        """Let the ranks take commands: matrices do not pass through the channel."""
        self._close_channel()
        yield
        self._open_channel()

    def _need_episode(self, routine: str) -> None:
        if not self._begun:
            raise EnvError(f"cannot {routine}: there is no episode; call reset() first")

    def _call(self, routine: str, *arguments: Any) -> Any:
        try:
            if self._channel is None:
                command = getattr(self._library, routine)
                return command.options(timeout_s=self.config.step_timeout_s)(*arguments)
            order = {"do": routine, "arguments": arguments}
            return self._channel.ask(order, self.config.step_timeout_s)
        except CallTimeoutError as error:
            doing = NAMES.get(routine, routine)
            limit = f"{self.config.step_timeout_s:g} s (step_timeout_s)"
            raise self._timed_out(
                f"{doing} of simulator {self.config.lib_name!r} took longer than {limit}"
            ) from error
        except (GroupFailedError, *RENEWED) as error:
            raise self._gone(error) from error
        except BadArgumentError as error:
            if self._channel is not None and not self._channel.serving:  # refused by the simulator
                self._drop_channel()
                self._open_channel()
            if routine == "advance":
                raise BadActionError(str(error.args[0]), **error.facts) from None
            raise
        except RoutineError as error:
            self.running = False
            self._raised = True
            self._drop_channel()
            raise SimulationError(f"{error}\ncall reset() to begin again", **error.facts) from error
        except BaseException:
            # Ctrl-C: the state of the simulation is unknown, and ranks may stay in native code.
            self.running, self._raised = False, True
            self._drop_channel()
            raise

    # --- the gang ---

    def _open_channel(self) -> None:
        """Connect to the ranks directly, where that is possible: a step is then no command."""
        library = self._library
        if library is None or self._session is None:
            return
        size = self.copies * self.spec.layout.itemsize
        # Anonymous memory, which ends with its processes. Ranks of this node open it by its
        # descriptor, until that is closed.
        fd = os.memfd_create("alchemist-env")
        try:
            os.ftruncate(fd, HEADER_NBYTES + size)
            memory = mmap.mmap(fd, HEADER_NBYTES + size)
            memory[:MARK] = mark = secrets.token_bytes(MARK)
            address = f"/proc/{os.getpid()}/fd/{fd} {mark.hex()}"
            self._channel = self._session.open_rank_channel(
                lambda addresses, token: library.serve(addresses, token, address), CHANNEL_S
            )
        except (GroupFailedError, *RENEWED) as error:
            raise self._gone(error) from error
        finally:
            os.close(fd)
        self._shared = np.frombuffer(memory, np.uint8, size, HEADER_NBYTES)

    def _drop_channel(self) -> None:
        """Disconnect at once, without waiting for the ranks to leave `serve`."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.hang_up()

    def _close_channel(self) -> None:
        """Disconnect, so that the ranks take commands again."""
        channel, self._channel = self._channel, None
        if channel is not None and not channel.close():
            raise self._timed_out("the ranks did not return from a step")

    def _start(self) -> None:
        """Attach the simulator, on the gang that goes on or on a new one.

        Raises `RestartLimitError`, `AlchemistError`.
        """
        lost = self._rate.recent()
        if lost > self.config.max_restarts:
            raise RestartLimitError(
                f"gangs of simulator {self.config.lib_name!r} were lost {lost} times within an "
                f"hour, and max_restarts is {self.config.max_restarts}: find the cause before "
                "starting more"
            )
        goes_on = self._goes_on
        self._goes_on = False
        if isinstance(self.config.placement, Mapping) and not goes_on:
            self._end()  # the chosen nodes may have others' work
        if self._session is None:
            self._session, self._close_session = open_session(self, self.config)
        try:
            if not goes_on:
                if self.config.placement != "inherit":
                    release_dropped(self.config.num_workers, self.config.cpus_per_worker or 1.0)
                self._session.request_workers(self.config.num_workers)
            self._attach()
        except GroupError as error:
            self._end()
            raise advising(error, NEXT_START) from error.__cause__
        except BaseException:
            self._end()
            raise
        if self._lost:
            self._lost = False
            self.losses.add(RESTARTS, 1, "other ranks replace the lost ones")

    def _attach(self) -> None:
        """Load the simulator on the gang and set up its copies."""
        assert self._session is not None
        config = self.config
        self._close_channel()
        try:
            library = self._session.load_library(HOST)
            text = library.attach.options(timeout_s=config.start_timeout_s)(
                config.lib_name, config.lib_path, config.sim_json(), self.copies
            )
        except CallTimeoutError as error:
            raise self._timed_out(
                f"loading and setting up simulator {config.lib_name!r} took longer than "
                f"{config.start_timeout_s:g} s (start_timeout_s)",
                NEXT_START,
            ) from error
        spec = SimulatorSpec.from_json(text)
        if spec.warning and config.simulator() not in _specs:
            warnings.warn(f"simulator {config.lib_name!r}: {spec.warning}", stacklevel=2)
        if spec != _specs.setdefault(config.simulator(), spec):
            raise EnvError(
                f"the spec of simulator {config.lib_name!r} has changed: it must depend on its "
                "'sim' options only"
            )
        self.steps = np.zeros(self.copies, np.int64)
        self._begun = False
        self._library = library

    def _gone(self, error: AlchemistError) -> GangLostError:
        """The episodes are lost, and the gang, unless it has other ranks: make the error."""
        goes_on = isinstance(error, RENEWED)
        self._give_up(goes_on=goes_on)
        what, then = ("episode", NEXT_EPISODE) if goes_on else ("gang", NEXT_RESET)
        text = f"the {what} of simulator {self.config.lib_name!r} is lost: {advising(error, then)}"
        if then not in text:
            text = f"{text}. {then}"
        return GangLostError(text, **error.facts)

    def _timed_out(self, event: str, advice: str = NEXT_RESET) -> StepTimeoutError:
        """Kill the gang, which does not respond, and make the error."""
        self._give_up()
        error = StepTimeoutError(f"{event}, so the gang was killed; {advice}")
        self.losses.add(TIMEOUTS, 1, error)
        return error

    def _give_up_stuck(self) -> None:
        """Give the gang up if ranks stay in native code or MPI after one has raised."""
        self._raised = False
        try:
            self._library.begin.options(timeout_s=RETURN_S)([], [])
        except RoutineError:
            pass
        except RENEWED:
            self._library = None
            self._goes_on = True
        except (CallTimeoutError, GroupError):
            self._give_up()

    def _give_up(self, *, goes_on: bool = False) -> None:
        """`goes_on`: the gang has other ranks, and is used again."""
        self._begun = self.running = self._raised = False
        self._library = None
        self._goes_on = goes_on
        self._drop_channel()
        self._lost = True
        self._rate.add()
        if self._session is not None and not goes_on:
            self._session.kill_workers("its simulation failed")

    def _end(self) -> None:
        self._begun = self.running = self._goes_on = False
        self._library = None
        channel, self._channel = self._channel, None
        if channel is not None and not channel.close() and self._session is not None:
            self._session.kill_workers("its ranks do not respond")
        if self._session is not None:
            self._session = None
            self._close_session()

    def close(self) -> None:
        """End the gang. Closing twice is allowed."""
        if self._lost and not self._closed:
            unreplaced[self.config.simulator()].append(self._rate)
        self._closed = True
        self._end()

    def __repr__(self) -> str:
        ranks = f"{self.config.num_workers} rank{'s' if self.config.num_workers > 1 else ''}"
        state = "closed" if self._closed else ("running" if self.running else "no episode")
        return f"{self.config.lib_name} on {ranks}: {state}"
