"""Functions that test_hpcc.py runs on ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ali.interface import Context
from benchmarks.papers import hpcc
from benchmarks.papers.hpcc import (
    PERIOD,
    Stencil,
    conjugate_gradient,
    fft,
    hpcg,
    hpl,
    numbers_at,
    ptrans,
    random_access,
    six_steps,
    transposed,
)
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_hpc import SHORT_S, refusals


def everything(gang: GangView, calls: list[Any]) -> dict[str, Any]:
    """The kernels' results, their parts beside other ways to compute them, and refused calls."""
    ctx = Context(gang, {})
    return {
        "refused": refusals(gang, calls, "hpcc", str(Path(hpcc.__file__))),
        "ptrans": ptrans(ctx, 101, SHORT_S),  # not a multiple of the number of ranks
        "fft": fft(ctx, 1000, SHORT_S),
        "random_access": random_access(ctx, 1 << 16, SHORT_S),
        "hpl": hpl(ctx, 150, SHORT_S),
        "hpcg": hpcg(ctx, 6, 10, SHORT_S),
        "transforms": transforms(gang, 12),
        "stencils": stencils(gang, 3),
        "sequence": sequence(),
        "all updates": random_access(ctx, 1 << 12, seconds=30.0),  # the table is small enough
    }


def sequence() -> list[int]:
    """Places at which a jump and single steps differ, among the first ones and around 2^40."""
    wrong = []
    for first in (0, 1 << 40):
        word = int(numbers_at(np.array([first]))[0])
        for place in range(first, first + 100):
            if int(numbers_at(np.array([place]))[0]) != word:
                wrong.append(place)
            word = (word << 1 & (1 << 64) - 1) ^ (7 if word >> 63 else 0)
    if int(numbers_at(np.array([PERIOD]))[0]) != 1:
        wrong.append(PERIOD)
    return wrong


def transforms(gang: GangView, side: int) -> tuple[float, float]:
    """Differences of a transform and a transpose from NumPy's."""
    ctx = Context(gang, {})
    rng = np.random.default_rng(1)
    whole = rng.random((side, side)) + 1j * rng.random((side, side))
    rows = slice(gang.rank * side // gang.size, (gang.rank + 1) * side // gang.size)
    row = np.arange(side)[rows]
    twiddles = np.exp(-2j * np.pi * np.outer(row, np.arange(side)) / side**2)
    found = six_steps(ctx, whole[rows], twiddles)
    expected = np.fft.fft(whole.reshape(-1)).reshape(side, side)[rows]
    worst = (
        np.abs(found - expected).max(),
        np.abs(transposed(ctx, whole[rows]) - whole.T[rows]).max(),
    )
    return tuple(gang.comm.allreduce(float(value), max) for value in worst)


def stencils(gang: GangView, n: int) -> dict[str, float]:
    """The stencil against dense arrays of the whole grid, and the solution, which is 1."""
    ctx = Context(gang, {})
    stencil = Stencil(ctx, n)
    b = stencil.product(np.ones(n**3))
    x, _ = conjugate_gradient(stencil, b, 200)
    # A row's sum is 27 less its stored elements: 0 within the grid, 19 in its corners.
    stored = np.diff(stencil.matrix.indptr)
    return {
        "rows": gang.comm.allreduce(float(np.abs(b - (27 - stored)).max()), max),
        "corners": gang.comm.allreduce(int((b == 19).sum())),
        "solution": gang.comm.allreduce(float(np.abs(x - 1).max()), max),
        "nonzeros": stencil.nonzeros,
    }
