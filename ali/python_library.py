"""Runs the routines of a Python library on this rank."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ali.interface import Context
from ali.sparse_matrices import arguments_of
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix, read_only
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.protocol.libraries import LOAD_STATE, SAVE_STATE
from mpi_workers.protocol.signature import MATRIX, SPARSE, Result, Signature, coerce, no_routine

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi_workers.rank.gang_view import GangView


def no_such_routine(library: str, routine: str, known: Iterable[str]) -> Failure:
    """The error for a routine that a library does not have."""
    return Failure("NoSuchRoutineError", no_routine(library, routine, known))


def check_state_routines(library: str, routines: Mapping[str, Signature]) -> None:
    """Refuse `save_state` and `load_state` that do not fit together. Raises `Failure`."""
    save, load = routines.get(SAVE_STATE), routines.get(LOAD_STATE)
    if save is None or load is None:
        return
    given, taken = [r.type for r in save.results], [p.type for p in load.parameters]
    if save.parameters or load.results or given != taken:
        raise Failure(
            "LibraryLoadError",
            f"library {library!r}: load_state must take what save_state returns, "
            f"({', '.join(given)}), and return nothing; save_state must take nothing",
        )


class PythonLibrary:
    """A module's routines, as the rank's loop calls them.

    The optional functions ``load(state, path)`` and ``close(state)`` of the module are called
    on every rank when the library is loaded (`path`: the shared object of a shipped library, as
    the user gave it, or None) and when it is unloaded. With the routines ``save_state(ctx)`` and
    ``load_state(ctx, ...)``, which takes what the first returns, the state outlives the ranks.
    """

    def __init__(
        self,
        name: str,
        module: types.ModuleType,
        path: str | None = None,
        *,
        shipped: bool = False,
    ) -> None:
        self._name = name
        self._module = module
        self._shipped = shipped
        self._state: dict[str, Any] = {}
        self._routines: dict[str, tuple[Callable[..., Any], Signature]] = {
            function.__alchemist__.name: (function, function.__alchemist__)
            for function in vars(module).values()
            if isinstance(getattr(function, "__alchemist__", None), Signature)
        }
        if not self._routines:
            raise Failure(
                "LibraryLoadError",
                f"library {name!r} ({module.__name__}) declares no routine: decorate at least one "
                "function with @ali.routine. A package that is no library is imported in functions "
                "of als.run",
            )
        self.signatures = {key: its for key, (_, its) in self._routines.items()}
        check_state_routines(name, self.signatures)
        load = getattr(module, "load", None)
        if callable(load):
            load(self._state, path)

    def describe(self) -> dict[str, Any]:
        """Name, documentation and signatures, as a map."""
        pure = getattr(self._module, "PURE", False)
        return {
            "name": self._name,
            "doc": inspect.getdoc(self._module) or "",
            "routines": [
                {
                    **signature.to_map(),
                    "writes": getattr(function, "__alchemist_writes__", None),
                    "pure": pure or getattr(function, "__alchemist_pure__", False),
                }
                for function, signature in self._routines.values()
            ],
        }

    def call(self, gang: GangView, routine: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Run a routine on this rank; one value per declared result.

        Raises
        ------
        Failure
            NoSuchRoutineError; RoutineError if the results differ from the declaration.
        """
        if routine not in self._routines:
            raise no_such_routine(self._name, routine, self._routines)
        function, signature = self._routines[routine]
        arguments = arguments_of(gang, signature, arguments)
        with self._unchanged(function, arguments):
            returned = function(self.context(gang), **arguments)
        declared = signature.results
        if not declared:
            values: tuple[Any, ...] = ()
        elif len(declared) == 1 or not isinstance(returned, Iterable):
            values = (returned,)
        else:
            values = tuple(returned)
        if len(values) != len(declared):
            raise Failure(
                "RoutineError",
                f"{routine} returned {len(values)} values, but declares {len(declared)}: "
                f"{signature}",
            )
        found = [self._checked(signature, r, v) for r, v in zip(declared, values, strict=True)]
        for i, result in enumerate(declared):
            source = getattr(function, "__alchemist_ndim__", {}).get(result.name)
            if source is not None:
                found[i] = found[i].with_ndim(arguments[source].ndim if source else 1)
        return found

    def context(self, gang: GangView) -> Context:
        """The context that a routine of this library gets."""
        return Context(gang, self._state, shipped=self._shipped)

    def _unchanged(
        self, function: Callable[..., Any], arguments: Mapping[str, Any]
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which the routine can change what it declares only; without a cost for others.

        The gang relies on declarations where it fetches, recovers and remembers elements.
        """
        writes = getattr(function, "__alchemist_writes__", None)
        if writes is None:
            return contextlib.nullcontext()
        matrices = {name: v for name, v in arguments.items() if isinstance(v, DistMatrix)}
        written = {id(matrices[name]) for name in writes if name in matrices}
        return read_only(
            [matrix for matrix in matrices.values() if id(matrix) not in written],
            f"The routine declares writes={tuple(writes)!r}, and changes another matrix: name it.",
        )

    def prepared(self, gang: GangView, routine: str) -> PreparedRoutine:
        """A routine of numbers, to be called often."""
        return PreparedRoutine(self, gang, routine)

    def _checked(self, signature: Signature, result: Result, value: Any) -> Any:
        try:
            if result.type == MATRIX:
                if not isinstance(value, DistMatrix):
                    raise TypeError(type(value).__name__)
                return value
            if result.type == SPARSE:
                if not isinstance(value, SparseMatrix):
                    raise TypeError(type(value).__name__)
                return value.packed
            return coerce(value, result.type)
        except TypeError as error:
            raise Failure(
                "RoutineError",
                f"{signature.name} declares its result {result.name!r} as {result.type}, but "
                f"returned {error}",
            ) from None

    def close(self) -> None:
        """Call the module's ``close(state)``, if it has one, and clear the state."""
        close = getattr(self._module, "close", None)
        try:
            if callable(close):
                close(self._state)
        finally:
            self._state.clear()


class PreparedRoutine:
    """Calls a routine as `ali.native.library.PreparedCall` does: results are not made lists."""

    def __init__(self, library: PythonLibrary, gang: GangView, routine: str) -> None:
        self._library, self._gang, self._routine = library, gang, routine
        self._function, self._signature = library._routines[routine]

    def __call__(self, numbers: NDArray[np.float64] | None = None) -> int:
        """Run it with `numbers`; 0 or 1 for a bool."""
        given = {} if numbers is None else {self._signature.parameters[0].name: numbers.tolist()}
        found = self._library.call(self._gang, self._routine, given)
        return int(found[0]) if found else 0

    def numbers(self) -> NDArray[Any]:
        """Run it without arguments; the numbers that it returns."""
        numbers = np.asarray(self._function(self._library.context(self._gang)))
        if numbers.dtype.kind not in "biuf":
            words = f"{self._routine} returned {numbers.dtype}, not numbers"
            raise Failure("RoutineError", words)
        return numbers.reshape(-1)
