"""Rank side of the tests of LAMMPS."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ali.registry import load
from mpi_workers.local import local_gang
from mpi_workers.rank.gang_view import GangView

SMALL = {"cells": 4, "md_steps": 20, "melt_steps": 100}
SHORT = {"cells": 4, "md_steps": 5, "melt_steps": 10}  # for more ranks than cores


class Simulator:
    """The library on this gang, with its routines as methods."""

    def __init__(self, gang: GangView, **setup: Any) -> None:
        self._gang, self._library = gang, load("lammps_crystal")
        self.call("setup", **setup)

    def call(self, routine: str, **arguments: Any) -> Any:
        told = self._library.call(self._gang, routine, arguments)
        return told[0] if told else None

    def error(self, routine: str, **arguments: Any) -> str:
        try:
            self.call(routine, **arguments)
        except Exception as error:
            return f"{getattr(error, 'kind', type(error).__name__)}: {error}"
        return "nothing"

    def begin(self, seed: int) -> list[float]:
        self.call("seed", seed=seed)
        self.call("reset")
        return self.call("get_state")

    def close(self) -> None:
        self._library.close()


def same(gang: GangView) -> dict[str, Any]:
    """First observations and steps: of two seeds, again, and of another LAMMPS."""
    one = Simulator(gang, **SHORT)
    first, other = one.begin(5), one.begin(6)
    one.call("step", action=[0.7])
    again = one.begin(5)
    one.call("step", action=[0.5])
    after = one.call("get_state")
    two = Simulator(gang, **SHORT)
    new = two.begin(5)
    two.call("step", action=[0.5])
    found = {
        "first": first,
        "other": other,
        "again": again,
        "new": new,
        "after": [after, two.call("get_state")],
        "following": [two.call("reset"), two.call("get_state")][1],
    }
    one.close()
    two.close()
    return found


def quiet(gang: GangView) -> list[str]:
    """Files that an episode leaves in the folder it runs in."""
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            simulator = Simulator(gang, **SMALL)
            simulator.begin(1)
            simulator.call("step", action=[1.0])
            simulator.close()
            return sorted(path.name for path in Path(folder).iterdir())
        finally:
            os.chdir(here)


def thermostat(gang: GangView, temperature: float) -> dict[str, Any]:
    """Mean of the temperature when it has been held, what was scored, the whole fall."""
    simulator = Simulator(gang, cells=5, md_steps=100, episode_length=10)
    start = simulator.begin(3)
    scores, temperatures = [], []
    for _ in range(10):
        simulator.call("step", action=[temperature])
        scores.append(simulator.call("get_score")[0])
        temperatures.append(simulator.call("get_state")[0])
    end = simulator.call("get_state")
    picture = simulator.call("render").local
    simulator.close()
    return {
        "temperature": float(np.mean(temperatures[5:])),
        "scores": sum(scores),
        "fall": start[1] - end[1],
        "order": [start[3], end[3]],
        "clock": [start[5], end[5]],
        "picture": [list(picture.shape), float(picture.mean())],
    }


def order(gang: GangView) -> list[float]:
    """Q6 of the melt, and of atoms put back on their lattice."""
    simulator = Simulator(gang, cells=4)
    melt = simulator.begin(2)[3]
    lattice = "delete_atoms group all\nreset_atoms id\ncreate_atoms 1 box\nvelocity all set 0 0 0\n"
    simulator.call("command", text=lattice + "run 0")
    crystal = simulator.call("get_state")
    simulator.close()
    return [melt, crystal[3], crystal[1]]


def crystallised(gang: GangView, temperature: float, seeds: list[int], steps: int) -> list[float]:
    """Energy and Q6 after a hold and a quench, of the first seed that crystallises."""
    simulator = Simulator(gang, cells=4)
    end = [0.0, 0.0]
    for seed in seeds:
        simulator.begin(seed)
        for _ in range(steps):
            simulator.call("step", action=[temperature])
            if simulator.call("get_state")[3] > 0.6:
                break
        for _ in range(2):
            simulator.call("step", action=[0.1])
        end = simulator.call("get_state")[1:4:2]
        if end[1] > 0.6:
            break
    simulator.close()
    return end


def refused(gang: GangView, texts: list[str]) -> dict[str, Any]:
    """The errors of bad commands and of the steps after them, and whether resets repair it."""
    simulator = Simulator(gang, **SMALL)
    before = simulator.begin(4)
    found = {}
    for text in texts:
        said = [simulator.error("command", text=text), simulator.error("step", action=[1.0])]
        found[text] = {"said": said, "same": simulator.begin(4) == before}
    simulator.close()
    return found


def bad_arguments(gang: GangView, calls: list[tuple[str, dict[str, Any]]]) -> list[str]:
    """The errors of calls that are refused, each of a new simulator."""
    return [Simulator(gang, **SMALL).error(routine, **given) for routine, given in calls]


def renewed(gang: GangView) -> bool:
    """Whether an episode goes on where a failure elsewhere costs the gang its communicator."""
    simulator = Simulator(gang, **SHORT)
    simulator.begin(4)
    local_gang.begin(2)
    gang.renew()
    simulator.call("step", action=[1.0])
    found = simulator.call("get_state")[5] > 0
    simulator.close()
    return bool(found)
