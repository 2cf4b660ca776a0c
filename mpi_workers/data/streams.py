"""A block of elements as the payload of one frame: cut, packed and sent; received and placed.

Both ends work on pieces (`regions.stream`), through a buffer that stays in cache, so no
temporary of the whole block is needed. A piece that is contiguous in the order of the payload is
sent from, or received into, the array itself. If the two ends differ in order, elements travel in
the sender's order and the receiver, which has less to do, transposes.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.regions import CHUNK_BYTES, stream
from mpi_workers.wire.blocking import Connection
from mpi_workers.wire.frames import Body, ConnectionLost, Kind

Array = NDArray[Any]
Order = Literal["C", "F"]

SEND_BYTES = 2 * CHUNK_BYTES  # per system call: smaller ones wake the receiver too often


def is_tiled(array: Array) -> bool:
    """Whether to cut an array into tiles (its rows are contiguous) instead of columns."""
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
    stop_on_reply: bool = False,
) -> tuple[float, float]:
    """Send an array of any strides as one frame.

    Parameters
    ----------
    connection : Connection
        Its socket's timeout is set, and applies to each piece.
    kind, body
        Of the frame.
    array : ndarray, shape (m, n)
        The elements.
    dtype : dtype
        Their dtype in the payload.
    tiled, order : bool, {"C", "F"}
        How the payload is cut, and the order of elements in a piece; the receiver must use the
        same.
    stop_on_reply : bool
        Whether to stop when the other end sends something: it can only be a refusal.

    Returns
    -------
    (float, float)
        Seconds spent packing and sending.

    Raises
    ------
    ConnectionLost
        If the other end is gone, accepts no bytes in time, or has replied.
    """
    connection.begin(kind, body, array.size * dtype.itemsize)
    packing = sending = 0.0
    staging = np.empty(min(array.size, SEND_BYTES // dtype.itemsize), dtype)
    filled = 0
    clock = time.perf_counter()

    def send(packed: Array) -> None:
        nonlocal clock, packing, sending
        packed_at = time.perf_counter()
        if stop_on_reply and connection.readable():
            raise ConnectionLost("the other end refused the data")
        connection.write(packed.view(np.uint8).data)
        now = time.perf_counter()
        packing += packed_at - clock
        sending += now - packed_at
        clock = now

    # Whole columns are contiguous in the payload whatever the size of a piece.
    chunk = CHUNK_BYTES if tiled else SEND_BYTES
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
    """Receive the payload of `send_stream` into an array of any strides.

    Returns
    -------
    (float, float)
        Seconds spent receiving and placing.

    Raises
    ------
    ConnectionLost, TimeoutError
        If the other end is gone, or sends nothing within the socket's timeout.
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
