"""Products and transposes of distributed matrices: four algorithms, chosen by words moved.

The algorithms ("ways") differ in which matrix is not moved:

======== ============ =========== ============ ===================================
way      A            B           C            words that a rank receives
======== ============ =========== ============ ===================================
rows     VC_STAR      gathered    VC_STAR      ``k n``
cols     gathered     STAR_VC     STAR_VC      ``m k``
inner    STAR_VC      VC_STAR     VC_STAR      ``m n`` (partial products are summed)
grid     MC_MR        MC_MR       MC_MR        ``m k / height + k n / width``
======== ============ =========== ============ ===================================

Gathered operands come in panels of `blocks.PANEL` bytes.

Sources: Schatz, van de Geijn, Poulson, "Parallel Matrix Multiplication: A
Systematic Journey", SIAM J. Sci. Comput. 38(6), 2016 (stationary A, B and C);
van de Geijn, Watts, "SUMMA", Concurrency 9(4), 1997 (`grid`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from ali.blocks import (
    CHUNK,
    Array,
    block,
    count_owned,
    floating,
    panel_width,
    panels,
    require,
    require_choice,
    shape_text,
    transposed,
)
from ali.interface import Context, routine
from ali.linalg.local_products import Operand, multiply
from mpi_workers.matrix import tags
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Distribution, mirrored

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpi_workers.matrix.memory import MemoryBlock


OPERATIONS = ("N", "T", "C")


class _View:
    """In place of a `MemoryBlock`: an array that is a view of another matrix's block."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def matrix(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        return self._array.reshape(shape) if not self._array.size else self._array


def operand(A: DistMatrix, operation: str) -> DistMatrix:
    """A ("N"), A^T ("T") or A^H ("C"), read-only; a routine must not return it.

    Notes
    -----
    "T" is a view whose local block is C-ordered. "C" of a complex matrix copies the local
    block once, since BLAS conjugates only together with a transposition.
    """
    if operation == "N":
        return A
    distribution = Distribution(mirrored(A.layout), (A.shape[1], A.shape[0]), A.grid)
    local = A.local.conj() if operation == "C" and A.dtype.kind == "c" else A.local
    return DistMatrix(distribution, A.rank, A.dtype, cast("MemoryBlock", _View(local.T)))


Order = Literal["C", "F"]
RECEIVED = 3  # time of a received word, in copies of a word: MPI copies it twice


def plan(left: Distribution, right: Distribution) -> str:
    """The way that takes a rank the least time to move words, redistribution included.

    Returns
    -------
    str
        ``"rows"``, ``"cols"``, ``"inner"`` or ``"grid"``; the first of them at a tie.

    Notes
    -----
    A received word counts `RECEIVED`, and each copy of a word in memory 1: packing and unpacking;
    in "inner" also writing the partial product and summing the parts. Measured, CPU time of "inner"
    over that of "rows" for A in STAR_VC and B in VC_STAR, where it receives fewer words: 1.07 on 2
    ranks (2000 x 2000), 1.57 on 4 (1600 x 1600).
    """
    (m, k), n = left.shape, right.shape[1]
    height, width = left.grid
    size = height * width
    others = (size - 1) / size

    def moved(distribution: Distribution, layout: str) -> float:
        if distribution.layout in (layout, "STAR_STAR"):
            return 0.0
        return (RECEIVED + 2) * distribution.shape[0] * distribution.shape[1] / size

    def gathered(distribution: Distribution, layout: str) -> float:
        if distribution.layout == "STAR_STAR":
            return 0.0
        words = distribution.shape[0] * distribution.shape[1]
        return moved(distribution, layout) + panels_of(words, size)

    def panels_of(words: float, group: int) -> float:
        """Packed once, received from the others of a group, and copied into panels."""
        return words / group + RECEIVED * words * (group - 1) / group + words

    times = {
        "rows": moved(left, "VC_STAR") + gathered(right, "VC_STAR"),
        "cols": gathered(left, "STAR_VC") + moved(right, "STAR_VC"),
        "inner": (
            moved(left, "STAR_VC") + moved(right, "VC_STAR") + (RECEIVED * others + 4) * m * n
        ),
        "grid": (
            moved(left, "MC_MR")
            + moved(right, "MC_MR")
            + panels_of(m * k / height, width)
            + panels_of(k * n / width, height)
        ),
    }
    return min(times, key=lambda way: times[way])


def product(ctx: Context, A: DistMatrix, B: DistMatrix, way: str = "") -> DistMatrix:
    """``A @ B``, in the layout of C in the table above. Collective."""
    dtype = np.result_type(A.dtype, B.dtype)
    if dtype.kind == "b" or dtype == np.float16:  # whether one is true; BLAS has no float16
        wide = np.int64 if dtype.kind == "b" else np.float32
        found = product(ctx, _widened(ctx, A, wide), _widened(ctx, B, wide), way)
        return _widened(ctx, found, dtype)
    if 0 in (*A.shape, B.shape[1]):
        return ctx.zeros((A.shape[0], B.shape[1]), dtype)
    if ctx.size == 1:
        C = ctx.empty((A.shape[0], B.shape[1]), dtype)
        multiply(_cast(A.local, dtype), _cast(B.local, dtype), C.local)
        return C
    match way or plan(A.distribution, B.distribution):
        case "rows":
            return _rows(ctx, A, B, dtype)
        case "cols":
            return _cols(ctx, A, B, dtype)
        case "inner":
            A, B = ctx.to_layout(A, "STAR_VC"), ctx.to_layout(B, "VC_STAR")
            return inner(ctx, _cast(block(A), dtype), _cast(block(B), dtype))
        case _:
            return _grid(ctx, A, B, dtype)


def _widened(ctx: Context, A: DistMatrix, dtype: Any) -> DistMatrix:
    whole = ctx.empty(A.shape, dtype, A.layout)
    whole.local[...] = A.local
    return whole


def _rows(ctx: Context, A: DistMatrix, B: DistMatrix, dtype: np.dtype[Any]) -> DistMatrix:
    A = ctx.to_layout(A, "VC_STAR")
    C = ctx.empty((A.shape[0], B.shape[1]), dtype)
    if B.layout == "STAR_STAR":
        _multiply(block(A), _cast(B.local, dtype), block(C))
    else:
        mine = _cast(block(A), dtype)
        _stationary(ctx, mine, _cast(block(ctx.to_layout(B, "VC_STAR")), dtype), block(C), "F")
    return C


def _cols(ctx: Context, A: DistMatrix, B: DistMatrix, dtype: np.dtype[Any]) -> DistMatrix:
    """``C^T = B^T A^T``, as in `_rows`; the transposes are views."""
    B = ctx.to_layout(B, "STAR_VC")
    C = ctx.empty((A.shape[0], B.shape[1]), dtype, "STAR_VC")
    mine = _cast(block(B), dtype)
    if A.layout == "STAR_STAR":
        multiply(_cast(A.local, dtype), mine, block(C))
    else:
        A = ctx.to_layout(A, "STAR_VC")
        _stationary(ctx, mine.T, _cast(block(A), dtype).T, block(C).T, "C")
    return C


def _stationary(ctx: Context, mine: Array, distributed: Array, out: Array, order: Order) -> None:
    """``out = mine @ X`` by panels of columns; `distributed` are this rank's VC rows of X.

    `order`: that of all blocks; panels are packed and filled in it, without a transposition.
    """
    k, n = mine.shape[1], distributed.shape[1]
    width = min(n, panel_width(k, mine.itemsize))
    if order == "F":
        scratch = ctx.empty((k, width), mine.dtype, "STAR_STAR").local
    else:
        scratch = ctx.empty((width, k), mine.dtype, "STAR_STAR").local.T
    ranks = range(ctx.size)
    left = Operand(mine, -(-n // width))
    for cols in panels(n, width):
        count = cols.stop - cols.start
        panel = scratch[:, :count]
        shapes = [(count_owned(k, q, ctx.size), count) for q in ranks]
        for q, part in _gathered(ctx.comm, ranks, distributed[:, cols], shapes, order):
            panel[q :: ctx.size] = part
        multiply(left, panel, out[:, cols])


def inner(ctx: Context, left: Array, right: Array) -> DistMatrix:
    """The sum over all ranks of ``left @ right``, in VC_STAR. Collective.

    Parameters
    ----------
    left, right : ndarray, shapes (m, k_local) and (k_local, n)
        This rank's part of the contracted dimension; of the same dtype.

    Notes
    -----
    Each element is summed in the order of the ranks: if every partial product is Hermitian to
    the last bit, so is the sum.
    """
    m, n, size = left.shape[0], right.shape[1], ctx.size
    C = ctx.empty((m, n), left.dtype)
    out = block(C)
    if size == 1:
        multiply(left, right, out)
        return C
    mine = out.shape[0]
    width = max(1, min(n, panel_width(m, left.itemsize)))
    resident = Operand(left, -(-n // width))
    for cols in panels(n, width):
        count = cols.stop - cols.start
        # The whole array, not a slice, if possible: NumPy halves the work of X.T @ X.
        partial = multiply(resident, right if count == n else right[:, cols])
        outgoing = np.concatenate([partial[q::size].reshape(-1, order="F") for q in range(size)])
        incoming = np.empty((size, count, mine), partial.dtype)
        ctx.comm.Alltoallv(
            [outgoing, [count_owned(m, q, size) * count for q in range(size)]],
            [incoming, [mine * count] * size],
        )
        out[:, cols] = incoming.sum(axis=0, dtype=out.dtype).T
    return C


def _grid(ctx: Context, A: DistMatrix, B: DistMatrix, dtype: np.dtype[Any]) -> DistMatrix:
    """SUMMA: panels of A travel along the rows of the grid, panels of B along its columns."""
    A, B = ctx.to_layout(A, "MC_MR"), ctx.to_layout(B, "MC_MR")
    (m, k), n = A.shape, B.shape[1]
    C = ctx.zeros((m, n), dtype, "MC_MR")
    a, b, c = _cast(block(A), dtype), _cast(block(B), dtype), block(C)
    height, width = ctx.grid
    row, col = ctx.rank % height, ctx.rank // height
    across = [row + height * j for j in range(width)]
    down = [col * height + i for i in range(height)]
    step = lcm(height, width)  # panels start at the first rank of a row and of a column
    longest = -(-m // height) + -(-n // width)  # of rank 0, so that all ranks cut alike
    span = max(step, panel_width(longest, a.itemsize) // step * step)
    left = np.empty((a.shape[0], min(span, k)), dtype, order="F")
    right = np.empty((min(span, k), b.shape[1]), dtype, order="F")
    for ks in panels(k, span):
        count = ks.stop - ks.start
        cols = slice(ks.start // width, ks.start // width + count_owned(count, col, width))
        rows = slice(ks.start // height, ks.start // height + count_owned(count, row, height))
        shapes = [(a.shape[0], count_owned(count, q, width)) for q in range(width)]
        for q, part in _gathered(ctx.comm, across, a[:, cols], shapes):
            left[:, q:count:width] = part
        shapes = [(count_owned(count, q, height), b.shape[1]) for q in range(height)]
        for q, part in _gathered(ctx.comm, down, b[rows], shapes):
            right[q:count:height] = part
        multiply(left[:, :count], right[:count], c, add=1)
    return C


def _multiply(a: Array, b: Array, out: Array) -> None:
    """``out = a @ b``; columns of `a` of another dtype are cast some at a time, in the caches."""
    if a.dtype == out.dtype:
        multiply(a, b, out)
        return
    out[...] = 0
    for some in panels(a.shape[1], panel_width(len(a), out.itemsize, 4 * CHUNK)):
        multiply(a[:, some].astype(out.dtype), b[some], out, add=1)


def _gathered(
    comm: MPI.Intracomm,
    group: Sequence[int],
    mine: Array,
    shapes: Sequence[tuple[int, int]],
    order: Order = "F",
) -> Iterator[tuple[int, Array]]:
    """The blocks of all members of a group of ranks, one after another, this rank's own first.

    Ranks exchange in pairs at increasing distance. A yielded array is overwritten by the next
    one.
    """
    me = group.index(comm.rank)
    yield me, mine
    if len(group) == 1:
        return
    outgoing = np.asarray(mine, order=order).reshape(-1, order=order)
    buffer = np.empty(max(m * n for m, n in shapes), mine.dtype)
    for distance in range(1, len(group)):
        to, source = (me + distance) % len(group), (me - distance) % len(group)
        m, n = shapes[source]
        incoming = buffer[: m * n]
        comm.Sendrecv(outgoing, group[to], tags.PRODUCT, incoming, group[source], tags.PRODUCT)
        yield source, incoming.reshape((m, n), order=order)


def _cast(array: Array, dtype: np.dtype[Any]) -> Array:
    return array.astype(dtype, copy=False)


@routine("C")
def matmul(
    ctx: Context,
    A: DistMatrix,
    B: DistMatrix,
    transpose_a: str = "N",
    transpose_b: str = "N",
) -> DistMatrix:
    """Matrix product C = A B; each operand as it is, transposed, or conjugated and transposed.

    Parameters
    ----------
    A : matrix, shape (m, k); (k, m) if transposed; or vector (k,)
    B : matrix, shape (k, n); (n, k) if transposed; or vector (k,)
        Any dtypes. C has the dtype of NumPy's product: integers stay integers and wrap around
        as in NumPy (use `astype` before where they could overflow).
    transpose_a, transpose_b : str
        "N": as it is, "T": transposed, "C": conjugated and transposed.

    Returns
    -------
    C : matrix, shape (m, n); of a vector A (n,), of a vector B (m,), of two a number
        In VC_STAR, STAR_VC or MC_MR, whichever takes the least time to move words. For A and B in
        VC_STAR it is VC_STAR if A is tall and B small, or if both are square on up to 5 ranks.

    Raises
    ------
    ShapeError
        If A's columns and B's rows differ in number.
    BadArgumentError
        If transpose_a or transpose_b is unknown.

    Notes
    -----
    ``2 m n k / ranks`` flops (of complex numbers four times as many). A rank receives one
    of ``k n``, ``m k``, ``m n`` (one operand, or partial results, between all ranks) and
    ``m k / height + k n / width`` (SUMMA on the grid) words. A transposed operand counts as one
    in the mirrored layout: it is a view of its local block and costs no communication, so that
    A^H B of tall A and B in VC_STAR takes ``m n`` words for any k; A^T A of a real A that is not
    wider than high takes half the flops for up to 2048 columns. Memory in addition to the
    matrices: three panels of 32 MiB, a copy of an operand whose layout does not fit, and for "C" of
    a complex operand its local conjugate. Sources: see ali/linalg/products.py.

    Error: 8 eps, relative to |C|. Peak memory: 1.1 times arguments and results.
    """
    for name, how in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        require_choice("matmul", name, how, OPERATIONS)
    left = operand(A, transpose_a if A.ndim == 2 else "N")
    right = operand(B, transpose_b if B.ndim == 2 else "N")
    inner_sizes = left.shape[A.ndim - 1], right.shape[0]
    shapes = [
        f"{name} is {shape_text(one)}{'' if op == 'N' or given.ndim < 2 else ' after transposing'}"
        for name, given, one, op in (("A", A, left, transpose_a), ("B", B, right, transpose_b))
    ]
    require(
        inner_sizes[0] == inner_sizes[1] and A.ndim > 0 and B.ndim > 0,
        "ShapeError",
        f"matmul: {shapes[0]} and {shapes[1]}; A must have as many columns as B has rows",
    )
    if A.ndim == 1:  # C^T = B^T A^T, where the column A^T is as A is stored
        return product(ctx, operand(right, "T"), A).with_ndim(B.ndim - 1)
    squares = A is B and transpose_a != "N" == transpose_b and A.shape[0] >= A.shape[1]
    return product(ctx, left, right, "inner" if squares else "").with_ndim(B.ndim)


@routine("G")
def gram(ctx: Context, A: DistMatrix) -> DistMatrix:
    """Gram matrix G = A^H A.

    Parameters
    ----------
    A : matrix, shape (m, n)
        Best with whole rows on a rank (VC_STAR, VR_STAR). Integers are promoted to float64,
        so that sums of squares do not wrap (unlike ``matmul(A, A, "C")``, which is NumPy's).

    Returns
    -------
    G : matrix, shape (n, n), VC_STAR
        Hermitian.

    Notes
    -----
    ``2 m n^2 / ranks`` flops (half of it for a real A with n up to 2048), ``n^2`` words received,
    and two panels of 32 MiB of memory; for a complex A also its local conjugate.

    Error: 4 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    if A.layout != "VR_STAR":  # whose rows are in another order: the sum is the same
        A = ctx.to_layout(A, "VC_STAR")
    local = floating(block(A))
    return inner(ctx, local.conj().T if local.dtype.kind == "c" else local.T, local)


@routine("B")
def transpose(ctx: Context, A: DistMatrix, conjugate: bool = False) -> DistMatrix:
    """Transpose B = A^T, or B = A^H.

    Parameters
    ----------
    A : matrix, shape (m, n)
    conjugate : bool
        Whether to conjugate the elements.

    Returns
    -------
    B : matrix, shape (n, m), dtype of A
        In the mirrored layout (VC_STAR gives STAR_VC, MC_MR gives MR_MC): every rank transposes
        its local block.

    Notes
    -----
    No communication. One local copy in cache-sized tiles; ``m n / ranks`` words of memory.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    return transposed(ctx, A, conjugate=conjugate)
