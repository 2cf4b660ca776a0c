"""DistMatrix: one rank's part of a distributed matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.matrix.layout import (
    ArrayShape,
    Distribution,
    Grid,
    Indices,
    LocalIndices,
    Shape,
    distributions,
)

if TYPE_CHECKING:
    from mpi_workers.matrix.memory import MemoryBlock

DTYPES: tuple[str, ...] = (
    "float32", "float64", "complex64", "complex128", "int32", "int64", "bool",
)  # fmt: skip
REPLY_NBYTES = 1 << 16  # 64 KiB: elements of results up to this size travel with the reply
ADVICE = {  # for elements that a dtype cannot hold
    "int32": "choose int64",
    "int64": "choose float64, which rounds, or subtract an offset",
    "float32": "choose float64",
    "complex64": "choose complex128",
}


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype. Raises `ValueError` if a matrix cannot have it."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is not a dtype") from None
    if found.name not in DTYPES:
        raise ValueError(f"dtype {found}: it must be one of {', '.join(DTYPES)}")
    return found


def chosen_dtype(have: np.dtype[Any], wanted: Any = None) -> np.dtype[Any]:
    """The dtype of the matrix that elements of dtype `have` become; by default the same one.

    Raises `ValueError` if a matrix cannot have the dtype, or the elements cannot be cast to it.
    """
    if wanted is None and have.kind in "biufc" and have.name not in DTYPES:
        last = "complex128" if have.kind == "c" else "float64"
        wider = (name for name in ("int32", "int64", "float32") if np.can_cast(have, name))
        raise ValueError(
            f"a matrix cannot have dtype {have}: choose one to convert to, e.g. "
            f"dtype={next(wider, last)!r}"
        )
    dtype = check_dtype(have if wanted is None else wanted)
    if have.kind not in "biufc" or not np.can_cast(have, dtype, "same_kind"):
        raise ValueError(f"elements of dtype {have} cannot become {dtype} without loss")
    return np.dtype(dtype.name)


def check_range(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    """Refuse an array (`what`) with an element that a dtype cannot hold; rounding is accepted.

    Raises `ValueError`. Nothing is read where the dtype holds every element of the array's dtype.
    """
    if not array.size or not narrows(array.dtype, dtype):
        return
    if dtype.kind == "i":
        limits = np.iinfo(dtype)
        for value in (array.real.min().item(), array.real.max().item()):
            if not limits.min - 1 < value < limits.max + 1:  # fractions are cut off
                raise _out_of_range(what, value, dtype)
    elif array.dtype.kind in "fc" and np.finfo(array.dtype).max > np.finfo(dtype).max:
        parts = (array.real, array.imag) if array.dtype.kind == "c" else (array,)
        for part in parts:
            finite = np.isfinite(part)
            low = np.min(part, where=finite, initial=0.0)
            high = np.max(part, where=finite, initial=0.0)
            worst = low if -low > high else high
            if abs(worst) > np.finfo(dtype).max:
                raise _out_of_range(what, float(worst), dtype)


def narrows(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether `want` cannot hold some elements of dtype `have`, even rounded."""
    return want.kind != "b" and not np.can_cast(have, want, "safe")


def _out_of_range(what: str, value: float, dtype: np.dtype[Any]) -> ValueError:
    advice = ADVICE.get(dtype.name, "scale the elements")
    if not np.isfinite(value):
        advice = "replace it first, for example with np.nan_to_num"
    return ValueError(f"{what} has the element {value!r}, which {dtype} cannot hold: {advice}")


def local_nbytes(distribution: Distribution, rank: int, dtype: np.dtype[Any]) -> int:
    """Bytes of the part of `rank`."""
    return distribution.local_indices(rank).size * int(dtype.itemsize)


class DistMatrix:
    """One rank's part of a matrix or vector that is distributed over the gang.

    Every rank of the gang has its own object with the same `shape`, `dtype`, `layout` and `grid`;
    `local` differs. Ranks store a vector with m elements as an (m, 1) matrix with ``ndim == 1``,
    and a number as a (1, 1) matrix with ``ndim == 0``.

    Attributes
    ----------
    distribution : Distribution
        Layout, global shape and grid.
    rank : int
        This rank.
    ndim : int
        Dimensions of the array that clients see: 0, 1 or 2.
    array_shape : tuple of int
        The shape that clients see: ``shape[:ndim]``.
    local : ndarray, shape (local_m, local_n)
        This rank's elements, Fortran-ordered, without a copy: writing to it changes the matrix.
        Element ``local[i, j]`` is element ``(rows[i], cols[j])`` of the matrix.
    rows, cols : range or BlockIndices
        Global indices of the local rows and columns: ranges, but in ``BLOCK_CYCLIC`` layouts.
    """

    __slots__ = ("_block", "cols", "distribution", "dtype", "local", "ndim", "rank", "rows")

    def __init__(
        self,
        distribution: Distribution,
        rank: int,
        dtype: np.dtype[Any],
        block: MemoryBlock,
        ndim: int = 2,
    ) -> None:
        local_indices: LocalIndices = distribution.local_indices(rank)
        self.distribution = distribution
        self.rank = rank
        self.dtype = dtype
        self.ndim = ndim
        self.rows: Indices = local_indices.rows
        self.cols: Indices = local_indices.cols
        self._block = block
        self.local: NDArray[Any] = block.matrix(local_indices.shape, dtype)

    @property
    def shape(self) -> Shape:
        return self.distribution.shape

    @property
    def array_shape(self) -> ArrayShape:
        return self.shape[: self.ndim]

    def with_ndim(self, ndim: int) -> DistMatrix:
        """The same elements, without a copy, as an array of another number of dimensions.

        Raises
        ------
        ValueError
            If the shape does not allow it: a vector has one column, a number one row as well.
        """
        if ndim == self.ndim:
            return self
        if self.shape[ndim:] != (1, 1)[ndim:]:
            raise ValueError(f"a {self.shape} matrix is not an array of {ndim} dimensions")
        return DistMatrix(self.distribution, self.rank, self.dtype, self._block, ndim)

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
        return max(1, len(self.local))

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

    @property
    def block(self) -> MemoryBlock:
        """The memory behind `local`."""
        return self._block

    def __repr__(self) -> str:
        m, n = self.shape
        local = " x ".join(map(str, self.local.shape))
        return f"<DistMatrix {m} x {n} {self.dtype} {self.layout}, rank {self.rank}: {local}>"
