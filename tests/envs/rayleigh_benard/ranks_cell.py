"""Rank side of the tests of the simulator."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ali.registry import load
from benchmarks.rayleigh_benard.baselines import POLICIES
from envs.rayleigh_benard.build import shared_object
from mpi_workers.failures import Interrupted
from mpi_workers.local import local_gang
from mpi_workers.protocol.signature import Signature
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of

SMALL = {"height": 8, "width": 24, "velocity": 0.1, "rayleigh": 5e3, "spin_up": 0.0}


class Cell:
    """The library, set up; its routines by name, with their defaults."""

    def __init__(self, gang: GangView, **sim: Any) -> None:
        self.gang = gang
        self.library = load("rayleigh_benard", shared_object())
        self.signatures = {
            found["name"]: Signature.from_map(found)
            for found in self.library.describe()["routines"]
        }
        self("setup", **sim)

    def __call__(self, routine: str, **arguments: Any) -> list[Any]:
        bound = self.signatures[routine].bind((), arguments, lambda matrix: matrix)
        return self.library.call(self.gang, routine, bound)

    def measure(self) -> dict[str, float]:
        names = [result.name for result in self.signatures["measure"].results]
        return dict(zip(names, self("measure"), strict=True))

    def act(self, action: Any) -> tuple[list[float], list[float]]:
        """A step: what is observed, and the score."""
        self("step", action=[float(a) for a in action])
        return self("get_state")[0], self("get_score")[0]

    def field(self) -> NDArray[np.float64]:
        return np.array(self("render")[0].local)

    def state(self) -> NDArray[np.float64]:
        """The whole saved state, on every rank."""
        (saved,) = self("save_state")
        return np.array(self.gang.to_layout(saved, "STAR_STAR").local)

    def load(self, state: NDArray[np.float64], layout: str = "VC_STAR") -> None:
        whole = self.gang.new(state.shape, "float64", "STAR_STAR")
        whole.local[...] = state
        self("load_state", state=self.gang.to_layout(whole, layout))


def bits(*values: Any) -> str:
    """A name for exactly these numbers."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(np.ascontiguousarray(value, dtype=np.float64).tobytes())
    return digest.hexdigest()


# One pair of rolls of the critical wavelength, as in Clever & Busse (J. Fluid Mech. 65, 625, 1974).
ROLLS = {"height": 48, "width": 97, "prandtl": 0.71, "velocity": 0.15, "heaters": 1}


def spec(gang: GangView, sim: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Cell(gang, **sim)("spec")[0])
    return found


def rolls(gang: GangView, rayleigh: float, free_falls: float) -> dict[str, float]:
    """Convection from a perturbed conducting state."""
    cell = Cell(gang, **ROLLS, rayleigh=rayleigh, spin_up=free_falls, perturbation=0.3)
    return cell.measure()


def growth(gang: GangView, rayleighs: list[float]) -> list[float]:
    """Rates at which the energy of a small perturbation grows, per free-fall time."""
    rates = []
    for rayleigh in rayleighs:
        small = {"height": 24, "width": 48, "roll_pairs": 1, "perturbation": 1e-3, "heaters": 1}
        cell = Cell(gang, **small, rayleigh=rayleigh, spin_up=30.0)
        before = cell.measure()
        cell("run", steps=1200)
        after = cell.measure()
        rise = np.log(after["kinetic_energy"] / before["kinetic_energy"])
        rates.append(float(rise / (after["time"] - before["time"])))
    return rates


def conserved(gang: GangView) -> list[dict[str, float]]:
    """Measures at the beginning of an episode, and after every step of it."""
    cell = Cell(gang, height=16, width=48, spin_up=5.0, time_step=0.25)
    cell("reset")
    found = [cell.measure()]
    random = np.random.default_rng(4)
    for _ in range(10):
        cell.act(random.uniform(-1, 1, 12))
        found.append(cell.measure())
    return found


def episode(gang: GangView, sim: dict[str, Any], seed: int, steps: int) -> str:
    """All that an episode shows, as bits."""
    cell = Cell(gang, **sim)
    cell("seed", seed=seed)
    cell("reset")
    random = np.random.default_rng(seed)
    shown = [cell("get_state")[0]]
    for _ in range(steps):
        shown += cell.act(random.uniform(-1, 1, 12))
    shown += [cell.field(), cell("measure"), cell.state()]
    everyone = gang.comm.allgather(bits(*shown))
    assert len(set(everyone)) == 1, "the ranks disagree"
    return everyone[0]


def views(gang: GangView) -> dict[str, Any]:
    """The same episode seen by one, and by an agent for each heater."""
    found = {}
    for agents in (1, 12):
        cell = Cell(gang, **SMALL, agents=agents, reference=2.0)
        cell("seed", seed=3)
        cell("reset")
        observation, score = cell.act(np.linspace(-1, 1, 12))
        found[str(agents)] = [observation, score, cell("spec")[0]]
    return found


def first_observations(gang: GangView, seeds: list[int]) -> list[list[float]]:
    cell = Cell(gang, **SMALL)
    found = []
    for seed in seeds:
        cell("seed", seed=seed)
        cell("reset")
        found.append(cell("get_state")[0])
    cell("reset")  # goes on from the last seed
    return [*found, cell("get_state")[0]]


def heated(gang: GangView) -> None:
    """Whatever the action, the plate's mean stays and no heater is beyond the amplitude."""
    sim = {**SMALL, "height": 4, "width": 240, "time_step": 0.02, "amplitude": 0.75}
    cell = Cell(gang, **sim)

    numbers = st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1.5, 1.5)

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.lists(numbers, min_size=12, max_size=12))
    def holds(action: list[float]) -> None:
        cell("step", action=action)
        rise = cell.field()[-1] - 0.5
        assert abs(rise.mean()) < 1e-14
        assert np.abs(rise).max() <= 0.75 + 1e-15
        heaters = rise.reshape(12, 20)[:, 10]  # the middles, which do not blend
        clipped = np.clip(action, -1, 1)
        order = np.argsort(clipped)
        assert (np.diff(heaters[order]) >= -1e-15).all(), "a hotter wish is not a cooler heater"
        if abs(clipped.mean()) < 1e-12:
            np.testing.assert_allclose(heaters, 0.75 * clipped, atol=1e-11)

    holds()


def saved(gang: GangView, sim: dict[str, Any], file: str) -> str:
    """Save in the middle of an episode; what comes after it, as bits."""
    cell = Cell(gang, **sim)
    cell("seed", seed=8)
    cell("reset")
    cell.act(np.linspace(-1, 1, 12))
    state = cell.state()
    if gang.rank == 0:
        np.save(file, state)
    return _after(cell)


def loaded(gang: GangView, sim: dict[str, Any], file: str, layout: str) -> str:
    cell = Cell(gang, **sim)
    cell.load(np.load(file), layout)
    return _after(cell)


def _after(cell: Cell) -> str:
    shown = [cell.act(np.cos(np.arange(12) + i))[0] for i in range(2)]
    cell("reset")  # the generator's state was saved as well
    return bits(*shown, cell("get_state")[0], cell.field(), cell.state())


def refusals(gang: GangView, cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The errors that the caller gets; a valid call works after each."""
    cell = Cell(gang, **SMALL)
    told = []
    for routine, arguments in cases:
        if routine == "load_state":
            arguments = {"state": gang.new(tuple(arguments["shape"]), "float64", "VC_STAR")}
        if "action" in arguments:
            arguments = {"action": [float(a) for a in arguments["action"]]}
        told.append(failure_of(cell, routine, **arguments))
        cell.act(np.zeros(12))
    fresh = Cell.__new__(Cell)
    fresh.gang, fresh.signatures = gang, cell.signatures
    fresh.library = type(cell.library)("unset", Path(cell.library._object._name))
    unset = ("spec", "reset", "get_state", "measure", "render", "save_state")
    return [*told, *(failure_of(fresh, routine) for routine in unset)]


def cancelled(gang: GangView) -> dict[str, Any]:
    """A run that is ended in the middle; what is said until reset, and how it goes on."""
    cell = Cell(gang, **SMALL)
    cell("seed", seed=1)
    cell("reset")
    wanted = cell("get_state")[0]
    found: dict[str, Any] = {}
    timer = threading.Timer(0.05, local_gang.interrupt, [1])
    timer.start()
    try:
        cell("run", steps=10**9)
        found["cancelled"] = False
    except Interrupted:
        found["cancelled"] = True
    timer.join()
    local_gang.begin(2)
    gang.renew()
    for routine in ("get_state", "run", "render", "save_state"):
        found[routine] = failure_of(cell, routine, **({"steps": 1} if routine == "run" else {}))
        gang.comm.Barrier()
    cell("seed", seed=1)
    cell("reset")
    found["the same"] = cell("get_state")[0] == wanted
    return found


def first_bits(gang: GangView, sim: dict[str, Any]) -> str:
    cell = Cell(gang, **sim)
    cell("reset")
    return bits(cell.act([1, 0, -1, 0])[0], cell.field())


def controlled(gang: GangView, steps: int) -> dict[str, float]:
    """Nusselt numbers of the default cell: developed, then with each of the baselines."""
    cell = Cell(gang)
    found = {"developed": cell.measure()["nusselt"]}
    for name, policy in POLICIES.items():
        cell("seed", seed=1)
        cell("reset")
        observation, nusselt = cell("get_state")[0], []
        for _ in range(steps):
            observation, score = cell.act(policy(np.array(observation)))
            nusselt.append(score[1])
        found[name] = float(np.mean(nusselt))
    return found
