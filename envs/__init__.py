"""Reinforcement-learning environments whose step is an MPI simulation on a gang."""

import sys
from importlib import import_module, util
from typing import Any

_ERRORS = (
    "EnvError", "EnvConfigError", "BadActionError", "NotFiniteError", "SimulationError",
    "GangLostError", "StepTimeoutError", "RestartLimitError",
)  # fmt: skip
_MODULES = {
    "HPCSimulatorEnv": "envs.hpc_env",
    "HPCSimulatorVectorEnv": "envs.vector_env",
    **dict.fromkeys(_ERRORS, "envs.errors"),
}
__all__ = sorted(_MODULES)

# For `gymnasium.make`: "alchemist/...-v0", and the library; any simulator by lib_name and lib_path.
_REGISTERED = {
    "Simulator": {},
    "RayleighBenard": {"lib_name": "rayleigh_benard"},
    "LennardJones": {"lib_name": "lammps_crystal"},
}


def _register() -> None:
    gymnasium = import_module("gymnasium")
    for name, config in _REGISTERED.items():
        gymnasium.register(
            f"alchemist/{name}-v0",
            entry_point="envs.hpc_env:HPCSimulatorEnv",
            vector_entry_point="envs.vector_env:HPCSimulatorVectorEnv",
            kwargs=config,
        )


# A rank that loads a simulator from a subfolder needs neither Ray nor gymnasium.
if "mpi_workers.rank.process" not in sys.modules and util.find_spec("gymnasium") is not None:
    _register()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if util.find_spec("gymnasium") is None:
        raise ImportError("envs needs gymnasium: pip install 'alchemist-on-ray[envs]'")
    return getattr(import_module(_MODULES[name]), name)
