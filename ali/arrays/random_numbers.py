"""Random numbers of many distributions, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ali.arrays.row_blocks import from_contiguous, replied
from ali.blocks import Array, require_choice
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import stored_shape

STREAM = 1 << 14  # numbers of one stream

Draw = Callable[[np.random.Generator, int, float, float], Array]
DRAWS: dict[str, Draw] = {
    "normal": lambda stream, count, mean, scale: stream.normal(mean, scale, count),
    "uniform": lambda stream, count, low, high: stream.uniform(low, high, count),
    "exponential": lambda stream, count, scale, _: stream.exponential(scale, count),
    "integers": lambda stream, count, low, high: stream.integers(int(low), int(high), count),
}


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
    require_choice("draw", "kind", kind, DRAWS)
    m, n = stored_shape(shape)
    low, high = whole or first
    rows = max(1, STREAM // max(1, n))  # of one stream
    streams = -(-m // rows)
    mine = range(streams * ctx.rank // ctx.size, streams * (ctx.rank + 1) // ctx.size)
    start, stop = (min(m, rows * edge) for edge in (mine.start, mine.stop))
    found = np.empty((stop - start, n), np.int64 if whole else np.float64)
    for stream in mine:
        ctx.check()
        part = found[stream * rows - start : (stream + 1) * rows - start]
        bits = np.random.Philox(key=seed % (1 << 64), counter=[0, 0, stream, 2])
        generator = np.random.Generator(bits)
        part[...] = DRAWS[kind](generator, part.size, low, high).reshape(part.shape)
    return replied(ctx, from_contiguous(ctx, found, start, shape))
