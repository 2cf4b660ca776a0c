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
    stored_shape,
)

if TYPE_CHECKING:
    from mpi_workers.matrix.memory import MemoryBlock

# The dtypes of libraries in C and Fortran; their codes (alchemist.h) are places here, from 1.
NATIVE_DTYPES: tuple[str, ...] = (
    "float32", "float64", "complex64", "complex128", "int32", "int64", "bool",
)  # fmt: skip
DTYPES: tuple[str, ...] = (
    *NATIVE_DTYPES, "int8", "int16", "uint8", "uint16", "uint32", "uint64", "float16",
)  # fmt: skip
REPLY_NBYTES = 1 << 16  # 64 KiB: elements of results up to this size travel with the reply
ADVICE = {  # for elements that a dtype cannot hold
    "int64": "choose float64, which rounds, or subtract an offset",
    "uint64": "choose float64, which rounds, or subtract an offset",
    "float16": "choose float32",
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
    if wanted is None and have.kind in "fc" and have.name not in DTYPES:
        nearest = "complex128" if have.kind == "c" else "float64"
        raise ValueError(
            f"a matrix cannot have dtype {have}: choose one to convert to, e.g. dtype={nearest!r}"
        )
    dtype = check_dtype(have if wanted is None else wanted)
    integers = have.kind in "iu" and dtype.kind == "u"  # which elements fit is checked
    if have.kind not in "biufc" or not (integers or np.can_cast(have, dtype, "same_kind")):
        raise ValueError(f"elements of dtype {have} cannot become {dtype} without loss")
    return np.dtype(dtype.name)


def check_range(array: NDArray[Any], dtype: np.dtype[Any], what: str) -> None:
    """Refuse an array (`what`) with an element that a dtype cannot hold; rounding is accepted.

    Raises `ValueError`. Nothing is read where the dtype holds every element of the array's dtype.
    """
    if not array.size or not narrows(array.dtype, dtype):
        return
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        for value in (array.real.min().item(), array.real.max().item()):
            if not limits.min - 1 < value < limits.max + 1:  # fractions are cut off
                raise _out_of_range(what, value, dtype)
        return
    most = float(np.finfo(dtype).max)
    for part in (array.real, array.imag) if array.dtype.kind == "c" else (array,):
        if not np.isfinite([part.min(), part.max()]).all():
            part = part[np.isfinite(part)]  # nan and infinity stay what they are
        for value in (part.min(initial=0).item(), part.max(initial=0).item()):
            if abs(value) > most:
                raise _out_of_range(what, float(value), dtype)


def narrows(have: np.dtype[Any], want: np.dtype[Any]) -> bool:
    """Whether some elements of dtype `have` are out of the range of `want`."""
    if want.kind in "iu":
        return not np.can_cast(have, want, "safe")
    if have.kind in "iu" and want.kind in "fc":  # 100000 is beyond float16
        return int(np.iinfo(have).max) > float(np.finfo(want).max)
    return have.kind in "fc" and want.kind in "fc" and np.finfo(have).maxexp > np.finfo(want).maxexp


def _out_of_range(what: str, value: float, dtype: np.dtype[Any]) -> ValueError:
    advice = ADVICE.get(dtype.name, "choose int64" if dtype.kind in "iu" else "scale the elements")
    if not np.isfinite(value):
        advice = "replace it first, for example with np.nan_to_num"
    return ValueError(f"{what} has the element {value!r}, which {dtype} cannot hold: {advice}")


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
