"""Rank side of test_halo.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang

SHAPES = [(12, 12), (7, 5), (5, 9), (1, 6), (6, 1), (1, 1), (0, 4), (13, 2)]


def halos(gang: Gang) -> list[Any]:
    """What is wrong, and how many halos were compared with those of the whole matrix."""
    ctx, wrong, done = Context(gang, {}), [], 0
    for shape in SHAPES:
        for width in (1, 2, 3):
            for dtype, fill in (("float64", 0), ("complex64", 2 - 1j), ("int32", -7)):
                whole = (1 + np.arange(shape[0] * shape[1]).reshape(shape)).astype(dtype)
                A = ctx.new_replicated(whole, "BLOCK")
                if any(
                    size < min(width, length)
                    for size, length in zip(A.distribution.block, shape, strict=True)
                ):
                    continue
                m, n = A.local.shape
                old = np.full((m + 2 * width, n + 2 * width), 99, dtype, order="C")
                found = [ctx.halo(A, width, fill=fill), ctx.halo(A, width, fill=fill, out=old)]
                done += 1
                padded = np.pad(whole, width, constant_values=fill)
                if A.local.size:
                    i, j = A.rows[0], A.cols[0]
                    expected = padded[i : i + m + 2 * width, j : j + n + 2 * width]
                    good = all(np.array_equal(one, expected) for one in found)
                else:
                    good = all(one.shape == (2 * width, 2 * width) for one in found)
                if not good or found[1] is not old or not np.array_equal(found[0], found[1]):
                    wrong.append([shape, width, dtype, gang.rank])
    return [done, [*itertools.chain(*gang.comm.allgather(wrong))]]


def periodic(gang: Gang) -> list[Any]:
    """How many halos agree with NumPy's padding by wrapping, and what is wrong."""
    ctx, wrong, done = Context(gang, {}), [], 0
    for shape, width in itertools.product(SHAPES, (1, 2, 3)):
        for around, fill in itertools.product(itertools.product((False, True), repeat=2), (0, 5)):
            whole = 1.0 + np.arange(shape[0] * shape[1]).reshape(shape)
            A = ctx.new_replicated(whole, "BLOCK")
            try:
                found = ctx.halo(A, width, fill=fill, periodic=around)
            except Failure:
                sizes = zip(A.distribution.block, shape, around, strict=True)
                least = [(n % b or b if wraps else b, n, wraps) for b, n, wraps in sizes if n]
                if all(b >= (width if wraps else min(width, n)) for b, n, wraps in least):
                    wrong.append([shape, width, around, "refused"])
                continue
            done += 1
            padded = whole
            for axis, wraps in enumerate(around if A.local.size else ()):
                pads = [(width, width) if axis == k else (0, 0) for k in (0, 1)]
                how: Any = {"mode": "wrap"} if wraps else {"constant_values": fill}
                padded = np.pad(padded, pads, **how)
            if A.local.size:
                (i, j), (m, n) = (A.rows[0], A.cols[0]), A.local.shape
                part = padded[i : i + m + 2 * width, j : j + n + 2 * width]
                if not np.array_equal(found, part):
                    wrong.append([shape, width, around, fill, gang.rank])
    return [done, [*itertools.chain(*gang.comm.allgather(wrong))]]


def refusals(gang: Gang) -> list[str]:
    """The messages of this rank; every rank has the same."""
    ctx, said = Context(gang, {}), []
    A = ctx.new_replicated(np.zeros((6, 5)), "BLOCK")
    calls = [
        lambda: ctx.halo(ctx.to_layout(A, "MC_MR")),
        lambda: ctx.halo(A, 0),
        lambda: ctx.halo(A, 1.5),
        lambda: ctx.halo(A, 4),
        lambda: ctx.halo(A, 3, periodic=True),
        lambda: ctx.halo(A, out=np.zeros((2, 2))),
    ]
    for call in calls:
        try:
            call()
            said.append("")
        except (Failure, ValueError) as error:
            said.append(f"{getattr(error, 'kind', '')}: {error}")
    everyone = gang.comm.allgather(said[:4])
    assert all(one == said[:4] for one in everyone)
    return said
