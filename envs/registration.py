"""Registers the environments with gymnasium: ``gym.make("alchemist/...")``."""

from __future__ import annotations

import gymnasium

ENV = "envs.hpc_env:HPCSimulatorEnv"
VECTOR_ENV = "envs.vector_env:HPCSimulatorVectorEnv"
SHIPPED = {
    "Simulator": None,  # any simulator, by lib_name and lib_path
    "RayleighBenard": "rayleigh_benard",
    "LennardJones": "lammps_crystal",
}


def register() -> None:
    """Register the environments that are not registered yet."""
    for name, library in SHIPPED.items():
        ident = f"alchemist/{name}-v0"
        if ident not in gymnasium.registry:
            gymnasium.register(
                ident,
                entry_point=ENV,
                vector_entry_point=VECTOR_ENV,
                kwargs={} if library is None else {"lib_name": library},
            )


register()
