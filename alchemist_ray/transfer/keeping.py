"""Keeps the data of a matrix that is sent, so that it can be sent again after a failure.

The GroupManager keeps them: blocks in the object store as references, which pins the objects, and
arrays as objects of its own. It sends them again itself, without this process.
"""

from __future__ import annotations

import logging

import numpy as np

from alchemist_ray.errors import MatrixError
from alchemist_ray.gang.connection import GangConnection
from alchemist_ray.transfer.sources import KeptSource, MatrixSource

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
    if isinstance(data, np.ndarray) and not durable and data.nbytes > ALWAYS_KEPT:
        data = None
    elif data is not None and connection.keep_source(matrix, data):
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
