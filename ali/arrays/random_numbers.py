"""Random numbers of many distributions, the same on any number of ranks."""

from __future__ import annotations

import numpy as np

from ali.arrays.exchanges import from_contiguous, scratch
from ali.arrays.ordering import replied
from ali.blocks import Array, require_choice
from ali.interface import Context, routine
from ali.linalg.creation import RowStreams
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import stored_shape

STREAM = 1 << 14  # numbers of one stream

KINDS = ("normal", "uniform", "exponential", "integers")


def _fill(kind: str, stream: np.random.Generator, out: Array, low: float, high: float) -> None:
    """Draw numbers of a kind with these two parameters."""
    start, factor = low, high
    match kind:
        case "normal":
            stream.standard_normal(out=out)
        case "uniform":
            stream.random(out=out)
            factor = high - low
        case "exponential":
            stream.standard_exponential(out=out)
            start, factor = 0.0, low
        case _:
            out[...] = stream.integers(int(low), int(high), out.shape)
            return
    if factor != 1.0:
        out *= factor
    if start:
        out += start


@routine("A")
def draw(
    ctx: Context, kind: str, shape: list[int], seed: int, first: list[float], whole: list[int]
) -> DistMatrix:
    """An array of independent random numbers.

    Parameters
    ----------
    kind : str
        "normal" (mean, standard deviation), "uniform" (from, to), "exponential" (scale) or
        "integers" (from, to).
    shape : list of int
    seed : int
        The same seed gives the same array on any number of ranks.
    first : list of float
        The two parameters, of "integers" empty.
    whole : list of int
        The two parameters of "integers", else empty.

    Returns
    -------
    A : array of float64, of "integers" int64; VC_STAR, small ones STAR_STAR

    Raises
    ------
    BadArgumentError
        If there is no such kind.

    Notes
    -----
    A Philox stream for every 16,384 numbers. Each number crosses the network once, to its place.
    """
    require_choice("draw", "kind", kind, KINDS)
    m, n = stored_shape(shape)
    low, high = whole or first
    rows = max(1, STREAM // max(1, n))  # of one stream
    streams = -(-m // rows)
    mine = range(streams * ctx.rank // ctx.size, streams * (ctx.rank + 1) // ctx.size)
    start, stop = (min(m, rows * edge) for edge in (mine.start, mine.stop))
    dtype = np.int64 if whole else np.float64
    found = scratch(ctx, (stop - start) * n, dtype).reshape(stop - start, n)
    streams_of_seed = RowStreams(seed, purpose=2)
    for stream in mine:
        ctx.check()
        part = found[stream * rows - start : (stream + 1) * rows - start]
        _fill(kind, streams_of_seed.at(stream), part, low, high)
    return replied(ctx, ctx.to_layout(from_contiguous(ctx, found, start, shape), "VC_STAR"))
