"""Errors of environments::

    AlchemistError
    └── EnvError
        ├── EnvConfigError      a key or value of the config (also a ValueError)
        ├── BadActionError      wrong shape, NaN, not a choice: not simulated (also a ValueError)
        ├── SimulationError     the simulation raised on a rank; the gang continues
        │   └── NotFiniteError      an observation or reward is NaN, infinite, or out of range
        ├── GangLostError       a rank died; the next reset() goes on with others
        │   └── StepTimeoutError    the gang was killed because of step_timeout_s (a TimeoutError)
        └── RestartLimitError   more gangs were lost within an hour than max_restarts

After a `SimulationError` or a `GangLostError` the environment must be reset.
"""

from __future__ import annotations

import sys
from typing import Any

from alchemist_ray.errors import AlchemistError

RLLIB_ERRORS = "ray.rllib.env.env_errors"


class EnvError(AlchemistError):
    """Base class of the errors of environments."""


class EnvConfigError(EnvError, ValueError):
    """A key or a value of an environment's config."""


class BadActionError(EnvError, ValueError):
    """An action of the wrong shape, with NaN, out of bounds, or not a choice; nothing ran."""


class SimulationError(EnvError):
    """The simulation raised on a rank. Its episode is over; the gang continues."""


class NotFiniteError(SimulationError):
    """An observation or reward is NaN or infinite, or an integer does not fit its dtype."""


class GangLostError(EnvError):
    """The ranks of the simulation were lost; the next reset() goes on with others."""


class StepTimeoutError(GangLostError, TimeoutError):
    """A step or a reset took longer than ``step_timeout_s``, and the gang was killed."""


class RestartLimitError(EnvError):
    """More gangs were lost within an hour than ``max_restarts`` allows."""


def of_failure(error: EnvError) -> dict[str, Any]:
    """The `info` of a step that failed, with ``on_failure="truncate"``."""
    return {"gang_lost": isinstance(error, GangLostError), "failure": str(error)}


def for_caller(error: EnvError) -> BaseException:
    """Convert an error to the type that the framework of this process expects.

    RLlib recreates an environment that raises its `StepFailedRecreateEnvError`.
    """
    if RLLIB_ERRORS in sys.modules and isinstance(error, SimulationError | GangLostError):
        return step_failed(error)
    return error


def step_failed(error: EnvError) -> BaseException:
    """An error of the type of `error` that is also RLlib's ``StepFailedRecreateEnvError``."""
    rllib_error = sys.modules[RLLIB_ERRORS].StepFailedRecreateEnvError
    kind = type(error)
    if issubclass(kind, rllib_error):
        return error
    members = {"__doc__": kind.__doc__, "__reduce__": lambda _: (_restored, (error,))}
    failed: BaseException = type(kind.__name__, (kind, rllib_error), members)(
        *error.args, **error.facts
    )
    return failed


def _restored(error: EnvError) -> BaseException:
    """Unpickle: a process without RLlib gets the plain error."""
    return for_caller(error)
