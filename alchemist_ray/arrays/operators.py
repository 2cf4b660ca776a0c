"""Operators, methods and NumPy's protocols of handles. `Handle` inherits them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from alchemist_ray.arrays import indexing
from alchemist_ray.arrays.engine import Engine, OperandPlacement
from alchemist_ray.arrays.fetched_values import FetchedValues
from alchemist_ray.arrays.function_dispatch import apply_function
from alchemist_ray.arrays.namespace import Namespace, namespace_of
from alchemist_ray.arrays.times import TimeHandle
from alchemist_ray.arrays.ufuncs import apply_ufunc, write_whole
from alchemist_ray.attached.libraries import calling_frame
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.errors import MatrixError


class ArrayMethods(FetchedValues):
    """Methods that `ArrayOperators` inherits; costs are those of the ranks' routines."""

    __slots__ = ()

    def argmax(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Indices of the first largest elements, or of the first nan; axis None in C order.

        One pass; ranks combine an element and its index for each result.
        """
        return np.argmax(self, axis, keepdims=keepdims)

    def argmin(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Indices of the first smallest elements, see `argmax`."""
        return np.argmin(self, axis, keepdims=keepdims)

    def argsort(self, axis: Any = -1, kind: Any = None, *, stable: bool = True) -> Any:
        """Indices that sort along an axis; equal elements keep their order in every `kind`.

        Each element crosses the network three times, of many lines once; ``m log(m)`` comparisons.
        """
        return np.argsort(self, axis)

    def sort(self, axis: Any = -1, kind: Any = None, *, stable: bool = True) -> None:
        """Sort in place, as in NumPy; ``np.sort(A)`` gives a new array. See `argsort`."""
        self[...] = np.sort(self, axis)  # type: ignore[index]

    def cumsum(self, axis: Any = None, dtype: Any = None) -> Any:
        """Cumulative sums; axis None: of all elements in C order.

        Each element crosses the network twice, of whole lines on one rank not at all.
        """
        return np.cumsum(self, axis, dtype)

    def cumprod(self, axis: Any = None, dtype: Any = None) -> Any:
        """Cumulative products, see `cumsum`."""
        return np.cumprod(self, axis, dtype)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Products of columns (``axis=0``), rows (1) or all; int32 in int64; see `sum`."""
        return np.prod(self, axis, dtype, out, **options)

    def nonzero(self) -> Any:
        """Indices of the elements that are not 0, a vector for each axis."""
        return np.nonzero(self)

    def repeat(self, repeats: Any, axis: Any = None) -> Any:
        """Repeat each element, or each part along an axis."""
        return np.repeat(self, repeats, axis)

    def take(self, indices: Any, axis: Any = None) -> Any:
        """Elements, or parts along an axis, at indices."""
        return np.take(self, indices, axis)

    def searchsorted(self, v: Any, side: Any = "left", sorter: Any = None) -> Any:
        """Where to insert elements into this sorted vector so that it stays sorted."""
        return np.searchsorted(self, v, side, sorter)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """The fetched elements, for libraries that exchange arrays by DLPack."""
        return self.fetch().__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU: the elements are fetched."""
        return np.zeros(0).__dlpack_device__()

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """With two axes exchanged: a copy."""
        return np.swapaxes(self, axis1, axis2)


def _binary(op: str) -> tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]:
    """The operator and its reflection."""

    def forward(self: ArrayOperators, other: Any) -> Any:
        return self._engine.binary(op, self, other)

    def reflected(self: ArrayOperators, other: Any) -> Any:
        return self._engine.binary(op, other, self)

    forward.__doc__ = f"NumPy's ``{op}``, on the gang."
    return forward, reflected


UNKNOWN = frozenset({"id", "name", "shape", "layout", "columns", "_lease"})  # before it is computed
WRITTEN = {"put": "write A[[1, 2]] = x", "partition": "A.sort() sorts all of it"}
# References to the operand of an operator in place if no name refers to it: the interpreter's
# stack, the parameter, and the argument of getrefcount.
UNNAMED = 3


def _in_place(op: str) -> Callable[[Any, Any], Any]:
    """The operator that writes to its left operand."""

    def operator(self: ArrayOperators, other: Any) -> Any:
        if not self.shape:
            return NotImplemented  # a new number: NumPy's numbers are immutable
        # `A[:2] += 1` assigns the unnamed part to A afterwards, `S += 1` does not.
        if self.part_of and sys.getrefcount(self) > UNNAMED:
            self._refuse_to_write()
        return self._engine.update(op, self, other)

    operator.__doc__ = f"NumPy's ``{op}`` in place: all handles of the matrix see it."
    return operator


class ArrayOperators(ArrayMethods):
    """Operators and methods of an array with up to eight axes, computed where it is.

    Notes
    -----
    Results have NumPy's shapes and dtypes, and every one is a handle, whatever its size. They are
    computed at once, or when their elements are needed, together with what else was asked of them.
    ``float()``, ``int()``, ``bool()``, ``.item()``, ``np.asarray`` and printing fetch; the elements
    of small results come with the reply, so that this costs nothing.
    """

    __slots__ = ()

    @property
    def _engine(self) -> Engine:
        return gang_of(self).part(Engine)

    # --- operators ---

    __add__, __radd__ = _binary("add")
    __sub__, __rsub__ = _binary("subtract")
    __mul__, __rmul__ = _binary("multiply")
    __truediv__, __rtruediv__ = _binary("divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide")
    __mod__, __rmod__ = _binary("remainder")
    __pow__, __rpow__ = _binary("power")
    __and__, __rand__ = _binary("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor")
    __lshift__, __rlshift__ = _binary("left_shift")
    __rshift__, __rrshift__ = _binary("right_shift")
    __lt__, _ = _binary("less")
    __le__, _ = _binary("less_equal")
    __gt__, _ = _binary("greater")
    __ge__, _ = _binary("greater_equal")
    __ne__, _ = _binary("not_equal")
    __eq__, _ = _binary("equal")
    del _
    __iadd__, __isub__, __imul__ = map(_in_place, ("add", "subtract", "multiply"))
    __itruediv__, __ifloordiv__ = map(_in_place, ("divide", "floor_divide"))
    __imod__, __ipow__ = map(_in_place, ("remainder", "power"))
    __iand__, __ior__, __ixor__ = map(_in_place, ("bitwise_and", "bitwise_or", "bitwise_xor"))
    __ilshift__, __irshift__ = map(_in_place, ("left_shift", "right_shift"))
    __hash__ = object.__hash__  # of the handle itself: == is element by element

    def __matmul__(self, other: Any) -> Any:
        return self._engine.matmul(self, other)

    def __imatmul__(self, other: Any) -> Any:
        found = self @ other
        return found if found is NotImplemented else write_whole("@=", found, self)

    def __rmatmul__(self, other: Any) -> Any:
        return self._engine.matmul(other, self)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __neg__(self) -> Any:
        return self._engine.unary("negative", self)

    def __pos__(self) -> Any:
        return self._engine.copy(self)

    def __abs__(self) -> Any:
        return self._engine.unary("abs", self)

    def __invert__(self) -> Any:
        return self._engine.unary("invert", self)

    def __getitem__(self, key: Any) -> Any:
        """A part, as a new array: a copy, where NumPy's slices are views.

        Parameters
        ----------
        key : slice, int, None, ..., list of int, mask, or two of them
            As in NumPy. Masks and lists can be NumPy arrays or handles.

        Returns
        -------
        Handle
            With NumPy's shape; of a single element a number, shape ().

        Raises
        ------
        ShapeError
            If an index is out of range, or a mask does not fit.

        Notes
        -----
        One command. Each element crosses the network at most once.
        """
        return indexing.get(self._engine, self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        """Write to a part of the matrix, on the ranks; all its handles see it.

        Parameters
        ----------
        key : slice, int, ..., list of int, mask, or two of them
            As in NumPy; of three axes and more, one list, or one for each axis.
        value : number, array or Handle
            Broadcasts to the part, and is converted to the matrix's dtype.

        Raises
        ------
        ShapeError
            If the index does not fit the matrix, or the value the part.
        DtypeError
            If the matrix cannot hold an element, see `astype`.
        MatrixError
            If NumPy would make this array a view of another one to which a handle refers, by a
            slice, `T`, `reshape`, `ravel` or the like: it is a copy, and an assignment would not
            reach the original.
        """
        if self.part_of:
            self._refuse_to_write()
        indexing.put(self._engine, self, key, value)

    def computed(self) -> Any:
        """This array, when it has been computed: only its shape and dtype may be known before."""
        recorded = self._recording
        if recorded is not None:
            recorded.connection.part(Engine).recorder.value(recorded)
        return self

    def _refuse_to_write(self) -> None:
        remedy = "assign to A[...] directly, or call .copy() first"
        if str(calling_frame().f_globals.get("__name__")).startswith("sklearn."):
            remedy = "choose a solver that does not write to a transpose: PCA(svd_solver='full')"
        raise MatrixError(
            f"{self.name} is a copy of elements of {self.part_of}, and an assignment would not "
            f"change that matrix: {remedy}"
        )

    if not TYPE_CHECKING:  # it would accept every name

        def __getattr__(self, name: str) -> Any:
            if name in UNKNOWN and self.recording:
                return getattr(self.computed(), name)
            there = f"{type(self).__name__!r} object has no attribute {name!r}"
            if not name.startswith("_") and hasattr(np.ndarray, name):
                there += f": {WRITTEN.get(name, f'A.fetch().{name} is that of a copy here')}"
            raise AttributeError(there, name=name, obj=self)

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    # --- NumPy's protocols and the standard's ---

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        return apply_ufunc(self._engine, ufunc, method, inputs, kwargs)

    def __array_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if TimeHandle in types:  # which knows what it has
            return NotImplemented
        return apply_function(self._engine, function, args, kwargs)

    def __array_namespace__(self, *, api_version: str | None = None) -> Namespace:
        """The array API standard for matrices of this gang; see alchemist_ray/arrays."""
        return namespace_of(gang_of(self)).of_version(api_version)

    # --- shapes ---

    @property
    def size(self) -> int:
        """How many elements there are."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Axes: 0 to 8."""
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() is not defined for an array of shape ()")
        return self.shape[0]

    def reshape(self, *shape: Any, order: Literal["C", "F"] = "C") -> Any:
        """The elements in another shape, in C order or in Fortran's; a copy. -1: what is left."""
        wanted = shape[0] if len(shape) == 1 and np.iterable(shape[0]) else shape
        return np.reshape(self, wanted, order)

    def ravel(self, order: Literal["C", "F"] = "C") -> Any:
        """The elements as a vector, in C order or in Fortran's ("F"); a copy."""
        return np.ravel(self, order)

    def flatten(self, order: Literal["C", "F"] = "C") -> Any:
        """As `ravel`; assignments to the result are no assignments to this array."""
        return self.ravel(order).mark_copy()

    def squeeze(self, axis: Any = None) -> Any:
        """Without axes of length 1; a copy."""
        return np.squeeze(self, axis)

    def copy(self) -> Any:
        """A matrix of its own with the same elements."""
        return self._engine.copy(self)

    @property
    def device(self) -> str:
        """Where it is: on a gang."""
        return "gang"

    def to_device(self, device: Any, /, *, stream: Any = None) -> Any:
        """Itself; a gang has one device."""
        if device != "gang":
            raise ValueError(f"device={device!r}: matrices of a gang are on the device 'gang'")
        return self

    @property
    def T(self) -> Any:
        """The transpose: a copy in the mirrored layout; every rank transposes what it holds."""
        return self._engine.transpose(self)

    @property
    def mT(self) -> Any:
        """The transpose of each matrix: the last two axes are swapped."""
        return np.matrix_transpose(self)

    def transpose(self, *axes: Any) -> Any:
        """The transpose, see `T`; with `axes` as in NumPy: ``A.transpose(1, 0)``."""
        given = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes or None
        return np.transpose(self, given)

    @property
    def flat(self) -> Any:
        """The elements in C order, see `ravel`; to write to them, assign to ``A[...]``."""
        return self.ravel()

    def fill(self, value: Any) -> None:
        """Set all elements."""
        self[...] = value

    @property
    def H(self) -> Any:
        """The conjugate transpose."""
        return self._engine.transpose(self, conjugate=True)

    @property
    def real(self) -> Any:
        """The real parts."""
        if self.dtype.kind != "c":
            return self
        return self._engine.unary("real", self).mark_part_of(self)

    @property
    def imag(self) -> Any:
        """The imaginary parts."""
        return self._engine.unary("imag", self).mark_part_of(self)

    def conj(self) -> Any:
        """The complex conjugates; a real array is its own."""
        return self if self.dtype.kind != "c" else self._engine.unary("conj", self)

    conjugate = conj

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        """A copy with another dtype; without `copy`, the same handle if it has the dtype.

        Fractions are cut off in integers. Raises `DtypeError` if the dtype cannot hold an element:
        nan, inf and numbers out of range as integers, finite ones that would become infinite.
        """
        return self._engine.astype(self, dtype, copy=copy)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        """The main diagonal of two axes, or the one `offset` columns further right."""
        return np.diagonal(self, offset, axis1, axis2)

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Any:
        """Elements below `min` or above `max` become these."""
        found: Any = np.clip(self, min, max, out=out)
        return found

    def round(self, decimals: int = 0) -> Any:
        """To whole numbers, halves to even."""
        found: Any = np.round(self, decimals)
        return found

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.item()) if ndigits is None else self.round(ndigits)

    def dot(self, other: Any) -> Any:
        """`numpy.dot`: the product of matrices and vectors, of more axes not that of ``@``."""
        return np.dot(self, other)

    # --- reductions ---

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Sums of columns (``axis=0``), rows (1) or all; int32 in int64.

        Parameters
        ----------
        axis : int or tuple of int, optional
        dtype : dtype, optional
            That of the sums.
        out : Handle, optional
            Array to which the result is copied.
        keepdims : bool
            Whether axes that are reduced stay, with a length of 1.
        initial : number
            Start value.
        where : array of bool
            Elements that count; it broadcasts to the array.
        """
        return np.sum(self, axis, dtype, out, **options)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Means of columns (``axis=0``), rows (1) or all; `keepdims`, `where` as in `sum`."""
        return np.mean(self, axis, dtype, out, **options)

    def var(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Variances: sums of squares, divided by the count less `ddof`; options as in `mean`."""
        return np.var(self, axis, dtype, out, **options)

    def std(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Standard deviations, see `var`."""
        return np.std(self, axis, dtype, out, **options)

    def min(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Smallest elements; nan where there is one; options as in `sum`."""
        return np.min(self, axis, out, **options)

    def max(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Largest elements; nan where there is one; options as in `sum`."""
        return np.max(self, axis, out, **options)

    def any(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Whether any element is not 0; `keepdims`, `where` as in `sum`."""
        return np.any(self, axis, out, **options)

    def all(self, axis: Any = None, out: Any = None, **options: Any) -> Any:
        """Whether all elements are not 0; `keepdims`, `where` as in `sum`."""
        return np.all(self, axis, out, **options)

    def trace(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Any:
        """Sum of a diagonal, see `diagonal`."""
        return np.trace(self, offset, axis1, axis2)

    def norm(self, ord: Any = None) -> Any:
        """A norm, as `numpy.linalg.norm` has it: "fro" (default), 1, inf, 2, "nuc"."""
        return np.linalg.norm(self, ord)

    # --- where it takes place ---

    def plan(self, op: str | None = None, other: Any = None) -> OperandPlacement | list[str]:
        """What will happen: the steps of an expression, or the elements that an operation moves.

        Parameters
        ----------
        op : str, optional
            ``"matmul"``, or the name of an element-wise function of NumPy's: ``"add"``, ...
        other : Handle, optional

        Returns
        -------
        OperandPlacement or list of str
            Layout of the result, those in which the operands are taken, bytes that move. Without
            `op`: the steps of the one command that will compute this array; none if it is there.

        Raises
        ------
        ShapeError
            If the shapes do not go together.

        Notes
        -----
        An element-wise result has the layout of one full-size operand: the layout for which
        the busiest rank receives the fewest bytes; on a tie, that of the left operand. Row,
        column and scalar operands are redistributed to it.
        """
        if op is None:
            recorder = self._engine.recorder
            return [] if self._recording is None else recorder.plan(self._recording)
        return self._engine.plan(op, self, other)
