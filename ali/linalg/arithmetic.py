"""Elementwise sums, products, comparisons and functions, with NumPy's broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.blocks import CHUNK, Array, panels, require
from ali.interface import Context, routine
from ali.linalg.broadcasting import aligned
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.ufuncs import (
    BINARY,
    PARTS,
    UNARY,
    check_range,
    function_of,
    number_of,
    result_dtype,
)
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix


@routine("C")
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
    dtypes = [result_dtype("add", np.multiply, x, type(f)) for x, f in ((A, one), (B, other))]
    dtype = np.result_type(*dtypes)
    for factor, kind in zip((one, other), dtypes, strict=True):
        check_range("add", factor, kind)
    C = ctx.empty(shape, dtype, layout)
    if not C.local.size:
        return C
    with np.errstate(all="ignore"):
        if one == 1 and other == 1:
            np.add(a.local, b.local, out=C.local, casting="same_kind")
        elif one == 1 and other == -1:
            np.subtract(a.local, b.local, out=C.local, casting="same_kind")
        else:
            for part in _strips(C.local):
                np.multiply(_strip(a.local, part), one, out=C.local[:, part], casting="same_kind")
                scaled = np.multiply(_strip(b.local, part), other, dtype=dtypes[1])
                C.local[:, part] += scaled
    return C


@routine("C")
def elementwise(ctx: Context, op: str, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """C = op(A, B), element by element.

    Parameters
    ----------
    op : str
        add, subtract, multiply, divide, floor_divide, remainder, power, minimum, maximum,
        arctan2, hypot; equal, not_equal, less, less_equal, greater, greater_equal; logical_and,
        logical_or, logical_xor; bitwise_and, bitwise_or, bitwise_xor, left_shift, right_shift;
        logaddexp, copysign, nextafter, fmin, fmax, fmod, float_power: NumPy's functions
        with these names.
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
    zero and the like give inf and nan (0 for integers), as in NumPy, without a warning.

    Error: 1 eps, relative to the largest element. Peak memory: 1.0 times arguments and results.
    """
    function = function_of("elementwise", op, BINARY)
    dtype = result_dtype("elementwise", function, A, B.dtype, op)
    shape, layout, (a, b) = aligned(ctx, "elementwise", A, B)
    if op == "power" and A.dtype.kind == B.dtype.kind == "i":
        _refuse_power(ctx, "elementwise", bool((b.local < 0).any()))
    C = ctx.empty(shape, dtype, layout)
    if C.local.size:
        with np.errstate(all="ignore"):
            function(a.local, b.local, out=C.local, casting="unsafe")
    return C


@routine("C")
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
    function = function_of("elementwise_scalar", op, BINARY)
    require(
        kind in ("", "bool", "int", "float", "complex"),
        "BadArgumentError",
        f"elementwise_scalar: kind must be one of bool, int, float, complex or empty; got {kind!r}",
    )
    number = number_of("elementwise_scalar", value, A.dtype, kind)
    dtype = result_dtype("elementwise_scalar", function, A, type(number), op, reflected)
    if not op.endswith("equal") and op not in ("less", "greater"):  # comparisons accept all numbers
        check_range("elementwise_scalar", number, A.dtype)
    if op == "power" and A.dtype.kind == "i" and isinstance(number, int):
        negative = bool((A.local < 0).any()) if reflected else number < 0
        _refuse_power(ctx, "elementwise_scalar", negative)
    C = ctx.empty(A.array_shape, dtype, A.layout)
    if C.local.size:
        operands = (number, A.local) if reflected else (A.local, number)
        with np.errstate(all="ignore"):
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


@routine("C")
def apply(ctx: Context, op: str, A: DistMatrix) -> DistMatrix:
    """C = op(A), element by element.

    Parameters
    ----------
    op : str
        negative, abs, sign, conj, real, imag, square, sqrt, reciprocal, exp, expm1, log, log1p,
        log2, log10, sin, cos, tan, arcsin, arccos, arctan, sinh, cosh, tanh, arcsinh, arccosh,
        arctanh, floor, ceil, trunc, rint; isnan, isinf, isfinite, signbit, logical_not,
        invert, cbrt, exp2, degrees, radians, fabs: NumPy's
        functions with these names.
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
    if op in PARTS:
        C = ctx.empty(A.array_shape, A.local.real.dtype, A.layout)
        C.local[...] = A.local.real if op == "real" else A.local.imag
        return C
    function = function_of("apply", op, UNARY)
    C = ctx.empty(A.array_shape, result_dtype("apply", function, A, None, op), A.layout)
    if C.local.size:
        with np.errstate(all="ignore"):
            function(A.local, out=C.local, casting="unsafe")
    return C


@routine("C")
def astype(ctx: Context, A: DistMatrix, dtype: str) -> DistMatrix:
    """A copy of A with another dtype.

    Parameters
    ----------
    A : matrix, shape (m, n)
    dtype : str
        float32, float64, complex64, complex128, int32, int64 or bool.

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        Conversion to integers truncates; values out of range are undefined, as in NumPy.

    Raises
    ------
    DtypeError
        If the dtype is unknown, or imaginary parts would be lost (see `apply` with "real").

    Notes
    -----
    One pass, no communication.

    Error: 0 eps. Peak memory: 1.0 times arguments and results.
    """
    require(
        dtype in DTYPES,
        "DtypeError",
        f"astype: dtype must be one of {', '.join(DTYPES)}; got {dtype!r}",
    )
    require(
        A.dtype.kind != "c" or dtype.startswith("complex"),
        "DtypeError",
        f'astype: {A.dtype} to {dtype} would drop the imaginary parts; apply("real", A) does that',
    )
    C = ctx.empty(A.array_shape, dtype, A.layout)
    with np.errstate(all="ignore"):
        C.local[...] = A.local
    return C


@routine("C")
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
            C.local[:, part] = _strip(b.local, part)
            np.copyto(C.local[:, part], _strip(a.local, part), where=_strip(test.local, part) != 0)
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
