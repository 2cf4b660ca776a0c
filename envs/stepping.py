"""Shared by single and vector environments: ``step_async``, ``step_wait``, opening, closing."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Self, TypeVar

from envs.errors import EnvError
from envs.gangs import Gangs
from envs.simulation import Simulation

S = TypeVar("S", Simulation, Gangs)


class SteppedEnv(Generic[S]):
    """An environment over a simulation, until it is closed.

    Each environment steps in a thread of its own, which waits for its gang, so that the gangs of
    several environments compute at the same time::

        for env, action in zip(envs, actions):
            env.step_async(action)
        results = [env.step_wait() for env in envs]

    Attributes
    ----------
    closed : bool
    """

    closed = False
    _simulation: S | None = None
    _pending: Future[Any] | None = None
    _stepper: ThreadPoolExecutor | None = None

    @abstractmethod
    def _step(self, action: Any) -> Any:
        """Advance by a time step."""

    def _open(self) -> S:
        """The simulation. Raises `EnvError` if the environment is closed."""
        if self._simulation is None:
            raise EnvError("the environment is closed: make another one")
        return self._simulation

    def _idle(self) -> S:
        """The simulation, between two steps. Raises `EnvError`."""
        if self._pending is not None:
            raise EnvError("a step is in progress: call step_wait() first")
        return self._open()

    def step_async(self, action: Any) -> None:
        """Begin a step; `step_wait` must come next.

        Raises
        ------
        EnvError
            If a step is in progress, or the environment is closed.
        """
        self._idle()
        self._stepper = self._stepper or ThreadPoolExecutor(1)
        self._pending = self._stepper.submit(self._step, action)

    def step_wait(self) -> Any:
        """Wait for the step of `step_async`. Returns and raises as ``step``.

        Raises
        ------
        EnvError
            If no step is in progress.
        """
        if self._pending is None:
            raise EnvError("no step is in progress: call step_async(action) first")
        try:
            return self._pending.result()
        except BaseException:  # of the step; or Ctrl-C, or another signal's handler, in the wait
            self._abandon_step()
            raise
        finally:
            self._pending = None

    def _abandon_step(self) -> None:
        """End a step in progress; its result is lost."""
        if self._pending is not None and not self._pending.done():
            self._open().interrupt()
            wait([self._pending])
        self._pending = None

    def close(self, **_: Any) -> None:
        """End the gangs. Closing twice is allowed."""
        self.closed = True
        self._abandon_step()
        if self._stepper is not None:
            self._stepper.shutdown(wait=False)
            self._stepper = None
        simulation, self._simulation = self._simulation, None
        if simulation is not None:
            simulation.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._simulation or 'closed'}>"

    def __str__(self) -> str:
        return repr(self)
