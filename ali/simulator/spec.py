"""A simulator's description of itself, checked when it is loaded, and the records of its steps."""

from __future__ import annotations

import copy
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpi_workers.failures import Failure

KEYS = {
    "name", "observation", "action", "agents", "episode_length", "time_step", "score", "info",
    "render", "warning",
}  # fmt: skip
DTYPES = ("float32", "float64", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64")
UNFIT = math.nan  # instead of the end of the episode: an integer of the observation does not fit


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


# Keys with their defaults, which values are valid, and that in words.
OPTIONS: tuple[tuple[str, Any, Callable[[Any], bool], str], ...] = (
    ("agents", 1, lambda value: _whole(value, 1), "an integer, at least 1"),
    (
        "episode_length",
        None,
        lambda value: value is None or _whole(value, 1),
        "an integer, at least 1, or null",
    ),
    ("time_step", 1.0, lambda value: isinstance(value, int | float), "a number"),
    ("info", [], _names, "a list of names"),
    ("render", None, lambda value: isinstance(value, dict | None), "an object or null"),
    ("warning", None, lambda value: isinstance(value, str | None), "a text or null"),
)


@dataclass(frozen=True, slots=True)
class Spec:
    """The sizes of a simulator's actions and results.

    Attributes
    ----------
    text : str
        The JSON, with defaults filled in.
    actions, observations, scores : int
        How many numbers `step` takes, and `get_state` and `get_score` return.
    choices : ndarray, shape (actions,), or None
        The number of choices of each number of an action, infinity where it is not a choice; None
        if no number is.
    layout : numpy.dtype
        Of a record, the results of a step: ``scores`` (and 1.0 if the episode has ended, or
        `UNFIT`), then the observation, each part (``o0``, ``o1``, ...) in its own dtype.
    """

    text: str
    actions: int
    observations: int
    scores: int
    choices: np.ndarray[Any, Any] | None = field(compare=False)
    layout: np.dtype[Any]


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

    for key, default, valid, words in OPTIONS:
        value = spec.setdefault(key, copy.copy(default))
        require(valid(value), f"has {key}={value!r}; it must be {words}")
    agents = spec["agents"]
    leaves = {key: list(_leaves(spec[key], key, require)) for key in ("observation", "action")}
    sizes: dict[str, list[int]] = {}
    for key, parts in leaves.items():
        sizes[key] = [_size(leaf, key, agents, require) for leaf in parts]
        require(bool(parts), f"has an {key} without parts")
    spec.setdefault("name", library)
    spec.setdefault("score", "")
    scores = agents + len(spec["info"])
    layout = [("scores", np.float64, (scores + 1,))]
    for number, leaf in enumerate(leaves["observation"]):
        layout.append((f"o{number}", np.dtype(leaf["dtype"]), (sizes["observation"][number],)))
    return Spec(
        json.dumps(spec),
        sum(sizes["action"]),
        sum(sizes["observation"]),
        scores,
        _choices(leaves["action"], sizes["action"]),
        np.dtype(layout, align=True),
    )


def _leaves(space: Any, key: str, require: Any) -> Iterator[dict[str, Any]]:
    """The parts of a space that are no ``dict`` or ``tuple``, in the order of their numbers."""
    words = "it must be an object, such as {'shape': [3]}, {'n': 5}, {'nvec': [3, 5]}"
    require(isinstance(space, dict), f"has {key} {space!r}; {words}")
    parts = space.get("dict", space.get("tuple"))
    if parts is None:
        yield space
        return
    kind = dict if "dict" in space else list
    require(isinstance(parts, kind) and len(space) == 1, f"has {key} {space!r}; {words}")
    for part in parts.values() if isinstance(parts, dict) else parts:
        yield from _leaves(part, key, require)


def _size(leaf: dict[str, Any], key: str, agents: int, require: Any) -> int:
    """How many numbers a leaf has, for all agents; fills in its defaults."""
    if "n" in leaf or "nvec" in leaf:
        choices = leaf["nvec"] if "nvec" in leaf else [leaf["n"]]
        valid = isinstance(choices, list) and choices and all(_whole(n, 1) for n in choices)
        said = f"nvec={choices!r}; it must be a list of integers" if "nvec" in leaf else (
            f"n={leaf['n']!r}; it must be an integer"
        )  # fmt: skip
        require(valid, f"has {key} {said}, at least 1")
        leaf.setdefault("dtype", "int64")
        return agents * len(choices)
    size = _box(leaf, key, require)
    if agents > 1:
        shape = leaf["shape"] or [0]
        words = f"has {agents} agents, so {key} shape {shape} must begin with {agents}"
        require(shape[0] == agents, words)
    return size


def _choices(leaves: list[dict[str, Any]], sizes: list[int]) -> np.ndarray[Any, Any] | None:
    found = []
    for leaf, size in zip(leaves, sizes, strict=True):
        choices = leaf.get("nvec", [leaf.get("n", math.inf)])
        found.append(np.resize(np.array(choices, float), size))
    together = np.concatenate(found)
    return None if np.isinf(together).all() else together


def _box(box: dict[str, Any], key: str, require: Any) -> int:
    """How many numbers a box contains."""
    shape: Any = box.get("shape")
    valid = isinstance(shape, list) and all(_whole(n, 1) for n in shape)
    require(valid, f"has {key} shape {shape!r}; it must be a list of integers, at least 1")
    dtype = box.setdefault("dtype", "float32")
    words = f"has {key} dtype {dtype!r}; it must be one of {', '.join(DTYPES)}"
    require(isinstance(dtype, str) and dtype in DTYPES, words)
    size = int(math.prod(shape))
    for end in ("low", "high"):
        bound = box.setdefault(end, None)
        numbers = bound if isinstance(bound, list) else [0.0 if bound is None else bound]
        fits = all(isinstance(n, int | float) for n in numbers) and len(numbers) in (1, size)
        require(fits, f"has {key} {end}={bound!r}; it must be a number, null or {size} numbers")
    return size


Array = np.ndarray[Any, Any]


class Record:
    """Views of one row of a table of records.

    Parameters
    ----------
    table : ndarray
        Structured, with the layout of a spec.
    row : int

    Attributes
    ----------
    scores : ndarray of float64
        The scores, and last 1.0 if the episode has ended.
    """

    def __init__(self, table: Array, row: int) -> None:
        names = table.dtype.names or ()
        self.scores: Array = table["scores"][row]
        self._parts: list[tuple[Array, slice]] = []
        begin = 0
        for name in names[1:]:
            part = table[name][row]
            self._parts.append((part, slice(begin, begin + len(part))))
            begin += len(part)

    def observe(self, numbers: Array | None) -> bool:
        """Write an observation; whether each integer of it is one, and in the range of its dtype.

        Numbers beyond the range of a floating-point dtype become infinite.
        """
        fits = True
        if numbers is None:
            return fits
        for part, where in self._parts:
            found = numbers[where]
            np.copyto(part, found, casting="unsafe")
            if part.dtype.kind in "iu" and part.dtype != found.dtype:
                fits = fits and bool((part == found).all())
        return fits


HEADER_NBYTES = 64  # bytes before the records; they begin with the mark


def open_shared(address: str | None, size: int) -> np.ndarray[Any, Any] | None:
    """`size` bytes in memory of a process on this node; None if it is not here.

    Parameters
    ----------
    address : str or None
        ``"PATH MARK"``: a file descriptor of that process below ``/proc``, and the hexadecimal
        bytes at its beginning. The same path on another node is another file.
    size : int
    """
    if address is None:
        return None
    path, _, mark = address.rpartition(" ")
    expected = bytes.fromhex(mark)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        if os.pread(fd, len(expected), 0) != expected:
            return None
        memory = mmap.mmap(fd, HEADER_NBYTES + size)
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return np.frombuffer(memory, np.uint8, size, HEADER_NBYTES)
