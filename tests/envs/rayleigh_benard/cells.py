"""A cell of the simulator, on the ranks of a trial gang."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ali.registry import load
from envs.rayleigh_benard.build import shared_object
from mpi_workers.rank.gang import Gang
from mpi_workers.wire.signature import Signature

SMALL = {"height": 8, "width": 24, "velocity": 0.1, "rayleigh": 5e3, "spin_up": 0.0}


class Cell:
    """The library, set up; its routines by name, with their defaults."""

    def __init__(self, gang: Gang, **sim: Any) -> None:
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
