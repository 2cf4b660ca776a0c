"""A block of elements as the payload of one frame: cut, packed and sent; received and placed.

Both ends work piece by piece (`regions.stream`), through a buffer that stays in
cache, so that no temporary of the whole is made. A piece that lies in memory as
it travels is sent from, or received into, its place. Where the two ends differ
in order, elements travel in the sender's and the receiver, which has less to
do, transposes.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.regions import CHUNK, stream
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, ConnectionLost, Kind

Array = NDArray[Any]
Order = Literal["C", "F"]

SEND_BYTES = 2 * CHUNK  # given to the kernel in one go: with less, it wakes the receiver too often


def is_tiled(array: Array) -> bool:
    """Which way of cutting suits an array: tiles where its rows are contiguous, else columns."""
    return abs(array.strides[0]) > abs(array.strides[1])


def send_stream(
    connection: Connection,
    kind: Kind,
    body: Body,
    array: Array,
    dtype: np.dtype[Any],
    *,
    tiled: bool,
    order: Order,
    heed: bool = False,
) -> tuple[float, float]:
    """Send an array of any strides as one frame.

    Parameters
    ----------
    connection : Connection
        With the socket's time limit set: it counts for a piece.
    kind, body
        Of the frame.
    array : ndarray, shape (m, n)
        The elements.
    dtype : dtype
        What they travel as.
    tiled, order : bool, {"C", "F"}
        How the payload is cut, and the order of elements in a piece; the receiver must know.
    heed : bool
        Whether to break off when the other end says something: it can only be a refusal.

    Returns
    -------
    (float, float)
        Seconds spent packing and sending.

    Raises
    ------
    ConnectionLost
        If the other end is gone, takes nothing for too long, or was heeded.
    """
    connection.begin(kind, body, array.size * dtype.itemsize)
    packing = sending = 0.0
    staging = np.empty(min(array.size, SEND_BYTES // dtype.itemsize), dtype)
    filled = 0
    clock = time.perf_counter()

    def send(packed: Array) -> None:
        nonlocal clock, packing, sending
        packed_at = time.perf_counter()
        if heed and connection.has_news():
            raise ConnectionLost("the other end does not want it")
        connection.write(packed.view(np.uint8).data)
        now = time.perf_counter()
        packing += packed_at - clock
        sending += now - packed_at
        clock = now

    # Columns follow each other whatever the size of a piece: take what one send takes.
    chunk = CHUNK if tiled else SEND_BYTES
    for rows, cols in stream(array.shape, dtype.itemsize, chunk, tiled=tiled):
        source = array[rows, cols]
        in_place = source.flags[order] and source.dtype == dtype
        if filled and (in_place or filled + source.size > staging.size):
            send(staging[:filled])
            filled = 0
        if in_place:
            send(source.reshape(-1, order=order))
            continue
        packed = staging[filled : filled + source.size]
        copy_kernels.copy(packed.reshape(source.shape, order=order), source)
        filled += source.size
    if filled:
        send(staging[:filled])
    return packing, sending


def receive_stream(
    connection: Connection, array: Array, dtype: np.dtype[Any], *, tiled: bool, order: Order
) -> tuple[float, float]:
    """Receive the payload that `send_stream` sends into an array of any strides.

    Returns
    -------
    (float, float)
        Seconds spent receiving and placing.

    Raises
    ------
    ConnectionLost, TimeoutError
        If the other end is gone, or gives nothing within the socket's time limit.
    """
    receiving = placing = 0.0
    staging = np.empty(0, dtype)
    clock = time.perf_counter()
    for rows, cols in stream(array.shape, dtype.itemsize, tiled=tiled):
        target = array[rows, cols]
        in_place = target.flags[order] and target.dtype == dtype
        if in_place:
            raw = target.reshape(-1, order=order)
        else:
            if staging.size < target.size:
                staging = np.empty(target.size, dtype)
            raw = staging[: target.size]
        connection.read_into(raw.view(np.uint8).data)
        arrived = time.perf_counter()
        if not in_place:
            copy_kernels.copy(target, raw.reshape(target.shape, order=order))
        now = time.perf_counter()
        receiving += arrived - clock
        placing += now - arrived
        clock = now
    return receiving, placing
