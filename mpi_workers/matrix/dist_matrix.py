"""DistMatrix: one rank's part of a distributed matrix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure
from mpi_workers.matrix import device
from mpi_workers.matrix.layout import (
    ArrayShape,
    Distribution,
    Grid,
    Indices,
    LocalIndices,
    Shape,
    distributions,
    stored_shape,
)

if TYPE_CHECKING:
    from mpi_workers.matrix.memory import MemoryBlock

REPLY_NBYTES = 1 << 16  # 64 KiB: elements of results up to this size travel with the reply


class DistMatrix:
    """One rank's part of a matrix or vector that is distributed over the gang.

    Every rank of the gang has its own object with the same `shape`, `dtype`, `layout` and `grid`;
    `local` differs. Ranks store a vector with m elements as an (m, 1) matrix, a number as a (1, 1)
    matrix, and an array of three axes or more as the matrix of its first axis by all others, in C
    order: the layout distributes that matrix.

    Attributes
    ----------
    distribution : Distribution
        Layout, global shape and grid.
    rank : int
        This rank.
    array_shape : tuple of int
        The shape of the array that clients see.
    stored : ndarray, shape (local_m, local_n)
        This rank's elements, Fortran-ordered, without a copy: writing to it changes the matrix.
        Element ``stored[i, j]`` is element ``(rows[i], cols[j])`` of the matrix.
    local : ndarray
        `stored`; of an array of three axes or more in a layout that divides only rows (VC_STAR,
        say), the same memory with all axes: ``local[i]`` is element ``rows[i]`` of the first axis.
    block : MemoryBlock
        The memory behind `stored`.
    rows, cols : range or BlockIndices
        Global indices of the local rows and columns: ranges, but in ``BLOCK_CYCLIC`` layouts.
    """

    __slots__ = (
        "array_shape", "block", "cols", "distribution", "dtype", "local", "rank", "rows", "stored",
    )  # fmt: skip

    def __init__(
        self,
        distribution: Distribution,
        rank: int,
        dtype: np.dtype[Any],
        block: MemoryBlock,
        array_shape: ArrayShape | None = None,
    ) -> None:
        local_indices: LocalIndices = distribution.local_indices(rank)
        self.distribution = distribution
        self.rank = rank
        self.dtype = dtype
        self.array_shape: ArrayShape = self.shape if array_shape is None else array_shape
        self.rows: Indices = local_indices.rows
        self.cols: Indices = local_indices.cols
        self.block = block
        self.stored: NDArray[Any] = block.matrix(local_indices.shape, dtype)
        self.local = self.stored
        inner = self.array_shape[1:]
        if len(inner) > 1 and local_indices.shape[1] in (0, self.shape[1]):
            self.local = self.stored.reshape(-1 if self.stored.size else 0, *inner)

    @property
    def shape(self) -> Shape:
        return self.distribution.shape

    @property
    def vector(self) -> NDArray[Any]:
        """This rank's elements of an array of one axis, shape (local_m,), without a copy.

        Element ``vector[i]`` is element ``rows[i]`` of the array; `local` is (local_m, 1).

        Raises
        ------
        ValueError
            If the array has other than one axis.
        """
        if self.ndim != 1:
            raise ValueError(f"an array of shape {self.array_shape} is no vector: use .local")
        return self.stored.reshape(-1)

    @property
    def ndim(self) -> int:
        """Axes of the array that clients see."""
        return len(self.array_shape)

    def with_shape(self, shape: ArrayShape) -> DistMatrix:
        """The same elements, without a copy, as an array of another shape that is stored alike.

        Raises
        ------
        ValueError
            If such an array has other rows and columns.
        """
        if shape == self.array_shape:
            return self
        if stored_shape(shape) != self.shape:
            raise ValueError(f"a {self.shape} matrix does not store an array of shape {shape}")
        return DistMatrix(self.distribution, self.rank, self.dtype, self.block, tuple(shape))

    def with_ndim(self, ndim: int) -> DistMatrix:
        """The matrix, or the vector or number that it stores; see `with_shape`."""
        if self.shape[ndim:] != (1, 1)[ndim:]:
            raise ValueError(f"a {self.shape} matrix is not an array of {ndim} dimensions")
        return self.with_shape(self.shape[:ndim])

    @property
    def layout(self) -> str:
        return self.distribution.layout

    @property
    def grid(self) -> Grid:
        return self.distribution.grid

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix, counted once."""
        return self.shape[0] * self.shape[1] * int(self.dtype.itemsize)

    @property
    def leading_dimension(self) -> int:
        """Elements from one local column to the next, for BLAS and Elemental (>= 1)."""
        return max(1, len(self.stored))

    def on_device(self, library: str = "torch") -> Any:
        """A copy of `local` on this rank's GPU, column-major as it lies. Do not write to it.

        The copy of a matrix that the call has declared not to change (``writes=()`` or `pure` of a
        routine, ``pure=True`` of `als.run`) is kept: the next call gets it without a transfer,
        until a call may change the matrix, it is freed, or the GPU's memory is short. Other
        matrices are copied each time.

        Parameters
        ----------
        library : {"torch", "cupy"}
            CuPy's array is of the same memory as PyTorch's tensor, so it needs both.

        Raises
        ------
        Failure
            ResourceError: no GPU is reserved for the ranks, it has too little memory, or the
            library or the driver does not fit. BadArgumentError: unknown library.
        """
        found = device.required()
        return found.given(found.part(self.local, self.block), library)

    @contextlib.contextmanager
    def changed_on_device(self, library: str = "torch") -> Iterator[Any]:
        """`on_device`, to be changed in place: the end of the ``with`` block copies it to `local`.

        After an error in the block `local` is as before.

        Raises
        ------
        Failure
            As `on_device`; RoutineError, if the call has declared not to change the matrix.
        """
        if self.block.steady:
            raise Failure(
                "RoutineError",
                f"changed_on_device() of the {self!r}: the routine has not declared that it writes "
                "to it (`writes=` of @routine, `pure=` of als.run)",
            )
        found = device.required()
        x = found.part(self.local, self.block)
        yield found.given(x, library)
        found.store(x, self.local)

    def descriptor(self, context: int) -> NDArray[np.int32]:
        """ScaLAPACK's descriptor, for a matrix in MC_MR, BLOCK or BLOCK_CYCLIC.

        Parameters
        ----------
        context : int
            Of a BLACS grid with the gang's height and width, ranks column by column (order "C").

        Raises
        ------
        ValueError
            For other layouts.
        """
        if distributions(self.layout) != ("MC", "MR"):
            raise ValueError(
                f"ScaLAPACK has no descriptor of a matrix in {self.layout}: convert it with "
                "to_layout to BLOCK_CYCLIC:64, BLOCK or MC_MR"
            )
        both = self.distribution.runs(self.rank)
        height = both[0].count(self.shape[0]) if both else 0  # also where there are no columns
        values = [1, context, *self.shape, *self.distribution.block, 0, 0, max(1, height)]
        return np.array(values, np.int32)

    def __repr__(self) -> str:
        shape, local = (" x ".join(map(str, x)) for x in (self.array_shape, self.local.shape))
        return f"<DistMatrix {shape} {self.dtype} {self.layout}, rank {self.rank}: {local}>"


@contextlib.contextmanager
def read_only(matrices: Iterable[DistMatrix], advice: str) -> Iterator[None]:
    """A block in which NumPy refuses to write into the elements, with `advice` in the traceback."""
    arrays = [array for matrix in matrices for array in (matrix.stored, matrix.local)]
    arrays = [array for array in arrays if array.flags.writeable]
    for array in arrays:
        array.flags.writeable = False
    try:
        yield
    except ValueError as error:
        if "read-only" in str(error):
            error.add_note(advice)
        raise
    finally:
        for array in arrays:
            array.flags.writeable = True
