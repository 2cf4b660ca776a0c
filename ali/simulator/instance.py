"""One simulation: a library with a simulator's routines, on its own communicator.

| routine | meaning |
|---|---|
| ``spec() -> string`` | JSON: see `ali.simulator.spec` |
| ``setup(config: string)`` | optional, called first: the user's options as JSON; or |
| ``setup(size: int = 3, ...)`` | the user's options as typed parameters, by name |
| ``seed(seed: int)`` | optional: takes effect at the next reset |
| ``reset()`` | a new episode |
| ``step(action: list[float])`` | one time step; the action flattened in C order |
| ``get_state() -> list[float]`` | the observation, flattened in C order |
| ``get_score() -> list[float]`` | the reward (one per agent), then the numbers named by "info" |
| ``is_terminated() -> bool`` | optional |
| ``render() -> matrix`` | optional: a scalar field, its first row on top |
| ``save_state() -> matrix``, ``load_state(state: matrix)`` | optional |

The results of rank 0 of the simulation's communicator are used. An observation or action of several
parts (``dict``, ``tuple``) is one list: the numbers of the parts, in the order of the spec.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ali.interface import Context
from ali.simulator.spec import UNFIT, Record, Spec, parse
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.protocol.signature import MATRIX, Signature

if TYPE_CHECKING:
    from ali.native import NativeLibrary
    from ali.python_library import PythonLibrary
    from mpi_workers.rank.gang_view import GangView

Array = np.ndarray[Any, Any]


class Expected(NamedTuple):
    """A routine of a simulator: the types of its parameters and results."""

    parameters: list[str]
    results: list[str]
    required: bool = False
    each_step: bool = False


ROUTINES = {
    "spec": Expected([], ["string"], required=True),
    "seed": Expected(["int"], []),
    "reset": Expected([], [], required=True),
    "step": Expected(["list[float]"], [], required=True, each_step=True),
    "get_state": Expected([], ["list[float]"], required=True, each_step=True),
    "get_score": Expected([], ["list[float]"], required=True, each_step=True),
    "is_terminated": Expected([], ["bool"], each_step=True),
    "render": Expected([], [MATRIX]),
    "save_state": Expected([], [MATRIX]),
    "load_state": Expected([MATRIX], []),
}


class Instance:
    """A simulator that has been loaded and set up, on this rank.

    Parameters
    ----------
    gang : GangView
        The ranks that compute it.
    library : PythonLibrary or NativeLibrary
        Loaded for this instance only: its state belongs to the instance.
    name : str
        Name of the library, for messages.
    config : str
        JSON for ``setup``; ``"{}"`` for no options.

    Raises
    ------
    Failure
        LibraryLoadError, if the library is not a simulator; the errors of its ``setup``.
    """

    def __init__(
        self, gang: GangView, library: PythonLibrary | NativeLibrary, name: str, config: str
    ) -> None:
        self._gang = gang
        self._library = library
        self._name = name
        try:
            self._set_up(config)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is reported
                library.close()  # its setup may have started programs
            raise

    def _set_up(self, config: str) -> None:
        gang, library, name = self._gang, self._library, self._name
        self._parameters = _checked(name, library.signatures)
        setup = library.signatures.get("setup")
        if setup is not None:
            library.call(gang, "setup", _setup_arguments(setup, config))
        elif config != "{}":
            raise Failure(
                "BadArgumentError",
                f"simulator {name!r} has no routine setup, so it takes no 'sim' options: {config}",
            )
        self.spec: Spec = parse(name, self._agreed_spec())
        self._prepared = {
            name: library.prepared(gang, name)
            for name, routine in ROUTINES.items()
            if routine.each_step and name in self._parameters
        }

    def has(self, routine: str) -> bool:
        return routine in self._parameters

    def _agreed_spec(self) -> str:
        """Rank 0's spec, on all ranks of the simulation."""
        (text,) = self.call("spec")
        told: str = self._gang.comm.bcast(text) if self._gang.size > 1 else text
        return told

    def call(self, routine: str, *values: Any) -> list[Any]:
        """Call a routine that the simulator has; one value per result."""
        arguments = dict(zip(self._parameters[routine], values, strict=True))
        return self._library.call(self._gang, routine, arguments)

    def begin(self, seed: int, record: Record) -> None:
        """Begin an episode; write its first observation into the record. A seed < 0 is ignored."""
        if seed >= 0 and self.has("seed"):
            self.call("seed", seed)
        self.call("reset")
        record.scores[:] = 0.0
        if not record.observe(self._numbers_of("get_state", self.spec.observations)):
            record.scores[-1] = UNFIT

    def advance(self, action: Array, record: Record) -> None:
        """A time step; write observation, scores and the end-of-episode flag into the record."""
        self._prepared["step"](action)
        fits = record.observe(self._numbers_of("get_state", self.spec.observations))
        scores = self._numbers_of("get_score", self.spec.scores)
        if scores is not None:
            record.scores[:-1] = scores
        over = self._prepared["is_terminated"]() if self.has("is_terminated") else 0
        record.scores[-1] = over if fits else UNFIT

    def _numbers_of(self, routine: str, count: int) -> Array | None:
        """The numbers that a routine returns; only rank 0 must have them."""
        numbers = self._prepared[routine].numbers()
        if len(numbers) == count:
            return numbers
        if self._gang.rank == 0:
            raise Failure(
                "RoutineError",
                f"simulator {self._name!r}: {routine} returned {len(numbers)} numbers; its spec "
                f"says {count}",
            )
        return None

    def picture(self) -> Array:
        """The result of ``render``, gathered on the simulation's rank 0."""
        return self._gang.to_layout(self.call("render")[0], "CIRC_CIRC").local

    def saved_state(self) -> Array:
        """The result of ``save_state``, gathered on the simulation's rank 0."""
        state: DistMatrix = self.call("save_state")[0]
        local = self._gang.to_layout(state, "CIRC_CIRC").local
        return local.reshape(state.array_shape) if local.size == math.prod(state.shape) else local

    def restore_state(self, state: Array) -> None:
        """Restore a state of `saved_state`, given on all ranks."""
        self.call("load_state", Context(self._gang, {}).new_replicated(state, "VC_STAR"))

    def renew(self) -> None:
        """Replace the communicator: messages of a failed call may still be in transit on it."""
        self._gang.renew()

    def close(self) -> None:
        self._library.close()


def _checked(name: str, signatures: Mapping[str, Signature]) -> dict[str, list[str]]:
    """Names of the parameters of each routine. Raises `Failure` if it is not a simulator."""
    found: dict[str, list[str]] = {}
    for signature in signatures.values():
        wanted = ROUTINES.get(signature.name)
        if wanted is None:
            continue  # not a routine of the simulator interface
        types = ([p.type for p in signature.parameters], [r.type for r in signature.results])
        if types != (wanted.parameters, wanted.results):
            taken, given = (", ".join(kinds) or "nothing" for kinds in wanted[:2])
            raise _not_a_simulator(name, f"its {signature} should take {taken} and return {given}")
        found[signature.name] = [p.name for p in signature.parameters]
    required = [routine for routine, about in ROUTINES.items() if about.required]
    if missing := [routine for routine in required if routine not in found]:
        raise _not_a_simulator(
            name, f"it has no {', '.join(missing)}; a simulator has {', '.join(required)}"
        )
    return found


def _setup_arguments(setup: Signature, config: str) -> dict[str, Any]:
    """The JSON text for ``setup(config: string)``, else its keys as named parameters."""
    whole = [(p.name, p.type) for p in setup.parameters] == [("config", "string")]
    return setup.bind((), {"config": config} if whole else json.loads(config), lambda given: given)


def _not_a_simulator(name: str, words: str) -> Failure:
    return Failure("LibraryLoadError", f"library {name!r} is not a simulator: {words}")
