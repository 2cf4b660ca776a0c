"""Copies a matrix from any layout to any other, over MPI.

Each rank computes which of its elements every other rank needs: the indices of both sides are
ranges, so their intersection is a slice of the local block, and no index is sent. Ranks exchange
in pairs at a growing distance, so that no rank is the first target of all others, in messages of
`MESSAGE` bytes, far below MPI's limit of 2 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, LocalIndices, intersect, positions
from mpi_workers.matrix.regions import stream
from mpi_workers.rank.communicator import GangComm

MESSAGE = 16 << 20  # 16 MiB
TAG = 7


def _sender(distribution: Distribution, group: tuple[int, ...], receiver: int) -> int:
    """The rank of a group of copies that serves `receiver`: itself if possible."""
    return receiver if receiver in group else group[receiver % len(group)]


def _share(distribution: Distribution, other: Distribution, giver: int, taker: int) -> LocalIndices:
    """The elements that `giver` (of `distribution`) sends to `taker` (of `other`)."""
    mine, theirs = distribution.local_indices(giver), other.local_indices(taker)
    rows, cols = intersect(mine.rows, theirs.rows), intersect(mine.cols, theirs.cols)
    return LocalIndices(rows, cols) if rows and cols else LocalIndices(range(0), range(0))


def _cuts(matrix: DistMatrix, share: LocalIndices) -> Iterator[NDArray[Any]]:
    view = matrix.local[positions(matrix.rows, share.rows), positions(matrix.cols, share.cols)]
    for rows, cols in stream(view.shape, view.itemsize, MESSAGE):
        yield view[rows, cols]


def redistribute(source: DistMatrix, result: DistMatrix, comm: GangComm) -> None:
    """Copy `source` into `result`, which has the same shape and dtype and any layout.

    Collective over the gang. Cost: each element crosses the network at most once per copy in the
    result; two messages of staging memory.

    Raises
    ------
    ValueError
        If shapes or dtypes differ.
    """
    if source.shape != result.shape or source.dtype != result.dtype:
        raise ValueError(f"cannot redistribute {source!r} into {result!r}")
    rank, size = source.rank, source.distribution.size
    group_of = {member: group for group in source.distribution.owners() for member in group}
    for distance in range(size):
        taker, giver = (rank + distance) % size, (rank - distance) % size
        outgoing = incoming = LocalIndices(range(0), range(0))
        if rank in group_of and _sender(source.distribution, group_of[rank], taker) == rank:
            outgoing = _share(source.distribution, result.distribution, rank, taker)
        if giver in group_of and _sender(source.distribution, group_of[giver], rank) == giver:
            incoming = _share(source.distribution, result.distribution, giver, rank)
        if distance == 0:
            if outgoing.size:
                copy_kernels.copy(
                    result.local[
                        positions(result.rows, outgoing.rows),
                        positions(result.cols, outgoing.cols),
                    ],
                    source.local[
                        positions(source.rows, outgoing.rows),
                        positions(source.cols, outgoing.cols),
                    ],
                )
            continue
        _pairwise(source, result, comm, (taker, outgoing), (giver, incoming))


def _pairwise(
    source: DistMatrix,
    result: DistMatrix,
    comm: GangComm,
    to: tuple[int, LocalIndices],
    frm: tuple[int, LocalIndices],
) -> None:
    """Send a share to one rank and receive one from another, message by message."""
    taker, outgoing = to
    giver, incoming = frm
    for cut, place in zip_longest(_cuts(source, outgoing), _cuts(result, incoming)):
        if cut is not None and place is not None:
            packed = np.asfortranarray(cut)
            buffer = np.empty(place.shape, place.dtype, order="F")
            comm.Sendrecv(_raw(packed), taker, TAG, _raw(buffer), giver, TAG)
            place[...] = buffer
        elif cut is not None:
            comm.Send(_raw(np.asfortranarray(cut)), taker, TAG)
        elif place is not None:
            buffer = np.empty(place.shape, place.dtype, order="F")
            comm.Recv(_raw(buffer), giver, TAG)
            place[...] = buffer


def _raw(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1, order="F").view(np.uint8)
