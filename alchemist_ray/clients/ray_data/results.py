"""From a handle to a Ray Dataset: read tasks fetch its rows, or this process does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import Block, BlockAccessor, BlockMetadata

from alchemist_ray.arguments import positive_int
from alchemist_ray.clients.worker_fetch import fetch
from alchemist_ray.errors import DtypeError, ShapeError
from alchemist_ray.gang.matrix_ref import MatrixRef
from mpi_workers.matrix import copy_kernels

BLOCK = 32 << 20  # 32 MiB: default size of a block
TENSOR = "data"  # name of the column, as in ray.data.from_numpy


class _MatrixDatasource(Datasource):
    """A datasource that reads a matrix in bands of rows."""

    def __init__(self, handle: MatrixRef, columns: Sequence[str] | None) -> None:
        super().__init__()
        self._handle = handle
        self._columns = columns

    def get_name(self) -> str:
        return "Alchemist"

    def estimate_inmemory_data_size(self) -> int:
        return self._handle.nbytes

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        row_bytes = self._handle.nbytes // max(1, self._handle.stored_shape[0])
        return [
            ReadTask(
                band,
                BlockMetadata(
                    num_rows=band.stop - band.start,
                    size_bytes=(band.stop - band.start) * row_bytes,
                    exec_stats=None,
                    input_files=None,
                ),
            )
            for band in _bands(self._handle, self._columns, parallelism)
        ]


@dataclass(frozen=True, slots=True)
class _BandReader:
    handle: MatrixRef
    start: int
    stop: int
    columns: Sequence[str] | None

    def __call__(self) -> Iterable[Block]:
        yield self.block()

    def block(self) -> Block:
        rows = fetch(self.handle, slice(self.start, self.stop))
        if self.columns is None:
            return BlockAccessor.batch_to_block({TENSOR: rows})
        rows = rows.reshape(len(rows), len(self.columns))
        by_column = np.empty_like(rows, order="F")
        copy_kernels.copy(by_column, rows)
        return BlockAccessor.batch_to_block(
            {name: by_column[:, i] for i, name in enumerate(self.columns)}
        )


def _bands(handle: MatrixRef, columns: Sequence[str] | None, count: int) -> list[_BandReader]:
    """The matrix in at most `count` bands of rows, and at least one."""
    m = handle.stored_shape[0]
    count = max(1, min(count, m))
    cuts = [m * k // count for k in range(count + 1)]
    return [_BandReader(handle, start, stop, columns) for start, stop in pairwise(cuts)]


def to_dataset(
    handle: MatrixRef,
    columns: Sequence[str] | None = None,
    *,
    override_num_blocks: int | None = None,
    lazy: bool = True,
) -> Any:
    """A Ray Dataset of a matrix, its rows in order.

    Parameters
    ----------
    handle : MatrixRef
        Of a matrix of shape (m, n).
    columns : sequence of str, optional
        Names of the n columns. Default: the handle's, if they differ from each other; else one
        column ``"data"`` with a row of the matrix in each row, as `ray.data.from_numpy` makes it.
    override_num_blocks : int, optional
        As in Ray's ``read_...`` functions. Default: blocks of 32 MiB.
    lazy : bool
        True: nothing moves until the Dataset is consumed; then the Ray task that reads a block
        fetches it from the ranks directly. The handle is pickled, so the matrix stays until
        `Handle.free` or the end of its gang. False: this process fetches the matrix now and puts
        its blocks into the object store, four times as fast for 128 MB; needs memory for the
        matrix in this process, and no free CPU. The matrix may be freed afterwards.

    Returns
    -------
    ray.data.Dataset
        Of ``lazy=False``: a `ray.data.dataset.MaterializedDataset`.

    Raises
    ------
    ShapeError
        If `columns` does not have n different names.
    DtypeError
        For a complex matrix: Arrow has no complex type.

    Notes
    -----
    A transformed Dataset keeps the order of rows only with
    ``DataContext.execution_options.preserve_order``.
    """
    _, n = handle.stored_shape
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Iterable)):
        raise ShapeError(f"columns={columns!r}: it must be a list of names, one for each column")
    if override_num_blocks is not None:
        positive_int("override_num_blocks", override_num_blocks)
    names = None if columns is None else [str(name) for name in columns]
    if names is None and handle.columns and len(set(handle.columns)) == n:
        names = list(handle.columns)
    if names is not None and (len(names) != n or len(set(names)) != n):
        raise ShapeError(
            f"columns={columns!r}: they must be {n} different names, one for each column"
        )
    if handle.dtype.kind == "c":
        raise DtypeError(
            f"{handle.name} has dtype {handle.dtype}, and Arrow has no complex numbers: convert "
            "its real and imaginary parts separately"
        )
    blocks = override_num_blocks or max(1, math.ceil(handle.nbytes / BLOCK))
    if not lazy:
        return ray.data.from_blocks([band.block() for band in _bands(handle, names, blocks)])
    return ray.data.read_datasource(
        _MatrixDatasource(handle.keep(), names), override_num_blocks=blocks
    )
