"""Elementwise functions with NumPy's broadcasting, and the dtypes of their results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import special

from ali.blocks import CHUNK, Array, panels, refuse_loss, require, require_choice, shape_text
from ali.interface import Context, routine
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.products import operand
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import (
    ArrayShape,
    Shape,
    distributions,
    owners,
    sibling,
    stored_shape,
)
from mpi_workers.matrix.redistribution import redistribute
from mpi_workers.protocol import libraries

# Sorted: the order of a set differs between ranks.
BINARY: dict[str, Any] = {
    **{name: getattr(np, name) for name in sorted(libraries.BINARY)},
    **{name: getattr(special, name) for name in sorted(libraries.SPECIAL_BINARY)},
}
UNARY: dict[str, Any] = {
    **{name: getattr(np, name) for name in sorted(libraries.UNARY)},
    **{name: getattr(special, name) for name in sorted(libraries.SPECIAL_UNARY)},
}


def function_of(name: str, op: str, table: dict[str, Any]) -> Any:
    known = sorted(table.keys() | libraries.PARTS if table is UNARY else table)
    require(
        op in table, "BadArgumentError", f"{name}: op must be one of {', '.join(known)}; got {op!r}"
    )
    return table[op]


def result_dtype(
    name: str, function: Any, have: np.dtype[Any], other: Any, op: str = "", reflected: bool = False
) -> np.dtype[Any]:
    """The dtype of the result; `other`: a dtype, a Python type, or None."""
    other = np.dtype(bool) if other is bool else other  # a Python bool is as strong as an array
    types = (have, None) if other is None else (have, other, None)
    if reflected:
        types = (other, have, None)
    try:
        found: np.dtype[Any] = function.resolve_dtypes(types)[-1]
    except TypeError:
        found = np.dtype(object)
    what = str(have) if other is None else f"{have} and {getattr(other, '__name__', other)}"
    require(found.name in DTYPES, "DtypeError", f"{name}: {op} is not defined for {what}")
    return found


def number_of(name: str, value: complex, dtype: np.dtype[Any], kind: str) -> complex | float | int:
    """The scalar as a Python number of its kind; see `elementwise_scalar`."""
    real = value.real
    if kind == "complex" or (kind == "" and value.imag != 0):
        return value
    require(value.imag == 0, "BadArgumentError", f"{name}: {value} is not of kind {kind!r}")
    if kind == "bool":
        return bool(real)
    whole = float(real).is_integer()
    if kind == "int" or (kind == "" and whole and dtype.kind in "iu"):
        require(whole, "BadArgumentError", f"{name}: {real} is not of kind 'int'")
        return int(real)
    return float(real)


def check_range(name: str, number: complex | float | int, dtype: np.dtype[Any]) -> None:
    if dtype.kind not in "iu" or not isinstance(number, int):
        return
    limits = np.iinfo(dtype)
    require(
        limits.min <= number <= limits.max,
        "BadArgumentError",
        f"{name}: {number} cannot be held in {dtype}",
    )


def broadcast_shape(name: str, operands: Sequence[DistMatrix]) -> ArrayShape:
    """The shape of the result, or a `Failure` (ShapeError)."""
    try:
        return np.broadcast_shapes(*(x.array_shape for x in operands))
    except ValueError:
        raise Failure(
            "ShapeError",
            f"{name}: shapes {' and '.join(map(shape_text, operands))} do not broadcast; sizes "
            "must be equal or 1",
        ) from None


def as_rows(operands: Sequence[DistMatrix]) -> tuple[DistMatrix, ...]:
    """The operands; vectors that meet a matrix as rows (views in the mirrored layout)."""
    if all(x.ndim < 2 for x in operands):
        return tuple(operands)
    return tuple(operand(x, "T") if x.ndim == 1 else x for x in operands)


def common_layout(operands: Sequence[DistMatrix], shape: Shape) -> str:
    """The layout, of those of the full operands, that needs the least communication.

    The cost of a move is the number of bytes that the busiest rank receives; of equals the first
    operand's layout is chosen.
    """
    full = [x for x in operands if x.shape == shape]
    if not full:  # a row with a column, or numbers
        return "VC_STAR" if shape[0] >= shape[1] else "STAR_VC"

    def cost(layout: str) -> int:
        return sum(received(x, layout) * x.dtype.itemsize for x in full)

    return min(dict.fromkeys(x.layout for x in full), key=cost)


def received(matrix: DistMatrix, layout: str) -> int:
    """Elements that the busiest rank receives when a matrix is moved to a layout."""
    if matrix.layout in (layout, "STAR_STAR"):
        return 0
    m, n = matrix.shape
    return -(-m * n // len(owners(layout, matrix.grid)))


def part_layout(layout: str, shape: Shape, whole: Shape) -> str:
    """The layout in which a row, column or element broadcasts against a matrix in `layout`."""
    if layout == "CIRC_CIRC" or shape == whole:
        return layout
    rows, cols = (
        dist if mine == full else "STAR"
        for dist, mine, full in zip(distributions(layout), shape, whole, strict=True)
    )
    return sibling(layout, rows, cols)


def aligned(
    ctx: Context, name: str, *operands: DistMatrix, layout: str = ""
) -> tuple[ArrayShape, str, tuple[Array, ...]]:
    """Shape and layout of the result, and the operands' local blocks. Collective.

    On every rank the blocks broadcast to that of the result.
    """
    shape = broadcast_shape(name, operands)
    whole = stored_shape(shape)
    if len(shape) > 2:
        full = [x for x in operands if x.array_shape == shape]
        layout = layout or common_layout(full, whole)
        if len(full) < len(operands) and not divides_rows(layout):
            layout = "VC_STAR"
        return shape, layout, tuple(_spread(ctx, x, shape, layout) for x in operands)
    placed = as_rows(operands)
    layout = layout or common_layout(placed, whole)
    moved = tuple(ctx.to_layout(x, part_layout(layout, x.shape, whole)).local for x in placed)
    return shape, layout, moved


def divides_rows(layout: str) -> bool:
    """Whether a rank has whole rows: all axes of an array but the first."""
    rows, cols = distributions(layout)
    return cols == "STAR" and rows != "MD"


def _spread(ctx: Context, A: DistMatrix, shape: ArrayShape, layout: str) -> Array:
    """This rank's block of an array that broadcasts to three axes or more, in a layout of rows."""
    if A.array_shape == shape or (A.ndim == len(shape) and A.shape[0] > 1):
        return ctx.to_layout(A, layout).local
    padded = (1,) * (len(shape) - A.ndim) + A.array_shape
    return ctx.to_layout(A, "STAR_STAR").local.reshape(padded)


@routine("C", any_axes=True)
def add(
    ctx: Context, A: DistMatrix, B: DistMatrix, alpha: complex = 1.0, beta: complex = 1.0
) -> DistMatrix:
    """Sum C = alpha A + beta B.

    Parameters
    ----------
    A, B : matrices
        Of shapes that broadcast: sizes are equal, or 1. Any layouts and dtypes.
    alpha, beta : complex
        Real if the imaginary part is 0, and integer if whole: they change the dtype of an
        integer matrix only if necessary.

    Returns
    -------
    C : matrix
        In the layout of A or B, whichever needs less communication (if one is broadcast: that of
        the other). NumPy's dtype.

    Raises
    ------
    ShapeError
        If the shapes do not broadcast.
    BadArgumentError
        If the dtype of an integer matrix cannot represent a factor.

    Notes
    -----
    1 to 3 flops an element in one pass, with 1 MiB of scratch (none with factors of 1 and -1). In
    the same layout nothing moves; else one operand is redistributed. A row or column that is
    broadcast is sent to the ranks of the full matrix: ``n / width`` to n words.

    Error: 1 eps, relative to the largest element. Peak memory: 1.1 times arguments and results.
    """
    shape, layout, (a, b) = aligned(ctx, "add", A, B)
    one, other = number_of("add", alpha, A.dtype, ""), number_of("add", beta, B.dtype, "")
    dtypes = [result_dtype("add", np.multiply, x.dtype, type(f)) for x, f in ((A, one), (B, other))]
    dtype = np.result_type(*dtypes)
    for factor, kind in zip((one, other), dtypes, strict=True):
        check_range("add", factor, kind)
    C = ctx.empty(shape, dtype, layout)
    if not C.local.size:
        return C
    with ctx.floating_errors():
        if one == 1 and other == 1:
            np.add(a, b, out=C.local, casting="same_kind")
        elif one == 1 and other == -1:
            np.subtract(a, b, out=C.local, casting="same_kind")
        else:
            for part in _strips(C.local):
                np.multiply(_strip(a, part), one, out=C.local[:, part], casting="same_kind")
                scaled = np.multiply(_strip(b, part), other, dtype=dtypes[1])
                C.local[:, part] += scaled
    return C


@routine("C", any_axes=True)
def elementwise(ctx: Context, op: str, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """C = op(A, B), element by element.

    Parameters
    ----------
    op : str
        add, subtract, multiply, divide, floor_divide, remainder, power, minimum, maximum,
        arctan2, hypot; equal, not_equal, less, less_equal, greater, greater_equal; logical_and,
        logical_or, logical_xor; bitwise_and, bitwise_or, bitwise_xor, left_shift, right_shift;
        logaddexp, copysign, nextafter, fmin, fmax, fmod, float_power: NumPy's functions
        with these names; beta, betaln, binom, gammainc, gammaincc, huber, jv, kl_div, rel_entr,
        xlog1py, xlogy: those of scipy.special.
    A, B : matrices
        Of shapes that broadcast: sizes are equal, or 1. Any layouts and dtypes.

    Returns
    -------
    C : matrix
        Layout as in `add`. NumPy's dtype.

    Raises
    ------
    BadArgumentError
        If the operation is unknown.
    ShapeError
        If the shapes do not broadcast.
    DtypeError
        If the operation is not defined for these dtypes (as floor_divide of complex numbers).
    RoutineError
        For an integer to the power of a negative integer.

    Notes
    -----
    One pass over the operands into C, no temporary; communication as in `add`. Divisions by
    zero and the like give inf and nan (0 for integers), as in NumPy, and the caller's
    `numpy.errstate` decides on warnings.

    Error: 1 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    return binary(ctx, "elementwise", op, A, B)


def binary(
    ctx: Context, name: str, op: str, A: DistMatrix, B: DistMatrix, *, in_place: bool = False
) -> DistMatrix:
    """``op(A, B)`` in a new matrix or, in place, in A. See `elementwise`."""
    function = function_of(name, op, BINARY)
    dtype = result_dtype(name, function, A.dtype, B.dtype, op)
    if in_place:
        _check_target(op, A, broadcast_shape(name, (A, B)), dtype)
    shape, layout, (a, b) = aligned(ctx, name, A, B, layout=A.layout if in_place else "")
    if op == "power" and dtype.kind == "i":
        _refuse_power(ctx, name, bool((b < 0).any()))
    C = A
    if not in_place or layout != A.layout:
        C = ctx.empty(shape, A.dtype if in_place else dtype, layout)
    if C.local.size:
        with ctx.floating_errors():
            function(a, b, out=C.local, casting="unsafe")
    if in_place and C is not A:
        redistribute(C, A, ctx.comm)
    return C


def _check_target(op: str, A: DistMatrix, shape: ArrayShape, dtype: np.dtype[Any]) -> None:
    """Refuse a result that A cannot take in place, by NumPy's rules."""
    require(
        shape == A.array_shape,
        "ShapeError",
        f"{op} in place: the result has the shape {shape}, and the array {A.array_shape}",
    )
    require(
        np.can_cast(dtype, A.dtype, "same_kind"),
        "DtypeError",
        f"{op} in place: the result is {dtype}, which cannot be cast to {A.dtype}: write "
        f"A = np.{op}(A, B) for a new array of {dtype}",
    )


@routine("C", any_axes=True)
def elementwise_scalar(
    ctx: Context,
    op: str,
    A: DistMatrix,
    value: complex,
    reflected: bool = False,
    kind: str = "",
) -> DistMatrix:
    """C = op(A, value), or op(value, A), element by element.

    Parameters
    ----------
    op : str
        See `elementwise`.
    A : matrix, shape (m, n)
    value : complex
    reflected : bool
        Whether `value` is the first operand:
        ``elementwise_scalar("divide", A, 1, reflected=True)`` is 1 / A.
    kind : str
        The type of `value`: "bool", "int", "float" or "complex". "" chooses:
        complex if the imaginary part is not 0, int if it is a whole number and A has an integer
        dtype, else float. NumPy's ``A + 2.0`` of an integer A is ``kind="float"``. Whole numbers
        beyond 2**53 are rounded; for those use `elementwise` with a 1 x 1 matrix.

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        The dtype that NumPy gives A with a Python number of this kind.

    Raises
    ------
    BadArgumentError
        If the operation or kind is unknown, or `value` is not of the kind, or A's dtype cannot
        represent it.
    DtypeError
        If the operation is not defined for A's dtype.
    RoutineError
        For an integer to the power of a negative integer.

    Notes
    -----
    One pass, no communication, no temporary.

    Error: 1 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    return with_number(ctx, op, A, value, reflected, kind)


def with_number(
    ctx: Context,
    op: str,
    A: DistMatrix,
    value: complex,
    reflected: bool,
    kind: str,
    *,
    in_place: bool = False,
) -> DistMatrix:
    """``op(A, value)`` in a new matrix or, in place, in A. See `elementwise_scalar`."""
    name = "elementwise_scalar"
    function = function_of(name, op, BINARY)
    require(
        kind in ("", "bool", "int", "float", "complex"),
        "BadArgumentError",
        f"{name}: kind must be one of bool, int, float, complex or empty; got {kind!r}",
    )
    number = number_of(name, value, A.dtype, kind)
    dtype = result_dtype(name, function, A.dtype, type(number), op, reflected)
    if in_place:
        _check_target(op, A, A.array_shape, dtype)
    if not op.endswith("equal") and op not in ("less", "greater"):  # comparisons accept all numbers
        check_range(name, number, A.dtype)
    if op == "power" and A.dtype.kind == "i" and isinstance(number, int):
        negative = bool((A.local < 0).any()) if reflected else number < 0
        _refuse_power(ctx, name, negative)
    C = A if in_place else ctx.empty(A.array_shape, dtype, A.layout)
    if C.local.size:
        operands = (number, A.local) if reflected else (A.local, number)
        with ctx.floating_errors():
            function(*operands, out=C.local, casting="unsafe")
    return C


@routine("C")
def scale(ctx: Context, A: DistMatrix, alpha: complex) -> DistMatrix:
    """C = alpha A.

    Parameters
    ----------
    A : matrix, shape (m, n)
    alpha : complex
        Real if the imaginary part is 0; a whole number keeps an integer matrix integer.

    Returns
    -------
    C : matrix, shape (m, n), layout of A

    Raises
    ------
    BadArgumentError
        If A's integer dtype cannot represent alpha.

    Notes
    -----
    ``m n / ranks`` flops, no communication, no temporary.

    Error: 1 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    return elementwise_scalar(ctx, "multiply", A, alpha)


@routine("C", any_axes=True)
def apply(ctx: Context, op: str, A: DistMatrix) -> DistMatrix:
    """C = op(A), element by element.

    Parameters
    ----------
    op : str
        negative, abs, sign, conj, real, imag, square, sqrt, reciprocal, exp, expm1, log, log1p,
        log2, log10, sin, cos, tan, arcsin, arccos, arctan, sinh, cosh, tanh, arcsinh, arccosh,
        arctanh, floor, ceil, trunc, rint; isnan, isinf, isfinite, signbit, logical_not,
        invert, cbrt, exp2, degrees, radians, fabs: NumPy's functions with these names; entr, erf,
        erfc, erfcinv, erfcx, erfinv, exp1, exp10, expi, expit, gamma, gammaln, i0, i0e, i1, i1e,
        j0, j1, k0, k1, log_expit, log_ndtr, logit, loggamma, ndtr, ndtri, psi, rgamma, y0, y1:
        those of scipy.special.
    A : matrix, shape (m, n)

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        NumPy's dtype (abs, real and imag of complex numbers are real, integers become float64
        unless the function keeps them).

    Raises
    ------
    BadArgumentError
        If the function is unknown.
    DtypeError
        If it is not defined for A's dtype (floor of complex numbers).

    Notes
    -----
    One pass, no communication, no temporary. Outside of the domain the result is nan, as in NumPy.

    Error: 1 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    if op in libraries.PARTS:
        C = ctx.empty(A.array_shape, A.local.real.dtype, A.layout)
        C.local[...] = A.local.real if op == "real" else A.local.imag
        return C
    function = function_of("apply", op, UNARY)
    C = ctx.empty(A.array_shape, result_dtype("apply", function, A.dtype, None, op), A.layout)
    if C.local.size:
        with ctx.floating_errors():
            function(A.local, out=C.local, casting="unsafe")
    return C


@routine("C", any_axes=True)
def astype(ctx: Context, A: DistMatrix, dtype: str) -> DistMatrix:
    """A copy of A with another dtype.

    Parameters
    ----------
    A : matrix, shape (m, n)
    dtype : str
        One of `DTYPES` (mpi_workers/matrix/dtypes.py).

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        Conversion to integers truncates.

    Raises
    ------
    DtypeError
        If the dtype is unknown, or imaginary parts would be lost (see `apply` with "real"), or
        the dtype cannot hold an element: nan, inf and numbers out of range as integers, finite
        numbers that would become infinite.

    Notes
    -----
    One pass, no communication; two more if the dtype is narrower, and a message.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    require_choice("astype", "dtype", dtype, DTYPES, "DtypeError")
    require(
        A.dtype.kind != "c" or dtype.startswith("complex"),
        "DtypeError",
        f'astype: {A.dtype} to {dtype} would drop the imaginary parts; apply("real", A) does that',
    )
    refuse_loss(ctx, A.local, np.dtype(dtype), "astype: A")
    C = ctx.empty(A.array_shape, dtype, A.layout)
    C.local[...] = A.local
    return C


@routine("C", any_axes=True)
def where(ctx: Context, condition: DistMatrix, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Elements of A where a condition is not zero, else elements of B.

    Parameters
    ----------
    condition, A, B : matrices
        Of shapes that broadcast: sizes are equal, or 1. Any layouts and dtypes.

    Returns
    -------
    C : matrix
        Layout as in `add`; NumPy's common dtype of A and B.

    Raises
    ------
    ShapeError
        If the shapes do not broadcast.

    Notes
    -----
    One pass with 1 MiB of scratch; communication as in `add`.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    shape, layout, (test, a, b) = aligned(ctx, "where", condition, A, B)
    C = ctx.empty(shape, np.result_type(A.dtype, B.dtype), layout)
    if C.local.size:
        for part in _strips(C.local):
            C.local[:, part] = _strip(b, part)
            np.copyto(C.local[:, part], _strip(a, part), where=_strip(test, part) != 0)
    return C


def _strips(local: Array) -> Any:
    return panels(local.shape[1], max(1, CHUNK // max(1, local.shape[0] * local.itemsize)))


def _strip(local: Array, part: slice) -> Array:
    return local[:, part] if local.shape[1] > 1 else local  # a single column broadcasts


def _refuse_power(ctx: Context, name: str, negative: bool) -> None:
    found = sum_over_ranks(ctx.comm, np.array([negative], np.int64))
    require(
        not found[0],
        "RoutineError",
        f"{name}: integers to negative integer powers are not integers; convert one to float",
    )
