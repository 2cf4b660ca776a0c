"""Rank side of test_redistribution.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpi_workers.matrix import pairwise
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import Distribution, Grid, Shape, positions
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.redistribution import redistribute
from mpi_workers.rank.gang_view import GangView
from tests.support.layouts import SOME_LAYOUTS

POOL = Pool(64 << 20, shared=False)
MIXED = ("VC_STAR", "MC_MR", "STAR_STAR", "MD_STAR", "BLOCK", "BLOCK_CYCLIC:4")


def grids(size: int) -> list[Grid]:
    return [(h, size // h) for h in range(1, size + 1) if size % h == 0]


def whole(shape: Shape, dtype: str) -> Any:
    """Every element different from every other, and none zero."""
    values = np.arange(1, shape[0] * shape[1] + 1).reshape(shape)
    return (values * (1 - 2j) if dtype.startswith("complex") else values).astype(dtype)


def blank(distribution: Distribution, rank: int, dtype: str) -> DistMatrix:
    kind = np.dtype(dtype)
    matrix = DistMatrix(
        distribution, rank, kind, POOL.take(distribution.local_indices(rank).size * kind.itemsize)
    )
    matrix.local[...] = np.array(-1).astype(kind)
    return matrix


def moved_wrong(gang: GangView, old: Distribution, new: Distribution, dtype: str) -> int:
    """Elements that this rank has wrong after a redistribution, of source and result."""
    values = whole(old.shape, dtype)
    source, result = blank(old, gang.rank, dtype), blank(new, gang.rank, dtype)
    source.local[...] = values[np.ix_(source.rows, source.cols)]
    redistribute(source, result, gang.comm)
    return sum(int((m.local != values[np.ix_(m.rows, m.cols)]).sum()) for m in (source, result))


def bad_cases(gang: GangView, cases: list[Any], wrong: list[int]) -> list[Any]:
    """The cases in which any rank has wrong elements. Ranks agree once: each message counts."""
    total = gang.comm.allreduce(np.array(wrong))
    return [case for case, count in zip(cases, total, strict=True) if count]


def every_pair(gang: GangView, shapes: list[Shape], message: int) -> list[Any]:
    """All pairs of layouts on every grid, dtypes in turn. Returns what went wrong, and how many."""
    cases: list[Any] = []
    wrong: list[int] = []
    dtypes = itertools.cycle(DTYPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairwise, "MESSAGE", message)
        for grid in grids(gang.size):
            for shape, old, new in itertools.product(shapes, SOME_LAYOUTS, SOME_LAYOUTS):
                dtype = next(dtypes)
                spreads = [Distribution(name, (shape[0], shape[1]), grid) for name in (old, new)]
                cases.append([old, new, shape, grid, dtype])
                wrong.append(moved_wrong(gang, spreads[0], spreads[1], dtype))
    return [len(cases), bad_cases(gang, cases, wrong)]


def every_dtype(gang: GangView) -> list[Any]:
    """Each dtype through layouts with and without copies, in messages of a few elements."""
    cases: list[Any] = []
    wrong: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        for message, dtype in itertools.product((16, 48, 1 << 20), DTYPES):
            patch.setattr(pairwise, "MESSAGE", message)
            for old, new in itertools.permutations(MIXED, 2):
                spreads = [Distribution(name, (23, 19), gang.grid) for name in (old, new)]
                cases.append([old, new, dtype, message])
                wrong.append(moved_wrong(gang, spreads[0], spreads[1], dtype))
    return bad_cases(gang, cases, wrong)


def refusals(gang: GangView) -> list[str]:
    """Messages for a result of another shape, and of another dtype: on one rank alone."""
    said: list[str] = []
    if gang.rank == 0:
        source = blank(Distribution("VC_STAR", (4, 3), gang.grid), 0, "float64")
        for shape, dtype in (((3, 4), "float64"), ((4, 3), "float32")):
            with pytest.raises(ValueError, match="cannot redistribute") as error:
                redistribute(
                    source, blank(Distribution("MC_MR", shape, gang.grid), 0, dtype), gang.comm
                )
            said.append(str(error.value))
    return said


def to_layout(gang: GangView) -> list[Any]:
    """The gang's own `to_layout`: itself where it has the layout, else new memory."""
    matrix = gang.new((5, 7), "float64", "VC_STAR")
    matrix.local[...] = gang.rank
    moved = gang.to_layout(matrix, "STAR_STAR")
    owners = [float(i % gang.size) for i in range(5)]
    return [
        gang.to_layout(matrix, "VC_STAR") is matrix,
        moved.layout,
        bool((moved.local == np.array(owners)[:, None]).all()),
        not np.shares_memory(moved.local, matrix.local),
        moved.local.flags.f_contiguous,
        moved.local[positions(moved.rows, range(1, 2)), :].shape,
    ]
