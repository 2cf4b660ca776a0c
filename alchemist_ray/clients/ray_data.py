"""Ray Data: a Dataset's blocks become a matrix, and a matrix becomes a Dataset.

A row of the matrix is a row of the Dataset: its columns in the order of the schema. A column of
tensors of two axes or more is sent alone, as an array of one axis more. Blocks are inspected, and
sent from the nodes that hold them. On the way back read tasks fetch the rows, or this process does.
Needs ``pip install 'alchemist-on-ray[data]'``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.exceptions import RayError, RayTaskError

from alchemist_ray.arguments import positive_int
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.attached.matrix_ref import ColumnName, MatrixRef
from alchemist_ray.clients.ray_tasks import fetch, wait_for_cpu
from alchemist_ray.cluster.node_jobs import SourceBlock, task_failure
from alchemist_ray.dtypes import chosen_dtype, common_dtype, refusals
from alchemist_ray.errors import DtypeError, LibraryLoadError, ShapeError, TransferError
from alchemist_ray.transfer.object_store import BlockSender, inspect_objects
from mpi_workers.columns import arrow_columns, arrow_memory, pandas_columns
from mpi_workers.columns.missing import ERROR, Missing
from mpi_workers.data.description import NodeTimes, TransferTarget
from mpi_workers.data.transfers import Progress
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.layout import MAX_AXES, ArrayShape, Shape

try:
    import pyarrow
    import ray.data
    from ray.data import Datasource, ReadTask
    from ray.data.block import Block, BlockAccessor, BlockMetadata
    from ray.data.dataset import MaterializedDataset
except ImportError as error:
    raise LibraryLoadError(
        f"Datasets need Ray Data on every node: pip install 'alchemist-on-ray[data]' ({error})"
    ) from error

__all__ = ["inspect", "to_dataset"]

BLOCK_NBYTES = 32 << 20  # 32 MiB: default size of a block
TENSOR = "data"  # name of the column, as in ray.data.from_numpy
TENSOR_TYPES = {"ray.data.arrow_tensor", "ray.data.arrow_tensor_v2", "arrow.fixed_shape_tensor"}


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block's number of rows; name, shape of an element (of numbers: ``()``), dtype by column."""

    rows: int
    columns: tuple[tuple[str, ArrayShape, str], ...]
    categories: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowsDecoder:
    """Decodes blocks of numeric and tensor columns, in Arrow or pandas format.

    Attributes
    ----------
    columns : sequence of (str, tuple of int)
        Names and shapes of the columns that each block must have; empty: any.
    missing : "error", "nan" or a number
    categories : dict
        Those that codes count, by the name of the column; the blocks' own come after them.
    """

    columns: tuple[tuple[str, ArrayShape], ...] = ()
    missing: Missing = ERROR
    categories: dict[str, list[str]] = field(default_factory=dict)

    def arrays(self, value: Any) -> list[NDArray[Any]]:
        if not len(value):  # its columns may be untyped
            return []
        names = _names(value)
        found = [self._column(value, name) for name in names]
        columns = tuple((n, a.shape[1:]) for n, a in zip(names, found, strict=True))
        if self.columns and columns != self.columns:
            raise ShapeError(
                f"it has the columns {_shown(columns)}, and the Dataset {_shown(self.columns)}"
            )
        return found

    def about(self, value: Any, arrays: list[NDArray[Any]]) -> BlockInfo:
        if not arrays:
            return BlockInfo(len(value), ())
        columns = zip(_names(value), arrays, strict=True)
        categories = {name: its for name in _names(value) if (its := _categories(value[name]))}
        return BlockInfo(
            len(arrays[0]), tuple((n, a.shape[1:], a.dtype.str) for n, a in columns), categories
        )

    def _column(self, value: Any, name: str) -> NDArray[Any]:
        """A column, shape (rows, ...). Raises `DtypeError` or `ShapeError` with its name."""
        column = value[name]
        kind = getattr(column, "type", None)  # of Arrow
        if kind is None and not isinstance(column.dtype, np.dtype):
            return self._elements(name, column)
        if kind is not None and not _is_variable(kind):
            found = self._elements(name, column)
            return found.reshape(len(found), *kind.shape) if _is_rays(kind) else found
        array = np.asarray(BlockAccessor.for_block(value).to_numpy(name))
        if array.dtype.kind == "O":
            first = array[0] if len(array) else None
            if isinstance(first, np.ndarray | list | tuple):
                shapes = {np.shape(row) for row in array}
                if len(shapes) > 1:
                    shown = " and ".join(map(str, sorted(shapes)[:2]))
                    raise ShapeError(f"column {name!r} has rows of different shapes, {shown}{FIT}")
                with contextlib.suppress(ValueError, TypeError):
                    array = np.stack([np.asarray(row) for row in array])
        if array.dtype.kind not in "biufcmM":
            kind = kind or getattr(column, "dtype", array.dtype)
            raise DtypeError(arrow_columns.not_numeric(name, kind))
        return array

    def _elements(self, name: str, column: Any) -> NDArray[Any]:
        """The elements of a column of Arrow, or of one of pandas that stores nulls apart."""
        its = self.categories.get(name, ())
        with refusals(FIT):
            if not hasattr(column, "type"):
                return pandas_columns.values_of(column, self.missing, {0: its})
            about = arrow_columns.Column(name, arrow_memory.read_schema(column.type))
            return about.values(column, self.missing, its)


FIT = ": map_batches can pad, cut or resize them to one shape"


def _names(value: Any) -> list[str]:
    return list(value.column_names) if hasattr(value, "column_names") else list(value.columns)


def _categories(column: Any) -> list[str]:
    """The categories of a column of a block; empty for a column of numbers."""
    kind = getattr(column, "type", None) or getattr(column.dtype, "pyarrow_dtype", None)
    if isinstance(kind, pyarrow.DictionaryType):
        return arrow_columns.categories_of(column)
    known = getattr(getattr(column, "dtype", None), "categories", None)
    if known is None:
        return []
    with refusals():
        its = pandas_columns.labels_of(str(column.name), known)
    return its if isinstance(its, list) else []


def _is_variable(kind: Any) -> bool:
    """Whether it is the Arrow type of tensors whose shapes may differ."""
    return isinstance(kind, pyarrow.BaseExtensionType) and "variable" in kind.extension_name


def _is_rays(kind: Any) -> bool:
    """Whether it is Ray's own Arrow type of tensors, which are stored as lists."""
    return _is_tensor(kind) and str(kind.extension_name).startswith("ray.")


def _is_tensor(kind: Any) -> bool:
    """Whether it is an Arrow type of tensors of one shape."""
    return isinstance(kind, pyarrow.BaseExtensionType) and kind.extension_name in TENSOR_TYPES


class DatasetSource:
    """A Dataset whose blocks are in the object store, and their numbers of rows."""

    def __init__(
        self,
        sources: list[Any],
        rows: Sequence[int],
        columns: Sequence[tuple[str, ArrayShape, str]],
        dtype: np.dtype[Any],
        decoder: RowsDecoder,
    ) -> None:
        self._sources = sources
        self._rows = rows
        shapes = tuple((name, inner) for name, inner, _ in columns)
        self._decoder = replace(decoder, columns=shapes)
        names = [name for name, _, _ in columns]
        width = sum(math.prod(inner) for _, inner, _ in columns)
        self._origin = ", ".join(names[:8])
        self.dtype = dtype
        self.shape: Shape = (sum(rows), width)
        inner = columns[0][1]
        self.array_shape: ArrayShape = (sum(rows), *inner) if len(inner) > 1 else self.shape
        named = width == len(names) and len(inner) < 2  # a tensor has more than its name
        its = decoder.categories
        self.columns = [ColumnName(name, its.get(name, ())) for name in names] if named else []

    def provenance(self) -> dict[str, Any]:
        return {"from": "ray.data", "dataset": self._origin}

    def send(
        self, connection: GangConnection, target: TransferTarget, progress: Progress | None
    ) -> dict[int, NodeTimes]:
        """Send every block from the node that holds it, and release it."""
        row = 0
        with BlockSender(connection, target, self._decoder, progress) as sender:
            while self._sources:
                i = len(self._rows) - len(self._sources)
                source = self._sources.pop(0)
                shape = (self._rows[i], self.shape[1])
                if shape[0]:
                    sender.add(SourceBlock(source, (row, 0), shape, _label(i)))
                row += shape[0]
            del source
        return sender.times


def _label(i: int) -> str:
    return f"block {i} of the Dataset"


def inspect(
    source: Any, wanted: Any, missing: Missing, connection: GangConnection
) -> DatasetSource:
    """A source for a Dataset: executes it, and inspects its blocks if its schemas do not suffice.

    Raises
    ------
    DtypeError
        For nulls and columns that are not numeric.
    ShapeError
        For tensors of different shapes or, if they have two axes or more, beside other columns;
        for blocks with different columns, or no rows.
    TransferError
        If a function of the Dataset raises; with its traceback.
    ResourceError
        If it has to be executed and gangs hold all CPUs.
    """
    if not isinstance(source, ray.data.Dataset):
        raise DtypeError(f"cannot send a {type(source).__name__} of ray.data: send a Dataset")
    bundles = _execute(source)
    sources: list[Any] = [ref for bundle in bundles for ref in bundle.block_refs]
    blocks = _declared(bundles)
    decoder = RowsDecoder(missing=missing)
    if blocks is None:
        inspected = inspect_objects(sources, [_label(i) for i in range(len(sources))], decoder)
        blocks = [block for block, _ in inspected]
        categories = _joined_categories(blocks)
        if categories:  # blocks that are open have codes of their own
            decoder = replace(decoder, categories=categories)
        else:
            sources = [source for _, source in inspected]
    filled = [i for i, block in enumerate(blocks) if block.rows]
    if not filled:
        raise ShapeError(
            "the Dataset has no rows, so the widths of its columns are not known: send "
            "numpy.empty((0, n)) for a matrix without rows"
        )
    first = blocks[filled[0]].columns
    for i in filled:
        if [c[:2] for c in blocks[i].columns] != [c[:2] for c in first]:
            raise ShapeError(
                f"{_label(i)} has the columns {_shown(blocks[i].columns)}, and "
                f"{_label(filled[0])} has {_shown(first)}"
            )
    if not sum(math.prod(inner) for _, inner, _ in first):
        raise ShapeError("the Dataset has no columns: there is nothing to send")
    for name, inner, _ in first:
        if len(inner) > 1 and len(first) > 1:
            raise ShapeError(
                f"column {name!r} has tensors of shape {inner}, which are no part of a row beside "
                f"other columns: dataset.select_columns([{name!r}]) sends it alone, as an array of "
                f"{len(inner) + 1} axes, and map_batches can flatten it"
            )
        if len(inner) >= MAX_AXES:
            raise ShapeError(
                f"column {name!r} has tensors of {len(inner)} axes, and an array on ranks has at "
                f"most {MAX_AXES} with that of the rows: reshape them with map_batches"
            )
    dtype = common_dtype(np.dtype(c[2]) for i in filled for c in blocks[i].columns)
    dtype = chosen_dtype(dtype, wanted)
    return DatasetSource(sources, [block.rows for block in blocks], first, dtype, decoder)


def _joined_categories(blocks: Sequence[BlockInfo]) -> dict[str, list[str]]:
    """The categories of each column that has some, of all blocks."""
    found: dict[str, dict[str, None]] = {}
    for block in blocks:
        for name, its in block.categories.items():
            found.setdefault(name, {}).update(dict.fromkeys(its))
    return {name: list(its) for name, its in found.items()}


def _shown(columns: Iterable[Sequence[Any]]) -> str:
    return ", ".join(f"{name} ({' x '.join(map(str, inner)) or 1})" for name, inner, *_ in columns)


def _declared(bundles: Sequence[Any]) -> list[BlockInfo] | None:
    """The blocks as their schemas describe them, for the decoder to check; None if too little."""
    found: list[BlockInfo] = []
    for bundle in bundles:
        columns = _schema_columns(bundle.schema)
        # Ray keeps one schema of several blocks; only float64 holds the elements of the others.
        exact = columns and np.result_type(*(c[2] for c in columns)) == np.float64
        for block in bundle.blocks:
            rows = block.metadata.num_rows
            if rows is None or (rows and not exact):
                return None
            found.append(BlockInfo(rows, (columns or ()) if rows else ()))
    return found


def _schema_columns(schema: Any) -> tuple[tuple[str, ArrayShape, str], ...] | None:
    if not isinstance(schema, pyarrow.Schema):
        return None
    found = []
    for one in schema:
        kind = one.type
        inner: ArrayShape = ()
        if _is_tensor(kind) and not pyarrow.types.is_boolean(kind.value_type):
            if getattr(kind, "permutation", None):
                return None
            kind, inner = kind.value_type, tuple(kind.shape)
        if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
            return None
        found.append((one.name, inner, np.dtype(kind.to_pandas_dtype()).str))
    return tuple(found)


def _execute(dataset: Any) -> list[Any]:
    """Execute a Dataset and return its blocks, in bundles, in the order of its rows."""
    if not isinstance(dataset, MaterializedDataset):
        wait_for_cpu("Ray Data", "materialize")
    options = dataset.context.execution_options
    before, options.preserve_order = options.preserve_order, True
    try:
        return list(dataset.iter_internal_ref_bundles())
    except RayTaskError as error:
        raise task_failure("the Dataset could not be executed", error) from None
    except RayError as error:
        words = f"the Dataset could not be executed: {type(error).__name__}: {error}"
        raise TransferError(words) from None
    finally:
        options.preserve_order = before


# --- from a matrix to a Dataset ---------------------------------------------------------------


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
                partial(_read, self._handle, self._columns, [(start, stop)]),
                BlockMetadata(
                    num_rows=stop - start,
                    size_bytes=(stop - start) * row_bytes,
                    exec_stats=None,
                    input_files=None,
                ),
            )
            for start, stop in _bands(self._handle, parallelism)
        ]


def _bands(handle: MatrixRef, count: int) -> list[tuple[int, int]]:
    """At most `count` bands of rows, and at least one."""
    m = handle.stored_shape[0]
    count = max(1, min(count, m))
    return list(pairwise(m * k // count for k in range(count + 1)))


def _read(
    handle: MatrixRef, columns: Sequence[str] | None, bands: Iterable[tuple[int, int]]
) -> list[Block]:
    """Fetch bands of rows, each as a block."""
    blocks = []
    for start, stop in bands:
        rows = fetch(handle, slice(start, stop))
        named = {TENSOR: rows}
        if columns is not None and rows.ndim > 2:
            named = {columns[0]: rows}
        elif columns is not None:
            rows = rows.reshape(len(rows), len(columns))
            by_column = np.empty_like(rows, order="F")
            copy_kernels.copy(by_column, rows)
            named = {name: by_column[:, i] for i, name in enumerate(columns)}
        blocks.append(BlockAccessor.batch_to_block(named))
    return blocks


def to_dataset(
    handle: MatrixRef,
    columns: Sequence[str] | None = None,
    *,
    override_num_blocks: int | None = None,
    lazy: bool = True,
) -> Any:
    """A Ray Dataset of a matrix, its rows in order; of more axes, a column of tensors.

    Parameters
    ----------
    handle : MatrixRef
        Of a matrix of shape (m, n), or an array of more axes.
    columns : sequence of str, optional
        Names of the n columns. Default: the handle's, if they differ from each other; else one
        column ``"data"`` with a row of the matrix in each row, as `ray.data.from_numpy` makes it.
        Of an array of three axes or more the name of its one column, of tensors.
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
        If `columns` does not have n different names; of three axes or more, one.
    DtypeError
        For a complex matrix: Arrow has no complex type.

    Notes
    -----
    A transformed Dataset keeps the order of rows only with
    ``DataContext.execution_options.preserve_order``.
    """
    tensors = len(handle.shape) > 2
    n = 1 if tensors else handle.stored_shape[1]
    if columns is not None and (isinstance(columns, str) or not isinstance(columns, Iterable)):
        raise ShapeError(f"columns={columns!r}: it must be a list of names, one for each column")
    if override_num_blocks is not None:
        positive_int("override_num_blocks", override_num_blocks)
    names = None if columns is None else [str(name) for name in columns]
    if names is None and handle.columns and len(set(handle.columns)) == n:
        names = list(handle.columns)
    if names is not None and (len(names) != n or len(set(names)) != n):
        wanted = f"{n} different names, one for each column"
        if tensors:
            wanted = f"one name, of the column of tensors of shape {tuple(handle.shape[1:])}"
        raise ShapeError(f"columns={columns!r}: they must be {wanted}")
    if handle.dtype.kind == "c":
        raise DtypeError(
            f"{handle.name} has dtype {handle.dtype}, and Arrow has no complex numbers: convert "
            "its real and imaginary parts separately"
        )
    blocks = override_num_blocks or max(1, math.ceil(handle.nbytes / BLOCK_NBYTES))
    if not lazy:
        return ray.data.from_blocks(_read(handle, names, _bands(handle, blocks)))
    return ray.data.read_datasource(
        _MatrixDatasource(handle.keep(), names), override_num_blocks=blocks
    )
