"""Expressions on one gang: each a command, its matrices temporary."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.placement import OperandPlacement
from alchemist_ray.errors import ShapeError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.gang.libraries import Library
from alchemist_ray.gang.matrix_ref import MatrixRef

LIBRARY = "ali.arrays"  # linalg under a name of its own: a user's is left alone
REAL = {"complex64": "float32", "complex128": "float64"}


class Engine:
    """What handles of one gang do as arrays.

    Parameters
    ----------
    connection : GangConnection
    """

    def __init__(self, connection: GangConnection) -> None:
        self.connection = connection
        self._library: Library | None = None

    def call(self, routine: str, *args: Any, **kwargs: Any) -> Any:
        """Call a routine of the ranks' library."""
        if self._library is None:
            described = self.connection.request({"op": "load", "library": LIBRARY, "path": None})
            self._library = Library(self.connection, described)
        return self._library.routine(routine)(*args, **kwargs)

    # --- element by element ---

    def binary(self, op: str, left: Any, right: Any) -> Any:
        """``op(left, right)``, one of them a handle; `NotImplemented` if the other is nothing."""
        if isinstance(left, MatrixRef) and isinstance(right, MatrixRef):
            return self.call("elementwise", op, left, right)
        reflected = isinstance(right, MatrixRef)
        A, other = (right, left) if reflected else (left, right)
        value = rules.number(other)
        if isinstance(value, int) and abs(value) > rules.EXACT and A.dtype == np.int64:
            other, value = np.asarray(value), None  # object, if it is beyond 64 bits
        if value is not None:
            kind = type(value).__name__
            return self.call("elementwise_scalar", op, A, value, reflected=reflected, kind=kind)
        if not rules.is_array(other):
            return NotImplemented
        return self.call(
            "combine",
            op,
            A,
            *rules.encode_operand(rules.operand(other, A.dtype)),
            reflected=reflected,
        )

    def unary(self, op: str, A: Any) -> Any:
        """``op(A)``."""
        if op == "conj" and A.dtype.kind != "c":
            return A
        return self.call("apply", op, A)

    def astype(self, A: Any, dtype: Any) -> Any:
        """A with another dtype (bool: int32, 0 and 1); A itself if it has it."""
        if np.dtype(dtype).kind == "b":
            found: Any = self.binary("not_equal", A, 0)
            return found
        wanted = rules.checked_dtype(dtype)
        return A if A.dtype == wanted else self.call("astype", A, wanted.name)

    def matrix(self, value: Any, beside: Any | None = None) -> Any:
        """A handle of an operand; numbers take their dtype from what they are beside."""
        if isinstance(value, MatrixRef):
            return value
        like = beside.dtype if beside is not None else np.dtype(np.int32)
        plain = rules.number(value)
        if plain is not None:
            value = np.asarray(plain, np.result_type(like, plain) if beside is not None else None)
        elif not rules.is_array(value):
            raise rules.unsupported(f"a {type(value).__name__} as an operand")
        return self.call("array", *rules.encode_operand(rules.operand(value, like)))

    def where(self, condition: Any, x: Any, y: Any) -> Any:
        """Elements of `x` where the condition is not 0, else of `y`."""
        beside = next((v for v in (x, y) if isinstance(v, MatrixRef)), None)
        if beside is None and rules.number(x) is not None and rules.number(y) is not None:
            x, y = (np.asarray(v, np.result_type(np.asarray(x), np.asarray(y))) for v in (x, y))
        args = (self.matrix(condition), self.matrix(x, beside), self.matrix(y, beside))
        return self.call("where", *args)

    # --- products ---

    def matmul(self, left: Any, right: Any) -> Any:
        """``left @ right``; with a 1-D NumPy array the result is 1-D as well, see `flat`."""
        if not all(isinstance(x, MatrixRef) or rules.is_array(x) for x in (left, right)):
            return NotImplemented
        if isinstance(left, MatrixRef) and isinstance(right, MatrixRef):
            return self.call("matmul", left, right)
        A, other = (left, right) if isinstance(left, MatrixRef) else (right, left)
        array = np.asarray(other)
        if array.ndim == 0:
            raise ShapeError("matmul: a number is not a matrix: use * to multiply by it")
        small = rules.operand(array, A.dtype)
        if array.ndim == 1 and A is left:
            small = small.T
        B = self.call("array", *rules.encode_operand(small))
        C = self.call("matmul", *((A, B) if A is left else (B, A)))
        return self.flat(C) if array.ndim == 1 else C

    # --- reductions ---

    def reduce(self, op: str, A: Any, axis: Any, *, keepdims: bool = False, ddof: int = 0) -> Any:
        """Sum, mean, var, std, min or max.

        Returns
        -------
        number, ndarray or Handle
            A NumPy scalar for both axes, a 1-D array for one of them, if it is small, else
            a (1, n) or (m, 1) handle. With `keepdims` always a handle of two dimensions.
        """
        along = rules.axis_of(axis)
        extra = {"ddof": ddof} if op in ("var", "std") else {}
        length = {0: A.shape[1], 1: A.shape[0], None: 1}[along]
        if keepdims or length * max(8, A.dtype.itemsize) > rules.SMALL:
            return self.call(op, A, axis=along, **extra)
        values = rules.decode_result(*self.call("reduce", op, A, axis=along, **extra))
        return values[0] if along is None else values

    def flat(self, column: Any) -> Any:
        """A row or column as NumPy would have it, 1-D, if it is small; else the handle."""
        if column.nbytes > rules.SMALL:
            return column
        return column.fetch().reshape(-1)

    # --- the rest ---

    def copy(self, A: Any) -> Any:
        """A matrix of its own with the elements of A: `als.run` may write to it."""
        return self.call("slice", A)

    def transpose(self, A: Any, *, conjugate: bool = False) -> Any:
        """A^T, or A^H."""
        return self.call("transpose", A, conjugate=conjugate)

    def diagonal(self, A: Any) -> Any:
        """The main diagonal, 1-D; see `flat`."""
        return self.flat(self.call("diagonal", A))

    def concatenate(self, parts: Any, axis: Any = 0) -> Any:
        """Matrices joined along axis 0 or 1, in pairs, so that few are copied."""
        along = rules.axis_of(axis)
        handles = [part for part in parts if isinstance(part, MatrixRef)]
        if along is None:
            raise rules.unsupported("concatenation of flattened matrices")
        level = [self.matrix(part, handles[0]) for part in parts]
        while len(level) > 1:
            pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
            level = [
                self.call("concatenate", *pair, axis=along) if len(pair) == 2 else pair[0]
                for pair in pairs
            ]
        return level[0]

    def plan(self, op: str, A: Any, B: Any) -> OperandPlacement:
        """See `Handle.plan`."""
        layout, a_layout, b_layout, a_words, b_words, way = self.call("plan", op, A, B)
        return OperandPlacement(
            op, layout, (a_layout, b_layout),
            (a_words * A.dtype.itemsize, b_words * B.dtype.itemsize), way,
        )  # fmt: skip
