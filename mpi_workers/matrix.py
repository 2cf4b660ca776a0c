"""DistMatrix: one rank's part of a distributed matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpi_workers.layout import Grid, Piece, Shape, Spread

if TYPE_CHECKING:
    from mpi_workers.memory import Block

DTYPES: tuple[str, ...] = ("float32", "float64", "complex64", "complex128", "int32", "int64")


def check_dtype(dtype: Any) -> np.dtype[Any]:
    """`dtype` as a NumPy dtype, if it is one that a matrix can have; else `ValueError`."""
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"{dtype!r} is not a dtype") from None
    if found.name not in DTYPES:
        raise ValueError(f"dtype {found} cannot be sent; a matrix is one of {', '.join(DTYPES)}")
    return found


def local_nbytes(spread: Spread, rank: int, dtype: np.dtype[Any]) -> int:
    """Bytes that `rank` needs for its part."""
    return spread.piece(rank).size * int(dtype.itemsize)


class DistMatrix:
    """One rank's part of a matrix that is spread over the gang.

    Every rank of the gang holds an object of its own with the same `shape`,
    `dtype`, `layout` and `grid`; `local` differs.

    Attributes
    ----------
    spread : Spread
        Layout, global shape and grid.
    rank : int
        This rank.
    local : ndarray, shape (local_m, local_n)
        This rank's elements, Fortran-ordered, without a copy: writing into it
        writes the matrix. Element ``local[i, j]`` is ``(rows[i], cols[j])``.
    rows, cols : range
        Global indices of the local rows and columns.
    """

    __slots__ = ("_block", "cols", "dtype", "local", "rank", "rows", "spread")

    def __init__(self, spread: Spread, rank: int, dtype: np.dtype[Any], block: Block) -> None:
        piece: Piece = spread.piece(rank)
        self.spread = spread
        self.rank = rank
        self.dtype = dtype
        self.rows, self.cols = piece
        self._block = block
        self.local: NDArray[Any] = block.matrix(piece.shape, dtype)

    @property
    def shape(self) -> Shape:
        return self.spread.shape

    @property
    def layout(self) -> str:
        return self.spread.layout

    @property
    def grid(self) -> Grid:
        return self.spread.grid

    @property
    def nbytes(self) -> int:
        """Bytes of the whole matrix, counted once."""
        return self.shape[0] * self.shape[1] * int(self.dtype.itemsize)

    @property
    def leading_dimension(self) -> int:
        """Elements from one local column to the next, as BLAS and Elemental want it (>= 1)."""
        return max(1, len(self.local))

    @property
    def block(self) -> Block:
        """The memory behind `local`."""
        return self._block

    def __repr__(self) -> str:
        m, n = self.shape
        local = " x ".join(map(str, self.local.shape))
        return f"<DistMatrix {m} x {n} {self.dtype} {self.layout}, rank {self.rank}: {local}>"
