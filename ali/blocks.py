"""Helpers for routines of all libraries: argument checks, local blocks, panels, norms, LAPACK."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cython_lapack

from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import check_range, narrows
from mpi_workers.matrix.layout import Indices, check_layout, clip, mirrored

Array = NDArray[Any]

PANEL = 32 << 20  # 32 MiB: large enough for BLAS's full speed, small compared with matrices
CHUNK = 1 << 20  # 1 MiB: stays in a core's cache between two passes


def require(condition: bool, kind: str, message: str) -> None:
    """Raise a `Failure` unless `condition` holds; it must be the same on all ranks."""
    if not condition:
        raise Failure(kind, message)


def refuse_loss(ctx: Context, values: Array, dtype: np.dtype[Any], what: str) -> None:
    """Require that a dtype can hold the elements of all ranks. Collective if it is narrower.

    Raises
    ------
    Failure
        DtypeError on all ranks, if a rank has nan, inf or a number out of range for an integer
        dtype, or a finite number that would become infinite.
    """
    if not narrows(values.dtype, dtype):
        return
    told = ""
    try:
        check_range(values, dtype, what, cut=True)
    except ValueError as error:
        told = str(error)
    told = next(filter(None, ctx.comm.allgather(told)), "")
    require(not told, "DtypeError", told)


def block(matrix: DistMatrix) -> Array:
    """`matrix.stored`; an empty one has its true shape, ``(0, n)`` instead of ``(0, 0)``."""
    both = matrix.distribution.runs(matrix.rank)
    if both is None:
        return matrix.stored
    rows, cols = (runs.count(length) for runs, length in zip(both, matrix.shape, strict=True))
    return matrix.stored.reshape(rows, cols, order="F")


def shape_text(matrix: DistMatrix) -> str:
    """The shape for a message: ``4 x 3``, or ``(4,)`` of a vector."""
    m, n = matrix.shape
    return f"{m} x {n}" if matrix.ndim == 2 else str(matrix.array_shape)


def require_square(routine: str, A: DistMatrix) -> int:
    """Raise ShapeError unless A is square; return its number of rows."""
    m, n = A.shape
    require(m == n, "ShapeError", f"{routine}: A is {shape_text(A)}; it must be square")
    return m


def require_same_rows(routine: str, A: DistMatrix, B: DistMatrix, names: str = "AB") -> None:
    """Require as many rows in B as in A. Raises `Failure` (ShapeError)."""
    require(
        A.shape[0] == B.shape[0],
        "ShapeError",
        f"{routine}: {names[0]} is {shape_text(A)} and {names[1]} is {shape_text(B)}; the numbers "
        "of rows must match",
    )


def product_sizes(
    A: DistMatrix, B: DistMatrix, transpose_a: str, transpose_b: str
) -> tuple[int, int, int]:
    """m, k, n of op(A) (m, k) times op(B) (k, n), op being "N", "T" or "C". Raises `Failure`."""
    for name, value in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
        require_choice("matmul", name, value, ("N", "T", "C"))
    m, k = A.shape if transpose_a == "N" else A.shape[::-1]
    rows, n = B.shape if transpose_b == "N" else B.shape[::-1]
    require(
        k == rows,
        "ShapeError",
        f"matmul: A is {shape_text(A)} ({transpose_a}) and B is {shape_text(B)} ({transpose_b}); "
        "op(A) must have as many columns as op(B) has rows",
    )
    return m, k, n


def require_choice(
    routine: str,
    name: str,
    value: str,
    choices: Collection[str],
    kind: str = "BadArgumentError",
) -> None:
    """Raise a `Failure` of that kind unless `value` is one of `choices`."""
    require(
        value in choices,
        kind,
        f"{routine}: {name} must be one of {', '.join(choices)}; got {value!r}",
    )


def require_range(
    routine: str,
    name: str,
    value: float,
    low: float,
    high: float = math.inf,
    *,
    above: bool = False,
    note: str = "",
) -> None:
    """Raise BadArgumentError unless ``low <= value <= high``; `above`: ``low < value``.

    `note` follows the bounds in the message.
    """
    bounds = f"{low} to {high}" if high < math.inf else f"{'above' if above else 'at least'} {low}"
    require(
        (low < value if above else low <= value) and value <= high,
        "BadArgumentError",
        f"{routine}: {name}={value}; it must be {bounds}{note}",
    )


def require_real(routine: str, **matrices: DistMatrix) -> None:
    """Raise DtypeError if one of the matrices is complex."""
    for name, matrix in matrices.items():
        require(
            matrix.dtype.kind != "c",
            "DtypeError",
            f"{routine}: {name} is {matrix.dtype}; it must be real",
        )


def require_finite(ctx: Context, routine: str, **local: Array) -> None:
    """Raise LinAlgError on all ranks if one has NaN or infinity in a local array. Collective.

    One pass over the arrays and a word from each rank for each of them.
    """
    mine = np.array([_finite(array) for array in local.values()], np.int32)
    every = np.empty((ctx.size, len(mine)), np.int32)
    ctx.comm.Allgather(mine, every)
    for name, good in zip(local, every.min(axis=0).tolist(), strict=True):
        require(good == 1, "LinAlgError", f"{routine}: {name} contains NaN or infinity")


def _finite(array: Array) -> bool:
    if array.dtype.kind in "biu":
        return True
    flat = array.ravel(order="K")
    step = CHUNK // array.itemsize
    return all(np.isfinite(flat[i : i + step]).all() for i in range(0, flat.size, step))


def finite_norm(ctx: Context, routine: str, matrix: DistMatrix) -> float:
    """`frobenius`; raises LinAlgError if it is not a number of the matrix's dtype."""
    scale = frobenius(ctx, matrix)
    dtype = float_dtype(matrix.dtype)
    require(
        scale <= float(np.finfo(dtype).max),
        "LinAlgError",
        f"{routine}: A contains NaN or infinity, or is too large (its norm is {scale})",
    )
    return scale


def require_layout(routine: str, layout: str) -> None:
    """Raise a `Failure` (LayoutError) unless there is a layout of that name."""
    try:
        check_layout(layout)
    except ValueError as error:
        raise Failure("LayoutError", f"{routine}: {error}") from None


def count_owned(length: int, rank: int, size: int) -> int:
    """How many of `length` indices `rank` owns if index i is on rank ``i % size``."""
    return len(range(rank, length, size))


def panel_width(length: int, itemsize: int, nbytes: int | None = None) -> int:
    """The number of vectors of `length` elements in a panel of `nbytes`, by default `PANEL`."""
    return max(1, (nbytes or PANEL) // max(1, length * itemsize))


def panels(stop: int, width: int) -> Iterator[slice]:
    """Cut ``range(stop)`` into half-open slices of `width`."""
    for start in range(0, stop, width):
        yield slice(start, min(start + width, stop))


def keep_triangle(matrix: DistMatrix, *, lower: bool, k: int = 0) -> DistMatrix:
    """Zero the elements above the k-th diagonal (`lower`), or below it; the matrix."""
    _keep_triangle(block(matrix), matrix.rows, matrix.cols, k, lower)
    return matrix


def _keep_triangle(local: Array, rows: Indices, cols: Indices, k: int, lower: bool) -> None:
    if local.shape[0] < local.shape[1]:  # few long rows: the other triangle of the transpose
        _keep_triangle(local.T, cols, rows, -k, not lower)
        return
    for j, col in enumerate(cols):
        first = len(clip(rows, 0, col - k + (not lower)))
        (local[:first] if lower else local[first:])[:, j] = 0


def set_diagonal(matrix: DistMatrix, values: Array | float, k: int = 0) -> DistMatrix:
    """Set the elements ``(i, i + k)`` to a number or to ``values[i]``; the matrix."""
    local = block(matrix)
    for j, col in enumerate(matrix.cols):
        if col - k in matrix.rows:
            value = values[col - k] if isinstance(values, np.ndarray) else values
            local[matrix.rows.index(col - k), j] = value
    return matrix


def phases(values: Array) -> tuple[Array, Array]:
    """``v / abs(v)`` (1 where v is 0), and the absolute values."""
    wide = np.result_type(values.dtype, np.float64)  # divides subnormal numbers exactly
    length = np.abs(values.astype(wide))
    turn = np.where(length > 0, values, 1) / np.where(length > 0, length, 1)
    return turn.astype(values.dtype), length


def transposed(ctx: Context, A: DistMatrix, *, conjugate: bool = False) -> DistMatrix:
    """A^T or A^H in the mirrored layout: every rank transposes its own block."""
    B = ctx.empty((A.shape[1], A.shape[0]), A.dtype, mirrored(A.layout))
    if A.local.size:
        copy_kernels.copy(B.local, A.local.T)
        if conjugate and A.dtype.kind == "c":
            np.conjugate(B.local, out=B.local)
    return B


def floating(array: Array) -> Array:
    """The array in the dtype of computations, see `float_dtype`."""
    return array.astype(float_dtype(array.dtype), copy=False)


def float_dtype(*dtypes: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of computations with matrices of these dtypes.

    Integers and bool give float64, float16 gives float32.
    """
    wide = np.dtype(np.float64)
    return np.result_type(np.float32, *(wide if dtype.kind in "biu" else dtype for dtype in dtypes))


def frobenius(ctx: Context, matrix: DistMatrix) -> float:
    """The Frobenius norm, the same number on every rank; NaN if an element is NaN. Collective.

    Norms of parts are those of elements over the largest one, times that one, so that
    neither 1e200 overflows nor 1e-200 underflows.
    """
    norms = [0.0]
    if any(group[0] == ctx.rank for group in matrix.distribution.owners()):  # each copy counts once
        local = matrix.local.reshape(-1, order="F")
        if local.dtype.kind == "c":
            local = local.view(local.real.dtype)
        for part in panels(local.size, CHUNK // 8):
            values = np.abs(local[part].astype(np.float64))
            top = float(values.max())
            if 0.0 < top < math.inf:
                values /= top
                top *= math.sqrt(float(values @ values))
            norms.append(top)
    every = np.empty(ctx.size)
    ctx.comm.Allgather(np.array([_joined(norms)]), every)
    return _joined(every.tolist())


def _joined(norms: list[float]) -> float:
    """The norm of a whole from its parts'; `math.hypot` takes infinity for more than NaN."""
    return math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)


COLUMNS = 4  # vectors at a time
ITERATIONS = 5


def norm_estimate(
    ctx: Context,
    n: int,
    dtype: np.dtype[np.generic],
    times: Callable[[Array], Array],
    adjoint: Callable[[Array], Array],
) -> float:
    """A lower bound of the 1-norm of an n x n matrix, the same on every rank. Collective.

    The matrix is known by its products only. Source: Higham, Tisseur, "A block algorithm for matrix
    1-norm estimation, with an application to 1-norm pseudospectra", SIAM J. Matrix Anal. Appl.
    21(4), 2000 (algorithm 2.4, without the search for parallel columns).

    Parameters
    ----------
    times, adjoint : callable
        Products of the matrix and its adjoint with (n, r) arrays that are the same on every rank.

    Notes
    -----
    At most `ITERATIONS` products of each kind with `COLUMNS` vectors.
    """
    width = min(COLUMNS, n)
    rng = np.random.default_rng(0)
    vectors = rng.choice([-1.0, 1.0], (n, width)) / n
    vectors[:, 0] = 1 / n
    X = vectors.astype(dtype)
    best = 0.0
    chosen = np.empty(0, np.int64)
    used = np.zeros(n, bool)
    for count in range(ITERATIONS):
        ctx.check()
        Y = times(X)
        sizes = np.abs(Y).sum(axis=0, dtype=np.float64)
        signs = phases(Y)[0]
        heights = np.abs(adjoint(signs)).max(axis=1)
        top = int(np.argmax(sizes))
        better = bool(sizes[top] > best)
        best = max(best, float(sizes[top]))
        # Unit vectors of the highest rows follow, unless the best one was such a vector already.
        finished = not better or (count > 0 and bool(heights.max() <= heights[chosen[top]]))
        order = np.argsort(-heights, kind="stable")
        chosen = order[~used[order]][:width]
        # Rank 0 decides: other ranks may round differently.
        finished, best, chosen = ctx.comm.bcast((finished or not chosen.size, best, chosen))
        if finished:
            break
        used[chosen] = True
        X = np.zeros((n, chosen.size), dtype)
        X[chosen, range(chosen.size)] = 1
    return best


def lapack(name: str, count: int) -> Callable[..., None]:
    """A subroutine of SciPy's LAPACK, such as ``"dlaed4"``, with `count` arguments: see below."""
    api = ctypes.pythonapi
    capsule = ctypes.py_object(cython_lapack.__pyx_capi__[name])
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    signature = ctypes.c_char_p(api.PyCapsule_GetName(capsule))
    address = api.PyCapsule_GetPointer(capsule, signature)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * count)(address)
    return lambda *arguments: function(*by_reference(arguments))


def by_reference(arguments: Sequence[Any]) -> list[Any]:
    """Arguments as Fortran takes them: addresses, and behind them the lengths of strings.

    Arrays are passed by their first element; `ctypes.c_int` and `c_double` receive results.
    """
    passed: list[Any] = []
    for value in arguments:
        if isinstance(value, str):
            passed.append(ctypes.c_char_p(value.encode()))
        elif isinstance(value, np.ndarray):
            passed.append(ctypes.c_void_p(value.ctypes.data))
        elif isinstance(value, ctypes.c_int | ctypes.c_double):
            passed.append(ctypes.byref(value))
        else:
            kind = ctypes.c_double if isinstance(value, float) else ctypes.c_int
            passed.append(ctypes.byref(kind(value)))
    return passed + [ctypes.c_size_t(len(value)) for value in arguments if isinstance(value, str)]
