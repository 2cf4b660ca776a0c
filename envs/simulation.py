"""A simulator on a gang, as an environment sees it: started, stepped, lost, started again."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    CallTimeoutError,
    GroupFailedError,
    RoutineError,
)
from alchemist_ray.gang.libraries import Routine
from alchemist_ray.gang.rank_channel import RankChannel
from envs.config import EnvConfig
from envs.errors import (
    BadActionError,
    EnvError,
    GangLostError,
    RestartLimitError,
    SimulationError,
    StepTimeoutError,
)
from envs.spec import SimulatorSpec

LINES_S = 10.0  # for the ranks to call back
HOST = "simulator"  # the library on the ranks that runs them

_specs: dict[tuple[Any, ...], SimulatorSpec] = {}  # of simulators that this process has met
_losses: Counter[tuple[Any, ...]] = Counter()  # of gangs, where RLlib makes one env after the other


class Simulation:
    """One or more copies of a simulator on a gang of ranks.

    Parameters
    ----------
    config : EnvConfig
    num_envs : int, optional
        Sub-environments that are wanted in all, copies x agents. Default: as the config says.

    Attributes
    ----------
    spec : SimulatorSpec
    copies : int
        Simulations of their own.

    Raises
    ------
    AlchemistError
        If the gang or the simulator does not start.

    Notes
    -----
    If this process has met the simulator before, its spec is known, and the gang is started
    by the first `begin`. Else the gang is started for it now, and stays.
    """

    def __init__(self, config: EnvConfig, num_envs: int | None = None) -> None:
        self.config = config
        self.copies = config.copies or 1
        self._session: AlchemistSession | None = None
        self._routines: dict[str, Routine] = {}  # none: there is no gang
        self._lines: RankChannel | None = None
        self._running = False
        self._closed = False
        self._lost = 0
        known = _specs.get(config.simulator())
        if known is None:
            self._start()
            known = _specs[config.simulator()]
        self.spec: SimulatorSpec = known
        if config.copies is None and num_envs is not None:
            copies = max(1, num_envs // known.agents)
            if copies != self.copies:
                self.copies = copies
                if self._routines:
                    self._guarded_attach()

    # --- episodes and steps ---

    def begin(self, which: Sequence[int], seeds: Sequence[int]) -> NDArray[np.float64]:
        """A record per copy; those in `which` have begun an episode. Starts a gang if need be.

        Raises
        ------
        SimulationError, GangLostError, StepTimeoutError, RestartLimitError
        AlchemistError
            If a gang cannot be started.
        """
        if self._closed:
            raise EnvError("the environment is closed: make another one")
        if not self._routines:
            self._start()
        if self._lines is None:
            self._open_lines()
        records = self._records("begin", which, seeds)
        self._running = True
        return records

    def advance(
        self, actions: bytes, which: Sequence[int] = (), seeds: Sequence[int] = ()
    ) -> NDArray[np.float64]:
        """A record per copy after a time step; those in `which` begin an episode instead.

        Raises
        ------
        BadActionError, SimulationError, GangLostError, StepTimeoutError
        """
        return self._records("advance", actions, which, seeds)

    def _records(self, routine: str, *arguments: Any) -> NDArray[np.float64]:
        told = self._call(routine, *arguments)
        return np.frombuffer(told).reshape(self.copies, -1)

    @property
    def running(self) -> bool:
        """Whether an episode is under way."""
        return self._running

    def picture(self, copy: int) -> NDArray[np.float32]:
        """The field that a copy shows, shape (height, width); its first row is the top."""
        height, width, told = self._call("render", copy)
        return np.frombuffer(told, np.float32).reshape(height, width)

    def save_state(self) -> NDArray[Any]:
        """The simulation's state, as its library gives it."""
        self._hang_up()
        handle = self._call("save_state")
        state: NDArray[Any] = handle.fetch()
        handle.free()
        self._open_lines()
        return state

    def load_state(self, state: NDArray[Any]) -> None:
        """Go back to a state that `save_state` gave, from this gang or another."""
        self._hang_up()
        handle = self._session.send_matrix(state) if self._session is not None else None
        self._call("load_state", handle)
        if handle is not None:
            handle.free()
        self._open_lines()

    def _call(self, routine: str, *arguments: Any) -> Any:
        if not self._routines:
            raise EnvError(f"there is no episode to {routine}: reset() begins one")
        try:
            if self._lines is None:
                return self._routines[routine](*arguments)
            order = {"do": routine, "arguments": arguments}
            return self._lines.ask(order, self.config.step_timeout_s)
        except CallTimeoutError as error:
            limit = f"{self.config.step_timeout_s:g} s (step_timeout_s)"
            raise self._late(f"{routine} took longer than {limit}") from error
        except GroupFailedError as error:
            self._give_up()
            raise GangLostError(
                f"the gang that simulated {self.config.lib_name!r} is lost; reset() starts a "
                f"fresh one. {error}",
                **error.facts,
            ) from error
        except BadArgumentError as error:
            if routine == "advance":
                raise BadActionError(str(error.args[0]), **error.facts) from None
            raise
        except RoutineError as error:
            self._running = False
            self._drop_lines()
            raise SimulationError(f"{error}\nreset() begins anew", **error.facts) from error
        except BaseException:
            self._running = False  # Ctrl-C: who knows what has been done
            self._drop_lines()
            raise

    # --- the gang ---

    def _open_lines(self) -> None:
        """Straight lines to the ranks, where they can be had: a step costs no command then."""
        serve = self._routines.get("serve")
        if serve is not None and self._session is not None:
            self._lines = self._session.open_rank_channel(serve, LINES_S)

    def _drop_lines(self) -> None:
        """Close them now: an error that is still held would hold them, and ranks in `serve`."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.hang_up()

    def _hang_up(self) -> None:
        """Have the ranks take commands again."""
        lines, self._lines = self._lines, None
        if lines is not None and not lines.close():
            raise self._late("the ranks were not back from a step")

    def _start(self) -> None:
        """A gang with the simulator on it. Raises `RestartLimitError`, `AlchemistError`."""
        lost = self._losses()
        if lost > self.config.max_restarts:
            raise RestartLimitError(
                f"gangs that simulated {self.config.lib_name!r} were lost {lost} times, and "
                f"max_restarts is {self.config.max_restarts}: look at why before more are started"
            )
        session = self._session or self._open()
        try:
            session.request_workers(self.config.num_workers)
            self._guarded_attach()
        except BaseException:
            self._end()
            raise

    def _open(self) -> AlchemistSession:
        config = self.config
        if config.hostname is not None and not ray.is_initialized():
            host = "127.0.0.1" if config.hostname == "0.0.0.0" else config.hostname
            ray.init(address=f"{host}:{config.port}")
        session = AlchemistSession(
            placement=config.placement,
            cpus_per_worker=config.cpus_per_worker,
            start_timeout_s=config.start_timeout_s,
            progress=False,
        )
        self._session = session
        # An environment that is dropped must not keep a gang. At exit sessions close themselves.
        weakref.finalize(self, _dropped.put, session).atexit = False
        _reaper.start()
        if config.hostname is not None and config.port is not None:
            session.connect_to_alchemist(config.hostname, config.port)
        return session

    def _guarded_attach(self) -> None:
        assert self._session is not None
        config = self.config
        self._hang_up()
        try:
            library = self._session.load_library(HOST)
            text = library.attach.options(timeout_s=config.start_timeout_s)(
                config.lib_name, config.lib_path, config.sim_json(), self.copies
            )
        except CallTimeoutError as error:
            raise self._late(
                f"loading and setting up simulator {config.lib_name!r} took longer than "
                f"{config.start_timeout_s:g} s (start_timeout_s)"
            ) from error
        spec = SimulatorSpec.from_json(text)
        known = _specs.setdefault(config.simulator(), spec)
        if spec != known:
            raise EnvError(
                f"simulator {config.lib_name!r} describes itself in another way than it did "
                "before: what it says must follow from its 'sim' options alone"
            )
        self._routines = {
            name: getattr(library, name).options(timeout_s=config.step_timeout_s)
            for name in ("begin", "advance", "render", "save_state", "load_state")
        }
        self._routines["serve"] = library.serve

    def _late(self, what: str) -> StepTimeoutError:
        """The gang hangs: it is killed, not asked."""
        self._give_up()
        return StepTimeoutError(f"{what}, so the gang was killed; reset() starts a fresh one")

    def _give_up(self) -> None:
        self._running = False
        self._routines = {}
        self._drop_lines()
        self._lost += 1
        _losses[self.config.simulator()] += 1
        if self._session is not None:
            self._session.kill_workers("a simulation was given up")

    def _losses(self) -> int:
        """Gangs lost so far. RLlib makes a new environment after each: its process counts."""
        return _losses[self.config.simulator()] if "ray.rllib" in sys.modules else self._lost

    def _end(self) -> None:
        self._running = False
        self._routines = {}
        lines, self._lines = self._lines, None
        if lines is not None and not lines.close() and self._session is not None:
            self._session.kill_workers("it hangs")
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def close(self) -> None:
        """End the gang. Closing twice is fine."""
        self._closed = True
        self._end()

    def __repr__(self) -> str:
        ranks = f"{self.config.num_workers} rank{'s' if self.config.num_workers > 1 else ''}"
        state = "closed" if self._closed else ("running" if self._running else "no episode")
        return f"{self.config.lib_name} on {ranks}: {state}"


class _Reaper:
    """Closes the sessions of simulations that nobody holds any more.

    Not where they are collected: that can be in the middle of a call to Ray.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            session = _dropped.get()
            with contextlib.suppress(AlchemistError, ray.exceptions.RayError):  # it is gone
                session.close()
            del session


_dropped: queue.SimpleQueue[AlchemistSession] = queue.SimpleQueue()
_reaper = _Reaper()
