"""Sends a source to a gang: looked at, allocated, moved, sealed. Nothing partial stays behind.

A gang with `max_failures` keeps what it needs to send a matrix again, without this process:
references to blocks in the object store, which pin them, and copies of arrays.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from typing import Any

import numpy as np

from alchemist_ray.arguments import checked_matrix_name
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import columns_to_wire
from alchemist_ray.attached.progress import say, times_table, transfer_bar
from alchemist_ray.dtypes import checked_missing
from alchemist_ray.errors import (
    AlchemistError,
    GroupFailedError,
    GroupRecoveredError,
    LayoutError,
    MatrixError,
)
from alchemist_ray.measures import events
from alchemist_ray.transfer.gangs import KeptMatrix
from alchemist_ray.transfer.sources import (
    IteratorSource,
    KeptSource,
    MatrixSource,
    SendAgainError,
    source_for,
)
from alchemist_ray.transfer.watching import RECOVERED, counted, watched
from mpi_workers.columns.missing import ERROR
from mpi_workers.data.description import TransferTarget
from mpi_workers.matrix.dtypes import is_time, stored_dtype
from mpi_workers.matrix.layout import Distribution, check_layout, copies
from mpi_workers.matrix.sparse_rows import of_layout

ALWAYS_KEPT = 1 << 20  # 1 MiB: smaller arrays are kept without being asked for

log = logging.getLogger(__name__)


def keep_source(
    connection: GangConnection, matrix: int, source: MatrixSource, *, durable: bool
) -> None:
    """Give a gang that recovers the data of a matrix that is sent to it.

    Raises
    ------
    MatrixError
        If `durable` is asked for, and the gang does not recover or the data cannot be kept.
    """
    if not connection.address.recovers:
        if durable:
            raise MatrixError(
                "durable=True needs a gang that recovers: AlchemistSession(..., max_failures=3)"
            )
        return
    data = source.kept() if isinstance(source, KeptSource) else None
    if is_time(source.dtype) and not isinstance(data, KeptMatrix):
        # It is made again as the counts that it is on the ranks.
        data = data.astype(source.dtype).view(np.int64) if isinstance(data, np.ndarray) else None
    if isinstance(data, np.ndarray) and not durable and data.nbytes > ALWAYS_KEPT:
        data = None
    elif data is not None and connection.transport.manager is not None:
        connection.transport.keep_source(connection.address.epoch, matrix, data)
        return
    if durable:
        raise MatrixError(
            "durable=True is for arrays of a process in the gang's Ray cluster, and for blocks in "
            "its object store: save other data to a file that all nodes see and load_matrix it, "
            "or start the session with checkpoint_folder=... and call als.checkpoint()"
        )
    log.warning(
        "matrix %d of gang %s cannot be rebuilt after a failure, because it is sent from memory of "
        "this process: send_matrix(..., durable=True) keeps a copy in the object store",
        matrix, connection.address.gang,
    )  # fmt: skip


BASE_LAYOUT = "VC_STAR"  # a layout with copies is sent as this one, and copied by the ranks


def checked_layout(layout: str) -> str:
    """The layout, if there is one of that name. Raises `LayoutError`."""
    try:
        return check_layout(layout)
    except TypeError:  # it cannot be hashed
        raise LayoutError(f"layout={layout!r}: it must be a string") from None
    except ValueError as error:
        raise LayoutError(str(error)) from None


def send(
    connection: GangConnection,
    data: Any,
    *,
    layout: str = BASE_LAYOUT,
    name: str | None = None,
    dtype: Any = None,
    missing: Any = ERROR,
    durable: bool = False,
    print_times: bool = False,
) -> Any:
    """Send data to a gang; the handle of the matrix. See `AlchemistSession.send_matrix`."""
    checked_layout(layout)
    checked_matrix_name(name)
    fill = checked_missing(missing)
    source: MatrixSource | None = None
    again = False
    while True:
        try:
            if source is None:
                source = source_for(data, dtype, fill, connection)
            form = getattr(source, "form", None)  # of a sparse matrix
            its = form.layout if form else layout
            return _send(connection, source, its, name, durable=durable, print_times=print_times)
        except GroupRecoveredError:
            if isinstance(data, IteratorSource):  # it cannot be read twice
                raise
        except SendAgainError as error:
            if again:
                raise
            again = True
            log.warning("%s. The matrix is sent once more", str(error).partition(";")[0])
        if not isinstance(source, KeptSource):  # else its data may have been a stream, read once
            source = None


def _send(
    connection: GangConnection,
    source: MatrixSource,
    layout: str,
    name: str | None,
    *,
    durable: bool,
    print_times: bool,
) -> Any:
    if (sparse := of_layout(layout)) is not None and source.shape != (sparse.nbytes, 1):
        raise LayoutError(f"layout={layout[:40]!r} is for sparse matrices of SciPy only")
    epoch = connection.address.epoch
    begun = events.now()
    sent_as = layout if copies(layout, connection.grid) == 1 else BASE_LAYOUT
    token = uuid.uuid4().hex  # of both commands: either can be repeated after a lost answer
    columns = columns_to_wire(source.columns, str(source.dtype) if is_time(source.dtype) else "")
    created = connection.request(
        {
            "op": "create",
            "send": token,
            "shape": list(getattr(source, "array_shape", source.shape)),
            "dtype": stored_dtype(source.dtype).name,
            "layout": sent_as,
            "source": source.provenance(),
            **({"becomes": layout} if sent_as != layout else {}),
            **({"columns": columns} if columns else {}),
        }
    )
    # A process that connects again keeps the matrices that it has leases of.
    lease = connection.leases.lease(created["matrix"])
    distribution = Distribution(sent_as, source.shape, connection.grid)
    target = TransferTarget(created["matrix"], distribution, source.dtype)
    nbytes = source.shape[0] * source.shape[1] * source.dtype.itemsize
    try:
        keep_source(connection, target.matrix, source, durable=durable)
        with transfer_bar("send", nbytes, connection.options.progress) as progress:
            times = watched(connection, lambda: source.send(connection, target, progress))
        seal = {"op": "seal", "send": token, "matrix": target.matrix, "name": name}
        record = connection.request(seal)
    except BaseException as error:
        if isinstance(error, AlchemistError) and connection.address.epoch != epoch:
            raise GroupRecoveredError(RECOVERED) from error  # what was sent is lost
        if not isinstance(error, GroupFailedError):
            with contextlib.suppress(AlchemistError):  # the gang is gone, and the matrix with it
                connection.request({"op": "free", "matrices": [target.matrix]})
        raise
    counted("send", times, begun)
    if print_times:
        say(times_table(times, sending=True))
    made = connection.handle(record)
    del lease
    return made
