"""Element by element: sums, products, comparisons, functions; with NumPy's broadcasting."""

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
        Of shapes that broadcast: in rows and in columns equal, or 1. Any layouts and dtypes.
    alpha, beta : complex
        Without an imaginary part they count as real, and whole numbers as integers: they
        change an integer matrix's dtype only where they must.

    Returns
    -------
    C : matrix
        In the layout of A or of B (of the full ones, where shapes differ): that of the operand
        to whose layout the others have the shortest way. NumPy's dtype.

    Raises
    ------
    ShapeError
        If the shapes do not broadcast.
    BadArgumentError
        If an integer matrix's dtype cannot hold a factor.

    Notes
    -----
    1 to 3 flops an element, in one pass, with 1 MiB of scratch beside C (none with factors of
    1 and -1). In the same layout nothing moves; else one operand is redistributed. A row or
    column moves to where the full matrix is: ``n / width`` to n words.
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
        logaddexp, copysign, nextafter: NumPy's functions of these names.
    A, B : matrices
        Of shapes that broadcast: in rows and in columns equal, or 1. Any layouts and dtypes.

    Returns
    -------
    C : matrix
        Layout as `add` chooses it. NumPy's dtype; where that is bool, int32 with 0 and 1.

    Raises
    ------
    BadArgumentError
        If there is no such operation.
    ShapeError
        If the shapes do not broadcast.
    DtypeError
        If the operation is not defined for these dtypes (floor_divide of complex numbers).
    RoutineError
        For an integer to the power of a negative integer.

    Notes
    -----
    One pass over the operands straight into C, no temporary; moves as in `add`. Divisions by
    zero and the like give inf and nan (0 for integers), as in NumPy, without a warning.
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
        Whether `value` comes first: ``elementwise_scalar("divide", A, 1, reflected=True)`` is
        1 / A.
    kind : str
        What `value` counts as: "int", "float" or "complex". "" takes the least: complex with an
        imaginary part, int if it is a whole number and A holds integers, else float. So NumPy's
        ``A + 2.0`` of an integer A is ``kind="float"``. Whole numbers beyond 2**53 are rounded on
        the way; for those use `elementwise` with a 1 x 1 matrix.

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        The dtype that NumPy gives A with a Python number of this kind; int32 for bool.

    Raises
    ------
    BadArgumentError
        If there is no such operation or kind, or `value` is not of the kind, or A's dtype
        cannot hold it.
    DtypeError
        If the operation is not defined for A's dtype.
    RoutineError
        For an integer to the power of a negative integer.

    Notes
    -----
    One pass, no communication, no temporary.
    """
    function = function_of("elementwise_scalar", op, BINARY)
    require(
        kind in ("", "int", "float", "complex"),
        "BadArgumentError",
        f'elementwise_scalar: kind={kind!r} is none of "int", "float", "complex" and ""',
    )
    number = number_of("elementwise_scalar", value, A.dtype, kind)
    dtype = result_dtype("elementwise_scalar", function, A, type(number), op, reflected)
    if not op.endswith("equal") and op not in ("less", "greater"):  # which compare all numbers
        check_range("elementwise_scalar", number, A.dtype)
    if op == "power" and A.dtype.kind == "i" and isinstance(number, int):
        negative = bool((A.local < 0).any()) if reflected else number < 0
        _refuse_power(ctx, "elementwise_scalar", negative)
    C = ctx.empty(A.shape, dtype, A.layout)
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
        A whole number leaves an integer matrix integer; without imaginary part it is real.

    Returns
    -------
    C : matrix, shape (m, n), layout of A

    Raises
    ------
    BadArgumentError
        If A's integer dtype cannot hold alpha.

    Notes
    -----
    ``m n / ranks`` flops, no communication, no temporary.
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
        arctanh, floor, ceil, trunc, rint; isnan, isinf, isfinite, signbit, logical_not: NumPy's
        functions of these names.
    A : matrix, shape (m, n)

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        NumPy's dtype (abs, real and imag of complex numbers are real, integers become float64
        where the function is not one of integers); int32 with 0 and 1 where that is bool.

    Raises
    ------
    BadArgumentError
        If there is no such function.
    DtypeError
        If it is not defined for A's dtype (floor of complex numbers).

    Notes
    -----
    One pass, no communication, no temporary. Out of the domain the result is nan, as in NumPy.
    """
    if op in PARTS:
        C = ctx.empty(A.shape, A.local.real.dtype, A.layout)
        C.local[...] = A.local.real if op == "real" else A.local.imag
        return C
    function = function_of("apply", op, UNARY)
    C = ctx.empty(A.shape, result_dtype("apply", function, A, None, op), A.layout)
    if C.local.size:
        with np.errstate(all="ignore"):
            function(A.local, out=C.local, casting="unsafe")
    return C


@routine("C")
def astype(ctx: Context, A: DistMatrix, dtype: str) -> DistMatrix:
    """A with another dtype.

    Parameters
    ----------
    A : matrix, shape (m, n)
    dtype : str
        float32, float64, complex64, complex128, int32 or int64.

    Returns
    -------
    C : matrix, shape (m, n), layout of A
        Fractions are cut off where it becomes integer, and what is out of range has no
        meaning, as in NumPy.

    Raises
    ------
    DtypeError
        If there is no such dtype, or numbers would lose their imaginary part (see `apply` with
        "real").

    Notes
    -----
    One pass, no communication.
    """
    require(
        dtype in DTYPES,
        "DtypeError",
        f"astype: dtype={dtype!r}; a matrix is one of {', '.join(DTYPES)}",
    )
    require(
        A.dtype.kind != "c" or dtype.startswith("complex"),
        "DtypeError",
        f'astype: {A.dtype} to {dtype} would drop the imaginary parts; apply("real", A) does that',
    )
    C = ctx.empty(A.shape, dtype, A.layout)
    with np.errstate(all="ignore"):
        C.local[...] = A.local
    return C


@routine("C")
def where(ctx: Context, condition: DistMatrix, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Elements of A where a condition is not zero, of B where it is.

    Parameters
    ----------
    condition, A, B : matrices
        Of shapes that broadcast: in rows and in columns equal, or 1. Any layouts and dtypes.

    Returns
    -------
    C : matrix
        Layout as `add` chooses it; NumPy's common dtype of A and B.

    Raises
    ------
    ShapeError
        If the shapes do not broadcast.

    Notes
    -----
    One pass with 1 MiB of scratch; moves as in `add`.
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
    return local[:, part] if local.shape[1] > 1 else local  # a column goes with every strip


def _refuse_power(ctx: Context, name: str, negative: bool) -> None:
    found = sum_over_ranks(ctx.comm, np.array([negative], np.int64))
    require(
        not found[0],
        "RoutineError",
        f"{name}: integers to negative integer powers are not integers; make one of them float",
    )
