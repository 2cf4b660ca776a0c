"""What tests of resizes share."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray

from alchemist_ray import Handle
from tests.support import traces

X = np.random.default_rng(0).random((300, 40))  # more than a handle remembers
UNDER_WAY_S = 10.0  # until the new ranks load a library, on a loaded machine


def cpus() -> float:
    """The free CPUs, when Ray has reported those of gangs that have just ended."""
    seen: list[float] = []

    def steady() -> bool:
        seen.append(_reported())
        return seen[-10:] == 10 * seen[-1:]

    assert traces.wait_until(steady, 10, 0.1) is not None, seen
    return seen[-1]


def _reported() -> float:
    return ray.available_resources().get("CPU", 0.0)


def free_cpus(wanted: float) -> bool:
    """Wait until this many CPUs are free: Ray reports them late."""
    return traces.wait_until(lambda: _reported() == wanted, 10) is not None


def same_numbers(handles: dict[Any, Handle], wanted: np.ndarray[Any, Any] = X) -> None:
    for what, handle in handles.items():
        np.testing.assert_array_equal(handle.fetch(), wanted, err_msg=str(what))
