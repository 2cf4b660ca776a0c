"""A simulator's spec: gymnasium spaces, checks of actions, records of steps, pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import util
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.config import EnvConfig
from envs.errors import BadActionError, EnvConfigError, EnvError, NotFiniteError

Array = NDArray[Any]
Space = spaces.Space[Any]
COLOURS = "RdBu_r"  # cold to hot through white (ColorBrewer)


@dataclass(frozen=True)
class Leaf:
    """A part of an observation or action that has a shape: a box, a choice, or several choices.

    Attributes
    ----------
    described : dict
        ``shape``, ``dtype``, ``low``, ``high``; or ``n``; or ``nvec``. The first axis of a shape
        is that of the agents, if there are several; choices are for each agent.
    agents : int
    """

    described: dict[str, Any]
    agents: int

    @cached_property
    def choices(self) -> list[int] | None:
        """The numbers of choices of an agent; None for a box."""
        if "n" in self.described:
            return [self.described["n"]]
        found: list[int] | None = self.described.get("nvec")
        return found

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(self.described["dtype"])
        return found

    def shape(self, agent: bool = False) -> tuple[int, ...]:
        """The shape for the whole simulation, or for one `agent`."""
        if self.choices is None:
            whole = tuple(self.described["shape"])
            return whole[1:] if agent else whole
        one = () if "n" in self.described else (len(self.choices),)
        return one if agent or self.agents == 1 else (self.agents, *one)

    @cached_property
    def count(self) -> int:
        """How many numbers it has, for all agents."""
        return int(np.prod(self.shape()))

    def space(self, agent: bool = False) -> Space:
        """The space for the whole simulation, or for one `agent`."""
        if self.choices is None:
            low, high = (
                self.bound(end)[0] if agent else self.bound(end) for end in ("low", "high")
            )
            return spaces.Box(low.copy(), high.copy(), dtype=self.dtype.type)
        if "n" in self.described and (agent or self.agents == 1):
            return spaces.Discrete(self.choices[0])
        return spaces.MultiDiscrete(np.resize(self.choices, self.shape(agent)))

    def bound(self, end: str) -> Array:
        """The ``low`` or ``high`` end of a box, in its own dtype and shape."""
        bound = self.described[end]
        if bound is None and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            bound = limits.min if end == "low" else limits.max
        elif bound is None:
            bound = -np.inf if end == "low" else np.inf
        found = np.asarray(bound, self.dtype)
        full = found.reshape(self.shape()) if found.size > 1 else found.reshape(())
        return np.broadcast_to(full, self.shape())


class Composition:
    """An observation or action as described by a spec: a leaf, or a dict or tuple of such.

    Parameters
    ----------
    described : dict
    agents : int

    Attributes
    ----------
    leaves : list of Leaf
        In the order of their numbers.
    """

    def __init__(self, described: dict[str, Any], agents: int) -> None:
        self._described = described
        self._agents = agents
        self.leaves = [Leaf(each, agents) for each in _leaves(described)]
        self.single = self.leaves[0].described is described  # neither a dict nor a tuple

    def space(self, agent: bool = False) -> Space:
        """The space for the whole simulation, or for one `agent`."""
        made: Space = self._built(lambda leaf: leaf.space(agent), spaces.Dict, spaces.Tuple)
        return made

    def one(self, values: Sequence[Array]) -> Any:
        """An element of `space` from the flat numbers of its leaves."""
        parts = zip(self.leaves, values, strict=True)
        shaped = [(leaf, numbers.reshape(leaf.shape())) for leaf, numbers in parts]
        return self.composed([x if leaf.choices is None else x[()] for leaf, x in shaped])

    def composed(self, values: Sequence[Any]) -> Any:
        """The values of the leaves in dicts and tuples as described."""
        if self.single:
            return values[0]
        each = iter(values)
        return self._built(lambda _: next(each), dict, tuple)

    def _built(self, value: Callable[[Leaf], Any], of_dict: Any, of_tuple: Any) -> Any:
        leaves = iter(self.leaves)

        def build(described: dict[str, Any]) -> Any:
            if "dict" in described:
                return of_dict({name: build(part) for name, part in described["dict"].items()})
            if "tuple" in described:
                return of_tuple([build(part) for part in described["tuple"]])
            return value(next(leaves))

        return build(self._described)

    def taken_apart(self, value: Any) -> list[Any]:
        """The values of the leaves. Raises `BadActionError`."""
        if self.single:
            return [value]
        found: list[Any] = []

        def visit(described: dict[str, Any], value: Any) -> None:
            parts = _parts(described)
            if not parts:
                found.append(value)
            elif "dict" in described:
                if not isinstance(value, Mapping) or set(value) != set(parts):
                    raise BadActionError(f"the action must be a dict with the keys {list(parts)}")
            elif not isinstance(value, Sequence | np.ndarray) or len(value) != len(parts):
                raise BadActionError(f"the action must be a tuple of {len(parts)} parts")
            for key, part in parts.items():
                visit(part, value[key])

        visit(self._described, value)
        return found


def _parts(described: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """The parts of a dict or tuple, by key or number; none of a leaf."""
    return described.get("dict") or dict(enumerate(described.get("tuple", ())))


def _leaves(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    parts = _parts(described)
    if not parts:
        yield described
    for part in parts.values():
        yield from _leaves(part)


@dataclass(frozen=True)
class SimulatorSpec:
    """The description of a simulator (its JSON with all defaults, as ``attach`` returns it).

    Attributes
    ----------
    agents : int
        Agents of one simulation; with more than one, they are the first axis of its
        observation and action.
    episode_length : int or None
        Steps after which an episode is truncated.
    warning : str or None
        About the options; shown once in a process.
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
    warning: str | None

    @classmethod
    def from_json(cls, text: str) -> SimulatorSpec:
        fields = json.loads(text)
        return cls(**{**fields, "info": tuple(fields["info"])})

    @cached_property
    def observed(self) -> Composition:
        return Composition(self.observation, self.agents)

    @cached_property
    def acted(self) -> Composition:
        return Composition(self.action, self.agents)

    @cached_property
    def layout(self) -> np.dtype[Any]:
        """Of the records of a step, as in `ali.simulator.spec.Spec`."""
        fields: list[Any] = [("scores", np.float64, (self.agents + len(self.info) + 1,))]
        for number, leaf in enumerate(self.observed.leaves):
            fields.append((f"o{number}", leaf.dtype, (leaf.count,)))
        made: np.dtype[Any] = np.dtype(fields, align=True)
        return made

    def check_render_mode(self, mode: Any) -> None:
        """Check that the simulator supports a render mode. Raises `EnvConfigError`."""
        if mode not in (None, "rgb_array"):
            raise EnvConfigError(f"render_mode={mode!r}: it must be None or 'rgb_array'")
        if mode is not None and self.render is None:
            raise EnvConfigError(
                f"render_mode={mode!r}: simulator {self.name!r} cannot be rendered (its spec has "
                "no 'render')"
            )
        if mode is not None and util.find_spec("matplotlib") is None:
            raise EnvConfigError(
                f"render_mode={mode!r} needs matplotlib: pip install 'alchemist-on-ray[envs]'"
            )

    def coloured(self, field: NDArray[np.float32]) -> NDArray[np.uint8]:
        """A field in colours, shape (height, width, 3).

        They range from the ``low`` of ``render`` to its ``high``; by default, over the field's
        values.
        """
        ends = self.render or {}
        low = float(np.nanmin(field) if ends.get("low") is None else ends["low"])
        high = float(np.nanmax(field) if ends.get("high") is None else ends["high"])
        share = np.nan_to_num((field - low) / ((high - low) or 1.0), nan=0.5)
        from matplotlib import colormaps  # noqa: PLC0415 - an optional package

        picture: NDArray[np.uint8] = colormaps[COLOURS](share, bytes=True)[..., :3]
        return picture


class ActionCheck:
    """Converts actions to the float64 numbers that the ranks get.

    Parameters
    ----------
    spec : SimulatorSpec
    out_of_bounds : {"clip", "refuse"}
        What to do with numbers beyond the bounds of the action space. NaN and infinite numbers
        are always refused; the ranks refuse choices that do not exist.
    num_envs : int, optional
        Sub-environments of a vector environment, the first axis of its actions. Default: actions
        of one simulation.
    """

    def __init__(
        self, spec: SimulatorSpec, out_of_bounds: str, num_envs: int | None = None
    ) -> None:
        self._acted = spec.acted
        self._clips = out_of_bounds == "clip"
        self._copies = 1 if num_envs is None else num_envs // spec.agents
        # Of each leaf, the shape, and the lowest and highest numbers of a box.
        self._leaves: list[tuple[tuple[int, ...], list[Array]]] = []
        for leaf in spec.acted.leaves:
            shape = leaf.shape(agent=spec.agents > 1 and num_envs is not None)
            ends = ("low", "high") if leaf.choices is None else ()
            bounds = [leaf.bound(end).astype(np.float64).ravel() for end in ends]
            self._leaves.append((shape if num_envs is None else (num_envs, *shape), bounds))

    def __call__(self, action: Any) -> NDArray[np.float64]:
        """The numbers of an action, shape (copies, n). Raises `BadActionError`."""
        parts = self._acted.taken_apart(action)
        rows = [
            self._checked(part, shape, bounds)
            for part, (shape, bounds) in zip(parts, self._leaves, strict=True)
        ]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)

    def _checked(
        self, part: Any, shape: tuple[int, ...], bounds: list[Array]
    ) -> NDArray[np.float64]:
        if isinstance(part, np.ndarray) and part.dtype.kind == "c":
            raise BadActionError("the action has complex numbers; it must have real ones")
        try:
            array = np.asarray(part, np.float64)
        except (TypeError, ValueError) as error:
            raise BadActionError(f"the action is not numeric: {error}") from None
        if array.shape != shape and not (shape == () and array.shape == (1,)):
            raise BadActionError(f"the action has shape {array.shape}; it must be {shape}")
        if not math.isfinite(np.add.reduce(array, axis=None)) and not np.isfinite(array).all():
            raise BadActionError("the action contains NaN or infinity")
        array = array.reshape(self._copies, -1)
        if not bounds:
            return array
        low, high = bounds
        if self._clips:
            clipped: NDArray[np.float64] = np.minimum(np.maximum(array, low), high)
            return clipped
        if (array < low).any() or (array > high).any():
            raise BadActionError(
                f"the action exceeds the bounds {_ends(low)} to {_ends(high)} "
                "(out_of_bounds='clip' clips it)"
            )
        return array


def _ends(bound: Array) -> Any:
    same = bound.size > 0 and (bound == bound[0]).all()
    return float(bound[0]) if same else bound.tolist()


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

    observations: list[Array]
    scores: NDArray[np.float64]
    ended: NDArray[np.bool_]
    failures: dict[int, EnvError]


def records_of(
    raw: NDArray[np.uint8],
    spec: SimulatorSpec,
    config: EnvConfig,
    which: Iterable[int],
    steps: NDArray[np.int64],
) -> Records:
    """Copy the records of a step, and check those of the copies in `which`.

    Parameters
    ----------
    raw : ndarray of uint8
        As the ranks write them.
    spec : SimulatorSpec
    config : EnvConfig
    which : iterable of int
    steps : ndarray of int, shape (copies,)
        The steps of the copies' episodes, for errors.
    """
    table = raw.view(spec.layout)
    scores = table["scores"].copy()
    observations = [table[name].copy() for name in (spec.layout.names or ())[1:]]
    failures: dict[int, EnvError] = {}
    if config.check_finite and not _finite(scores, *observations):
        # The rank sets the end of the episode to NaN if an integer does not fit its dtype.
        valid: NDArray[np.bool_] = np.asarray(np.isfinite(scores).all(axis=1))
        for part in observations:
            valid &= np.isfinite(part).all(axis=1)
        dtypes = ", ".join({str(leaf.dtype): None for leaf in spec.observed.leaves})
        for copy in which:
            if valid[copy]:
                continue
            where = f" of copy {copy}" if len(scores) > 1 else ""
            where += f" in step {steps[copy]} of its episode" if steps[copy] else " after reset()"
            if np.isfinite(scores[copy, :-1]).all():
                found = f"observation{where} is not finite, or does not fit {dtypes}"
            else:
                found = f"reward or info{where} is not finite: {scores[copy, :-1].tolist()}"
            failures[copy] = NotFiniteError(
                f"simulator {config.lib_name!r}: {found}. The episode is over; call reset(), or "
                "set check_finite=False to get such numbers"
            )
    return Records(observations, scores[:, :-1], scores[:, -1] == 1.0, failures)


def _finite(*arrays: Array) -> bool:
    """Whether all numbers are finite. False also if finite numbers are too large to be added."""
    with np.errstate(over="ignore", invalid="ignore"):
        return all(
            math.isfinite(np.add.reduce(array, axis=None)) for array in arrays
            if array.dtype.kind == "f"
        )  # fmt: skip
