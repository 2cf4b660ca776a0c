"""Expressions on one gang: each a command, or a part of one; their matrices are temporary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.recording import Recorder
from alchemist_ray.arrays.times import TimeHandle
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.libraries import Routine, shipped
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.dtypes import DTYPES
from alchemist_ray.errors import DtypeError, ResourceError, ShapeError
from alchemist_ray.transfer.sending import send
from mpi_workers.matrix.dtypes import is_time
from mpi_workers.protocol.libraries import ARRAYS, BINARY, UNARY


@dataclass(frozen=True, slots=True)
class OperandPlacement:
    """Where an operation on A and B takes place, as the ranks decide it.

    Attributes
    ----------
    op : str
    layout : str
        Of the result.
    operands : (str, str)
        The layouts in which A and B are taken.
    moved_nbytes : (int, int)
        Bytes that the busiest rank receives to have A and B in those layouts.
    way : str
        Of a product ``"rows"``, ``"cols"``, ``"inner"`` or ``"grid"``: what stays where it is
        (ali/linalg/products.py); what moves further, in panels, is not counted here.
    """

    op: str
    layout: str
    operands: tuple[str, str]
    moved_nbytes: tuple[int, int]
    way: str


LAYOUT = "VC_STAR"  # of arrays that are sent
# Functions that are recorded: quick ones, which may be computed twice, and which report no error
# but an overflow. The others are carried out at once, in one pass with what they are applied to.
QUICK = frozenset({
    *rules.COMPARISONS, "add", "subtract", "multiply", "minimum", "maximum", "logical_and",
    "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "negative", "abs",
    "sign", "conj", "square", "logical_not", "invert", "isnan", "isinf", "isfinite", "signbit",
    "floor", "ceil", "rint", "trunc", "fabs",
})  # fmt: skip
# A program that has chosen to be told of overflows is told by the operation itself.
UNNOTICED = (
    {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"},  # NumPy's default
    dict.fromkeys(("divide", "over", "under", "invalid"), "ignore"),
)
REDUCED = frozenset({"sum", "mean", "min", "max", "var", "std", "prod", "any", "all"})


class Engine:
    """Computes expressions on handles of one gang.

    Parameters
    ----------
    connection : GangConnection
    """

    eager = False  # whether every operation is carried out at once

    def __init__(self, connection: GangConnection) -> None:
        self.connection = connection
        self.recorder = Recorder(connection, self.call)
        connection.before_commands = self.recorder.flush

    def call(self, routine: str, *args: Any, columns: Sequence[str] = (), **kwargs: Any) -> Any:
        """Call a routine of the ranks' library; `columns` are names for those of its result."""
        try:
            found = self._routine(routine)
            return (found.options(columns=columns) if columns else found)(*args, **kwargs)
        except ResourceError as error:
            matrices = [x for x in (*args, *kwargs.values()) if isinstance(x, MatrixRef)]
            shapes = " and ".join(str(x.shape) for x in matrices)
            raise ResourceError(f"{routine}{shapes and f' of {shapes}'}: {error}") from None

    def _routine(self, name: str) -> Routine:
        found: Routine = shipped(self.connection, ARRAYS).routine(name)
        return found

    def corners(self, A: Any, lists: Sequence[NDArray[np.int64]], timeout_s: float) -> Any:
        """Few indices of each axis of A, within a time limit."""
        part = self._routine("part").options(timeout_s=timeout_s)
        encoded = [rules.encode_index(one) for one in lists]
        return part(A, [0, 0, -1] * len(lists), encoded, [one.size for one in lists])

    # --- element by element ---

    def binary(self, op: str, left: Any, right: Any) -> Any:
        """``op(left, right)``, one of them a handle; `NotImplemented` if the other is nothing."""
        if isinstance(left, MatrixRef) and isinstance(right, MatrixRef):
            if op in rules.COMPARISONS:
                rules.require_same_categories(op, left, right)
            return self._elementwise("elementwise", op, {"A": left, "B": right})
        reflected = isinstance(right, MatrixRef)
        A, other = (right, left) if reflected else (left, right)
        if op in rules.COMPARISONS and type(other) is int and _beyond(other, A):
            found = rules.COMPARISONS[op](*((other, 0) if reflected else (0, other)))
            return self.call("filled", list(A.shape), complex(found), "bool", A.layout)
        if op in ("equal", "not_equal") and (other is None or isinstance(other, str | bytes)):
            return self.call("filled", list(A.shape), complex(op != "equal"), "bool", A.layout)
        value = self._operand(op, A, other, reflected=reflected)
        if isinstance(value, MatrixRef):
            pair = (value, A) if reflected else (A, value)
            return self._elementwise("elementwise", op, dict(zip("AB", pair, strict=True)))
        if value is NotImplemented:
            return value
        given: dict[str, Any] = {"reflected": reflected}
        if isinstance(value, np.ndarray):
            given |= zip(("values", "shape", "dtype"), rules.encode_operand(value), strict=True)
            return self._elementwise("combine", op, {"A": A}, given, value)
        given |= {"value": complex(value), "kind": type(value).__name__}
        return self._elementwise("elementwise_scalar", op, {"A": A}, given, value)

    def _elementwise(
        self, routine: str, op: str, matrices: dict[str, Any], given: dict[str, Any] | None = None,
        other: Any = None,
    ) -> Any:  # fmt: skip
        """Call a routine that computes element by element, or record it; see `Recorder`.

        `given` are its arguments besides matrices, `other` is the operand among them.
        """
        values = {"op": op, **(given or {})}
        if op in QUICK or any(x.recording for x in matrices.values()):
            result = self._result(op, matrices, values, other)
            if result is not None:
                found = self.recorder.record(routine, matrices, values, *result)
                return found if op in QUICK else found.computed()
        return self.call(routine, **values, **matrices)

    def _result(
        self, op: str, matrices: dict[str, Any], values: dict[str, Any], other: Any
    ) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
        """Shape and dtype of a result that may be recorded; None: the ranks decide."""
        if op not in BINARY and op not in UNARY:
            return None
        if not self._records(matrices.values()):
            return None
        types: list[Any] = [x.dtype for x in matrices.values()]
        shapes = [x.shape for x in matrices.values()]
        if other is not None:
            number = not isinstance(other, np.ndarray)
            kind = type(other) if number and type(other) is not bool else np.asarray(other).dtype
            types = [kind, *types] if values["reflected"] else [*types, kind]
            shapes.append(np.shape(other))
        try:
            shape = np.broadcast_shapes(*shapes)
            dtype = getattr(np, op).resolve_dtypes((*types, None))[-1]
        except (ValueError, TypeError):
            return None
        grown = math.prod(shape) > 2 * max(math.prod(one) for one in shapes)
        return None if grown or dtype.name not in DTYPES else (shape, dtype)

    def _records(self, matrices: Any) -> bool:
        """Whether an operation on these may be carried out later.

        Not if others may change them meanwhile, or the program asks to be told of each call.
        """
        if self.eager or self.connection.address.shared or self.connection.options.verbose:
            return False
        if np.geterr() not in UNNOTICED:
            return False
        return all(x.recording or self.connection.check(x).temporary for x in matrices)

    def update(self, op: str, A: Any, other: Any) -> Any:
        """``A = op(A, other)`` in the memory of A; `NotImplemented` if the other is nothing."""
        value = self._operand(op, A, other)
        if value is NotImplemented:
            return value
        if isinstance(value, MatrixRef):
            self.call("update", op, A, [], value)
        elif isinstance(value, np.ndarray):
            values, shape, dtype = rules.encode_operand(value)
            self.call("update", op, A, shape, values=values, dtype=dtype)
        else:
            self.call("update", op, A, [], value=complex(value), kind=type(value).__name__)
        return A

    def _operand(self, op: str, A: Any, other: Any, *, reflected: bool = False) -> Any:
        """The operand beside A: a handle, a small array or a Python number; or `NotImplemented`."""
        if isinstance(other, MatrixRef):
            return other
        value = rules.number(other)
        beyond = isinstance(value, int) and _beyond(value, A)
        if isinstance(value, int) and (beyond or abs(value) > rules.EXACT):
            if A.dtype.kind not in "biu":
                return float(value)
            dtype = rules.taken_as(op, A.dtype, reflected=reflected)
            if beyond and dtype.kind in "iu":
                raise OverflowError(f"{op}: {value} is out of range of elements of {A.dtype}")
            other, value = np.asarray(value, dtype), None
        if value is not None:
            return value
        if not rules.is_array(other):
            return NotImplemented
        array = rules.operand(other, A.dtype)
        return self.sent(array) if array.nbytes > rules.INLINE_NBYTES else array

    def unary(self, op: str, A: Any) -> Any:
        """``op(A)``."""
        return self._elementwise("apply", op, {"A": A})

    def astype(self, A: Any, dtype: Any, *, copy: bool = True) -> Any:
        """A copy with another dtype; without `copy`, A itself if it has the dtype."""
        if is_time(time := rules.plain_dtype(dtype)):
            if A.dtype != np.int64:
                raise DtypeError(f"{A.dtype} is no count of {time}: .astype('int64') makes one")
            return TimeHandle(self.copy(A) if copy else A, time)
        wanted = rules.checked_dtype(time)
        if A.dtype == wanted and not copy:
            return A
        if wanted.kind == "b" != A.dtype.kind:
            return self.call("elementwise_scalar", "not_equal", A, 0j, kind="int",
                             columns=A.columns)  # fmt: skip
        if np.can_cast(A.dtype, wanted) and (A.recording or not A.columns) and self._records([A]):
            return self.recorder.record("astype", {"A": A}, {"dtype": wanted.name}, A.shape, wanted)
        return self.call("astype", A, wanted.name, columns=A.columns)

    def cast(self, A: Any, dtype: Any) -> Any:
        """A with another dtype; A itself if it has that one, or for None."""
        return A if dtype is None else self.astype(A, dtype, copy=False)

    def matrix(self, value: Any, beside: Any | None = None) -> Any:
        """A handle of an operand; numbers take their dtype from what they are beside."""
        given = self._given(value, beside)
        if isinstance(given, MatrixRef):
            return given
        return self.call("array", *rules.encode_operand(given))

    def both(self, left: Any, right: Any) -> tuple[Any, Any]:
        """Handles of two operands; numbers take their dtype from the other one."""
        A = self.matrix(left, right if isinstance(right, MatrixRef) else None)
        return A, self.matrix(right, A)

    def _given(self, value: Any, beside: Any | None) -> Any:
        """An operand as a handle, or a small one as an array of a dtype that a matrix can have."""
        if isinstance(value, MatrixRef):
            return value
        like = beside.dtype if beside is not None else None
        plain = rules.number(value)
        if plain is not None:
            value = np.asarray(plain, None if like is None else np.result_type(like, plain))
        elif not rules.is_array(value) and not rules.is_foreign(value):
            raise rules.unsupported(f"a {type(value).__name__} as an operand")
        array = rules.operand(value, like)
        return self.sent(array) if array.nbytes > rules.INLINE_NBYTES else array

    def sent(self, array: NDArray[Any], layout: str = LAYOUT) -> Any:
        """A handle of an array that is too large to travel in a command."""
        return send(self.connection, array, layout=layout)

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Elements of `x` where the condition is not 0, else of `y`."""
        beside = next((v for v in (x, y) if isinstance(v, MatrixRef)), None)
        if beside is None and rules.number(x) is not None and rules.number(y) is not None:
            x, y = (np.asarray(v, np.result_type(np.asarray(x), np.asarray(y))) for v in (x, y))
        mask = self.matrix(condition)
        given = [self._given(v, beside) for v in (x, y)]
        handles = {n: v for n, v in zip("AB", given, strict=True) if isinstance(v, MatrixRef)}
        matrices: dict[str, Any] = {"condition": mask, **handles}
        routine, values = "where", dict[str, Any]()
        if len(handles) < 2:  # small operands travel in the command
            small = [v for v in given if isinstance(v, np.ndarray)]
            packed = small[0] if handles else np.stack(np.broadcast_arrays(*small))
            named = zip(("values", "shape", "dtype"), rules.encode_operand(packed), strict=True)
            routine, values = "choose", dict(named)
        alike = all(v.shape in ((), mask.shape) for v in given)
        if alike and self._records(matrices.values()):
            dtype = np.result_type(*(v.dtype for v in given))
            return self.recorder.record(routine, matrices, values, mask.shape, dtype)
        return self.call(routine, **matrices, **values)

    def selected(self, A: Any, mask: Any) -> Any:
        """The elements where a mask is true, in C order.

        How many there are is known when they are computed; a reduction does without them.
        """
        if self._records([A, mask]):
            return self.recorder.record("elements", {"A": A, "mask": mask}, {}, None, A.dtype)
        return self.call("elements", A, mask)

    # --- products ---

    def matmul(self, left: Any, right: Any) -> Any:
        """``left @ right`` of matrices and vectors."""
        if not all(isinstance(x, MatrixRef) or rules.is_array(x) for x in (left, right)):
            return NotImplemented
        if not np.ndim(left) or not np.ndim(right):
            raise ShapeError("matmul: a number is not a matrix: use * to multiply by it")
        A = left if isinstance(left, MatrixRef) else right
        left, right = self.matrix(left, A), self.matrix(right, A)
        if max(left.ndim, right.ndim) <= 2:
            given: dict[str, Any] = {"A": left, "B": right}
            for name, way in (("A", "transpose_a"), ("B", "transpose_b")):
                turned = self.recorder.operands("transpose", given[name])
                if turned is not None:  # A.T @ A by half the operations, without a copy
                    given |= {name: turned["A"], way: "C" if turned["conjugate"] else "T"}
            return self.call("matmul", **given)
        k = left.shape[-1]
        if k != right.shape[-2 if right.ndim > 1 else 0]:
            raise ShapeError(f"matmul of shapes {left.shape} and {right.shape}: they do not match")
        if right.ndim <= 2:  # the rows of all matrices, one below the other
            rows = self.matmul(self.reshape(left, (math.prod(left.shape[:-1]), k)), right)
            return self.reshape(rows, left.shape[:-1] + right.shape[1:])
        if left.ndim == 1:
            found = self.matmul(self.reshape(left, (1, k)), right)
            return self.reshape(found, (*found.shape[:-2], found.shape[-1]))
        try:
            batch = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except ValueError as error:
            raise ShapeError(f"matmul of shapes {left.shape} and {right.shape}: {error}") from None
        ends = left.shape[-2:], right.shape[-2:]
        count = math.prod(batch)
        pair = [
            self.reshape(
                x if x.shape[:-2] == batch else self.broadcast(x, batch + end), (count, *end)
            )
            for x, end in zip((left, right), ends, strict=True)
        ]
        return self.reshape(self.call("matmul_each", *pair), (*batch, ends[0][0], ends[1][1]))

    # --- reductions ---

    def reduce(self, op: str, A: Any, axis: Any, *, keepdims: bool = False, ddof: int = 0) -> Any:
        """Sum, mean, var, std, min, max, any or all: a handle with one dimension less, or none."""
        if axis in (None, 0, -1) and op in REDUCED - {"any", "all"} and A.recording:
            chosen = self.recorder.operands("elements", A)
            if chosen is not None:
                return self.call("reduce_elements", op, **chosen, ddof=ddof, keepdims=keepdims)
        axes = rules.axes_of(axis, A.ndim)
        if not axes and A.ndim:  # each element by itself
            found = self.reduce(op, self.reshape(A, (-1, 1)), 1, ddof=ddof)
            return self.reshape(found, A.shape)
        values: dict[str, Any] = {"op": op, "axes": axes, "ddof": ddof, "keepdims": keepdims}
        if A.recording and A.size and op in REDUCED and ddof >= 0 and self._records([A]):
            shape = [
                1 if i in axes else n for i, n in enumerate(A.shape) if keepdims or i not in axes
            ]
            dtype = _reduced_dtype(op, A.dtype)
            return self.recorder.record("reduce", {"A": A}, values, tuple(shape), dtype)
        return self.call("reduce", A=A, **values)

    def along(self, A: Any, axis: int | None, work: Callable[[Any, Any], Any]) -> Any:
        """An operation of matrices along rows or columns, along any axis of an array.

        `work(matrix, axis)` gives a matrix whose other axis is as long as before; of the axis None,
        that is of all elements, a vector.
        """
        if axis is None:
            return work(rules.flat(A), None)
        if A.ndim < 3:
            return work(A, axis)
        others = [i for i in range(A.ndim) if i != axis]
        lengths = [A.shape[i] for i in others]
        if axis == 0:
            found = work(self.reshape(A, (A.shape[0], math.prod(lengths))), 0)
            return self.reshape(found, (found.shape[0], *lengths))
        order = [*others, axis]
        matrix = self.reshape(self.permute(A, order), (math.prod(lengths), A.shape[axis]))
        found = work(matrix, 1)
        found = self.reshape(found, (*lengths, found.shape[1]))
        return self.permute(found, np.argsort(order).tolist())

    def each(self, A: Any, work: Callable[[Any], Any]) -> Any:
        """A function of matrices, element by element, of an array of any number of axes."""
        if A.ndim < 3:
            return work(A)
        return self.reshape(work(self.reshape(A, A.stored_shape)), A.shape)

    # --- the rest ---

    def copy(self, A: Any) -> Any:
        """A matrix of its own with the elements of A: `als.run` may write to it."""
        return self.call("astype", A, A.dtype.name, columns=A.columns)

    def transpose(self, A: Any, *, conjugate: bool = False) -> Any:
        """A^T, or A^H, with all axes in reverse order; a vector is its own."""
        if A.ndim < 2:
            return self.unary("conj", A) if conjugate else A
        if A.ndim > 2:
            found = self.permute(A, list(reversed(range(A.ndim))))
            return self.unary("conj", found) if conjugate else found
        if not self._records([A]) or A.columns:
            found = self.call("transpose", A, conjugate=conjugate)
        else:
            values = {"conjugate": conjugate}
            found = self.recorder.record("transpose", {"A": A}, values, A.shape[::-1], A.dtype)
        return found if conjugate else self.recorder.view(found, A)

    def permute(self, A: Any, order: Sequence[int]) -> Any:
        """The axes in another order."""
        if list(order) == list(range(A.ndim)):
            return A
        if A.ndim == 2:
            return self.transpose(A)
        return self.call("permute", A, list(order)).mark_part_of(A)

    def broadcast(self, A: Any, shape: Sequence[int]) -> Any:
        """A copy in a shape to which A broadcasts."""
        return self.call("broadcast", A, list(shape))

    def reshape(self, A: Any, shape: Any, *, copy: bool = True) -> Any:
        """The elements in another shape; -1 stands for the length that is left.

        Without `copy`, the result may share the memory of A: only for results that are not
        given to the program.
        """
        wanted = rules.reshaped(A.shape, shape)
        return self.call("reshape", A, list(wanted), copy).mark_part_of(A)

    def concatenate(self, parts: Any, axis: Any = 0) -> Any:
        """Arrays joined along an axis, in pairs, so that few are copied; None: of vectors."""
        handles = [part for part in parts if isinstance(part, MatrixRef)]
        level = [self.matrix(part, handles[0]) for part in parts]
        if axis is None:
            level = [part if part.ndim == 1 else self.reshape(part, -1) for part in level]
        along = 0 if axis is None else rules.axis_index(axis, level[0].ndim)
        if len(level) == 1:
            return self.copy(level[0])
        while len(level) > 1:
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [self._joined(pair, along) if len(pair) == 2 else pair[0] for pair in pairs]
        return level[0]

    def _joined(self, pair: Sequence[Any], along: int) -> Any:
        if along == 0:
            rules.require_same_categories("concatenate", *pair)
        if along < 1 or pair[0].ndim < 3:
            columns = _joined_columns(pair, along)
            return self.call("concatenate", *pair, axis=along, columns=columns)
        shapes = [(*x.shape[:along], *x.shape[along + 1 :]) for x in pair]
        if shapes[0] != shapes[1]:
            raise ShapeError(
                f"arrays of shapes {pair[0].shape} and {pair[1].shape} cannot be joined along axis "
                f"{along}: the other lengths must be equal"
            )
        return self.call("join", *pair, along)

    def plan(self, op: str, A: Any, B: Any) -> OperandPlacement:
        """See `Handle.plan`."""
        layout, a_layout, b_layout, a_words, b_words, way = self.call("plan", op, A, B)
        return OperandPlacement(
            op, layout, (a_layout, b_layout),
            (a_words * A.dtype.itemsize, b_words * B.dtype.itemsize), way,
        )  # fmt: skip


@lru_cache
def _reduced_dtype(op: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    found: np.dtype[Any] = getattr(np, op)(np.ones(1, dtype)).dtype
    return found


def _beyond(value: int, beside: Any) -> bool:
    """Comparisons with such an integer are the same for all integer elements."""
    return beside.dtype.kind in "biu" and rules.is_beyond(value, beside.dtype)


def _joined_columns(pair: Sequence[Any], along: int) -> tuple[str, ...]:
    """Names of the columns of two matrices that are joined; none unless both have names."""
    above, below = (one.columns for one in pair)
    if along == 0:
        return tuple(above) if above == below else ()
    return (*above, *below) if above and below else ()
