"""Rank side of test_halo.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of

SHAPES = [(12, 12), (7, 5), (5, 9), (1, 6), (6, 1), (1, 1), (0, 4), (13, 2)]


FILLS: tuple[tuple[str, Any], ...] = (("float64", 0), ("complex64", 2 - 1j), ("int32", -7))
AROUND = tuple(itertools.product((False, True), repeat=2))


def halos(gang: GangView) -> list[Any]:
    """How many halos agree with the part of a padded matrix, and what is wrong."""
    ctx, wrong, done = Context(gang, {}), [], 0
    for shape, width, around, (dtype, fill) in itertools.product(SHAPES, (1, 2, 3), AROUND, FILLS):
        whole = (1 + np.arange(shape[0] * shape[1]).reshape(shape)).astype(dtype)
        A = ctx.new_replicated(whole, "BLOCK")
        m, n = A.local.shape
        old = np.full((m + 2 * width, n + 2 * width), 99, dtype, order="C")
        what = [shape, width, around, dtype, gang.rank]
        try:
            found = [
                ctx.halo(A, width, fill=fill, periodic=around),
                ctx.halo(A, width, fill=fill, periodic=around, out=old),
            ]
        except Failure:
            sizes = zip(A.distribution.block, shape, around, strict=True)
            least = [(n % b or b if wraps else b, n, wraps) for b, n, wraps in sizes if n]
            if all(b >= (width if wraps else min(width, n)) for b, n, wraps in least):
                wrong.append([*what, "refused"])
            continue
        done += 1
        padded = whole
        for axis, wraps in enumerate(around if A.local.size else ()):
            pads = [(width, width) if axis == k else (0, 0) for k in (0, 1)]
            how: Any = {"mode": "wrap"} if wraps else {"constant_values": fill}
            padded = np.pad(padded, pads, **how)
        if A.local.size:
            i, j = A.rows[0], A.cols[0]
            expected = padded[i : i + m + 2 * width, j : j + n + 2 * width]
            good = all(np.array_equal(one, expected) for one in found)
        else:
            good = all(one.shape == (2 * width, 2 * width) for one in found)
        if not good or found[1] is not old:
            wrong.append(what)
    return [done, [*itertools.chain(*gang.comm.allgather(wrong))]]


def refusals(gang: GangView) -> list[str]:
    """The messages of this rank; every rank has the same."""
    ctx = Context(gang, {})
    A = ctx.new_replicated(np.zeros((6, 5)), "BLOCK")
    calls: list[Any] = [
        lambda: ctx.halo(ctx.to_layout(A, "MC_MR")),
        lambda: ctx.halo(A, 0),
        lambda: ctx.halo(A, 1.5),
        lambda: ctx.halo(A, 4),
        lambda: ctx.halo(A, 3, periodic=True),
        lambda: ctx.halo(A, out=np.zeros((2, 2))),
    ]
    said = [failure_of(call) for call in calls]
    everyone = gang.comm.allgather(said[:4])
    assert all(one == said[:4] for one in everyone)
    return said
