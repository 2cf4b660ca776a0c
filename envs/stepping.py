"""``step_async`` and ``step_wait``: environments of one process that step at the same time."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from envs.errors import EnvError


class AsyncSteps:
    """Adds ``step_async`` and ``step_wait`` to an environment.

    Each environment steps in a thread of its own, which waits for its gang, so that the gangs of
    several environments compute at the same time::

        for env, action in zip(envs, actions):
            env.step_async(action)
        results = [env.step_wait() for env in envs]
    """

    _pending: Future[Any] | None = None
    _stepper: ThreadPoolExecutor | None = None

    @abstractmethod
    def _step(self, action: Any) -> Any:
        """Advance by a time step."""

    @abstractmethod
    def _open(self) -> Any:
        """Raises `EnvError` if the environment is closed."""

    @abstractmethod
    def _interrupt(self) -> None:
        """End the step in progress, from another thread."""

    def step_async(self, action: Any) -> None:
        """Begin a step; `step_wait` must come next.

        Raises
        ------
        EnvError
            If a step is in progress, or the environment is closed.
        """
        self._check_idle()
        self._open()
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
        except KeyboardInterrupt:
            self._abandon_step()
            raise
        finally:
            self._pending = None

    def _check_idle(self) -> None:
        if self._pending is not None:
            raise EnvError("a step is in progress: call step_wait() first")

    def _abandon_step(self) -> None:
        """End a step in progress; its result is lost."""
        if self._pending is not None and not self._pending.done():
            self._interrupt()
            wait([self._pending])
        self._pending = None

    def _end_stepper(self) -> None:
        self._abandon_step()
        if self._stepper is not None:
            self._stepper.shutdown(wait=False)
            self._stepper = None
