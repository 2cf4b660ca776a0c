"""Quantiles of an array: order statistics by selection, and NumPy's interpolation between them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.arrays.dimensions import with_shape
from ali.arrays.row_blocks import gathered, replied, whole_columns
from ali.blocks import CHUNK, Array, block, panels, require_choice
from ali.interface import Context, routine
from ali.linalg.views import operand
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix

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
SAMPLES = 1 << 14  # of all ranks, to choose the bounds between which an element is looked for
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
        mine = _own_elements(ctx, A)
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
            return with_shape(ctx, replied(ctx, Q), shape)
        rows = ctx.to_layout(work, "VC_STAR")
        lines = [
            _interpolated(*_selected(ctx, x, q, method, skip_nan), method) for x in block(rows).T
        ]
        values = np.stack(lines, axis=1)
    with np.errstate(all="ignore"):
        return with_shape(ctx, ctx.new_replicated(values.astype(dtype)), shape)


def _own_elements(ctx: Context, A: DistMatrix) -> Array:
    """This rank's elements, each on one rank only."""
    if any(len(group) > 1 for group in A.distribution.owners()):
        A = ctx.to_layout(A, "VC_STAR")
    return A.local.reshape(-1, order="F")


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
    slack = MARGIN * count / np.sqrt(SAMPLES)
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
    share = -(-SAMPLES * mine.size // count)
    places = np.random.Generator(np.random.Philox(key=ctx.rank)).integers(0, mine.size, share) \
        if mine.size else np.zeros(0, np.int64)  # fmt: skip
    samples = np.sort(np.concatenate(gathered(ctx, mine[places])))
    edges = np.array([wanted[0] - slack, wanted[-1] + slack]) / count * samples.size
    first, last = np.clip(edges, 0, samples.size - 1).astype(np.int64)
    return samples[first], samples[last]
