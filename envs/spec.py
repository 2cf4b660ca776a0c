"""A simulator's spec as gymnasium's spaces, and its numbers as observations and actions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from envs.errors import BadActionError

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class SimulatorSpec:
    """What a simulator says of itself (JSON with all defaults, as ``attach`` gives it).

    Attributes
    ----------
    agents : int
        Agents of one simulation; with more than one, they are the first axis of its
        observation and action.
    episode_length : int or None
        Steps after which an episode is truncated.
    """

    name: str
    observation: dict[str, Any]
    action: dict[str, Any]
    agents: int
    episode_length: int | None
    time_step: float
    score: str
    info: tuple[str, ...]
    render: dict[str, Any] | None

    @classmethod
    def from_json(cls, text: str) -> SimulatorSpec:
        told = json.loads(text)
        return cls(**{**told, "info": tuple(told["info"])})

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return tuple(self.observation["shape"])

    @property
    def action_shape(self) -> tuple[int, ...]:
        return () if "n" in self.action else tuple(self.action["shape"])

    def observation_space(self, agent: bool = False) -> spaces.Box:
        """Of a simulation, or of one `agent` of it."""
        return _box(self.observation, agent)

    def action_space(self, agent: bool = False) -> spaces.Space[Any]:
        """Of a simulation, or of one `agent` of it."""
        if "n" in self.action:
            return spaces.Discrete(self.action["n"])
        return _box(self.action, agent)

    def numbers(self, action: ArrayLike, count: int | None = None) -> Array:
        """An action, or `count` of them, as the float64 numbers that the ranks get.

        Raises
        ------
        BadActionError
        """
        shape = self.action_shape if count is None else (count, *self.action_shape)
        try:
            array = np.asarray(action, np.float64)
        except (TypeError, ValueError) as error:
            raise BadActionError(f"the action is not numbers: {error}") from None
        if array.shape != shape and not (shape == () and array.shape == (1,)):
            raise BadActionError(f"an action of shape {array.shape}: it must be {shape}")
        return array


def _box(box: dict[str, Any], agent: bool) -> spaces.Box:
    shape = tuple(box["shape"])
    dtype = np.dtype(box["dtype"])
    whole = np.issubdtype(dtype, np.integer)
    ends = []
    for bound, none in ((box["low"], -np.inf), (box["high"], np.inf)):
        if bound is None:
            limits = np.iinfo(dtype) if whole else None
            bound = none if limits is None else (limits.min if none < 0 else limits.max)
        end = np.asarray(bound, dtype)
        end = np.broadcast_to(end, shape) if end.size == 1 else end.reshape(shape)
        ends.append(end[0] if agent else end)
    return spaces.Box(ends[0].copy(), ends[1].copy(), dtype=dtype.type)
