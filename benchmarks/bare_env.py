"""A simulator called in the process of one rank: no Ray, no session, no gymnasium.

Run by `mpi_workers.local.local_gang`, as the baseline of an environment's overhead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.registry import load
from ali.simulator.instance import Instance
from ali.simulator.spec import Record
from benchmarks.harness import timed
from mpi_workers.rank.gang_view import GangView


def step_s(gang: GangView, name: str, path: str | None, sim: str, copies: int, steps: int) -> Any:
    """Median time of a step of all copies, one after another, in seconds."""
    instances = [Instance(gang, load(name, path), name, sim) for _ in range(copies)]
    record = Record(np.zeros(1, instances[0].spec.layout), 0)
    action = np.zeros(instances[0].spec.actions)
    for instance in instances:
        instance.begin(0, record)

    def step() -> None:
        for instance in instances:
            instance.advance(action, record)

    return float(np.median([timed(step) for _ in range(steps)]))
