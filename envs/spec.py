"""A simulator's spec as gymnasium spaces, and its numbers as observations and actions."""

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
    """The description of a simulator (its JSON with all defaults, as ``attach`` returns it).

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
        fields = json.loads(text)
        return cls(**{**fields, "info": tuple(fields["info"])})

    @property
    def observation_shape(self) -> tuple[int, ...]:
        return tuple(self.observation["shape"])

    @property
    def observations(self) -> int:
        """How many numbers an observation has."""
        return int(np.prod(self.observation_shape))

    @property
    def record(self) -> int:
        """How many numbers a step returns: observation, scores, end of the episode."""
        return self.observations + self.agents + len(self.info) + 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of observations."""
        found: np.dtype[Any] = np.dtype(self.observation["dtype"])
        return found

    @property
    def action_shape(self) -> tuple[int, ...]:
        return () if "n" in self.action else tuple(self.action["shape"])

    def observation_space(self, agent: bool = False) -> spaces.Box:
        """The space of a simulation, or of one `agent` of it."""
        return _box(self.observation, agent)

    def action_space(self, agent: bool = False) -> spaces.Space[Any]:
        """The space of a simulation, or of one `agent` of it."""
        if "n" in self.action:
            return spaces.Discrete(self.action["n"])
        return _box(self.action, agent)


class ActionCheck:
    """Converts actions to the float64 numbers that the ranks get.

    Parameters
    ----------
    spec : SimulatorSpec
    out_of_bounds : {"clip", "refuse"}
        What to do with numbers beyond the bounds of the action space. NaN and infinite numbers
        are always refused.
    shape : tuple of int, optional
        Shape of the actions that a call gets. Default: of one simulation.
    """

    def __init__(
        self, spec: SimulatorSpec, out_of_bounds: str, shape: tuple[int, ...] | None = None
    ) -> None:
        self._spec = spec
        self._clips = out_of_bounds == "clip"
        self._shape = spec.action_shape if shape is None else shape
        self._choice = "n" in spec.action
        if not self._choice:
            many = spec.agents > 1 and shape is not None
            ends = [_bound(spec.action, end) for end in ("low", "high")]
            # The agents of all copies are one axis, and bounds may differ between agents.
            copies = self._shape[0] // spec.agents if many else 1
            self._low, self._high = (
                np.tile(end, (copies, *[1] * (end.ndim - 1)))
                if many and isinstance(end, np.ndarray)
                else end
                for end in ends
            )

    def __call__(self, action: ArrayLike) -> NDArray[np.float64]:
        """The numbers of an action. Raises `BadActionError`."""
        try:
            array = np.asarray(action, np.float64)
        except (TypeError, ValueError) as error:
            raise BadActionError(f"the action is not numeric: {error}") from None
        if array.shape != self._shape and not (self._shape == () and array.shape == (1,)):
            raise BadActionError(f"the action has shape {array.shape}; it must be {self._shape}")
        if not np.isfinite(array).all():
            raise BadActionError("the action contains NaN or infinity")
        if self._choice:
            return array  # the ranks check choices
        if self._clips:
            clipped: NDArray[np.float64] = np.minimum(np.maximum(array, self._low), self._high)
            return clipped
        if (array < self._low).any() or (array > self._high).any():
            ends = self._spec.action
            raise BadActionError(
                f"the action exceeds the bounds {ends['low']} to {ends['high']} "
                "(out_of_bounds='clip' clips it)"
            )
        return array


def _bound(box: dict[str, Any], end: str) -> Array | float:
    """A bound of a box, which broadcasts against its shape."""
    bound = box[end]
    if bound is None:
        return -np.inf if end == "low" else np.inf
    # The space has the bound in its own dtype: an action at it must not be out of bounds.
    found = np.asarray(bound, box["dtype"]).astype(np.float64)
    return found.reshape(box["shape"]) if found.size > 1 else float(found.reshape(()))


def _box(box: dict[str, Any], agent: bool) -> spaces.Box:
    shape = tuple(box["shape"])
    dtype = np.dtype(box["dtype"])
    limits = np.iinfo(dtype) if np.issubdtype(dtype, np.integer) else None
    ends = []
    for end in ("low", "high"):
        bound = _bound(box, end)
        if limits is not None and box[end] is None:
            bound = limits.min if end == "low" else limits.max
        full = np.broadcast_to(np.asarray(bound, dtype), shape)
        ends.append(full[0] if agent else full)
    return spaces.Box(ends[0].copy(), ends[1].copy(), dtype=dtype.type)
