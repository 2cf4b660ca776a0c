"""Handle: the name of a matrix that lives in a gang. Cheap to copy, pickle and pass around."""

from __future__ import annotations

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.arrays.lifetime import MatrixLease
from alchemist_ray.arrays.operators import ArrayOperators
from alchemist_ray.clients.convertible import Convertible
from alchemist_ray.io.matrix_files import Savable


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class Handle(ArrayOperators, Savable, Convertible):
    """Names a matrix in a gang, and is an array; usable in any process of the Ray cluster.

    Attributes
    ----------
    id : int
        Of the matrix within its gang.
    name : str
        As given to `send_matrix`, or made up.
    shape : (int, int)
    dtype : numpy.dtype
        One of float32, float64, complex64, complex128, int32, int64.
    layout : str
        One of Elemental's 14, e.g. ``"VC_STAR"``.
    session, gang : str
        Ids of the session and of its gang.
    epoch : int
        The gang's incarnation; a handle of an older one is stale.

    Notes
    -----
    ``==`` compares elements, on the gang. Two handles name the same matrix where their `id`,
    `gang` and `epoch` are the same. Everything that makes it an array is in
    `alchemist_ray.arrays`.
    """

    id: int
    name: str
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    layout: str
    session: str
    gang: str
    epoch: int
    _lease: MatrixLease | None = field(default=None)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix, each element counted once."""
        return self.shape[0] * self.shape[1] * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        return 2

    def __len__(self) -> int:
        return self.shape[0]

    def fetch(
        self,
        rows: slice | int | None = None,
        cols: slice | int | None = None,
        *,
        print_times: bool = False,
    ) -> NDArray[Any]:
        """The elements as a NumPy array, C-ordered and always two-dimensional.

        Parameters
        ----------
        rows, cols : slice or int, optional
            The part that is wanted; only its elements are moved. Default: all.
        print_times : bool
            Print where the time went, per worker.

        Returns
        -------
        ndarray, shape (m, n) or of the part

        Raises
        ------
        StaleHandleError, MatrixNotFoundError
            If the gang is gone or the matrix was freed.
        GroupFailedError, TransferError
            If a rank dies on the way.

        Notes
        -----
        One copy on the same node; one stream per rank from other nodes.
        """
        from alchemist_ray.gang.connection import gang_of  # noqa: PLC0415  (the gang makes handles)

        return gang_of(self).fetch(self, rows, cols, print_times=print_times)

    def to_layout(self, layout: str) -> Handle:
        """A new matrix with the same elements in another layout, made by the ranks over MPI."""
        from alchemist_ray.gang.connection import gang_of  # noqa: PLC0415

        return gang_of(self).to_layout(self, layout)

    def free(self) -> None:
        """Give the matrix's memory back; every handle to it is dead then. Free twice is fine."""
        from alchemist_ray.gang.connection import gang_of  # noqa: PLC0415

        gang_of(self.keep()).free(self)

    @property
    def temporary(self) -> bool:
        """Whether the matrix is freed when no handle of this process holds it; see `keep`."""
        return self._lease is not None and not self._lease.kept

    def keep(self) -> Handle:
        """This handle, its matrix no longer temporary.

        The result of an expression is freed when no handle holds it. After `keep`, as
        after pickling (for a Ray task, say), it stays until `free` or the end of its gang, like
        what `send_matrix` and the routines of libraries return.
        """
        if self._lease is not None:
            self._lease.keep()
        return self

    def __copy__(self) -> Handle:
        return self

    def __deepcopy__(self, memo: Any) -> Handle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        self.keep()  # whoever unpickles it holds it, and cannot say until when
        return Handle, (
            self.id, self.name, self.shape, self.dtype, self.layout, self.session, self.gang,
            self.epoch,
        )  # fmt: skip

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a matrix that lives on ranks cannot become an array without a copy")
        fetched = self.fetch()
        return fetched if dtype is None else fetched.astype(dtype, copy=False)

    def __repr__(self) -> str:
        m, n = self.shape
        return (
            f"<Handle {self.name}: {m} x {n} {self.dtype}, {self.layout}, "
            f"in gang {self.gang} (epoch {self.epoch})>"
        )

    def _repr_html_(self) -> str:
        m, n = self.shape
        rows = {
            "matrix": html.escape(self.name),
            "shape": f"{m:,} &times; {n:,}",
            "dtype": str(self.dtype),
            "layout": self.layout,
            "size": f"{self.nbytes / 1e6:,.1f} MB",
            "gang": f"{html.escape(self.gang)} (epoch {self.epoch})",
        }
        cells = "".join(f"<tr><th>{k}</th><td>{v}</td></tr>" for k, v in rows.items())
        return f"<table>{cells}</table>"
