"""A simulator's description of itself, checked once when it is loaded."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from mpi_workers.failures import Failure

KEYS = {
    "name", "observation", "action", "agents", "episode_length", "time_step", "score", "info",
    "render",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spec:
    """The sizes of a simulator's actions and results.

    Attributes
    ----------
    text : str
        The JSON, with defaults filled in.
    actions, observations, scores : int
        How many numbers `step` takes, and `get_state` and `get_score` return.
    choices : int or None
        The number of choices of a discrete action.
    """

    text: str
    actions: int
    observations: int
    scores: int
    choices: int | None

    @property
    def record(self) -> int:
        """Length of a record: observation, scores, end-of-episode flag."""
        return self.observations + self.scores + 1


def parse(library: str, text: str) -> Spec:
    """Read a simulator's ``spec()``.

    Raises
    ------
    Failure
        LibraryLoadError, which names the fault.
    """

    def require(holds: bool, words: str) -> None:
        if not holds:
            raise Failure("LibraryLoadError", f"simulator {library!r}: its spec {words}")

    try:
        spec = json.loads(text)
    except ValueError as error:
        raise Failure(
            "LibraryLoadError", f"simulator {library!r}: its spec is not JSON: {error}"
        ) from None
    require(isinstance(spec, dict), f"is a {type(spec).__name__}, not an object")
    unknown = sorted(set(spec) - KEYS)
    require(not unknown, f"has unknown keys {unknown}; known keys are {', '.join(sorted(KEYS))}")
    for key in ("observation", "action"):
        require(isinstance(spec.get(key), dict), f"needs {key!r}: {{'shape': [...], ...}}")

    observations = _box(spec["observation"], "observation", require)
    action = spec["action"]
    choices = action.get("n")
    if choices is None:
        actions = _box(action, "action", require)
    else:
        require(_whole(choices, 1), f"has action n={choices!r}; it must be an integer, at least 1")
        actions = 1
    agents = spec.setdefault("agents", 1)
    require(_whole(agents, 1), f"has agents={agents!r}; it must be an integer, at least 1")
    if agents > 1:
        for key in ("observation", "action"):
            shape = spec[key].get("shape") or [0]
            words = f"has {agents} agents, so {key} shape {shape} must begin with {agents}"
            require(shape[0] == agents, words)
    length = spec.setdefault("episode_length", None)
    require(
        length is None or _whole(length, 1),
        f"has episode_length={length!r}; it must be an integer, at least 1, or null",
    )
    step = spec.setdefault("time_step", 1.0)
    require(isinstance(step, int | float), f"has time_step={step!r}; it must be a number")
    info = spec.setdefault("info", [])
    named = isinstance(info, list) and all(isinstance(name, str) for name in info)
    require(named, f"has info={info!r}; it must be a list of names")
    picture = spec.setdefault("render", None)
    require(
        picture is None or isinstance(picture, dict),
        f"has render={picture!r}; it must be an object or null",
    )
    spec.setdefault("name", library)
    spec.setdefault("score", "")
    return Spec(json.dumps(spec), actions, observations, agents + len(info), choices)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _box(box: dict[str, Any], key: str, require: Any) -> int:
    """How many numbers a box contains."""
    shape: Any = box.get("shape")
    valid = isinstance(shape, list) and all(_whole(n, 1) for n in shape)
    require(valid, f"has {key} shape {shape!r}; it must be a list of integers, at least 1")
    dtype = box.setdefault("dtype", "float32")
    known = isinstance(dtype, str) and dtype.rstrip("0123456789") in ("float", "int", "uint")
    require(known, f"has {key} dtype {dtype!r}; it must be like 'float32' or 'int64'")
    size = int(math.prod(shape))
    for end in ("low", "high"):
        bound = box.setdefault(end, None)
        numbers = bound if isinstance(bound, list) else [0.0 if bound is None else bound]
        fits = all(isinstance(n, int | float) for n in numbers) and len(numbers) in (1, size)
        require(fits, f"has {key} {end}={bound!r}; it must be a number, null or {size} numbers")
    return size
