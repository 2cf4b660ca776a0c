"""MatrixRef: the facts that name a matrix on a gang."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from alchemist_ray.gang.address import GangAddress
from alchemist_ray.gang.leases import MatrixLease, ResultLease
from mpi_workers.wire.frames import Body


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class MatrixRef:
    """Names a matrix on a gang. `alchemist_ray.Handle` adds what can be done with it.

    Attributes
    ----------
    id : int
        Number of the matrix on its gang.
    name : str
    shape : (int, int)
    dtype : numpy.dtype
    layout : str
    session, gang : str
        Ids of the session and of its gang.
    epoch : int
        The incarnation of the gang that holds the matrix.
    """

    id: int
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: str
    session: str
    gang: str
    epoch: int
    _lease: MatrixLease | ResultLease | None = field(default=None)

    @classmethod
    def from_record(
        cls, record: Body, address: GangAddress, lease: MatrixLease | ResultLease | None = None
    ) -> Self:
        """The reference for a matrix as the dispatcher describes it (`runtime.commands`)."""
        m, n = record["shape"]
        return cls(
            id=record["matrix"],
            name=record["name"],
            shape=(m, n),
            dtype=np.dtype(record["dtype"]),
            layout=record["layout"],
            session=address.session,
            gang=address.gang,
            epoch=address.epoch,
            _lease=lease,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix, each element counted once."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def temporary(self) -> bool:
        """Whether the matrix is freed when no handle of this process refers to it; see `keep`."""
        return self._lease is not None and not self._lease.kept

    def keep(self) -> Self:
        """This handle; its matrix is no longer temporary.

        A matrix is freed when no handle of any attached process refers to it. After `keep`, as
        after pickling (for a Ray task, say) or with a name of its own, it stays until `free`
        or the end of its gang.
        """
        if self._lease is not None:
            self._lease.keep()
        return self
