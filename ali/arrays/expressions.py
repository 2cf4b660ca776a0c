"""Expressions that a client has recorded: several calls of element-wise routines in one command.

Where nothing moves, the steps are carried out on pieces of the operands that stay in a core's
cache, without temporaries of full size: memory is read once, and written once. A reduction at the
end takes the pieces as they are computed. Else the routines run one after another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ali.arrays import operands
from ali.arrays.selecting import require_mask
from ali.blocks import Array, require_choice
from ali.interface import Context, routine
from ali.linalg import arithmetic, reductions
from ali.linalg.arithmetic import BINARY, UNARY, number_of, result_dtype
from ali.linalg.reductions import SUPPORTED
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import ArrayShape, Shape, distributions, stored_shape

OPERAND_NBYTES = 1 << 18  # 256 KiB of each operand: a few of them stay in a core's cache
ROUTINES: dict[str, Callable[..., DistMatrix]] = {
    "elementwise": arithmetic.elementwise, "elementwise_scalar": arithmetic.elementwise_scalar,
    "apply": arithmetic.apply, "astype": arithmetic.astype, "where": arithmetic.where,
    "choose": operands.choose, "combine": operands.combine, "reduce": operands.reduce,
}  # fmt: skip
IN_PIECES = frozenset({  # reductions that only take blocks of their operand, one after another
    "sum", "mean", "min", "max", "var", "std", "prod", "nansum", "nanprod", "nanmin", "nanmax",
    "nanmean", "nanvar", "nanstd",
})  # fmt: skip


class Step(NamedTuple):
    """One call: its matrices are results of earlier steps, from 0, or operands, from -1 down."""

    routine: str
    matrices: dict[str, int]
    values: dict[str, Any]


@routine("R", any_axes=True)
def evaluate(
    ctx: Context,
    op: str,
    steps: str,
    data: bytes = b"",
    A: DistMatrix | None = None,
    B: DistMatrix | None = None,
    C: DistMatrix | None = None,
    D: DistMatrix | None = None,
    E: DistMatrix | None = None,
    F: DistMatrix | None = None,
    G: DistMatrix | None = None,
    H: DistMatrix | None = None,
) -> DistMatrix:
    """The result of the last of some calls, which use each other's results.

    Parameters
    ----------
    op : str
        The last function, for messages.
    steps : str
        A list of `Step` in JSON, of routines in `ROUTINES`: complex numbers are pairs, and bytes
        are the start and the end of a piece of `data`.
    data : bytes
        Elements of small operands.
    A, B, C, D, E, F, G, H : array, optional
        The operands. Each has a name, because signatures have no lists of matrices.

    Returns
    -------
    R : array

    Raises
    ------
    RoutineError and others
        As the routines.

    Notes
    -----
    One pass over the operands if they are numbers, or have the shape of the result and one layout,
    with scratch of 256 KiB for each step. Results have the bits of the single calls.
    """
    program = [Step(*one) for one in json.loads(steps)]
    for step in program:
        if "value" in step.values:
            step.values["value"] = complex(*step.values["value"])
        if "values" in step.values:
            step.values["values"] = data[slice(*step.values["values"])]
    given = [x for x in (A, B, C, D, E, F, G, H) if x is not None]
    last = program[-1] if program[-1].routine == "reduce" else None
    body = program[:-1] if last else program
    found = _one_pass(ctx, body, given) if body and len(program) > 1 else None
    if found is None:
        return _one_by_one(ctx, program, given)
    if last is None:
        return found.whole(ctx)
    whole: Any = found if _in_pieces(found.ndim, **last.values) else found.whole(ctx)
    return operands.reduce(ctx, A=whole, **last.values)


def _in_pieces(ndim: int, op: str, axes: Sequence[int] | None = None, **_: Any) -> bool:
    """Whether a reduction takes the stored matrix as it is, block by block."""
    gone = range(ndim) if axes is None else sorted(axes)
    by_sides = ndim < 3 or list(gone) in ([0], [*range(1, ndim)], [*range(ndim)])
    return op in IN_PIECES and by_sides


def _one_by_one(ctx: Context, program: Sequence[Step], given: Sequence[DistMatrix]) -> DistMatrix:
    found: dict[int, DistMatrix] = {-1 - i: x for i, x in enumerate(given)}
    for number, step in enumerate(program):
        matrices = {name: found[i] for name, i in step.matrices.items()}
        found[number] = ROUTINES[step.routine](ctx, **matrices, **step.values)
        for i in step.matrices.values():
            if i >= 0 and not any(i in later.matrices.values() for later in program[number + 1 :]):
                found.pop(i, None)
    return found[len(program) - 1]


class Operation(NamedTuple):
    """The work of one step on blocks: ``function(*operands, out=block, casting="unsafe")``.

    `operands` are places in a list of the leaves, the numbers, and the results of the steps.
    """

    function: Callable[..., Any]
    operands: tuple[int, ...]
    dtype: np.dtype[Any]


class Unstored:
    """Elements that are made when they are taken, with what reductions read of a `DistMatrix`.

    They are on the ranks of those of `like`; `stored` is this rank's part, of which slices are
    arrays.
    """

    def __init__(self, like: DistMatrix, array_shape: ArrayShape, dtype: np.dtype[Any]) -> None:
        self.array_shape = array_shape
        self.ndim = len(array_shape)
        self.shape = stored_shape(array_shape)
        self.dtype = dtype
        self.layout, self.distribution, self.rank = like.layout, like.distribution, like.rank

    def with_shape(self, shape: ArrayShape) -> Unstored:
        """The same elements; see `DistMatrix.with_shape`."""
        assert stored_shape(shape) == self.shape
        return self


class Expression(Unstored):
    """The value of an expression, as a matrix whose elements are computed when they are taken.

    Parameters
    ----------
    like : DistMatrix
        With the shape and the layout of the result.
    runs : list of ndarray
        This rank's elements of the operands in the order of memory, or a number.
    """

    def __init__(
        self,
        ctx: Context,
        like: DistMatrix,
        runs: Sequence[Array],
        numbers: Sequence[Any],
        operations: Sequence[Operation],
    ) -> None:
        super().__init__(like, like.array_shape, operations[-1].dtype)
        self._ctx = ctx
        self._like = like
        self._runs, self._numbers = runs, numbers
        # Which step's buffer takes each result: that of a dead result of the same dtype.
        first = len(runs) + len(numbers)
        last = {i: k for k, op in enumerate(operations) for i in op.operands}
        self._code = list[tuple[Any, tuple[int, ...], int]]()
        free = dict[Any, list[int]]()
        slots, dtypes = list[int](), list[np.dtype[Any]]()
        for k, (function, places, dtype) in enumerate(operations):
            spare = free.setdefault(dtype, [])
            if not spare:
                spare.append(len(dtypes))
                dtypes.append(dtype)
            slots.append(spare.pop())
            self._code.append((function, places, slots[-1]))
            for i in {i for i in places if i >= first and last[i] == k}:
                free[operations[i - first].dtype].append(slots[i - first])
        self._count = OPERAND_NBYTES // max(dtype.itemsize for dtype in dtypes)
        self._buffers = [np.empty(self._count, dtype) for dtype in dtypes]

    @property
    def stored(self) -> _Block:
        """This rank's elements."""
        return _Block(self, self._like.stored.shape)

    def whole(self, ctx: Context) -> DistMatrix:
        """All elements in a new matrix."""
        R = ctx.empty(self.array_shape, self.dtype, self.layout)
        self.fill(R.stored, (0, 0))
        return R

    def fill(self, out: Array, start: tuple[int, int]) -> None:
        """Compute the elements from a row and column of this rank's block that `out` has room for.

        `out` is in Fortran order.
        """
        height = self._like.stored.shape[0]
        begin = start[1] * height + start[0]
        with self._ctx.floating_errors():
            if len(out) == height:  # whole columns are one run of memory
                self._fill(out.reshape(-1, order="F"), begin)
                return
            for j, column in enumerate(out.T):
                self._fill(column, begin + j * height)

    def _fill(self, run: Array, begin: int) -> None:
        last = len(self._code) - 1
        for first in range(0, run.size, self._count):
            out = run[first : first + self._count]
            here = slice(begin + first, begin + first + out.size)
            values = [x[here] if x.size > 1 else x for x in self._runs]
            values += self._numbers
            for k, (function, places, slot) in enumerate(self._code):
                target = out if k == last else self._buffers[slot][: out.size]
                function(*[values[i] for i in places], out=target, casting="unsafe")
                values.append(target)


class _Block:
    """This rank's part of an expression: slices of it are arrays."""

    def __init__(self, expression: Expression, shape: Shape) -> None:
        self.shape, self.dtype = shape, expression.dtype
        self.itemsize, self.size = self.dtype.itemsize, math.prod(shape)
        self._expression = expression
        self._room: Array | None = None

    def reshape(self, *shape: int, order: str) -> _Block:
        """For `ali.blocks.block`: also of no elements."""
        return _Block(self._expression, (shape[0], shape[1]))

    def __getitem__(self, key: tuple[slice, slice]) -> Array:
        (top, bottom, _), (left, right, _) = (
            one.indices(length) for one, length in zip(key, self.shape, strict=True)
        )
        shape = bottom - top, right - left
        if self._room is None or self._room.shape != shape:
            self._room = np.empty(shape, self.dtype, "F")
        self._expression.fill(self._room, (top, left))
        return self._room


@routine("R", any_axes=True)
def reduce_elements(
    ctx: Context, op: str, A: DistMatrix, mask: DistMatrix, ddof: int = 0, keepdims: bool = False
) -> DistMatrix:
    """Reduce the elements where a mask is true.

    Parameters
    ----------
    op, ddof, keepdims
        As in `reduce`; one of the operations in `IN_PIECES`.
    A : array
    mask : array of bool, of A's shape

    Returns
    -------
    R : number, or vector with one element

    Raises
    ------
    ShapeError
        If the shapes differ, or there is no smallest or largest element, because none is selected.

    Notes
    -----
    One pass, after one over the mask; no element moves but in layouts that are redistributed.
    """
    require_choice("reduce_elements", "op", op, IN_PIECES)
    require_mask(A, mask)
    if not all(dist in SUPPORTED for dist in distributions(A.layout)):
        A = ctx.to_layout(A, "VC_STAR")
    chosen: Any = Selection(ctx, A, ctx.to_layout(mask, A.layout))
    return operands.reduce(ctx, op, chosen, None, ddof, keepdims)


class Selection(Unstored):
    """The elements where a mask is true, as a vector that a reduction takes block by block."""

    def __init__(self, ctx: Context, A: DistMatrix, mask: DistMatrix) -> None:
        super().__init__(A, (int(reductions.sum(ctx, mask).local[0, 0]),), A.dtype)
        self.stored = _Chosen(A.stored, mask.stored)


class _Chosen:
    """This rank's elements, of which slices are the selected ones, as a column."""

    def __init__(self, elements: Array, mask: Array) -> None:
        self.shape, self.size, self.itemsize = elements.shape, elements.size, elements.itemsize
        self._elements, self._mask = elements, mask

    def reshape(self, *shape: int, order: str) -> _Chosen:
        """For `ali.blocks.block`: how many elements there are is not what is selected."""
        return self

    def __getitem__(self, key: tuple[slice, slice]) -> Array:
        mask, elements = (x[key].reshape(-1, order="F") for x in (self._mask, self._elements))
        return np.compress(mask, elements)[:, None]  # a quarter of the time of an index


def _one_pass(ctx: Context, body: Sequence[Step], given: Sequence[DistMatrix]) -> Expression | None:
    """The value of the last step, or None where the steps need each other's whole results."""
    leaves = list(given)
    steps = []
    for step in body:  # small operands are operands like others
        routine, matrices, values = step.routine, dict(step.matrices), dict(step.values)
        if routine in ("combine", "choose"):
            told = (values.pop(name) for name in ("values", "shape", "dtype"))
            small = operands.decoded(routine, *told)
            missing = [name for name in "AB" if name not in matrices]
            for name, one in zip(missing, small if len(missing) > 1 else [small], strict=True):
                leaves.append(ctx.new_replicated(np.asarray(one)))
                matrices[name] = -len(leaves)
            if values.pop("reflected", False):
                matrices["A"], matrices["B"] = matrices["B"], matrices["A"]
            routine = "elementwise" if routine == "combine" else "where"
        steps.append(Step(routine, matrices, values))
    shapes = {-1 - i: x.array_shape for i, x in enumerate(leaves)}
    for k, step in enumerate(steps):
        shapes[k] = np.broadcast_shapes(*(shapes[i] for i in step.matrices.values()))
    whole = shapes[len(steps) - 1]
    full = [x for x in leaves if x.array_shape == whole]
    if {shapes[k] for k in range(len(steps))} != {whole} or len({x.layout for x in full}) != 1:
        return None
    if not all(dist in SUPPORTED for dist in distributions(full[0].layout)):
        return None
    # Rows beside a matrix make its pieces so short that whole passes are quicker.
    if any(x.array_shape != whole and math.prod(x.array_shape) > 1 for x in leaves):
        return None
    found = _operations(steps, [x.dtype for x in leaves])
    if found is None:
        return None
    here = [x if x.array_shape == whole else ctx.to_layout(x, "STAR_STAR") for x in leaves]
    return Expression(ctx, full[0], [x.stored.reshape(-1, order="F") for x in here], *found)


def _operations(
    steps: Sequence[Step], leaves: Sequence[np.dtype[Any]]
) -> tuple[list[Any], list[Operation]] | None:
    """The numbers among the operands, and what the steps do, by the rules of `arithmetic`.

    None where ranks have to agree on something first.
    """
    count = sum(step.routine == "elementwise_scalar" for step in steps)
    numbers: list[Any] = []
    found: list[Operation] = []
    dtypes = dict(enumerate(leaves))
    for k, (name, matrices, values) in enumerate(steps):
        places = {key: -1 - i if i < 0 else len(leaves) + count + i for key, i in matrices.items()}
        A, op = places["A"], values.get("op", "")
        function: Callable[..., Any]
        taken: tuple[int, ...]
        if name == "elementwise_scalar":
            number = number_of(name, values["value"], dtypes[A], values["kind"])
            reflected = values.get("reflected", False)
            numbers.append(number)
            place = len(leaves) + len(numbers) - 1
            taken = (place, A) if reflected else (A, place)
            function = BINARY[op]
            dtype = result_dtype(name, function, dtypes[A], type(number), op, reflected)
        elif name == "elementwise":
            taken, function = (A, places["B"]), BINARY[op]
            dtype = result_dtype(name, function, dtypes[A], dtypes[places["B"]], op)
        elif name == "apply":
            taken, function = (A,), UNARY[op]
            dtype = result_dtype(name, function, dtypes[A], None, op)
        elif name == "where":
            taken, function = (places["condition"], A, places["B"]), _choose
            dtype = np.result_type(dtypes[A], dtypes[places["B"]])
        else:
            taken, function, dtype = (A,), _cast, np.dtype(values["dtype"])
        if op == "power" and dtype.kind == "i":  # is an exponent negative on any rank?
            return None
        dtypes[len(leaves) + count + k] = dtype
        found.append(Operation(function, taken, dtype))
    return numbers, found


def _choose(test: Array, a: Array, b: Array, out: Array, casting: Any) -> None:
    out[...] = np.where(test, a, b)  # a third of the time of a copy where the test is true


def _cast(block: Array, out: Array, casting: Any) -> None:
    np.copyto(out, block, casting)
