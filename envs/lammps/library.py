"""Crystallisation of a Lennard-Jones melt, by LAMMPS on the gang's ranks.

An episode starts with a liquid of 4 cells^3 atoms at temperature 1.5 (Lennard-Jones units). A step
sets the thermostat's temperature and runs `md_steps` of molecular dynamics. The score is the
decrease of the potential energy per atom in the step; its sum is that of the episode. A fast
quench ends in a glass; a melt that is held near 0.6 crystallises.
"""

from __future__ import annotations

import json
from typing import Any

from ali import Context, DistMatrix, routine
from ali.blocks import require
from envs.lammps.crystal import Crystal, Parameters

PIXELS = 96
INFO = ("potential_energy", "temperature", "pressure", "q6")


def load(state: dict[str, Any], path: str | None) -> None:
    state.update(parameters=Parameters(), seed=0, episode=0)


def close(state: dict[str, Any]) -> None:
    crystal = state.pop("crystal", None)
    if crystal is not None:
        crystal.close()


def _episode(ctx: Context) -> Crystal:
    """The simulation, which must have an episode."""
    crystal = ctx.state.get("crystal")
    require(
        crystal is not None and crystal.sound,
        "RoutineError",
        "there is no episode: call reset() first, also after an error of LAMMPS",
    )
    ctx.comm.Barrier()  # all ranks must enter LAMMPS, which cannot be interrupted
    assert crystal is not None
    found: Crystal = crystal
    return found


@routine()
def setup(
    ctx: Context,
    cells: int = 5,
    density: float = 1.0,
    md_steps: int = 300,
    episode_length: int = 40,
    timestep: float = 0.008,
    damping: float = 0.5,
    coldest: float = 0.1,
    hottest: float = 2.0,
    melt_steps: int = 300,
) -> None:
    """Set the parameters of the next `reset`, in Lennard-Jones units.

    Parameters
    ----------
    cells : int
        Unit cells along each side of the periodic box: ``4 cells^3`` atoms.
    density : float
        Atoms per volume.
    md_steps : int
        Steps of molecular dynamics in a step of the environment.
    episode_length : int
        Steps of the environment in an episode.
    timestep, damping : float
        Time step; damping time of the Langevin thermostat.
    coldest, hottest : float
        Range of the action; actions are clipped to it.
    melt_steps : int
        Steps of molecular dynamics for melting the lattice, and again for cooling it.
    """
    parameters = Parameters(
        cells, density, md_steps, episode_length, timestep, damping, coldest, hottest, melt_steps
    )
    close(ctx.state)
    ctx.state["parameters"] = parameters


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec of the simulator, as JSON."""
    p: Parameters = ctx.state["parameters"]
    return json.dumps(
        {
            "name": "LennardJones",
            "observation": {"shape": [6], "dtype": "float32", "low": None, "high": None},
            "action": {"shape": [1], "dtype": "float32", "low": p.coldest, "high": p.hottest},
            "agents": 1,
            "episode_length": p.episode_length,
            "time_step": p.md_steps * p.timestep,
            "score": "decrease of the potential energy per atom in the step",
            "info": list(INFO),
            "render": {"field": "density of atoms along z", "low": 0.0, "high": 2.5},
        }
    )


@routine()
def seed(ctx: Context, seed: int) -> None:
    """Set the seed of the next episode, from which later ones follow."""
    require(seed >= 0, "BadArgumentError", f"seed={seed}: it must be at least 0")
    ctx.state.update(seed=seed, episode=0)


@routine()
def reset(ctx: Context) -> None:
    """Begin an episode: a melt at temperature 1.5, which depends on seed and number of ranks."""
    state = ctx.state
    ctx.comm.Barrier()
    if state.get("crystal") is None:
        state["crystal"] = Crystal(ctx.comm, state["parameters"])
    state["crystal"].melt(state["seed"], state["episode"])
    state["episode"] += 1


@routine()
def step(ctx: Context, action: list[float]) -> None:
    """Change the thermostat to the temperature ``action[0]`` over `md_steps`."""
    require(
        len(action) == 1 and action[0] == action[0],
        "BadArgumentError",
        f"action={action}: it must be one temperature",
    )
    _episode(ctx).hold(action[0])


@routine("state")
def get_state(ctx: Context) -> list[float]:
    """Temperature, potential energy per atom, pressure / 10, Q6, thermostat, time (0 to 1).

    Q6 is the length of the atoms' mean bond-orientational order vector of degree 6 (12 nearest
    neighbours, each vector normalised): 1 in a perfect crystal, below 0.1 in a liquid.
    """
    c = _episode(ctx)
    time = c.steps / c.parameters.episode_length
    return [c.temperature, c.energy, c.pressure / 10, c.order, c.target, time]


@routine("score")
def get_score(ctx: Context) -> list[float]:
    """The score of the last step, then potential energy, temperature, pressure, Q6."""
    c = _episode(ctx)
    return [c.fell, c.energy, c.temperature, c.pressure, c.order]


@routine("field")
def render(ctx: Context) -> DistMatrix:
    """The density of atoms along z, divided by its mean, shape (96, 96)."""
    return ctx.new_replicated(_episode(ctx).picture(PIXELS))


@routine()
def command(ctx: Context, text: str) -> None:
    """Run LAMMPS commands on the current episode, one per line.

    An error of LAMMPS fails the call; `reset` makes the simulation usable again.
    """
    crystal = _episode(ctx)
    crystal.run(text)
    crystal.measure()
