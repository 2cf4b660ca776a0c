"""Handle: names a matrix that lives on a gang. Cheap to copy, pickle and pass around."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alchemist_ray.arguments import named_after
from alchemist_ray.arrays import saving
from alchemist_ray.arrays.operators import ArrayOperators
from alchemist_ray.arrays.sparse import SparseHandle
from alchemist_ray.arrays.times import TimeHandle
from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.leases import MatrixLease, ResultLease
from alchemist_ray.attached.matrix_ref import time_from_wire
from alchemist_ray.attached.registry import gang_of, lease_of
from alchemist_ray.errors import SessionError
from alchemist_ray.transfer.sending import checked_layout
from mpi_workers.matrix.sparse_rows import of_layout
from mpi_workers.wire.frames import Body


@named_after
class Handle(ArrayOperators):
    """Names a matrix on a gang and is an array; usable in any process of the Ray cluster.

    Attributes
    ----------
    id : int
        Of the matrix within its gang.
    name : str
        As given to `send_matrix`, or ``matrix<id>``.
    shape : tuple of int
        NumPy's, with 0 to 8 axes.
    dtype : numpy.dtype
        float16 to float64, complex64, complex128, int8 to int64, uint8 to uint64 or bool.
    layout : str
        Of Elemental's 14 or in blocks, e.g. ``"VC_STAR"``, ``"BLOCK_CYCLIC:64"``.
    session, gang : str
        Ids of the session and of its gang.
    epoch : int
        The gang's incarnation; a handle of an older one is stale.
    columns : tuple of str
        Names of the columns, if the data that was sent or loaded had names; else empty. `save` to
        CSV and Parquet, `to_dataset` and `to_spark` give them back. They stay with a copy
        (`copy`, `astype`, `to_layout`), with selected rows and columns, with columns that are
        sorted (``np.sort(A, axis=0)``) and with matrices that are joined. Other results have none.

    Notes
    -----
    ``==`` compares elements, on the gang. Two handles name the same matrix if their `id`, `gang`
    and `epoch` are equal.
    """

    __slots__ = ()

    @classmethod
    def from_record(
        cls, record: Body, address: GangAddress, lease: MatrixLease | ResultLease | None = None
    ) -> Any:
        """The handle for a matrix as the dispatcher describes it; of a sparse one its own kind."""
        made = super().from_record(record, address, lease)
        if time := time_from_wire(record.get("columns", ())):
            return TimeHandle(made, np.dtype(time))
        return made if of_layout(made.layout) is None else SparseHandle(made)

    def to_layout(self, layout: str) -> Handle:
        """A new matrix with the same elements in another layout, made by the ranks over MPI."""
        connection = gang_of(self)
        connection.check(self)
        made: Handle = connection.handle(
            connection.request(
                {"op": "redistribute", "source": self.id, "layout": checked_layout(layout)}
            )
        )
        return made

    def free(self) -> None:
        """Free the matrix; all its handles become invalid. A second call does nothing."""
        gang_of(self).free(self)

    # --- to files and other systems ---

    def save(
        self,
        path: str | os.PathLike[str],
        dataset: str | None = None,
        *,
        columns: Sequence[str] | None = None,
        header: bool | None = None,
        delimiter: str = ",",
        append: bool = False,
    ) -> None:
        """Write the matrix to a file that all nodes see; every rank writes its own part.

        Parameters
        ----------
        path : path_like
            Its suffix selects the format, as in `AlchemistSession.load_matrix`. Zarr is a folder,
            and so is Parquet, with one file per rank. Or a URL (``s3://...``) that ends in
            ``.zarr``, where nothing exists.
        dataset : str, optional
            Name in an HDF5 file. Default: ``"data"``.
        columns : sequence of str, optional
            Names of the columns, for Parquet and CSV. Default: the handle's.
        header : bool, optional
            Whether the first line of a CSV file has the names. Default: if there are any.
        delimiter : str
            Separator of the fields of a CSV file.
        append : bool
            Keep the other data sets of an existing HDF5 file.

        Raises
        ------
        FileError
            If it cannot be written; with the `rank` that found it. The old file is unchanged,
            and nothing else is left.
        DtypeError
            For complex numbers in Parquet and CSV.
        BadArgumentError
            If the format has no such option.

        Notes
        -----
        The file appears, or replaces the old one, in one step when all of it is on the disk. (At
        a URL, where nothing can be replaced in one step, the metadata is written last.) Every
        format keeps dtype and values bit for bit, except CSV, which keeps neither the dtype nor
        the payload of a NaN.
        """
        saving.save(
            self, path, columns=columns, dataset=dataset, header=header, delimiter=delimiter,
            append=append,
        )  # fmt: skip

    def to_dask(self, chunks: Any = "auto") -> Any:
        """A lazy dask array of the matrix; see `alchemist_ray.clients.dask.to_dask`."""
        return _client("dask").to_dask(self, chunks)

    def to_dataset(
        self,
        columns: Sequence[str] | None = None,
        *,
        override_num_blocks: int | None = None,
        lazy: bool = True,
    ) -> Any:
        """A Ray Dataset of the matrix; see `alchemist_ray.clients.ray_data.to_dataset`."""
        return _client("ray_data").to_dataset(
            self, columns, override_num_blocks=override_num_blocks, lazy=lazy
        )

    def to_arrow(self, dtype: Any = None) -> Any:
        """The matrix, or a vector, as a `pyarrow.Table`; see `alchemist_ray.clients.arrow`."""
        return _client("arrow").to_arrow(self, dtype)

    def to_polars(self, dtype: Any = None) -> Any:
        """The matrix, or a vector, as a `polars.DataFrame`, with the columns of `to_arrow`."""
        return _client("arrow").to_polars(self, dtype)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Arrow's protocol, of `to_arrow`: ``polars.from_arrow(A)``, a query of DuckDB, ..."""
        stream: Any = self.to_arrow().__arrow_c_stream__(requested_schema)
        return stream

    def to_spark(
        self, spark: Any = None, kind: str = "DataFrame", *, block: tuple[int, int] | None = None
    ) -> Any:
        """A lazy DataFrame or MLlib matrix; see `alchemist_ray.clients.spark.to_spark`."""
        return _client("spark").to_spark(self, spark, kind, block=block)

    # --- Python's protocols ---

    def __copy__(self) -> Handle:  # as of NumPy's arrays: assignments to elements change one only
        copied: Handle = self.copy()
        return copied

    def __deepcopy__(self, memo: Any) -> Handle:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        self.keep()  # when the other process drops its handle cannot be known here
        return _received, (
            self.id, self.name, self.shape, self.dtype, self.layout, self.session, self.gang,
            self.epoch, self.columns, isinstance(self._lease, ResultLease),
        )  # fmt: skip


def _client(system: str) -> Any:
    """The client of another system. Raises `SessionError` in a thin client."""
    name = f"alchemist_ray.clients.{system}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in (name, "ray"):
            raise
        raise SessionError(
            "conversion to Dask, Ray Data and Spark needs a process in the Ray cluster, and this "
            "client has no Ray: fetch() the matrix, or run the program in the cluster, where "
            "alchemist-on-ray is installed"
        ) from None


def _received(*fields: Any) -> Handle:
    """A handle that was pickled; of a `.remote` result an attached process takes a lease."""
    *own, is_result = fields
    handle = Handle(*own)
    lease = lease_of(handle) if is_result else None
    return handle if lease is None else replace(handle, _lease=lease)
