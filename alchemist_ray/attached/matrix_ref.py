"""MatrixRef: the facts that name a matrix on a gang."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.attached.address import GangAddress
from alchemist_ray.attached.leases import MatrixLease, ResultLease
from alchemist_ray.errors import BadArgumentError
from mpi_workers.matrix.layout import ArrayShape, Shape, stored_shape
from mpi_workers.matrix.sizes import readable
from mpi_workers.protocol.files import TIME
from mpi_workers.wire.frames import Body

REMEMBERED_NBYTES = 1 << 16  # 64 KiB


class ColumnName(str):
    """The name of a column, with the categories that its codes count, if it has some."""

    categories: tuple[str, ...]

    def __new__(cls, name: str, categories: Iterable[str] = ()) -> Self:
        found = super().__new__(cls, name)
        found.categories = tuple(categories)
        return found


def columns_to_wire(columns: Iterable[str], time: str = "") -> list[Any]:
    """The columns in a message: their names; a column with categories as its name and their list.

    Of dates and durations, which are int64 on the ranks, the first item is their dtype, `time`.
    """
    return [*([{TIME: time}] if time else []), *_names_to_wire(columns)]


def _names_to_wire(columns: Iterable[str]) -> list[Any]:
    return [
        [str(name), list(its)] if (its := getattr(name, "categories", ())) else str(name)
        for name in columns
    ]


def with_categories(names: list[str], categories: dict[str, Any]) -> list[Any]:
    """Columns in a message, from their names; `categories` as the routine `load` does."""
    columns = [ColumnName(name, categories.get(str(j), ())) for j, name in enumerate(names)]
    return columns_to_wire(columns, categories.get(TIME, ""))


def columns_from_wire(columns: Iterable[Any]) -> tuple[str, ...]:
    names = (name for name in columns if not isinstance(name, dict))
    return tuple(name if isinstance(name, str) else ColumnName(*name) for name in names)


def time_from_wire(columns: Sequence[Any]) -> str:
    """The dtype of dates and durations; empty for numbers."""
    time: str = columns[0][TIME] if columns and isinstance(columns[0], dict) else ""
    return time


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class MatrixRef:
    """Names a matrix on a gang. `alchemist_ray.Handle` adds what can be done with it.

    Attributes
    ----------
    id : int
        Number of the matrix on its gang.
    name : str
    shape : tuple of int
        NumPy's shape, of 0 to 8 axes.
    stored_shape : (int, int)
        Rows and columns on the ranks: of the first axis, and of all others in C order.
    dtype : numpy.dtype
    layout : str
    session, gang : str
        Ids of the session and of its gang.
    epoch : int
        The incarnation of the gang that holds the matrix.
    columns : tuple of str
        Names of the columns, if the data that was sent or loaded had names; else empty. Copies and
        selections of rows and columns keep them, other results have none.
    """

    id: int
    name: str
    shape: ArrayShape
    dtype: np.dtype[Any]
    layout: str
    session: str
    gang: str
    epoch: int
    columns: tuple[str, ...] = ()
    _lease: MatrixLease | ResultLease | None = field(default=None)
    # Of an array that is not computed yet (`arrays.recording`): it has neither id nor lease.
    _recording: Any = field(default=None, init=False)

    @classmethod
    def from_record(
        cls, record: Body, address: GangAddress, lease: MatrixLease | ResultLease | None = None
    ) -> Self:
        """The reference for a matrix as the dispatcher describes it (`runtime.commands`)."""
        return cls(
            id=record["matrix"],
            name=record["name"],
            shape=tuple(record["shape"]),
            dtype=np.dtype(record["dtype"]),
            layout=record["layout"],
            session=address.session,
            gang=address.gang,
            epoch=address.epoch,
            columns=columns_from_wire(record.get("columns", ())),
            _lease=lease,
        )

    @property
    def stored_shape(self) -> Shape:
        return stored_shape(self.shape)

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The categories of each column that has codes of some, by its name."""
        named = ((str(name), getattr(name, "categories", ())) for name in self.columns)
        return {name: its for name, its in named if its}

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix, each element counted once."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def recording(self) -> bool:
        """Whether the array is not computed yet."""
        return self._recording is not None

    def known_elements(self) -> NDArray[Any] | None:
        """The elements of a small matrix, if this process knows them; else None."""
        elements = None if self._lease is None else self._lease.elements
        if elements is None:
            return None
        kind = self.dtype.newbyteorder("<")
        return np.frombuffer(elements, kind).astype(self.dtype).reshape(self.shape)

    @property
    def version(self) -> int | None:
        """The version that this process knows of the elements; see `MatrixLease.version`."""
        return None if self._lease is None else self._lease.version

    def remember_elements(self, values: NDArray[Any], version: int | None) -> None:
        """The elements of a version have been fetched: keep those of a small matrix."""
        if self._lease is not None and version is not None and values.nbytes <= REMEMBERED_NBYTES:
            kind = self.dtype.newbyteorder("<")
            self._lease.remember(values.astype(kind, copy=False).tobytes(), version)

    def forget_lease(self) -> None:
        """The matrix is freed: there is nothing left to lease."""
        if isinstance(self._lease, MatrixLease):
            self._lease.kept = True

    def described(self) -> str:
        """Name, shape, dtype, layout, memory and gang: a line without elements."""
        length = " x ".join(map(str, self.shape)) if len(self.shape) > 1 else str(self.shape)
        return (
            f"<Handle {self.name}: {length} {self.dtype}, {self.layout}, "
            f"{readable(self.nbytes)}, in gang {self.gang} (epoch {self.epoch})>"
        )

    @property
    def part_of(self) -> str:
        """Name of the matrix of which NumPy would make this one a view, or an empty string.

        It is empty too when no handle refers to that matrix any more: an assignment then changes
        all that is left of it.
        """
        return "" if self._lease is None else self._lease.part_of

    def mark_part_of(self, other: MatrixRef) -> Self:
        """This handle; NumPy would make its matrix a view of another one."""
        if isinstance(self._lease, MatrixLease):
            theirs = other._lease
            if isinstance(theirs, MatrixLease):
                one = (other.name, None if theirs.kept else weakref.ref(theirs))
                self._lease.originals = (*theirs.originals, one)
            else:
                self._lease.originals = ((other.name, None),)
        return self

    def mark_copy(self) -> Self:
        """This handle; NumPy would copy the elements as well."""
        if isinstance(self._lease, MatrixLease):
            self._lease.originals = ()
        return self

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


def argument_ref(value: Any) -> MatrixRef | None:
    """The reference in an argument of code on the ranks; None for other values.

    Raises
    ------
    BadArgumentError
        For dates and durations, which are numbers there.
    """
    found = ref_of(value)
    if found is not None and (dtype := value.dtype).kind in "mM":
        raise BadArgumentError(
            f"{found.name} has elements of {dtype}, which are int64 on the ranks: "
            ".astype('int64') gives these counts, and .astype of a result makes dates of them"
        )
    return found


def ref_of(value: Any) -> MatrixRef | None:
    """The reference of a handle, also of a sparse one or of dates; None for other values."""
    if not isinstance(value, MatrixRef):
        value = vars(type(value)).get("matrix_ref") and value.matrix_ref
    return value if isinstance(value, MatrixRef) else None
