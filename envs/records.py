"""The records that a gang returns for a step: decoded, and checked by ``check_finite``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.config import EnvConfig
from envs.errors import NotFiniteError
from envs.spec import SimulatorSpec

UNFIT = 2.0  # as in ali/simulator/spec.py: an integer does not fit its dtype


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
    unusable : dict of int to NotFiniteError
        Copies whose observation or scores failed the checks of ``check_finite``.
    """

    observations: list[NDArray[Any]]
    scores: NDArray[np.float64]
    ended: NDArray[np.bool_]
    unusable: dict[int, NotFiniteError]


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
        self._parts = (self._layout.names or ())[1:]

    def __call__(self, raw: NDArray[np.uint8], which: Iterable[int]) -> Records:
        """Copy the records, and check those of the copies in `which`."""
        table = raw.view(self._layout)
        scores = table["scores"].copy()
        observations = [table[name].copy() for name in self._parts]
        unusable = {}
        if self._config.check_finite:
            valid = np.isfinite(scores).all(axis=1) & (scores[:, -1] != UNFIT)
            for part in observations:
                if part.dtype.kind == "f":
                    valid &= _finite(part)
            if not valid.all():
                wrong = [copy for copy in which if not valid[copy]]
                unusable = {copy: self._error(copy, scores) for copy in wrong}
        return Records(observations, scores[:, :-1], scores[:, -1] == 1.0, unusable)

    def _error(self, copy: int, scores: NDArray[np.float64]) -> NotFiniteError:
        where = f" of copy {copy}" if len(scores) > 1 else ""
        if not np.isfinite(scores[copy]).all():
            found = f"reward or info{where} is not finite: {scores[copy, :-1].tolist()}"
        else:
            dtypes = ", ".join({str(leaf.dtype): None for leaf in self._spec.observed.leaves})
            found = f"observation{where} is not finite, or does not fit {dtypes}"
        return NotFiniteError(
            f"simulator {self._config.lib_name!r}: {found}. The episode is over; call reset(), or "
            "set check_finite=False to get such numbers"
        )


def _finite(part: NDArray[Any]) -> NDArray[np.bool_]:
    """For each copy, whether all its numbers are finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduce(part, axis=1)  # not finite if a number is not
    found: NDArray[np.bool_] = np.isfinite(sums)
    if not found.all():  # or if finite numbers are too large to be added
        found = np.isfinite(part).all(axis=1)
    return found
