"""The records that a gang returns for a step: decoded, and checked by ``check_finite``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.config import EnvConfig
from envs.errors import EnvError, NotFiniteError
from envs.spec import SimulatorSpec


@dataclass(frozen=True, slots=True)
class Records:
    """The results of a step for all copies.

    Attributes
    ----------
    observations : list of ndarray, each of shape (copies, n)
        The leaves of the observation, flattened in C order, each in its own dtype.
    scores : ndarray, shape (copies, agents + number of info names)
    ended : ndarray of bool, shape (copies,)
        Whether the simulation says that its episode has ended.
    failures : dict of int to EnvError
        By copy: why its episode has ended. The numbers of such a copy cannot be used.
    """

    observations: list[NDArray[Any]]
    scores: NDArray[np.float64]
    ended: NDArray[np.bool_]
    failures: dict[int, EnvError]


class Decoder:
    """Makes `Records` from the bytes of a step.

    Parameters
    ----------
    spec : SimulatorSpec
    config : EnvConfig
    """

    def __init__(self, spec: SimulatorSpec, config: EnvConfig) -> None:
        self._spec = spec
        self._config = config
        self._layout = spec.layout
        self._names = (self._layout.names or ())[1:]
        self._raw: NDArray[np.uint8] | None = None  # of the last call, with views of it
        self._scores: NDArray[np.float64] = np.zeros(0)
        self._parts: list[NDArray[Any]] = []

    def __call__(
        self, raw: NDArray[np.uint8], which: Iterable[int], steps: NDArray[np.int64]
    ) -> Records:
        """Copy the records, and check those of the copies in `which`; `steps` is for errors."""
        if raw is not self._raw:
            table = raw.view(self._layout)
            self._raw, self._scores = raw, table["scores"]
            self._parts = [table[name] for name in self._names]
        scores = self._scores.copy()
        observations = [part.copy() for part in self._parts]
        failures: dict[int, EnvError] = {}
        if self._config.check_finite and not _finite(scores, *observations):
            # The rank sets the end of the episode to NaN if an integer does not fit its dtype.
            valid: NDArray[np.bool_] = np.asarray(np.isfinite(scores).all(axis=1))
            for part in observations:
                valid &= np.isfinite(part).all(axis=1)
            failures = {copy: self._error(copy, scores, steps) for copy in which if not valid[copy]}
        return Records(observations, scores[:, :-1], scores[:, -1] == 1.0, failures)

    def _error(
        self, copy: int, scores: NDArray[np.float64], steps: NDArray[np.int64]
    ) -> NotFiniteError:
        where = f" of copy {copy}" if len(scores) > 1 else ""
        where += f" in step {steps[copy]} of its episode" if steps[copy] else " after reset()"
        if not np.isfinite(scores[copy, :-1]).all():
            found = f"reward or info{where} is not finite: {scores[copy, :-1].tolist()}"
        else:
            dtypes = ", ".join({str(leaf.dtype): None for leaf in self._spec.observed.leaves})
            found = f"observation{where} is not finite, or does not fit {dtypes}"
        return NotFiniteError(
            f"simulator {self._config.lib_name!r}: {found}. The episode is over; call reset(), or "
            "set check_finite=False to get such numbers"
        )


def _finite(*arrays: NDArray[Any]) -> bool:
    """Whether all numbers are finite. False also if finite numbers are too large to be added."""
    with np.errstate(over="ignore", invalid="ignore"):
        return all(
            math.isfinite(np.add.reduce(array, axis=None)) for array in arrays
            if array.dtype.kind == "f"
        )  # fmt: skip
