"""Collective operations on small arrays that give the same bits on every rank."""

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
    """The ranks, `rank` among them, that share the indices of one dimension.

    `dist` is the distribution of that dimension. With ``STAR`` every rank has all indices and
    shares them with no other rank.
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
    raise ValueError(f"{dist} does not give indices to every rank")


def tree_reduce(comm: GangComm, group: Sequence[int], mine: Array, join: Join) -> Array:
    """Combine the arrays of a group of ranks with `join`. Collective over the group.

    Arrays are combined in the order of the group, up a binary tree. The result comes down the
    same tree, so that every rank gets the same bits: ``2 log2(len(group))`` messages.

    Parameters
    ----------
    group : sequence of int
        Ranks, this one included.
    mine : ndarray
        Of the same shape and dtype on all ranks; it is not changed.
    join : callable
        ``join(a, b)``, associative up to rounding. It may overwrite b, but not a.
    """
    result, me = np.ascontiguousarray(mine), list(group).index(comm.rank)
    if len(group) == 1:
        return result
    step, children = 1, []
    while step < len(group) and not me & step:
        if me + step < len(group):
            other = np.empty_like(result)
            comm.Recv(other, group[me + step], TAG)
            result = np.ascontiguousarray(join(result, other))
            children.append(group[me + step])
        step *= 2
    if me:
        comm.Send(result, group[me - step], TAG)
        result = np.empty_like(result)
        comm.Recv(result, group[me - step], TAG)
    for child in reversed(children):
        comm.Send(result, child, TAG)
    return result


def sum_over_ranks(comm: GangComm, mine: Array) -> Array:
    """The sum over all ranks, the same bits on each. Memory: one array besides `mine`."""
    return tree_reduce(comm, range(comm.size), mine, _add)


def _add(a: Array, b: Array) -> Array:
    return np.add(a, b, out=b)
