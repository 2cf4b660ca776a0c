"""What can go wrong with an environment.

    AlchemistError
    └── EnvError
        ├── EnvConfigError      a key or a value of the config (also a ValueError)
        ├── BadActionError      wrong shape, NaN, no choice: not simulated (also a ValueError)
        ├── SimulationError     the simulation raised on a rank; the gang goes on
        ├── GangLostError       a rank died; the next reset() starts a fresh gang
        │   └── StepTimeoutError    ... was killed, because of step_timeout_s (also a TimeoutError)
        └── RestartLimitError   gangs are lost again and again: max_restarts is used up

After a `SimulationError` or a `GangLostError` the environment wants a ``reset()``, and
nothing else.
"""

from __future__ import annotations

import sys

from alchemist_ray.errors import AlchemistError


class EnvError(AlchemistError):
    """Something about an environment."""


class EnvConfigError(EnvError, ValueError):
    """A key or a value of an environment's config."""


class BadActionError(EnvError, ValueError):
    """An action of the wrong shape, with NaN, or that is no choice; nothing was simulated."""


class SimulationError(EnvError):
    """The simulation raised on a rank. Its episode is over; the gang goes on."""


class GangLostError(EnvError):
    """The gang that simulated is gone; the next reset() starts a fresh one."""


class StepTimeoutError(GangLostError, TimeoutError):
    """A step or a reset took longer than ``step_timeout_s``, and the gang was killed."""


class RestartLimitError(EnvError):
    """The gang was lost more often than ``max_restarts``."""


def to_raise(error: EnvError) -> BaseException:
    """An error as who runs the environment needs it.

    RLlib makes an environment anew for errors of a class of its own.
    """
    if "ray.rllib" in sys.modules and isinstance(error, SimulationError | GangLostError):
        from envs import rllib  # noqa: PLC0415  (it needs RLlib)

        told: BaseException = rllib.step_failed(error)
        return told
    return error
