"""Collective operations on small arrays that give the same bits on every rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ali.blocks import Array
from mpi_workers.matrix import tags
from mpi_workers.matrix.layout import Grid

if TYPE_CHECKING:
    from mpi4py import MPI

SLICE = 1 << 16  # 64 KiB: arrays of at least one such slice for each rank are summed by slices
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


def tree_reduce(comm: MPI.Intracomm, group: Sequence[int], mine: Array, join: Join) -> Array:
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
    result = np.ascontiguousarray(mine)
    me = list(group).index(comm.rank)
    if len(group) == 1:
        return result
    step, children = 1, []
    while step < len(group) and not me & step:
        if me + step < len(group):
            other = np.empty_like(result)
            comm.Recv(other, group[me + step], tags.COLLECTIVE)
            result = np.ascontiguousarray(join(result, other))
            children.append(group[me + step])
        step *= 2
    if me:
        comm.Send(result, group[me - step], tags.COLLECTIVE)
        result = np.empty_like(result)
        comm.Recv(result, group[me - step], tags.COLLECTIVE)
    for child in reversed(children):
        comm.Send(result, child, tags.COLLECTIVE)
    return result


def sum_over_ranks(comm: MPI.Intracomm, mine: Array) -> Array:
    """The sum over all ranks, the same bits on each. Collective.

    Each element is summed in an order that depends on the number of ranks only: sums of Hermitian
    arrays are Hermitian to the last bit. (With another number of ranks the parts differ, so that
    the sum may be rounded differently.)

    Small arrays are summed up a tree. Of large ones each rank sums a slice, and the slices are
    gathered: a rank sends and receives two arrays instead of up to ``2 log2(ranks)``. Measured on 2
    ranks of one node: 0.42 of the tree's time for 0.8 MB, 0.61 for 32 MB. Memory: one array besides
    `mine`, and a slice.
    """
    if comm.size == 1 or mine.nbytes < SLICE * comm.size:
        return tree_reduce(comm, range(comm.size), mine, _add)
    size, me = comm.size, comm.rank
    flat = np.ascontiguousarray(mine).reshape(-1)
    edges = [flat.size * i // size for i in range(size + 1)]
    slices = [slice(a, b) for a, b in itertools.pairwise(edges)]
    longest = -(-flat.size // size)
    room = np.empty(longest * size, flat.dtype)  # first for all ranks' copies of one slice
    for ahead in range(size):
        to, source = (me + ahead) % size, (me - ahead) % size
        place = room[source * longest :][: edges[me + 1] - edges[me]]
        if ahead:
            comm.Sendrecv(flat[slices[to]], to, tags.COLLECTIVE, place, source, tags.COLLECTIVE)
        else:
            place[...] = flat[slices[me]]
    total = room[: edges[me + 1] - edges[me]].copy()
    for source in range(1, size):
        total += room[source * longest :][: total.size]
    room[slices[me]] = total
    for ahead in range(1, size):
        to, source = (me + ahead) % size, (me - ahead) % size
        comm.Sendrecv(total, to, tags.COLLECTIVE, room[slices[source]], source, tags.COLLECTIVE)
    return room[: flat.size].reshape(mine.shape)


def _add(a: Array, b: Array) -> Array:
    return np.add(a, b, out=b)
