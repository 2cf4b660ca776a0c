"""New matrices: filled, diagonal, triangular, random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ali.blocks import CHUNK, Array, panels, require, require_layout, set_diagonal, shape_text
from ali.interface import Context, routine
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES

UNIFORM = 1  # purpose of the streams of `random_uniform`; that of `random_normal` is 0


@routine("A")
def full(
    ctx: Context,
    m: int,
    n: int,
    value: complex,
    dtype: str = "float64",
    layout: str = "VC_STAR",
) -> DistMatrix:
    """Matrix in which all elements have the same value.

    Parameters
    ----------
    m, n : int
        Its shape.
    value : complex
        Without an imaginary part if `dtype` is real, a whole number if it is an integer dtype.
    dtype : str
        float32, float64, complex64, complex128, int32 or int64.
    layout : str
        One of Elemental's 14, or in blocks.

    Returns
    -------
    A : matrix, shape (m, n)

    Raises
    ------
    ShapeError
        If m or n is negative.
    DtypeError, LayoutError
        If there is no such dtype or layout.
    BadArgumentError
        If `value` cannot be held in `dtype`.

    Notes
    -----
    No communication, no flops; ``m n / ranks`` words of memory (more if the layout keeps copies).

    Error: 0.5 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    kind = _checked("full", m, n, dtype, layout)
    number = _as_dtype("full", value, kind)
    A = ctx.empty((m, n), kind, layout)
    A.local[...] = number
    return A


@routine("A")
def zeros(
    ctx: Context, m: int, n: int, dtype: str = "float64", layout: str = "VC_STAR"
) -> DistMatrix:
    """Matrix of zeros.

    Parameters
    ----------
    m, n : int
        Its shape.
    dtype, layout : str
        See `full`.

    Returns
    -------
    A : matrix, shape (m, n)

    Raises
    ------
    ShapeError, DtypeError, LayoutError
        See `full`.

    Notes
    -----
    No communication; ``m n / ranks`` words of memory.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return ctx.zeros((m, n), _checked("zeros", m, n, dtype, layout), layout)


@routine("A")
def eye(
    ctx: Context,
    m: int,
    n: int | None = None,
    dtype: str = "float64",
    layout: str = "VC_STAR",
    k: int = 0,
) -> DistMatrix:
    """Ones on a diagonal, zeros elsewhere.

    Parameters
    ----------
    m : int
        Rows.
    n : int, optional
        Columns; m by default.
    dtype, layout : str
        See `full`.
    k : int
        Which diagonal: the elements ``(i, i + k)``.

    Returns
    -------
    A : matrix, shape (m, n)

    Raises
    ------
    ShapeError, DtypeError, LayoutError
        See `full`.

    Notes
    -----
    No communication, no temporary; ``m n / ranks`` words of memory.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    n = m if n is None else n
    A = ctx.zeros((m, n), _checked("eye", m, n, dtype, layout), layout)
    return set_diagonal(A, 1, k)


@routine("D")
def diag(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Square matrix with the elements of a row or column on its diagonal.

    Parameters
    ----------
    A : matrix, shape (n, 1) or (1, n)

    Returns
    -------
    D : matrix, shape (n, n), dtype of A, VC_STAR

    Raises
    ------
    ShapeError
        If A has more than one row and more than one column (see `diagonal`).

    Notes
    -----
    n words received (A on every rank), ``n^2 / ranks`` words of memory.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    require(
        1 in A.shape,
        "ShapeError",
        f"diag: A is {shape_text(A)}; it must be one row or one column (see diagonal)",
    )
    values = ctx.to_layout(A, "STAR_STAR").local.reshape(-1)
    D = ctx.zeros((values.size, values.size), A.dtype)
    return set_diagonal(D, values)


@routine("A")
def random_normal(ctx: Context, m: int, n: int, seed: int) -> DistMatrix:
    """Matrix of independent standard normal numbers.

    Parameters
    ----------
    m, n : int
        Its shape.
    seed : int
        The same seed and n give the same rows, for any m and any number of ranks.

    Returns
    -------
    A : matrix, shape (m, n), float64, VC_STAR

    Raises
    ------
    ShapeError
        If m or n is negative.

    Notes
    -----
    A Philox stream for each row, with the seed as its key and the index of the row in its
    counter; no communication. About 4 microseconds a row and 20 nanoseconds an element. Source:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

    Error: 0 eps. Peak memory: 1.2 times arguments and results.
    """
    require(m >= 0 and n >= 0, "ShapeError", f"random_normal: {m} x {n} is not a shape")
    A = ctx.empty((m, n), np.float64)
    _fill_rows(A, RowStreams(seed), lambda stream, row: stream.standard_normal(out=row))
    return A


@routine("A")
def random_uniform(ctx: Context, m: int, n: int, seed: int) -> DistMatrix:
    """Matrix of independent numbers, uniform in the half-open interval [0, 1).

    Parameters
    ----------
    m, n : int
        Its shape.
    seed : int
        The same seed and n give the same rows, for any m and any number of ranks.

    Returns
    -------
    A : matrix, shape (m, n), float64, VC_STAR

    Raises
    ------
    ShapeError
        If m or n is negative.

    Notes
    -----
    As `random_normal`: a Philox stream for each row, no communication; 53 random bits a number.

    Error: 0 eps. Peak memory: 1.2 times arguments and results.
    """
    require(m >= 0 and n >= 0, "ShapeError", f"random_uniform: {m} x {n} is not a shape")
    A = ctx.empty((m, n), np.float64)
    _fill_rows(A, RowStreams(seed, UNIFORM), lambda stream, row: stream.random(out=row))
    return A


class RowStreams:
    """A stream of random numbers for each row, the same on every rank.

    Parameters
    ----------
    seed : int
    purpose : int
        Streams of different purposes are independent, also with the same seed.
    """

    def __init__(self, seed: int, purpose: int = 0) -> None:
        self._bits = np.random.Philox(key=seed % (1 << 64))
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state
        self._state["state"]["counter"][3] = purpose

    def at(self, row: int) -> np.random.Generator:
        """The stream of a row from its start, valid until the next call."""
        self._state["state"]["counter"][2] = row
        self._bits.state = self._state
        return self._generator


def normal_rows(rows: range, n: int, seed: int, purpose: int) -> Array:
    """These rows of a matrix of independent standard normal numbers. No communication."""
    found = np.empty((len(rows), n))
    streams = RowStreams(seed, purpose)
    for row, values in zip(rows, found, strict=True):
        streams.at(row).standard_normal(out=values)
    return found


def _fill_rows(
    A: DistMatrix, streams: RowStreams, draw: Callable[[np.random.Generator, Array], Any]
) -> None:
    some = np.empty((max(1, CHUNK // (8 * max(1, A.shape[1]))), A.shape[1]))
    for part in panels(len(A.rows), some.shape[0]):
        rows = A.rows[part]
        for row, values in zip(rows, some, strict=False):
            draw(streams.at(row), values)
        copy_kernels.copy(A.local[part], some[: len(rows)])


def _checked(name: str, m: int, n: int, dtype: str, layout: str) -> np.dtype[Any]:
    require(m >= 0 and n >= 0, "ShapeError", f"{name}: {m} x {n} is not a shape")
    require(
        dtype in DTYPES,
        "DtypeError",
        f"{name}: dtype must be one of {', '.join(DTYPES)}; got {dtype!r}",
    )
    require_layout(name, layout)
    return np.dtype(dtype)


def _as_dtype(name: str, value: complex, dtype: np.dtype[Any]) -> complex | float | int:
    if dtype.kind == "c":
        return value
    number, fits = value.real, value.imag == 0
    if dtype.kind in "biu":
        least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        fits = fits and float(number).is_integer() and least <= number <= most
    require(fits, "BadArgumentError", f"{name}: {value} cannot be held in {dtype}")
    return number if dtype.kind == "f" else int(number)
