"""The Alchemist-Library Interface: how a Python library declares its routines.

    from ali import Context, DistMatrix, routine

    @routine("B")
    def scale(ctx: Context, A: DistMatrix, factor: float = 2.0) -> DistMatrix:
        \"\"\"B = factor * A.\"\"\"
        B = ctx.empty_like(A)
        B.local[...] = factor * A.local
        return B

A library is a module with such functions. Each runs on every rank of the gang
at once, with that rank's part of each matrix. The client builds a method of the
same name, signature and docstring from it.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Grid
from mpi_workers.matrix.runs import selector, taken
from mpi_workers.wire.library_names import LOAD_STATE, SAVE_STATE
from mpi_workers.wire.signature import MATRIX, REQUIRED, Parameter, Result, Signature, coerce

if typing.TYPE_CHECKING:
    from mpi_workers.rank.communicator import GangComm
    from mpi_workers.rank.gang import Gang
    from mpi_workers.rank.history import Span

F = TypeVar("F", bound=Callable[..., Any])

_SCALARS: dict[Any, str] = {
    DistMatrix: MATRIX,
    int: "int",
    float: "float",
    complex: "complex",
    bool: "bool",
    str: "string",
    bytes: "bytes",
}


class Context:
    """The services of the gang that a routine can use.

    Attributes
    ----------
    comm : GangComm
        The gang's communicator (an `mpi4py.MPI.Intracomm`), used by this routine only. Read it
        in each call: a failed call replaces it, and objects derived from the old one must be
        created again.
    rank, size : int
        This rank, and how many there are.
    grid : (int, int)
        Height and width of the grid of ranks.
    state : dict
        The library's own values, kept on this rank from call to call until the library is
        loaded again or the gang ends. The routines `save_state` and `load_state` of a library
        carry it over to other ranks (``docs/own-library.md``).
    gang : Gang
        The ranks that run the routine, for libraries that host other libraries.
    """

    def __init__(self, gang: Gang, state: dict[str, Any]) -> None:
        self.gang = gang
        self.state = state
        self.rank = gang.rank
        self.size = gang.size
        self.grid: Grid = gang.grid

    @property
    def comm(self) -> GangComm:
        return self.gang.comm

    def zeros(self, shape: Sequence[int], dtype: Any, layout: str = "VC_STAR") -> DistMatrix:
        """A distributed matrix of zeros; every rank must pass the same arguments.

        `shape` is (m, n), or (m,) for a vector, which is stored as a column (`DistMatrix.ndim`).

        Raises
        ------
        Failure
            ResourceError, if a rank's node has not enough memory.
        ValueError
            For an unknown layout or dtype.
        """
        return self.gang.new(shape, dtype, layout)

    def empty(self, shape: Sequence[int], dtype: Any, layout: str = "VC_STAR") -> DistMatrix:
        """Like `zeros`, with uninitialised elements."""
        return self.gang.new(shape, dtype, layout, zero=False)

    def empty_like(self, matrix: DistMatrix) -> DistMatrix:
        """An uninitialised matrix of the same shape, dtype and layout."""
        return self.empty(matrix.array_shape, matrix.dtype, matrix.layout)

    def to_layout(self, matrix: DistMatrix, layout: str) -> DistMatrix:
        """The matrix in another layout (the same matrix if it has that layout). Collective.

        Each element crosses the network at most once per copy that the layout keeps.
        """
        return self.gang.to_layout(matrix, layout)

    def check(self) -> None:
        """End a long computation if the call has failed on another rank or was cancelled.

        Costs less than a microsecond. Waits in `comm` check by themselves.

        Raises
        ------
        Interrupted
            Do not catch it: it ends the routine on this rank.
        """
        self.gang.check()

    def progress(self, fraction: float, text: str = "") -> None:
        """Report to the user that a `fraction` (0 to 1) of the routine is done."""
        self.gang.progress(fraction, text)

    def span(self, name: str) -> Span:
        """Mark a part of the routine: ``with ctx.span("assemble"): ...``.

        `AlchemistSession.trace` shows it on this rank's row, below the call, and
        `AlchemistSession.profile` in its table. Spans may be nested. A span costs about 2 us; a
        rank keeps its last 10,000.
        """
        return self.gang.span(name)

    def new_from_rows(self, local: np.ndarray[Any, Any], m: int) -> DistMatrix:
        """A VC_STAR matrix with `m` rows, built from each rank's own rows in VC_STAR's order.

        A rank without rows passes an array of shape ``(0, n)``.

        Raises
        ------
        ValueError
            If a rank does not pass as many rows as it owns.
        """
        owned = len(range(self.rank, m, self.size))
        if local.ndim != 2 or local.shape[0] != owned:
            raise ValueError(
                f"rank {self.rank} must pass {owned} of the {m} rows; its local array has shape "
                f"{local.shape}"
            )
        matrix = self.empty((m, local.shape[1]), local.dtype, "VC_STAR")
        if local.size:
            matrix.local[...] = local
        return matrix

    def new_replicated(self, values: np.ndarray[Any, Any], layout: str = "STAR_STAR") -> DistMatrix:
        """A matrix or vector in any layout from a small array that is the same on every rank."""
        matrix = self.empty(values.shape, values.dtype, layout)
        values = values.reshape(matrix.shape)
        matrix.local[...] = taken(values, selector(matrix.rows), selector(matrix.cols))
        return matrix


def _type_name(annotation: Any) -> str:
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        if item in _SCALARS and item is not DistMatrix:
            return f"list[{_SCALARS[item]}]"
    raise TypeError(
        f"{annotation!r} cannot be the type of a parameter or result: use DistMatrix, int, float, "
        "complex, bool, str, bytes or a list of one of the scalars"
    )


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(options) != 1 or default is not None:
            raise TypeError(f"parameter {name!r}: the only supported union is `T | None = None`")
        return Parameter(name, _type_name(options[0]), None)
    return Parameter(
        name, _type_name(annotation), REQUIRED if default is inspect.Parameter.empty else default
    )


def describe(function: Callable[..., Any], results: Sequence[str]) -> Signature:
    """The signature of a typed function ``f(ctx, ...)`` with results of these names.

    Raises
    ------
    TypeError
        If an annotation is missing or its type is not supported.
    """
    hints = typing.get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise TypeError(f"{function.__name__}: its first parameter must be the Context")
    taken = []
    for parameter in parameters[1:]:
        if parameter.name not in hints:
            raise TypeError(f"{function.__name__}: parameter {parameter.name!r} has no annotation")
        taken.append(_parameter(parameter.name, hints[parameter.name], parameter.default))
    given = hints.get("return", type(None))
    if given is type(None):
        kinds: tuple[Any, ...] = ()
    elif typing.get_origin(given) is tuple:
        kinds = typing.get_args(given)
    else:
        kinds = (given,)
    if len(kinds) != len(results):
        raise TypeError(
            f"{function.__name__} returns {len(kinds)} values but names {len(results)} results"
        )
    return Signature(
        function.__name__,
        tuple(taken),
        tuple(Result(name, _type_name(kind)) for name, kind in zip(results, kinds, strict=True)),
        inspect.getdoc(function) or "",
    )


def routine(
    *results: str,
    like: Mapping[str, str] | None = None,
    vectors: Sequence[str] = (),
    writes: Sequence[str] | None = None,
    pure: bool = False,
) -> Callable[[F], F]:
    """Declare a function as a routine of the library that the module defines.

    Parameters
    ----------
    *results : str
        Names of the results, in the order in which the function returns them.
    like : mapping of str to str, optional
        ``{"X": "B"}``: the (m, 1) result X is a vector if the parameter B got a vector.
    vectors : sequence of str
        Results with one column that clients get as vectors.
    writes : sequence of str, optional
        Matrix parameters that the routine changes in place: on a gang that several programs
        use, they are not fetched meanwhile. Default: not declared; recovery assumes that the
        routine changes all of them.
    pure : bool
        It has no effects but its results and the matrices in `writes`: no files, no state. After
        the loss of a rank a gang with ``max_failures`` runs it again. A module with the variable
        ``PURE = True`` declares it for all its routines.

    Notes
    -----
    The function's first parameter is the `Context`; all others and the return
    value are typed. An exception on any rank fails the call for all.
    """

    ndim_of = {**(like or {}), **dict.fromkeys(vectors, "")}

    def declare(function: F) -> F:
        vars(function).update(
            __alchemist__=describe(function, results),
            __alchemist_ndim__=ndim_of,
            __alchemist_writes__=None if writes is None else list(writes),
            __alchemist_pure__=pure,
        )
        return function

    return declare


def no_such_routine(library: str, routine: str, known: Iterable[str]) -> Failure:
    """The error for a routine that a library does not have."""
    return Failure(
        "NoSuchRoutineError",
        f"library {library!r} has no routine {routine!r}; it has {', '.join(sorted(known))}",
    )


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

    def __init__(self, name: str, module: types.ModuleType, path: str | None = None) -> None:
        self._name = name
        self._module = module
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
                "function with @ali.routine",
            )
        check_state_routines(name, {key: its for key, (_, its) in self._routines.items()})
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

    def call(self, gang: Gang, routine: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Run a routine on this rank; one value per declared result.

        Raises
        ------
        Failure
            NoSuchRoutineError; RoutineError if the results differ from the declaration.
        """
        if routine not in self._routines:
            raise no_such_routine(self._name, routine, self._routines)
        function, signature = self._routines[routine]
        returned = function(Context(gang, self._state), **arguments)
        declared = signature.results
        if not declared:
            values: tuple[Any, ...] = ()
        elif len(declared) == 1:
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

    def result(self, gang: Gang, routine: str) -> Any:
        """Run a routine that takes nothing; its result as it is (an array is not made a list)."""
        function, _ = self._routines[routine]
        return function(Context(gang, self._state))

    def _checked(self, signature: Signature, result: Result, value: Any) -> Any:
        try:
            if result.type == MATRIX:
                if not isinstance(value, DistMatrix):
                    raise TypeError(type(value).__name__)
                return value
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
        if callable(close):
            close(self._state)
        self._state.clear()
