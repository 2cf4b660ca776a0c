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

import importlib
import inspect
import pkgutil
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ali import sparse_matrices
from mpi_workers.failures import Failure
from mpi_workers.matrix import device
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import BLOCK, Grid, selector, shape_of_parts, taken
from mpi_workers.matrix.sparse_matrix import SparseMatrix
from mpi_workers.protocol.libraries import SLICE_WARNINGS
from mpi_workers.protocol.signature import MATRIX, REQUIRED, SPARSE, Parameter, Result, Signature

if typing.TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_workers.rank.channels import Channel
    from mpi_workers.rank.gang_view import GangView
    from mpi_workers.rank.history import Span

F = TypeVar("F", bound=Callable[..., Any])

_SCALARS: dict[Any, str] = {
    DistMatrix: MATRIX,
    SparseMatrix: SPARSE,
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
    comm : MPI.Intracomm
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
    gang : GangView
        The ranks that run the routine, for libraries that host other libraries.
    """

    def __init__(self, gang: GangView, state: dict[str, Any], *, shipped: bool = False) -> None:
        self.gang = gang
        self._shipped = shipped  # its messages are this product's own
        self.state = state
        self.rank = gang.rank
        self.size = gang.size
        self.grid: Grid = gang.grid

    @property
    def comm(self) -> MPI.Intracomm:
        return self.gang.own_comm if self._shipped else self.gang.comm

    def floating_errors(self) -> np.errstate:
        """A block in which NumPy's functions report floating-point errors to the call's caller.

        The caller's `numpy.errstate` decides between warnings, errors and silence.
        """
        return np.errstate(all="call", call=self.gang.note_floating)

    def warn_of_slice(self, text: str) -> None:
        """Have the call's caller warned, once for all ranks, by a text of `SLICE_WARNINGS`."""
        self.gang.note_floating(text, SLICE_WARNINGS[text])

    def zeros(self, shape: Sequence[int], dtype: Any, layout: str = "VC_STAR") -> DistMatrix:
        """A distributed matrix of zeros; every rank must pass the same arguments.

        `shape` is (m, n), or (m,) for a vector, or longer: see `DistMatrix` on how it is stored.

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

    def channel(self, name: str) -> Channel:
        """A channel to a running call of another gang, which `alchemist_ray.couple` has coupled.

        Collective. The first time in a call, it waits until the call of the other gang has asked
        for the channel, too. ``send(A)`` sends a copy of a matrix, ``receive(like=B)`` or
        ``receive(out=B)`` takes the next one; layouts and numbers of ranks may differ.

        Raises
        ------
        Failure
            ChannelError, if the gang is not coupled, or the other gang is lost.
        """
        found: Channel = self.gang.coupled.channel(name)
        return found

    def show(self, name: str, A: DistMatrix) -> None:
        """Let programs look at a matrix as it is now, with ``als.watch(name)``. Collective.

        Costs a copy of the matrix, in memory for two. Never waits, also if nothing looks. Show a
        field every few milliseconds at most: one that changes while it is read is not seen.
        """
        self.gang.coupled.show(name, A)

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

    def from_device(self, x: Any, layout: str = "VC_STAR") -> DistMatrix:
        """A matrix of which each rank passes its part, on its GPU. Collective.

        Parameters
        ----------
        x : tensor of PyTorch or array of CuPy, shape (local_m, local_n); or (local_m,) of a vector
            Of one dtype on all ranks. Copied to the host once: columns that lie one after another
            (``x.T.contiguous().T``) are copied fastest. Later changes of `x` are not seen.
        layout : str
            The matrix has the shape that these parts have in it.

        Raises
        ------
        Failure
            ResourceError, as `DistMatrix.on_device`; ShapeError or DtypeError on all ranks, if the
            parts make no matrix.
        """
        found = device.required()
        x = found.tensor(x)
        kind = str(x.dtype).removeprefix("torch.")
        parts = self.gang.own_comm.allgather((kind, tuple(x.shape)))
        kinds, dimensions = {kind for kind, _ in parts}, {len(shape) for _, shape in parts}
        if len(kinds) > 1 or len(dimensions) > 1 or not dimensions <= {1, 2}:
            raise Failure(
                "ShapeError" if len(kinds) == 1 else "DtypeError",
                "from_device: the parts of all ranks must have one dtype, and 1 axis or 2; they "
                f"have {', '.join(sorted(kinds))} and {', '.join(map(str, sorted(dimensions)))}",
            )
        try:
            dtype = found.numpy_dtype(x)
            whole = shape_of_parts(layout, self.grid, [(*shape, 1)[:2] for _, shape in parts])
        except (TypeError, ValueError) as error:
            words = "DtypeError" if isinstance(error, TypeError) else "ShapeError"
            raise Failure(words, f"from_device: {error}") from None
        matrix = self.empty(whole[: x.ndim], dtype, layout)
        if matrix.stored.size:
            found.store(x.reshape(matrix.stored.shape), matrix.stored)
        return matrix

    def new_sparse(self, local: Any, m: int) -> SparseMatrix:
        """A sparse matrix with `m` rows, built from each rank's own rows. Collective.

        Parameters
        ----------
        local : scipy.sparse matrix or array, shape (k, n)
            This rank's rows: ``ceil(m / size)`` from ``rank * ceil(m / size)`` on, the last ranks
            fewer or none. Copied once.

        Raises
        ------
        ValueError
            If a rank does not pass as many rows as it owns.
        """
        return sparse_matrices.from_rows(self.gang, local, m)

    def sparse_from_triplets(
        self,
        rows: NDArray[Any],
        columns: NDArray[Any],
        elements: NDArray[Any],
        shape: tuple[int, int],
    ) -> SparseMatrix:
        """A sparse matrix of elements that ranks hold anywhere, with their places. Collective.

        Elements at the same place are added. Each crosses the network once, with its place;
        memory: three copies of a rank's elements and places.

        Raises
        ------
        Failure
            ShapeError on all ranks, if a place is outside of the shape.
        """
        return sparse_matrices.from_triplets(self.gang, rows, columns, elements, shape)

    def halo(
        self,
        matrix: DistMatrix,
        width: int = 1,
        *,
        fill: complex = 0,
        out: np.ndarray[Any, Any] | None = None,
        periodic: bool | tuple[bool, bool] = False,
    ) -> np.ndarray[Any, Any]:
        """This rank's block of a matrix in BLOCK with its neighbours' elements around. Collective.

        Parameters
        ----------
        width : int
            Rows and columns on each side, >= 1; no more than the blocks of the matrix have.
        fill : number
            In place of elements beyond the matrix.
        out : ndarray, shape (local_m + 2 width, local_n + 2 width)
            Memory for the result, such as that of the step before. Default: new memory.
        periodic : bool or (bool, bool)
            Whether the first and the last rows (first value), and columns (second value), are
            neighbours. Then `fill` is not used there.

        Returns
        -------
        H : ndarray, shape (local_m + 2 width, local_n + 2 width)
            A copy; ``H[i + width, j + width]`` is ``matrix.local[i, j]``. Corners are filled.

        Raises
        ------
        Failure
            LayoutError for another layout, ShapeError for blocks smaller than `width`; with
            `periodic` the last block counts, too.
        """
        return _halo(self.gang, matrix, width, fill, out, periodic)

    def new_replicated(self, values: np.ndarray[Any, Any], layout: str = "STAR_STAR") -> DistMatrix:
        """A matrix or vector in any layout from a small array that is the same on every rank."""
        matrix = self.empty(values.shape, values.dtype, layout)
        values = values.reshape(matrix.shape)
        matrix.stored[...] = taken(values, selector(matrix.rows), selector(matrix.cols))
        return matrix


def _type_name(annotation: Any, what: str) -> str:
    """The name of a type; `what` has it, for the message of the error."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if typing.get_origin(annotation) is list:
        (item,) = typing.get_args(annotation)
        if item in _SCALARS and item not in (DistMatrix, SparseMatrix):
            return f"list[{_SCALARS[item]}]"
    name = annotation.__name__ if isinstance(annotation, type) else repr(annotation)
    raise TypeError(
        f"{what}: {name} cannot be the type of a parameter or result: use DistMatrix, "
        "SparseMatrix, int, float, complex, bool, str, bytes or a list of one of the scalars"
    )


def _parameter(routine: str, name: str, annotation: Any, default: Any) -> Parameter:
    what = f"{routine}: parameter {name!r}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(options) != 1 or default is not None:
            raise TypeError(f"{what}: the only supported union is `T | None = None`")
        return Parameter(name, _type_name(options[0], what), None)
    default = REQUIRED if default is inspect.Parameter.empty else default
    return Parameter(name, _type_name(annotation, what), default)


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
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"{function.__name__}: its parameters must be named, without *")
        if parameter.name not in hints:
            raise TypeError(f"{function.__name__}: parameter {parameter.name!r} has no annotation")
        taken.append(
            _parameter(function.__name__, parameter.name, hints[parameter.name], parameter.default)
        )
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
        tuple(
            Result(name, _type_name(kind, f"{function.__name__}: result {name!r}"))
            for name, kind in zip(results, kinds, strict=True)
        ),
        inspect.getdoc(function) or "",
    )


def routine(
    *results: str,
    like: Mapping[str, str] | None = None,
    vectors: Sequence[str] = (),
    writes: Sequence[str] | None = None,
    pure: bool = False,
    any_axes: bool = False,
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
    any_axes : bool
        Its parameters take arrays of three axes and more, see `DistMatrix.local`. Other routines
        refuse them, with advice to reshape.

    Notes
    -----
    The function's first parameter is the `Context`; all others and the return
    value are typed. An exception on any rank fails the call for all.
    """

    if not all(isinstance(name, str) for name in results):
        raise TypeError('@routine takes the names of the results: @routine("B"), or @routine()')
    ndim_of = {**(like or {}), **dict.fromkeys(vectors, "")}

    def declare(function: F) -> F:
        signature = replace(describe(function, results), any_axes=any_axes)
        matrices = {p.name for p in signature.parameters if p.type == MATRIX}
        unknown = {*(writes or ()), *(like or {}).values()} - matrices
        unknown |= ndim_of.keys() - {r.name for r in signature.results if r.type == MATRIX}
        if unknown:
            raise TypeError(
                f"{function.__name__}: writes, like or vectors name {', '.join(sorted(unknown))}, "
                "which is not a matrix of this routine"
            )
        vars(function).update(
            __alchemist__=signature,
            __alchemist_ndim__=ndim_of,
            __alchemist_writes__=None if writes is None else list(writes),
            __alchemist_pure__=pure,
        )
        return function

    return declare


UP, DOWN = 21, 22  # tags: with two blocks along an axis both neighbours may be the same rank
Periodic = bool | tuple[bool, bool]


def _halo(
    gang: GangView,
    matrix: DistMatrix,
    width: int,
    fill: complex,
    out: NDArray[Any] | None,
    periodic: Periodic,
) -> NDArray[Any]:
    """See `Context.halo`.

    Two exchanges between neighbours on the grid: columns first, then rows with the columns that
    have arrived, so that corners need no messages of their own.
    """
    around = (periodic, periodic) if isinstance(periodic, bool) else periodic
    _check_halo(matrix, width, around)
    m, n = matrix.local.shape
    shape = m + 2 * width, n + 2 * width
    if out is None:
        out = np.empty(shape, matrix.dtype, order="F")
    elif out.shape != shape or out.dtype != matrix.dtype:
        raise ValueError(f"halo: out is {out.shape} of {out.dtype}, not {shape} of {matrix.dtype}")
    for edge in (out[:width], out[m + width :], out[:, :width], out[:, n + width :]):
        edge[...] = fill
    out[width : m + width, width : n + width] = matrix.local
    if matrix.local.size:
        height = matrix.grid[0]
        row, col = gang.rank % height, gang.rank // height
        _swap(gang, matrix, out.T, 1, (col, height), width, around[1])
        _swap(gang, matrix, out, 0, (row, 1), width, around[0])
    return out


def _check_halo(matrix: DistMatrix, width: int, around: tuple[bool, bool]) -> None:
    if matrix.layout != BLOCK:
        raise Failure(
            "LayoutError",
            f"halo: the matrix is in {matrix.layout}; convert it with to_layout to {BLOCK}, in "
            "which each rank has one block of neighbouring rows and columns",
        )
    if not isinstance(width, int | np.integer) or width < 1:
        raise Failure(
            "BadArgumentError", f"halo: width must be an integer of at least 1; got {width!r}"
        )
    for length, size, what, wraps in zip(
        matrix.shape, matrix.distribution.block, ROWS, around, strict=True
    ):
        last = length - (length - 1) // size * size if length else 0
        if wraps and 0 < last < width:
            raise Failure(
                "ShapeError",
                f"halo: periodic, a width of {width} needs as many {what} in every block; the last "
                f"block of this matrix has {last}: use another number of ranks or a smaller width",
            )
        if size < min(width, length):
            raise Failure(
                "ShapeError",
                f"halo: a width of {width} needs as many {what} in a block; those of this matrix "
                f"have {size}: use fewer ranks or a smaller width",
            )


ROWS = "rows", "columns"


def _swap(
    gang: GangView,
    matrix: DistMatrix,
    lines: NDArray[Any],
    axis: int,
    place: tuple[int, int],
    width: int,
    periodic: bool,
) -> None:
    """Exchange the first and last lines of the block with the neighbours along an axis.

    `place`: this rank's row or column on the grid, and the distance to the next rank.
    """
    length, size = matrix.shape[axis], matrix.distribution.block[axis]
    mine, step = place
    blocks = -(-length // size)  # further ranks have no elements
    ahead, behind = mine - 1, mine + 1
    if periodic:
        ahead, behind = ahead % blocks, behind % blocks
    before, own, after = (
        max(0, min(size, length - k * size)) if k >= 0 else 0 for k in (ahead, mine, behind)
    )
    before, after = min(width, before), min(width, after)
    first = np.ascontiguousarray(lines[width : width + min(width, own)])
    last = np.ascontiguousarray(lines[own + width - min(width, own) : own + width])
    head = np.empty((before, lines.shape[1]), lines.dtype)
    tail = np.empty((after, lines.shape[1]), lines.dtype)
    requests = []
    for arriving, leaving, there, tags in (
        (head, first, ahead, (DOWN, UP)),
        (tail, last, behind, (UP, DOWN)),
    ):
        if len(arriving):
            neighbour = gang.rank + (there - mine) * step
            requests.append(gang.comm.Irecv(_raw(arriving), neighbour, tags[0]))
            requests.append(gang.comm.Isend(_raw(leaving), neighbour, tags[1]))
    for request in requests:
        request.Wait()
    lines[width - before : width] = head
    lines[own + width : own + width + after] = tail


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def collect_routines(package: str) -> list[str]:
    """Put the routines that the modules of a package declare into the package; their names."""
    names = []
    for found in pkgutil.iter_modules(sys.modules[package].__path__):
        module = importlib.import_module(f"{package}.{found.name}")
        for name, value in sorted(vars(module).items()):
            if hasattr(value, "__alchemist__") and value.__module__ == module.__name__:
                setattr(sys.modules[package], name, value)
                names.append(name)
    return names
