"""Cumulative sums and products."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.arrays.row_blocks import (
    canonical,
    contiguous_rows,
    from_contiguous,
    gathered,
    restored,
    scratch,
    whole_columns,
)
from ali.blocks import block, require_choice
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

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
    R : array, VC_STAR (axis 1: STAR_VC; small ones STAR_STAR)
        int64 for bool and int32.

    Raises
    ------
    BadArgumentError
        If op is unknown.

    Notes
    -----
    Each element crosses the network twice, to consecutive blocks and back; the ranks' totals are
    gathered: ``ranks`` words for each column. No communication if ranks have whole lines.
    """
    require_choice("cumulative", "op", op, SCANS)
    function, work = SCANS[op], canonical(ctx, A, axis)
    kind = np.dtype(np.int64) if A.dtype.kind in "bi" else A.dtype
    m, n = work.shape
    first = int(initial)
    whole = whole_columns(ctx, work)
    with np.errstate(all="ignore"):
        if whole is not None:
            R = ctx.empty((m + first, n), kind, whole.layout)
            if R.local.size:
                R.local[:first] = function.identity
                function.accumulate(block(whole), axis=0, dtype=kind, out=R.local[first:])
            return restored(ctx, R, A, axis)
        local, start = contiguous_rows(ctx, work)
        sums = local if local.dtype == kind else scratch(ctx, local.size, kind).reshape(local.shape)
        function.accumulate(local, axis=0, dtype=kind, out=sums)
        totals = gathered(ctx, sums[-1:])
        before = np.concatenate([sums[:0], *totals[: ctx.rank]])
        if len(before):
            function(sums, function.reduce(before, axis=0), out=sums)
    if initial and ctx.rank == 0:
        sums = np.concatenate([np.full((1, n), function.identity, kind), sums])
    elif initial:
        start += 1
    return restored(ctx, from_contiguous(ctx, sums, start, (m + first, n)), A, axis)
