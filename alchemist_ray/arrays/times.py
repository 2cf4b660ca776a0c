"""Dates and durations on ranks: handles of the int64 counts of a unit, with NumPy's rules for them.

The ranks know nothing of dates. A handle here has the counts and the dtype, and each operation is
one of the counts: which ones there are, and their dtypes, is what NumPy's ufuncs say. NaT is the
least int64. `_key`, which subtracts 1, makes it the greatest, as NumPy sorts it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.saving import renamed
from alchemist_ray.attached.matrix_ref import MatrixRef, columns_to_wire
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.dtypes import check_range
from alchemist_ray.errors import DtypeError
from mpi_workers.matrix.dtypes import common_dtype, is_time

NAT = int(np.iinfo(np.int64).min)
COUNTS = "A.astype('int64') gives the counts of its unit, which are numbers"
OF_COUNTS = (  # attributes that are those of the counts
    "shape", "ndim", "size", "nbytes", "itemsize", "layout", "columns", "categories", "name", "id",
    "session", "gang", "epoch", "temporary", "part_of",
)  # fmt: skip
# Functions that only move elements: what they do with the counts they do with the dates.
MOVING = frozenset({
    np.append, np.array_split, np.atleast_1d, np.atleast_2d, np.broadcast_to, np.column_stack,
    np.concatenate, np.copy, np.diagonal, np.expand_dims, np.flip, np.fliplr, np.flipud, np.hsplit,
    np.hstack, np.matrix_transpose, np.moveaxis, np.ravel, np.repeat, np.reshape, np.roll,
    np.split, np.squeeze, np.stack, np.swapaxes, np.take, np.take_along_axis, np.tile,
    np.transpose, np.vsplit, np.vstack, np.where,
})  # fmt: skip
# By the keys: NaT last. By the counts: NaT first.
BY_KEY = frozenset({np.sort, np.partition, np.max, np.amax, np.nanmin})
BY_COUNT = frozenset({np.min, np.amin, np.nanmax})
PLACES_BY_KEY = frozenset({np.argsort, np.argpartition, np.argmax})
METHODS = frozenset({
    "argmax", "argmin", "argsort", "clip", "copy", "cumsum", "diagonal", "max", "mean", "min",
    "ravel", "repeat", "searchsorted", "squeeze", "sum", "swapaxes", "take",
})  # fmt: skip


def _key(counts: Any) -> Any:
    """Numbers in the order of dates, NaT last: the least int64 wraps around to the greatest."""
    with np.errstate(over="ignore"):
        return np.subtract(counts, 1)


def _of_key(keys: Any) -> Any:
    return np.add(keys, 1)


class TimeHandle(NDArrayOperatorsMixin):
    """Names an array of dates or durations on a gang.

    Arithmetic, comparisons, orders and what moves elements are NumPy's, with NaT; other functions
    refuse. Everything else of a handle is that of the counts.

    Attributes
    ----------
    dtype : numpy.dtype
        datetime64 or timedelta64 of a unit.
    matrix_ref : Handle
        The counts of this unit, int64; NaT is the least int64.
    """

    __array_priority__ = 1000
    __hash__ = object.__hash__  # == is element by element

    def __init__(self, counts: Any, dtype: np.dtype[Any]) -> None:
        self._counts = counts
        self.dtype = dtype

    @property
    def matrix_ref(self) -> Any:
        return self._counts

    # --- computing ---

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        (out,) = kwargs.pop("out", (None,))
        if method != "__call__" or kwargs:
            self._refuse(f"np.{ufunc.__name__} with {next(iter(kwargs), method)}")
        found = _ufunc(ufunc, inputs)
        if out is None:
            return found
        out[...] = found
        return out

    def __array_function__(self, function: Any, _: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {key: x for key, x in kwargs.items() if x is not np._NoValue}
        if function in MOVING:
            dtype = _common([*args, *kwargs.values()])
            found = function(*_counts(args, dtype), **_counts(kwargs, dtype))
            return _dated(found, dtype)
        own = FUNCTIONS.get(function)
        first, *rest = args or [None]
        if own is not None:
            return own(*args, **kwargs)
        if not isinstance(first, TimeHandle) or "out" in kwargs:
            self._refuse(f"np.{function.__name__}{' with out=' * ('out' in kwargs)}")
        counts = first.matrix_ref
        if function in BY_KEY:
            return _dated(_of_key(function(_key(counts), *rest, **kwargs)), first.dtype)
        if function in BY_COUNT:
            return _dated(function(counts, *rest, **kwargs), first.dtype)
        if function in PLACES_BY_KEY:
            return function(_key(counts), *rest, **kwargs)
        if function is np.argmin:
            return function(counts, *rest, **kwargs)
        return self._refuse(f"np.{function.__name__}")

    def _refuse(self, what: str) -> NoReturn:
        raise rules.unsupported(f"{what} of {self.dtype}", COUNTS)

    def __getitem__(self, key: Any) -> Any:
        return _dated(self.matrix_ref[key], self.dtype)

    def __setitem__(self, key: Any, value: Any) -> None:
        kind = _kind(value)
        if not is_time(np.dtype(kind)) or np.dtype(kind).kind != self.dtype.kind:
            raise DtypeError(f"an element of {np.dtype(kind)} is no element of {self.dtype}")
        self.matrix_ref[key] = _converted(value, self.dtype)

    def astype(self, dtype: Any, *, copy: bool = True) -> Any:
        """In another unit, rounded down; or as ``int64``, the counts, in which NaT is the least."""
        wanted = rules.plain_dtype(dtype)
        if wanted == np.int64:
            return self.matrix_ref.copy() if copy else self.matrix_ref
        if wanted.kind != self.dtype.kind:
            raise DtypeError(f"elements of {self.dtype} cannot become {wanted}: {COUNTS}")
        counts = _converted(self, wanted)
        return TimeHandle(counts.copy() if copy and counts is self.matrix_ref else counts, wanted)

    def reshape(self, *shape: Any) -> Any:
        return _dated(self.matrix_ref.reshape(*shape), self.dtype)

    def transpose(self, *axes: Any) -> Any:
        return _dated(self.matrix_ref.transpose(*axes), self.dtype)

    @property
    def T(self) -> Any:
        return self.transpose()

    # --- to this process ---

    def fetch(self, rows: Any = None, cols: Any = None, *, print_times: bool = False) -> Any:
        """The elements as a NumPy array of this dtype; see `Handle.fetch`."""
        return self.matrix_ref.fetch(rows, cols, print_times=print_times).view(self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        if copy is False:
            raise ValueError(f"{self.name} is on the ranks, and a fetch copies it")
        return self.fetch() if dtype is None else self.fetch().astype(dtype)

    def item(self, *index: int) -> Any:
        """One element as NumPy's ``item`` gives it: a date, a duration, an int or None."""
        return np.int64(self.matrix_ref.item(*index)).view(self.dtype).item()

    def head(self, n: int = 5) -> Any:
        """The first rows, fetched."""
        return self.fetch(slice(0, n))

    def tolist(self) -> Any:
        return self.fetch().tolist()

    def __iter__(self) -> Iterator[Any]:
        return (counts.view(self.dtype) for counts in self.matrix_ref)

    def __len__(self) -> int:
        return len(self.matrix_ref)

    def __bool__(self) -> bool:
        self._refuse("the truth value")

    def __str__(self) -> str:
        text: str = self.matrix_ref._numbers(np.array2string, self.dtype)
        return text

    def described(self) -> str:
        """Name, shape, dtype, layout, memory and gang: a line without elements."""
        text: str = self.matrix_ref.described()
        return text.replace("<Handle", "<TimeHandle", 1).replace(" int64,", f" {self.dtype},", 1)

    def __repr__(self) -> str:
        return f"{self.described()}\n{self}"

    # --- to other systems ---

    def to_arrow(self) -> Any:
        """A `pyarrow.Table`, in which NaT is a null; see `Handle.to_arrow`."""
        return self.matrix_ref.to_arrow(self.dtype)

    def to_polars(self) -> Any:
        """A `polars.DataFrame`, see `to_arrow`."""
        return self.matrix_ref.to_polars(self.dtype)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def to_dask(self, chunks: Any = "auto") -> Any:
        """A lazy dask array, see `Handle.to_dask`."""
        return self.matrix_ref.to_dask(chunks).view(self.dtype)

    def to_layout(self, layout: str) -> Any:
        """The same elements in another layout."""
        return _dated(self.matrix_ref.to_layout(layout), self.dtype)

    def keep(self) -> TimeHandle:
        """This handle; its matrix stays until `free` or the end of the gang."""
        ref = self.matrix_ref
        if ref.temporary:
            ref.keep()
            named = columns_to_wire(ref.columns, str(self.dtype))
            renamed(gang_of(ref), ref, ref.name, columns=named)
        return self

    def free(self) -> None:
        """Free the matrix; its handles become invalid."""
        self.matrix_ref.free()

    def __copy__(self) -> Any:
        return self.astype(self.dtype)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self.keep()
        return TimeHandle, (self.matrix_ref, self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name in OF_COUNTS:
            return getattr(self.matrix_ref, name)
        if name in METHODS:
            function = getattr(np, name)
            return lambda *args, **kwargs: function(self, *args, **kwargs)
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{name!r} of {self.dtype} is not supported: {COUNTS}")


# --- operands ---


def _kind(value: Any) -> Any:
    """The dtype of an operand as ufuncs take it; a Python number's is its type."""
    if isinstance(value, TimeHandle | MatrixRef):
        return value.dtype
    plain = rules.number(value)
    return type(plain) if plain is not None else _array(value).dtype


def _array(value: Any) -> Any:
    if isinstance(value, datetime.date):  # and a datetime; pandas' have their own unit
        value = value.to_numpy() if hasattr(value, "to_numpy") else np.datetime64(value)
    elif isinstance(value, datetime.timedelta):
        value = value.to_numpy() if hasattr(value, "to_numpy") else np.timedelta64(value)
    array = np.asarray(value)
    if array.dtype.kind not in "biufmM":
        raise DtypeError(f"an operand of dtype {array.dtype} beside dates or durations")
    return array


def _converted(value: Any, dtype: np.dtype[Any]) -> Any:
    """An operand as numbers: of dates and durations the counts in the unit of `dtype`."""
    if isinstance(value, TimeHandle):
        return _in_unit(value.matrix_ref, value.dtype, dtype)
    if isinstance(value, MatrixRef):
        return value if is_time(dtype) else value.astype(dtype, copy=False)  # type: ignore[attr-defined]
    array = _array(value)
    if is_time(array.dtype):
        check_range(array, dtype, "the operand")
    array = array.astype(dtype)
    return array.view(np.int64) if is_time(dtype) else array


def _in_unit(counts: Any, have: np.dtype[Any], want: np.dtype[Any]) -> Any:
    """Counts of one unit as those of another; of a coarser one rounded down, as in NumPy."""
    if have == want or np.datetime_data(have) == np.datetime_data(want):
        return counts
    try:
        more, fewer = _steps(have, want), _steps(want, have)
    except TypeError:
        raise DtypeError(
            f"elements of {have} cannot become {want} on the ranks, because months have different "
            f"lengths: send A.fetch().astype('{want}')"
        ) from None
    if more:
        low, high = (_key(counts).min() + 1).item(), counts.max().item()
        for one in (low, high):
            if one != NAT and not -(2**63) < one * more < 2**63:
                raise DtypeError(
                    f"{np.int64(one).view(have)} is beyond {want}: convert both to a coarser unit"
                )
        return np.where(counts == NAT, NAT, counts * more)
    return np.where(counts == NAT, NAT, counts // fewer)


def _steps(have: np.dtype[Any], want: np.dtype[Any]) -> int:
    """How many units of `want` one of `have` is; 0 if it is less than one."""
    one, other = (np.ones((), f"m8{x.str[3:]}") for x in (have, want))
    return int(one // other)


def _common(values: Any) -> np.dtype[Any]:
    """The dtype of all dates or durations among arguments. Raises `DtypeError`."""
    found = list(_times(values))
    try:
        return common_dtype(found)
    except ValueError as error:
        raise DtypeError(str(error)) from None


def _times(values: Any) -> Iterator[np.dtype[Any]]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _times(value)
        elif isinstance(value, TimeHandle) or (
            isinstance(value, np.ndarray | np.generic) and is_time(value.dtype)
        ):
            yield value.dtype


def _counts(values: Any, dtype: np.dtype[Any]) -> Any:
    """Arguments in which dates or durations are counts."""
    if isinstance(values, dict):
        return {key: _counts(value, dtype) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_counts(value, dtype) for value in values])
    return _converted(values, dtype) if any(_times([values])) else values


def _dated(found: Any, dtype: np.dtype[Any]) -> Any:
    """A result of counts, or several, as dates or durations."""
    if isinstance(found, list | tuple):
        return type(found)([_dated(one, dtype) for one in found])
    return found if isinstance(found, TimeHandle) else TimeHandle(found, dtype)


def _missing(*operands: Any) -> Any:
    """Where one of them is NaT; None: nowhere, as far as this process knows."""
    masks = [np.equal(x, NAT) for x in operands if isinstance(x, MatrixRef) or (x == NAT).any()]
    return None if not masks else masks[0] if len(masks) == 1 else np.logical_or(*masks)


def _with_nat(found: Any, *operands: Any, nat: Any = NAT) -> Any:
    mask = _missing(*operands)
    return found if mask is None else np.where(mask, nat, found)


# --- ufuncs ---


def _ufunc(ufunc: np.ufunc, inputs: Any) -> Any:
    """A ufunc of operands with dates or durations. Raises `BadArgumentError`, `DtypeError`."""
    name = ufunc.__name__
    kinds = [_kind(value) for value in inputs]
    try:
        *wanted, result = ufunc.resolve_dtypes((*kinds, None))
    except (TypeError, ValueError) as error:
        raise DtypeError(f"np.{name}: {error}; {COUNTS}") from None
    operands = [_converted(x, dtype) for x, dtype in zip(inputs, wanted, strict=True)]
    own = UFUNCS.get(name)
    if own is None:
        told = next(str(kind) for kind in kinds if kind not in (int, float, complex))
        raise rules.unsupported(f"np.{name} of {told}", COUNTS)
    found = own(ufunc, operands, [is_time(dtype) for dtype in wanted])
    return _dated(found, result) if is_time(result) else found


def _sum(ufunc: Any, operands: Any, _: Any) -> Any:
    return _with_nat(ufunc(*operands), *operands)


def _compared(ufunc: Any, operands: Any, _: Any) -> Any:
    found, mask = ufunc(*operands), _missing(*operands)
    if mask is None:
        return found
    return found | mask if ufunc is np.not_equal else found & ~mask


def _least(ufunc: Any, operands: Any, _: Any) -> Any:
    plain = np.minimum if ufunc in (np.minimum, np.fmin) else np.maximum
    if ufunc in (np.minimum, np.fmax):
        return plain(*operands)
    return _of_key(plain(*map(_key, operands)))


def _multiplied(ufunc: Any, operands: Any, times: Any) -> Any:
    counts = operands[times.index(True)]
    found = ufunc(*operands)
    return _with_nat(found, counts) if found.dtype == np.int64 else _whole(found, counts)


def _divided(ufunc: Any, operands: Any, times: Any) -> Any:
    counts, other = operands
    if times[1]:
        if ufunc is np.floor_divide:
            return _with_nat(counts // other, counts, other, nat=0)
        return _with_nat(counts / other, counts, other, nat=np.nan)
    if other.dtype.kind == "f":
        return _whole(counts / other, counts)
    down = counts // other  # towards 0, as NumPy divides durations by integers
    found = down + ((down * other != counts) & ((counts < 0) != (other < 0)))
    zero = np.equal(other, 0)
    return _with_nat(np.where(zero, NAT, found) if np.any(zero) else found, counts)


def _remainder(ufunc: Any, operands: Any, _: Any) -> Any:
    zero = np.equal(operands[1], 0)
    found = ufunc(*operands)
    return _with_nat(np.where(zero, NAT, found) if np.any(zero) else found, *operands)


def _whole(values: Any, counts: Any) -> Any:
    """Floats as counts, cut towards 0; what is not finite is NaT."""
    there = np.isfinite(values) & (counts != NAT)
    return np.where(there, np.trunc(np.where(there, values, 0.0)).astype(np.int64), NAT)


def _same(ufunc: Any, operands: Any, _: Any) -> Any:
    return ufunc(*operands)  # the least int64 stays what it is


UFUNCS: dict[str, Callable[..., Any]] = {
    "add": _sum, "subtract": _sum, "multiply": _multiplied, "divide": _divided,
    "floor_divide": _divided, "remainder": _remainder, "negative": _same, "absolute": _same,
    "positive": _same, "isnat": lambda _, x, __: x[0] == NAT, "isnan": lambda _, x, __: x[0] == NAT,
    "isfinite": lambda _, x, __: x[0] != NAT, "isinf": lambda _, x, __: x[0] != x[0],
} | dict.fromkeys(("minimum", "maximum", "fmin", "fmax"), _least) | dict.fromkeys(
    rules.COMPARISONS, _compared
)  # fmt: skip


# --- functions ---


def _unique(
    ar: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    axis: Any = None,
) -> Any:  # fmt: skip
    asked = return_index, return_inverse, return_counts
    unique: Any = np.unique
    found = unique(_key(ar.matrix_ref), *asked, axis=axis)
    if not any(asked):
        return _dated(_of_key(found), ar.dtype)
    return (_dated(_of_key(found[0]), ar.dtype), *found[1:])


def _searchsorted(a: Any, v: Any, side: Any = "left", sorter: Any = None) -> Any:
    dtype = _common([a, v])
    keys = [_key(x) for x in _counts([a, v], dtype)]
    return np.searchsorted(*keys, side=side, sorter=sorter)  # type: ignore[call-overload]


def _isin(element: Any, test_elements: Any, *, invert: bool = False, **_: Any) -> Any:
    one, others = _counts([element, test_elements], _common([element, test_elements]))
    found = np.isin(one, others) & (one != NAT)
    return ~found if invert else found


def _diff(a: Any, n: int = 1, axis: int = -1) -> Any:
    along = rules.axis_index(axis, a.ndim)
    for _ in range(n):
        ends = [a[rules.at(along, part)] for part in (slice(1, None), slice(None, -1))]
        a = ends[0] - ends[1]
    return a


def _durations(what: str, a: Any) -> Any:
    if a.dtype.kind != "m":
        raise DtypeError(f"np.{what} of {a.dtype}: dates cannot be added; their differences can")
    return a.matrix_ref


def _total(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    counts = _durations("sum", a)
    mask = np.any(counts == NAT, axis=axis, keepdims=keepdims)
    found = np.sum(counts, axis=axis, keepdims=keepdims)
    return _dated(np.where(mask, NAT, found), a.dtype)


def _mean(a: Any, axis: Any = None, *, keepdims: bool = False) -> Any:
    total = _total(a, axis, keepdims=keepdims)
    return total / (a.size // max(1, total.size))


def _running(a: Any, axis: Any = None) -> Any:
    counts = _durations("cumsum", a)
    mask = np.cumsum(counts == NAT, axis=axis) > 0
    return _dated(np.where(mask, NAT, np.cumsum(counts, axis=axis)), a.dtype)


def _equal(a1: Any, a2: Any) -> bool:
    return np.shape(a1) == np.shape(a2) and bool(np.all(np.equal(a1, a2)))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    np.unique: _unique, np.searchsorted: _searchsorted, np.isin: _isin, np.diff: _diff,
    np.sum: _total, np.mean: _mean, np.cumsum: _running, np.array_equal: _equal,
    np.union1d: lambda a, b: np.unique(np.concatenate([np.ravel(a), np.ravel(b)])),
    np.ptp: lambda a, **options: np.max(a, **options) - np.min(a, **options),
    np.clip: lambda a, low, high: np.minimum(np.maximum(a, low), high),
    np.shape: lambda a: a.shape, np.ndim: lambda a: a.ndim, np.size: lambda a: a.size,
    np.result_type: lambda *given: np.result_type(*(getattr(x, "dtype", x) for x in given)),
}  # fmt: skip
