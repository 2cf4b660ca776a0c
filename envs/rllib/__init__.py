"""RLlib with environments that run on gangs: CPUs, time limits, restarts and metrics.

::

    config = configure(
        PPOConfig(),
        HPCSimulatorEnv,
        env_config={"num_workers": 2, "lib_name": "lammps_crystal"},
        num_env_runners=2,
    )
    algo = config.build_algo()

A gang needs CPUs beyond those of its env runner, and RLlib waits forever for resources that it
cannot get. `configure` therefore gives each runner the CPUs of its gang, and the gang runs inside
them. Configs that do not fit the cluster are refused before anything starts. `spanning` supports
gangs over several nodes. Written for the new API stack (EnvRunners, Learners) of RLlib 2.60.
"""

from envs.errors import step_failed
from envs.rllib.configuration import configure, env_runner_resources
from envs.rllib.env_runner import (
    GangCallbacks,
    GangEnvRunner,
    GangMultiAgentEnvRunner,
    HPCSimulatorMultiAgentEnv,
    spanning,
)

__all__ = [
    "GangCallbacks",
    "GangEnvRunner",
    "GangMultiAgentEnvRunner",
    "HPCSimulatorMultiAgentEnv",
    "configure",
    "env_runner_resources",
    "spanning",
    "step_failed",
]
