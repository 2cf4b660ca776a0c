"""Small results that all ranks of a group have a part in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ali.blocks import Array
from mpi_workers.matrix.layout import Grid

if TYPE_CHECKING:
    from mpi_workers.rank.communicator import GangComm

TAG = 13
Join = Callable[[Array, Array], Array]


def ranks_sharing(dist: str, grid: Grid, rank: int) -> list[int]:
    """The ranks among which distribution `dist` deals indices out, and `rank` is one of them.

    ``STAR`` deals to nobody else. Ranks of different groups hold copies of each other in this
    direction, or other indices in the other one.
    """
    height, width = grid
    row, col = rank % height, rank // height
    match dist:
        case "STAR":
            return [rank]
        case "MC":
            return [col * height + i for i in range(height)]
        case "MR":
            return [row + height * j for j in range(width)]
        case "VC" | "VR":
            return list(range(height * width))
    raise ValueError(f"{dist} does not deal to every rank")


def tree_reduce(comm: GangComm, group: Sequence[int], mine: Array, join: Join) -> Array:
    """``join`` over the arrays of a group of ranks, in its order; the same bits on each of them.

    Up a binary tree and down again: ``2 log2(len(group))`` messages of the array's size.

    Parameters
    ----------
    group : sequence of int
        Ranks, this one among them; all of them must come here.
    mine : ndarray
        Of the same shape and dtype on all.
    join : callable
        Of two arrays; associative but for rounding. It may not change them.
    """
    result, me = np.ascontiguousarray(mine), list(group).index(comm.rank)
    if len(group) == 1:
        return result
    step, below = 1, []
    while step < len(group) and not me & step:
        if me + step < len(group):
            other = np.empty_like(result)
            comm.Recv(other, group[me + step], TAG)
            result = np.ascontiguousarray(join(result, other))
            below.append(group[me + step])
        step *= 2
    if me:
        comm.Send(result, group[me - step], TAG)
        result = np.empty_like(result)
        comm.Recv(result, group[me - step], TAG)
    for child in reversed(below):
        comm.Send(result, child, TAG)
    return result


def sum_over_ranks(comm: GangComm, mine: Array) -> Array:
    """The sum over all ranks; the same bits on each of them."""
    return tree_reduce(comm, range(comm.size), mine, np.add)
