"""Copies a matrix from any layout to any other, over MPI.

Each rank computes which ranks need its elements (`partners.py`): the indices of both sides are
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
from mpi_workers.matrix.layout import NOTHING, Distribution, LocalIndices, positions
from mpi_workers.matrix.partners import givers, takers
from mpi_workers.matrix.regions import stream
from mpi_workers.rank.communicator import GangComm

MESSAGE = 16 << 20  # 16 MiB
TAG = 7


def exchanges(
    source: Distribution, result: Distribution, rank: int
) -> Iterator[tuple[tuple[int, LocalIndices], tuple[int, LocalIndices]]]:
    """The elements that a rank sends, with their taker, and those that it receives, with the giver.

    In the order of the distances; those at which this rank has nothing to do are left out.
    """
    size = source.size
    to, frm = takers(source, result, rank), givers(source, result, rank)
    outgoing = {(taker - rank) % size: part for taker, part in zip(*to, strict=True)}
    incoming = {(rank - giver) % size: part for giver, part in zip(*frm, strict=True)}
    for distance in sorted({*outgoing, *incoming}):
        taker, giver = (rank + distance) % size, (rank - distance) % size
        yield (
            (taker, outgoing.get(distance, NOTHING)),
            (giver, incoming.get(distance, NOTHING)),
        )


def _cuts(matrix: DistMatrix, share: LocalIndices) -> Iterator[NDArray[Any]]:
    view = _local(matrix, share)
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
    for to, frm in exchanges(source.distribution, result.distribution, source.rank):
        if to[0] == source.rank:
            copy_kernels.copy(_local(result, to[1]), _local(source, to[1]))
        else:
            _pairwise(source, result, comm, to, frm)


def _local(matrix: DistMatrix, part: LocalIndices) -> NDArray[Any]:
    return matrix.local[positions(matrix.rows, part.rows), positions(matrix.cols, part.cols)]


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
