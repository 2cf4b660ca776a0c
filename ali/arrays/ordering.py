"""Sorting, distinct elements, quantiles, cumulative sums: algorithms that need an order.

Rows go into consecutive blocks first.

A matrix in VC_STAR has row i on rank ``i % size``. Here rank 0 has the first rows, rank 1 the next
ones, and so on (``VC_STAR:BLOCK``), in the results too: that sends each element once and no
positions, and what is in blocks already stays where it is.

Vectors, and matrices with fewer lines than ranks, are sorted by samples (Li et al., "On the
versatility of parallel sorting by regular sampling", Parallel Computing 19(10), 1993):

1. Every rank sorts a block.
2. Samples of all blocks give the values at which the blocks are cut.
3. Each piece goes to the rank of its values.
4. Every rank merges its pieces.

Equal elements are cut by their position, so that a vector with few distinct values is divided
evenly too, and the order is stable.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ali.arrays.exchanges import (
    IN_BLOCKS,
    array_of,
    contiguous_rows,
    exchange_pieces,
    from_contiguous,
    gathered,
    in_order,
    reshaped,
    scratch,
    start_of,
)
from ali.blocks import CHUNK, Array, block, panels, require_choice
from ali.interface import Context, routine
from ali.linalg import products
from ali.linalg.products import operand
from ali.linalg.reductions import sum_dtype
from mpi_workers.matrix.dist_matrix import REPLY_NBYTES, DistMatrix
from mpi_workers.matrix.dtypes import DTYPES


def flattened(ctx: Context, A: DistMatrix) -> DistMatrix:
    """The elements in C order as a vector in VC_STAR:BLOCK; A itself if it is one. Collective."""
    if A.shape[1] == 1:
        return A.with_ndim(1)
    rows, start = contiguous_rows(ctx, A)
    n = A.shape[1]
    return from_contiguous(ctx, rows.reshape(-1, 1), start * n, (A.shape[0] * n,))


# --- lines: what an operation along an axis works on --------------------------------------


def canonical(ctx: Context, A: DistMatrix, axis: int | None) -> DistMatrix:
    """A matrix along whose columns an operation along `axis` of A goes; maybe a read-only view."""
    if A.ndim < 2:
        return A
    if axis is None:
        return flattened(ctx, A)
    return operand(A, "T") if axis == 1 else A


def restored(ctx: Context, R: DistMatrix, A: DistMatrix, axis: int | None) -> DistMatrix:
    """A new matrix of the shape of `canonical`, turned back; a vector if that is one."""
    if A.ndim < 2 or axis is None:
        return replied(ctx, R).with_ndim(1)
    return replied(ctx, products.transpose(ctx, R) if axis == 1 else R)


def replied(ctx: Context, R: DistMatrix) -> DistMatrix:
    """A small result in STAR_STAR, so that its elements come with the reply."""
    return ctx.to_layout(R, "STAR_STAR") if R.nbytes <= REPLY_NBYTES else R


def whole_columns(ctx: Context, A: DistMatrix) -> DistMatrix | None:
    """A in a layout in which ranks have whole columns; None where too few ranks would.

    Small matrices come in STAR_STAR: they cost one message, and every rank has the result.
    """
    if A.nbytes <= REPLY_NBYTES:
        return ctx.to_layout(A, "STAR_STAR")
    if A.layout.startswith("STAR_"):
        return A
    return ctx.to_layout(A, "STAR_VC") if A.shape[1] >= ctx.size else None


SCANS: dict[str, Any] = {"sum": np.add, "prod": np.multiply}


@routine("R")
def cumulative(
    ctx: Context, op: str, A: DistMatrix, axis: int | None = None, initial: bool = False
) -> DistMatrix:
    """Cumulative sums or products along an axis.

    Parameters
    ----------
    op : str
        "sum" or "prod".
    A : array
    axis : int, optional
        None: of all elements in C order, as a vector.
    initial : bool
        Whether the results are preceded by 0 (1 for a product).

    Returns
    -------
    R : array, VC_STAR:BLOCK (axis 1: STAR_VC; small ones STAR_STAR)
        int64 (uint64) for smaller integers and bool.

    Raises
    ------
    BadArgumentError
        If op is unknown.

    Notes
    -----
    Sums are accumulated in float64 (complex128). Each element crosses the network once, to
    consecutive blocks; the ranks' totals are gathered: ``ranks`` words for each column. No
    communication if ranks have whole lines.
    """
    require_choice("cumulative", "op", op, SCANS)
    function = SCANS[op]
    work = canonical(ctx, A, axis)
    kind = sum_dtype(A.dtype)
    wide = np.result_type(kind, np.float64) if kind.kind in "fc" else kind
    m, n = work.shape
    first = int(initial)
    whole = whole_columns(ctx, work)
    with np.errstate(all="ignore"):
        if whole is not None:
            R = ctx.empty((m + first, n), kind, whole.layout)
            if R.local.size:
                R.local[:first] = function.identity
                if wide == kind:
                    function.accumulate(block(whole), axis=0, dtype=kind, out=R.local[first:])
                else:
                    for mine, column in zip(R.local[first:].T, block(whole).T, strict=True):
                        mine[...] = function.accumulate(column, dtype=wide)
            return restored(ctx, R, A, axis)
        local, start = contiguous_rows(ctx, work)
        local = local.astype(wide, copy=False)
        totals = gathered(ctx, function.reduce(local, axis=0, keepdims=True))
        if len(local) and ctx.rank:
            local[0] = function(function.reduce(totals[: ctx.rank], axis=0), local[0])
        if not initial:  # the ranks have the rows of the result already
            R = ctx.empty((m, n), kind, IN_BLOCKS)
            if local.size and kind == wide:
                function.accumulate(local, axis=0, out=block(R))
            elif local.size:
                R.stored[...] = function.accumulate(local, axis=0, out=local)
            return restored(ctx, R, A, axis)
        sums = function.accumulate(local, axis=0, out=local).astype(kind, copy=False)
    if ctx.rank == 0:
        sums = np.concatenate([np.full((1, n), function.identity, kind), sums])
    else:
        start += 1
    return restored(ctx, from_contiguous(ctx, sums, start, (m + first, n)), A, axis)


SAMPLES = 256  # of each rank: buckets then differ by a few percent


@routine("B")
def sort(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Sort along an axis, ascending, as NumPy does: nan at the end, complex numbers by real part.

    Parameters
    ----------
    A : array
    axis : int, optional
        None: all elements, as a vector.

    Returns
    -------
    B : array, dtype of A; VC_STAR:BLOCK
        Small ones STAR_STAR; of many lines STAR_VC (axis 1: VC_STAR).

    Notes
    -----
    ``m n log(m) / ranks`` comparisons for n lines of m elements. With at least as many lines as
    ranks, each element crosses the network once, to the rank of its line. Otherwise once to the
    rank of its value, and few a second time, to their places.
    Memory: four copies of the rank's part, and 256 samples from each rank.
    """
    work = canonical(ctx, A, axis)
    whole = whole_columns(ctx, work)
    if whole is not None:
        R = ctx.empty(work.shape, A.dtype, whole.layout)
        R.local[...] = whole.local
        R.local.sort(axis=0)
        return restored(ctx, R, A, axis)
    return restored(ctx, _sorted_columns(ctx, work, ordered=False), A, axis)


@routine("indices")
def argsort(ctx: Context, A: DistMatrix, axis: int | None = None) -> DistMatrix:
    """Indices that sort along an axis, stable: equal elements keep their order.

    Parameters
    ----------
    A : array
    axis : int, optional
        None: positions of all elements in C order, as a vector.

    Returns
    -------
    indices : array of int64, layout as in `sort`

    Notes
    -----
    As `sort`, but elements are first moved to consecutive blocks; indices move with them.
    Memory: seven copies of the rank's part.
    """
    work = canonical(ctx, A, axis)
    whole = whole_columns(ctx, work)
    if whole is not None:
        R = ctx.empty(work.shape, np.int64, whole.layout)
        if R.local.size:
            R.local[...] = np.argsort(whole.local, axis=0, kind="stable")
        return restored(ctx, R, A, axis)
    return restored(ctx, _sorted_columns(ctx, work, ordered=True), A, axis)


def _sorted_columns(ctx: Context, work: DistMatrix, ordered: bool) -> DistMatrix:
    """Every column sorted by all ranks; if `ordered`, the indices instead."""
    if ordered:
        rows, start = contiguous_rows(ctx, work)
    else:  # equal elements are alike: any block will do
        dealt = work.layout.partition(":")[0] == "VC_STAR"
        rows = block(work if dealt else ctx.to_layout(work, "VC_STAR"))
        start = 0
    columns = []
    for j in range(work.shape[1]):
        if ordered:
            mine = sorted_with_index(ctx, rows[:, j], start)[1]
        else:
            mine = merged(ctx, sorted_copy(ctx, rows[:, j]))
        column = from_contiguous(ctx, mine[:, None], start_of(ctx, mine), (work.shape[0], 1))
        columns.append(column)
    if work.shape[1] == 1:
        return column
    R = ctx.empty(work.shape, np.int64 if ordered else work.dtype, IN_BLOCKS)
    for j, column in enumerate(columns):
        if R.local.size:
            R.local[:, j] = column.local[:, 0]
    return R


def sorted_copy(ctx: Context, own: Array) -> Array:
    """The elements of this rank's array, sorted."""
    values = scratch(ctx, own.size, own.dtype)
    values[...] = own.reshape(-1, order="F")
    values.sort()
    return values


def merged(ctx: Context, values: Array) -> Array:
    """This rank's block of the elements of all ranks, each of which gives sorted ones. Collective.

    Returns
    -------
    ndarray
        Sorted; all are at least those of the ranks before.
    """
    if ctx.size == 1:
        return values
    values, _ = exchange_pieces(ctx, values, _piece_sizes(ctx, values))
    values.sort(kind="stable")  # merges the runs: a tenth of the time of NumPy's other sort on AMD
    return values


def sorted_with_index(ctx: Context, own: Array, start: int) -> tuple[Array, Array]:
    """This rank's block of the sorted elements of all ranks' blocks. Collective.

    Parameters
    ----------
    own : ndarray, shape (k,)
    start : int
        Index of the first element of this block in the vector.

    Returns
    -------
    values : ndarray
        All are at least those of the ranks before.
    index : ndarray of int64
        Of these elements in the vector; equal elements are in the order of the vector.
    """
    index = stable_order(own)
    values = own[index]
    index += start
    if ctx.size == 1:
        return values, index
    counts = _piece_sizes(ctx, values)
    values, _ = exchange_pieces(ctx, values, counts)
    index, _ = exchange_pieces(ctx, index, counts)
    order = np.argsort(values, kind="stable")  # a merge: runs come in the order of the vector
    return values[order], index[order]


def stable_order(values: Array) -> Array:
    """As ``np.argsort(values, kind="stable")``, three times as fast for numbers of 4 and 8 bytes.

    NumPy's default sort has vector instructions, its stable one has not. The order of equal
    elements is restored by a sort of the indices within each group of them.
    """
    if values.dtype.kind not in "iuf" or not values.size:
        return np.argsort(values, kind="stable")
    order = np.argsort(values)
    differs = _differs(values[order])
    if not differs.all():
        group = np.cumsum(differs, dtype=np.int64)
        if int(group[-1]) >= np.iinfo(np.int64).max // values.size:
            return np.argsort(values, kind="stable")
        group *= values.size
        group += order
        group.sort()
        order = group % values.size
    return order


def _differs(values: Array, equal_nan: bool = True) -> Array:
    """Which of the sorted elements differ from the one before."""
    found = np.ones(values.size, bool)
    np.not_equal(values[1:], values[:-1], out=found[1:])
    if equal_nan and values.dtype.kind in "fc" and values.size and np.isnan(values[-1]):
        found[1:] &= ~(np.isnan(values[1:]) & np.isnan(values[:-1]))
    return found


def _piece_sizes(ctx: Context, values: Array) -> Array:
    """How many of this rank's sorted elements each rank gets."""
    return np.diff([0, *_cuts(ctx, values), values.size])


def _cuts(ctx: Context, values: Array) -> list[int]:
    """Where to cut this rank's sorted elements: one piece for each rank."""
    size = ctx.size
    count = min(SAMPLES, values.size)
    places = (2 * np.arange(count, dtype=np.int64) + 1) * values.size // max(1, 2 * count)
    samples = gathered(ctx, values[places])
    owners = np.repeat(np.arange(size), [len(one) for one in samples])
    positions = np.concatenate(gathered(ctx, places))
    every = np.concatenate(samples)
    order = np.argsort(every, kind="stable")  # by value, then by rank and position
    found = []
    for k in range(1, size):
        if not order.size:
            found.append(0)
            continue
        chosen = order[k * order.size // size]
        if owners[chosen] == ctx.rank:
            found.append(int(positions[chosen]))
        else:
            side: Literal["left", "right"] = "right" if owners[chosen] > ctx.rank else "left"
            found.append(int(np.searchsorted(values, every[chosen], side)))
    return found


@routine("values")
def unique(ctx: Context, A: DistMatrix, equal_nan: bool = True) -> DistMatrix:
    """The distinct elements of an array, sorted.

    Parameters
    ----------
    A : array
    equal_nan : bool
        Whether all nan are the same.

    Returns
    -------
    values : vector, dtype of A

    Notes
    -----
    Every rank finds its own distinct elements; those are sorted as in `sort`.
    """
    local = block(ctx.to_layout(A, "VC_STAR"))
    if local.dtype.kind in "biu" and local.itemsize < 4:
        own = _present(local)
    else:
        own = sorted_copy(ctx, local)
        own = own[_differs(own, equal_nan)]
    values = merged(ctx, own)
    return replied(ctx, in_order(ctx, values[_firsts(ctx, values, equal_nan)]))


def _present(local: Array) -> Array:
    """The distinct ones of integers of one or two bytes, sorted: a fifth of the time of a sort."""
    unsigned = np.dtype(f"u{local.itemsize}")
    seen = np.zeros(1 << (8 * local.itemsize), bool)
    for column in local.T:
        for part in panels(len(column), CHUNK // 8):  # NumPy copies an index as int64
            seen[column[part].view(unsigned)] = True
    return np.sort(np.flatnonzero(seen).astype(unsigned).view(local.dtype))


@routine("values", "indices", "inverse", "counts")
def unique_all(
    ctx: Context, A: DistMatrix, equal_nan: bool = True
) -> tuple[DistMatrix, DistMatrix, DistMatrix, DistMatrix]:
    """The distinct elements of an array, sorted, and where they are.

    Parameters
    ----------
    A : array
    equal_nan : bool
        Whether all nan are the same.

    Returns
    -------
    values : vector, dtype of A
    indices : vector of int64
        Of the first element with each value, in C order.
    inverse : array of int64, shape of A
        For each element of A the index of its value.
    counts : vector of int64
        How often each value occurs.

    Notes
    -----
    As `argsort` of all elements; each element's number then crosses the network with its position.
    """
    rows, start = contiguous_rows(ctx, A)
    values, index = sorted_with_index(ctx, rows.reshape(-1), start * A.shape[1])
    first = _firsts(ctx, values, equal_nan)
    numbers = np.cumsum(first, dtype=np.int64) - 1 + start_of(ctx, np.flatnonzero(first))
    inverse = array_of(ctx, numbers, index, A.array_shape)
    places = np.flatnonzero(first) + start_of(ctx, values)
    after = np.concatenate([*gathered(ctx, places[:1])[ctx.rank + 1 :], [A.shape[0] * A.shape[1]]])
    counts = np.diff(places, append=after[0])
    made = [replied(ctx, in_order(ctx, x)) for x in (values[first], index[first], counts)]
    return made[0], made[1], replied(ctx, inverse), made[2]


def _firsts(ctx: Context, values: Array, equal_nan: bool) -> Array:
    """As `_differs`, over the sorted elements of all ranks."""
    lasts = np.concatenate([values[:0], *gathered(ctx, values[-1:])[: ctx.rank]])
    found = _differs(values, equal_nan)
    if lasts.size and values.size:
        found[0] = _differs(np.array([lasts[-1], values[0]]), equal_nan)[1]
    return found


# Parameters alpha and beta of Hyndman and Fan, "Sample Quantiles in Statistical Packages",
# The American Statistician 50(4), 1996. The others take an element near the linear position.
CONTINUOUS = {
    "linear": (1.0, 1.0), "hazen": (0.5, 0.5), "weibull": (0.0, 0.0),
    "median_unbiased": (1 / 3, 1 / 3), "normal_unbiased": (3 / 8, 3 / 8),
    "interpolated_inverted_cdf": (0.0, 1.0),
}  # fmt: skip
NEAREST: dict[str, Any] = {"lower": np.floor, "higher": np.ceil, "nearest": np.rint}
DISCONTINUOUS = ("inverted_cdf", "closest_observation")  # of Hyndman and Fan: one element each
METHODS = (*CONTINUOUS, *NEAREST, *DISCONTINUOUS, "averaged_inverted_cdf", "midpoint", "median")
FEW = 1 << 14  # elements that are gathered on every rank, and sorted there
QUANTILE_SAMPLES = (
    1 << 14
)  # of all ranks, to choose the bounds between which an element is looked for
MARGIN = 4.0  # standard deviations of the sample: an element is missed once in 10,000


@routine("Q")
def quantile(
    ctx: Context,
    A: DistMatrix,
    q: list[float],
    shape: list[int],
    axis: int | None = None,
    method: str = "linear",
    skip_nan: bool = False,
    dtype: str = "float64",
) -> DistMatrix:
    """Quantiles along an axis.

    Parameters
    ----------
    A : array
    q : list of float
        From 0 to 1.
    shape : list of int
        Of the result: that of one quantile for each of q and each line, without axes of length 1 or
        with more of them.
    axis : int, optional
        None: of all elements.
    method : str
        A name of NumPy's, or "median": the mean of the two elements in the middle.
    skip_nan : bool
        Whether nan is left out; otherwise the quantiles of a line with nan are nan.
    dtype : str
        Of the result.

    Returns
    -------
    Q : array of that shape

    Raises
    ------
    BadArgumentError
        If the method or dtype is unknown.

    Notes
    -----
    Many lines: each element crosses the network once, to the rank of its line, which partitions
    it. Few lines, or all elements: nothing moves but samples; about 1.2 passes over the elements
    for each quantile, each of 16,384 elements sampled and as many gathered. Source: Floyd, Rivest,
    "Expected time bounds for selection", CACM 18(3), 1975.
    """
    require_choice("quantile", "method", method, METHODS)
    require_choice("quantile", "dtype", dtype, DTYPES, "DtypeError")
    work = operand(A, "T") if axis == 1 and A.ndim == 2 else A
    if A.ndim == 2 and axis is None:
        _, mine = own_elements(ctx, A)
        values = _interpolated(*_selected(ctx, mine, q, method, skip_nan), method)[:, None]
    else:
        whole = whole_columns(ctx, work)
        if whole is not None:
            Q = ctx.empty((len(q), work.shape[1]), dtype, whole.layout)
            columns = block(whole)
            width = max(1, CHUNK // max(1, columns.shape[0] * columns.itemsize))
            with np.errstate(all="ignore"):
                for part in panels(Q.local.shape[1], width):
                    _of_columns(columns[:, part], Q.local[:, part], q, method, skip_nan)
            _warn_of_nan(ctx, A, Q.local, skip_nan)
            return reshaped(ctx, replied(ctx, Q), shape)
        rows = ctx.to_layout(work, "VC_STAR")
        lines = [
            _interpolated(*_selected(ctx, x, q, method, skip_nan), method) for x in block(rows).T
        ]
        values = np.stack(lines, axis=1)
    _warn_of_nan(ctx, A, values, skip_nan)
    with np.errstate(all="ignore"):
        return reshaped(ctx, ctx.new_replicated(values.astype(dtype)), shape)


def _warn_of_nan(ctx: Context, A: DistMatrix, values: Array, skip_nan: bool) -> None:
    """As NumPy warns of quantiles of no elements."""
    if (skip_nan or not A.nbytes) and np.isnan(values).any():
        ctx.warn_of_slice("All-NaN slice encountered" if skip_nan else "Mean of empty slice")


def own_elements(ctx: Context, A: DistMatrix) -> tuple[DistMatrix, Array]:
    """A in a layout without copies, and this rank's elements in it."""
    if any(len(group) > 1 for group in A.distribution.owners()):
        A = ctx.to_layout(A, "VC_STAR")
    return A, A.local.reshape(-1, order="F")


def _positions(count: int, q: list[float], method: str) -> tuple[Array, Array, Array]:
    """The two elements between which each quantile is, and its share of the way."""
    asked = np.asarray(q, np.float64)
    if method in CONTINUOUS:
        alpha, beta = CONTINUOUS[method]
        place = count * asked + (alpha + asked * (1 - alpha - beta)) - 1
        if method == "linear":
            place = (count - 1) * asked
    elif method in DISCONTINUOUS:
        place = count * asked - (1 if method == "inverted_cdf" else 1.5)
        at_element = place == np.floor(place)
        if method == "closest_observation":
            at_element &= np.floor(place) % 2 == 1
        place = np.floor(place) + ~at_element
    elif method == "averaged_inverted_cdf":
        place = count * asked - 1
    else:
        place = (count - 1) * asked
        place = NEAREST[method](place) if method in NEAREST else place
    if method == "averaged_inverted_cdf":
        low = np.floor(place)
        high, share = low + 1, np.where(low == place, 0.5, 1.0)
    elif method in ("midpoint", "median"):
        low, high = np.floor(place), np.ceil(place)
        share = np.where(low == high, 0.0, 0.5)
    else:
        low = np.floor(place)
        high, share = low + 1, place - low
    low, high = (np.clip(x, 0, max(0, count - 1)).astype(np.int64) for x in (low, high))
    return low, high, share


def _interpolated(low: Array, high: Array, share: Array, method: str) -> Array:
    """Between two elements, as NumPy rounds it."""
    if method in NEAREST or method in DISCONTINUOUS:
        return low
    with np.errstate(all="ignore"):
        if method == "median":  # infinities stay
            return np.where(share == 0, low, np.mean([low, high], axis=0))
        apart = np.subtract(high, low)
        found = np.add(low, apart * share)
        return np.asarray(np.where(share >= 0.5, high - apart * (1 - share), found))


def _nothing(kind: np.dtype[Any], q: list[float]) -> tuple[Array, Array, Array]:
    nan = np.full(len(q), np.nan, kind if kind.kind in "fc" else np.float64)
    return nan, nan, np.zeros(len(q))


def _of_columns(columns: Array, found: Array, q: list[float], method: str, skip_nan: bool) -> None:
    """Of each column, into those of another array: columns with as many nan at once."""
    missing = np.isnan(columns).sum(axis=0)
    for count in np.unique(missing).tolist():
        chosen = np.flatnonzero(missing == count)
        left = len(columns) - count
        if not left or (count and not skip_nan):
            found[:, chosen] = np.nan
            continue
        some = np.array(columns[:, chosen], order="F")
        low, high, share = _positions(left, q, method)
        some.partition(np.unique([*low, *high]), axis=0)  # nan come last
        found[:, chosen] = _interpolated(some[low], some[high], share[:, None], method)


def _selected(
    ctx: Context, mine: Array, q: list[float], method: str, skip_nan: bool
) -> tuple[Array, Array, Array]:
    """Of the elements of all ranks, the same on every rank. Collective."""
    if _total(ctx, int(mine.size > 0 and np.isnan(mine.max()))):
        if not skip_nan:
            return _nothing(mine.dtype, q)
        mine = mine[~np.isnan(mine)]
    count = _total(ctx, mine.size)
    if not count:
        return _nothing(mine.dtype, q)
    low, high, share = _positions(count, q, method)
    wanted = np.unique([*low, *high])
    found = order_statistics(ctx, mine, wanted)
    return found[np.searchsorted(wanted, low)], found[np.searchsorted(wanted, high)], share


def _total(ctx: Context, count: int) -> int:
    return int(ctx.comm.allreduce(count))


def order_statistics(ctx: Context, mine: Array, wanted: Array) -> Array:
    """Elements of the sorted elements of all ranks, without sorting them. Collective.

    Parameters
    ----------
    mine : ndarray, shape (k,)
        Without nan.
    wanted : ndarray of int64
        Positions, ascending.

    Notes
    -----
    Samples give two bounds for a group of close positions. The elements between them, about a
    sixteenth, are kept, until they are few enough to be gathered. Elements equal to a bound need no
    further step, so that every step makes progress with any elements.
    """
    count = _total(ctx, mine.size)
    if count <= FEW:
        every = np.sort(np.concatenate(gathered(ctx, mine)))
        return np.asarray(every[wanted])
    ctx.check()
    slack = MARGIN * count / np.sqrt(QUANTILE_SAMPLES)
    if wanted[-1] - wanted[0] > slack and len(wanted) > 1:
        cut = 1 + int(np.argmax(np.diff(wanted)))
        if wanted[cut] - wanted[cut - 1] > slack:
            parts = (wanted[:cut], wanted[cut:])
            return np.concatenate([order_statistics(ctx, mine, part) for part in parts])
    low, high = _bounds(ctx, mine, count, wanted, slack)
    kept = mine[(mine >= low) & (mine <= high)]
    below = _total(ctx, int(np.count_nonzero(mine < low)))
    left = _total(ctx, kept.size)
    if below <= wanted[0] and wanted[-1] < below + left <= below + count // 2:
        return order_statistics(ctx, kept, wanted - below)
    masks = [mine < low, mine == low, (mine > low) & (mine < high), mine == high, mine > high]
    if low == high:
        masks[3] = np.zeros(mine.size, bool)
    sizes = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
    total = np.empty_like(sizes)
    ctx.comm.Allreduce(sizes, total)
    found, start = [], 0
    for i, size in enumerate(total.tolist()):
        inside = wanted[(wanted >= start) & (wanted < start + size)] - start
        if inside.size and i in (1, 3):
            found.append(np.full(inside.size, low if i == 1 else high, mine.dtype))
        elif inside.size:
            found.append(order_statistics(ctx, mine[masks[i]], inside))
        start += size
    return np.concatenate(found)


def _bounds(ctx: Context, mine: Array, count: int, wanted: Array, slack: float) -> tuple[Any, Any]:
    """Two elements between which those at the wanted positions probably are."""
    share = -(-QUANTILE_SAMPLES * mine.size // count)
    places = np.random.Generator(np.random.Philox(key=ctx.rank)).integers(0, mine.size, share) \
        if mine.size else np.zeros(0, np.int64)  # fmt: skip
    samples = np.sort(np.concatenate(gathered(ctx, mine[places])))
    edges = np.array([wanted[0] - slack, wanted[-1] + slack]) / count * samples.size
    first, last = np.clip(edges, 0, samples.size - 1).astype(np.int64)
    return samples[first], samples[last]
