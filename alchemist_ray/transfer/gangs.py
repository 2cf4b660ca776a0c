"""A matrix of another gang as a source: its elements go from ranks to ranks.

Agents copy them (`gang_copies`); this process asks for it and watches both gangs. Needs no Ray: of
a client of a gateway, the gateway asks the agents.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alchemist_ray.attached.connection import NODE_FAILED, GangConnection
from alchemist_ray.attached.matrix_ref import MatrixRef, columns_from_wire, ref_of, time_from_wire
from alchemist_ray.attached.registry import gang_of
from alchemist_ray.dtypes import chosen_dtype
from alchemist_ray.errors import (
    AlchemistError,
    DtypeError,
    GroupFailedError,
    GroupRecoveredError,
    MatrixError,
    MatrixNotFoundError,
    SessionError,
    TransferError,
    from_failure,
)
from alchemist_ray.transfer.sources import SendAgainError
from alchemist_ray.transfer.watching import FAILURE_NEWS_S, RECOVERED, WATCH_POLL_S
from mpi_workers.columns.missing import Missing
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import Progress
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import Distribution, Shape, stored_shape
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.wire.frames import Body, WireError

COPIES = "alchemist_ray.transfer.gang_copies"  # where there is Ray


@dataclass(frozen=True)
class KeptMatrix:
    """A matrix of another gang, from which one is made again: only in the version that was sent.

    It has no lease: the matrix is freed as if nothing had been sent.
    """

    ref: MatrixRef
    version: int
    dtype: np.dtype[Any]  # of the matrix that was made of it


def inspect(data: Any, dtype: Any, missing: Missing, connection: GangConnection) -> GangSource:
    """A source for a handle, or for what was kept of one.

    Raises
    ------
    MatrixError
        If it is of the gang that it is sent to, or was changed since it was kept.
    StaleHandleError, MatrixNotFoundError, AuthError, GroupFailedError
        If there is no such matrix, or it is not this process's to read.
    """
    kept = isinstance(data, KeptMatrix)
    ref = data.ref if kept else ref_of(data)
    assert ref is not None
    if ref.gang == connection.address.gang:
        raise MatrixError(
            f"{ref.name} is on the ranks already: handle.to_layout() changes its layout, and "
            "handle.copy() copies it"
        )
    source = gang_of(ref)
    ident = source.check(ref).id  # computes what is only recorded
    about = source.request({"op": "describe", "matrix": ident})
    version = int(source.request({"op": "version", "matrix": ident})["version"])
    if kept and (source.address.epoch, version) != (ref.epoch, data.version):
        raise MatrixError(
            f"it was sent from {ref.name} of gang {ref.gang}, which was changed or made again "
            "since: send it again"
        )
    return GangSource(data, ref, about, data.dtype if kept else dtype, source, version)


class GangSource:
    """See the module.

    Parameters
    ----------
    data : object
        The handle, whose lease keeps the matrix.
    ref : MatrixRef
    about : dict
        As its gang describes the matrix.
    dtype : dtype, optional
    source : GangConnection
        This process's to the gang of the matrix.
    version : int
        Of the matrix.
    """

    def __init__(
        self, data: Any, ref: MatrixRef, about: Body, dtype: Any, source: GangConnection,
        version: int,
    ) -> None:  # fmt: skip
        self._data, self._ref, self._source, self._version = data, ref, source, version
        self.form = of_layout(about["layout"])
        self.array_shape: tuple[int, ...] = tuple(about["shape"])
        self.shape: Shape = stored_shape(self.array_shape)
        self._columns = about.get("columns", ())
        self.columns: Sequence[str] = columns_from_wire(self._columns)
        stored = np.dtype(about["dtype"])
        self._dtype = np.dtype(time_from_wire(self._columns) or stored)
        self.dtype = self._dtype if self.form else chosen_dtype(self._dtype, dtype)
        if self.form and dtype not in (None, self.form.dtype, self.dtype):
            raise DtypeError(
                f"{ref.name} is sparse and has dtype {self.form.dtype}: send "
                f"{ref.name}.astype({str(dtype)!r})"
            )
        self._layout: str = about["layout"]

    def provenance(self) -> dict[str, Any]:
        """Where the matrix comes from, for the gang's record."""
        its = {"gang": self._ref.gang, "matrix": self._ref.name}
        return {"from": "gang", **its, "dtype": str(self.dtype), "shape": list(self.array_shape)}

    def kept(self) -> Any:
        """The matrix and its version."""
        ref = self._ref
        facts = (ref.name, ref.shape, ref.dtype, ref.layout, ref.session, ref.gang)
        same = MatrixRef(ref.id, *facts, self._source.address.epoch, ref.columns)
        return KeptMatrix(same, self._version, self.dtype)

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Have every element copied from the ranks of the other gang to those of this one.

        Raises
        ------
        SendAgainError
            If the matrix was changed, or its ranks were replaced, meanwhile.
        MatrixNotFoundError
            If it was freed.
        TransferError
            If its gang was lost.
        """
        tries = 0

        def transfer(_: MatrixRef) -> dict[int, NodeTimes]:
            nonlocal tries
            tries += 1
            if tries > 1:
                raise SendAgainError(
                    f"{self._ref.name} was changed while it was sent; send it between the calls "
                    "that change it, or send a copy (A.copy())"
                )
            return self._copied(connection, target, progress)

        return self._source.read(self._ref, transfer)

    def _copied(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        source = self._source
        epochs = source.address.epoch, connection.address.epoch
        distribution = Distribution(self._layout, self.shape, source.grid)
        read = TransferTarget(self._ref.id, distribution, self._dtype)
        gateways = [c.transport for c in (source, connection) if c.transport.token]
        try:
            if not gateways:
                copy_matrix = importlib.import_module(COPIES).copy_matrix
                found = copy_matrix(source, read, connection, target, self._ref.name, progress)
            elif len(gateways) == 1 or source.address.addresses != connection.address.addresses:
                raise TransferError(
                    f"gangs {source.address.gang} and {connection.address.gang} are reached in "
                    "different ways, so their ranks are not: connect to both through one gateway, "
                    "or to both inside the Ray cluster",
                    cause=NODE_FAILED,
                )
            else:
                found = connection.transport.copy_matrix(
                    source.address.gang, read, target, self._ref.name
                )
                if progress is not None:
                    progress(sum(times.nbytes for times in found.values()))
        except (AlchemistError, Failure, WireError, OSError) as error:
            self._raise_cause(error, connection, *epochs)
            raise self._told(error, connection) from None
        times: dict[int, NodeTimes] = found
        return times

    def _told(self, error: Exception, connection: GangConnection) -> Exception:
        """An error of the copy; of one that broke, with the names of both gangs."""
        known = from_failure(error) if isinstance(error, Failure) else error
        if not isinstance(known, WireError | OSError) and type(known) is not TransferError:
            return known
        source, target = self._source.address.gang, connection.address.gang
        words = f"{self._ref.name} was not sent from gang {source} to gang {target}: {known}"
        return TransferError(words, **getattr(known, "facts", {}))

    def _raise_cause(
        self, error: Exception, connection: GangConnection, epoch: int, target_epoch: int
    ) -> None:
        """Raise what broke the copy, if it is known soon: the loss of either gang, or a free."""
        name, gang = self._ref.name, self._source.address.gang
        answer = isinstance(error, AlchemistError) and error.facts.get("cause") == NODE_FAILED
        answer = answer or not isinstance(
            error, Failure | WireError | OSError | TransferError | GroupFailedError
        )
        deadline = time.monotonic() + (0.0 if answer else FAILURE_NEWS_S)
        while True:
            try:
                self._source.ping(wait=True)
                self._source.request({"op": "describe", "matrix": self._ref.id})
            except MatrixNotFoundError:
                raise MatrixNotFoundError(
                    f"{name} of gang {gang} was freed while it was sent: keep its handle until "
                    "send_matrix returns"
                ) from None
            except (GroupFailedError, SessionError) as lost:
                raise TransferError(
                    f"{name} cannot be sent: gang {gang}, which has it, was lost or has ended "
                    f"({lost}). Gang {connection.address.gang} is unharmed, and has nothing of it",
                    cause=NODE_FAILED,
                ) from lost
            if self._source.address.epoch != epoch:
                raise SendAgainError(
                    f"gang {gang} has other ranks now, and {name} was being read from those before;"
                    " send it again"
                ) from error
            connection.ping(wait=True)
            if connection.address.epoch != target_epoch:
                raise GroupRecoveredError(RECOVERED) from error
            if time.monotonic() >= deadline:
                return
            time.sleep(WATCH_POLL_S)
