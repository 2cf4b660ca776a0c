"""Functions that test_linalg.py runs on ranks: matrices behave as NumPy's arrays."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from scipy import special

from ali import linalg
from ali.linalg.arithmetic import UNARY
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import NUMBERS, Checks, small_panels, values
from tests.support.layouts import SOME_LAYOUTS as EVERY

SHAPES = [(13, 7), (1, 1), (2, 30), (40, 1)]
SOME_LAYOUTS = (
    "VC_STAR", "MC_MR", "STAR_VC", "MD_STAR", "CIRC_CIRC", "STAR_MR", "STAR_STAR", "BLOCK",
    "BLOCK_CYCLIC:2",
)  # fmt: skip


def sums_of_two(check: Checks) -> None:
    for one, other in check.sample(NUMBERS, NUMBERS):
        a, b = values((9, 5), one), values((9, 5), other, 1)
        A, B = check.distribute(a, "MC_MR"), check.distribute(b)
        for alpha, beta in ((1, 1), (1, -1), (2, -3), (0.5, 1), (1, 2j)):
            C = check.linalg.add(A, B, alpha, beta)
            with small_panels():
                D = check.linalg.add(A, B, alpha, beta)
            factors = [
                int(f) if isinstance(f, int) and x.dtype.kind == "i" else f * 1.0
                for f, x in ((alpha, a), (beta, b))
            ]
            expected = np.multiply(a, factors[0]) + np.multiply(b, factors[1])
            what = [one, other, alpha, beta]
            check.close(C, expected, expected.dtype, what)
            check.close(D, expected, expected.dtype, [*what, "in strips"])
    for left, right in check.sample(EVERY, SOME_LAYOUTS):
        a, b = values((11, 6), "float64"), values((11, 6), "float64", 1)
        C = check.linalg.add(check.distribute(a, left), check.distribute(b, right))
        check.close(C, a + b, "float64", [left, right])
        check.true(C.layout in (left, right), [left, right, C.layout])


def broadcasts(check: Checks) -> None:
    shapes = [(8, 6), (1, 6), (8, 1), (1, 1)]
    for one, other, layout, small in check.sample(shapes, shapes, EVERY, ("VC_STAR", "MR_MC")):
        a, b = values(one, "float64"), values(other, "int32", 1)
        C = check.linalg.elementwise(
            "subtract", check.distribute(a, layout), check.distribute(b, small)
        )
        check.close(C, a - b, "float64", [one, other, layout, small])
        test = check.distribute((values((8, 1), "int32") > 0).astype(np.int32), small)
        C = check.linalg.where(test, check.distribute(a, layout), check.distribute(b, small))
        expected = np.where(values((8, 1), "int32") > 0, a, b)
        check.close(C, expected, "float64", ["where", one, other, layout, small])
    a = values((8, 6), "float64")
    A = check.distribute(a)
    mean = check.linalg.mean(A, 0)
    check.true(mean.layout == "STAR_STAR", "a row by A")  # lies where A is: no move
    C = check.linalg.elementwise("subtract", A, mean)
    check.close(C, a - a.mean(axis=0), "float64", "centred")


def operations(check: Checks) -> None:
    binary = [
        "add", "subtract", "multiply", "divide", "floor_divide", "remainder", "minimum", "maximum",
        "arctan2", "hypot", "equal", "not_equal", "less", "less_equal", "greater",
        "greater_equal", "logical_and", "logical_or", "logical_xor", "logaddexp", "copysign",
        "nextafter", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift",
    ]  # fmt: skip
    whole = {"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"}
    real_only = {
        "floor_divide", "remainder", "arctan2", "hypot", "logaddexp", "copysign", "nextafter",
        *whole,
    }  # fmt: skip
    for op, one, other in check.sample(binary, NUMBERS, NUMBERS):
        if op in real_only and "complex" in one + other:
            continue
        if op in whole and "float" in one + other:
            continue
        a, b = values((6, 4), one), values((6, 4), other, 1)
        with np.errstate(all="ignore"):
            expected = getattr(np, op)(a, b)
            check.same(check.linalg.elementwise(op, a, b), expected, [op, one, other])
    for op, dtype, reflected in check.sample(
        [b for b in binary if b not in real_only], NUMBERS, (False, True)
    ):
        a = values((6, 4), dtype)
        for number in (2, 2.5, 1 - 2j):
            kind = type(number).__name__
            with np.errstate(all="ignore"):
                expected = getattr(np, op)(*((number, a) if reflected else (a, number)))
            found = check.linalg.elementwise_scalar(
                op, check.distribute(a, "STAR_VC"), number, reflected, kind
            )
            check.same(found, expected, [op, dtype, number, reflected])
    for exponent in (2, 0.5, 3):
        a = values((5, 4), "int64") ** 2
        found = check.linalg.elementwise_scalar("power", a, exponent)
        check.same(found, a**exponent, ["power", exponent])


def functions_of_one(check: Checks) -> None:
    for op, dtype in itertools.product((*UNARY, "real", "imag"), NUMBERS):
        a = values((6, 5), dtype)
        if op in ("rint", "log2") and dtype.startswith("complex"):
            a = a.real.astype(dtype)
        A = check.distribute(a, "MC_MR")
        try:
            with np.errstate(all="ignore"):
                expected = np.asarray(getattr(np, op, getattr(special, op, None))(a))
        except TypeError:
            said = check.failures(linalg.apply, check.ctx, op, A)
            check.true(all(s.startswith("DtypeError: apply: ") for s in said), [op, dtype, said])
            continue
        check.same(check.linalg.apply(op, A), expected, [op, dtype])
    for one, other in itertools.product(NUMBERS, NUMBERS):
        if one.startswith("complex") and not other.startswith("complex"):
            continue
        a = values((5, 4), one)
        found = check.linalg.astype(check.distribute(a, "STAR_VC"), other)
        check.same(found, a.astype(other), ["astype", one, other])
    a = values((5, 4), "complex64")
    check.close(check.linalg.scale(a, 2 - 1j), a * (2 - 1j), "complex64", "scale")
    a = values((5, 4), "int32")
    check.same(check.linalg.scale(a, 3), a * 3, "scale int")


def reductions(check: Checks) -> None:
    names = ("sum", "mean", "min", "max", "var", "std")
    # All layouts with one dtype, all dtypes with one layout: six names, 14 layouts, three axes.
    typed = [("float64", layout) for layout in EVERY] + [(t, "MC_MR") for t in NUMBERS]
    for shape, (dtype, layout), name in check.sample(SHAPES, typed, names):
        a = values(shape, dtype)
        A = check.distribute(a, layout)
        wide = a.astype("complex128") if a.dtype.kind == "c" else a
        for axis in (0, 1, None):
            with small_panels():
                R = getattr(check.linalg, name)(A, axis)
            expected = getattr(np, name)(wide, axis=axis, keepdims=True)
            kind = getattr(np, name)(a, axis=axis).dtype
            scale = 20.0 * (a.size if name in ("sum", "var") else 1)
            scale = 0 if kind.kind == "i" else scale
            check.close(R, expected.astype(kind), kind, [name, shape, dtype, layout, axis], scale)
    a = values((40, 6), "float64") + 1e8  # what is naive has no digit left
    expected = a.var(axis=0, ddof=1, keepdims=True)
    check.close(check.linalg.var(a, 0, 1), expected, "float64", "var with a large mean", 1e6)
    for dtype, layout in check.sample(("float32", "float64", "int32"), EVERY):
        a = values((23, 5), dtype)
        with small_panels():
            found = check.linalg.column_stats(check.distribute(a, layout), 1)
        kind = np.dtype("float64" if dtype == "int32" else dtype)
        wanted = a.mean(0), a.std(0, ddof=1), a.min(0), a.max(0)
        for M, expected in zip(found, wanted, strict=True):
            check.close(M, expected[None].astype(kind), kind, ["stats", dtype], 20)
    a = values((9, 4), "float64")
    a[3, 1], a[4, 2] = np.nan, -np.inf
    for name in ("sum", "mean", "min", "max"):
        expected = getattr(np, name)(a, axis=0, keepdims=True)
        check.same(getattr(check.linalg, name)(a, 0), expected, [name, "not finite"])
    a[3, 1] = np.inf
    for rows in (a, a[3:5]):  # two rows are less than ranks
        mean = check.linalg.column_stats(rows)[0]
        check.same(mean, rows.mean(axis=0, keepdims=True), "mean with inf")
    big = np.full((70_000, 1), 2**31 - 1, "int32")
    check.same(check.linalg.sum(big), big.sum(keepdims=True), "i32")


def other_norms(check: Checks) -> None:
    orders: dict[str, Any] = {"1": 1, "inf": np.inf, "2": 2, "nuc": "nuc", "fro": "fro"}
    for shape, dtype, layout, name in check.sample(
        SHAPES, NUMBERS, ("VC_STAR", "MC_MR", "STAR_VC", "CIRC_CIRC", "MR_STAR"), orders
    ):
        a = values(shape, dtype)
        A = check.distribute(a, layout)
        used = np.float64 if dtype in ("float64", "complex128", "int32", "int64") else np.float32
        found = used(check.linalg.norm(A, name))
        expected = used(np.linalg.norm(a.astype("complex128"), orders[name]))
        check.close(found, expected, used, [name, shape, dtype, layout])
        if name == "fro":
            check.close(check.linalg.norm(A, "max"), float(np.abs(a).max()), "float64", "max")


def slices(check: Checks) -> None:
    cuts = [
        (None, None, None), (2, 9, 1), (None, None, 3), (None, None, -1), (-2, None, -4), (9, 2, 1)
    ]  # fmt: skip
    for layout, rows, cols, dtype in check.sample(EVERY, cuts, cuts, ("float32", "complex128")):
        a = values((14, 11), dtype)
        with small_panels():
            B = check.linalg.slice(check.distribute(a, layout), *rows, *cols)
        expected = a[slice(*rows), slice(*cols)]
        check.same(B, expected, [layout, rows, cols, dtype])
        check.true(B.layout == layout, "layout")
    picks = [[0], [-1, 3, 3, 0], list(range(13, -1, -1)), [5, 6, 7], [2, 9, 4], []]
    for layout, pick, dtype in check.sample(EVERY, picks, NUMBERS):
        a = values((14, 15), dtype)
        A = check.distribute(a, layout)
        index = np.array(pick, int)
        check.same(check.linalg.take_rows(A, pick), a[index], [layout, pick])
        check.same(check.linalg.take_cols(A, pick), a[:, index], [layout, pick])
    a = values((14, 15), "float64")
    A = check.distribute(a, "MC_MR")
    zero = np.zeros((1, 1))
    column = check.linalg.elementwise("greater", check.linalg.slice(A, col_stop=1), zero)
    check.same(check.linalg.select_rows(A, column), a[a[:, 0] > 0], "rows by mask")
    row = check.linalg.elementwise("greater", check.linalg.slice(A, row_stop=1), zero)
    check.same(check.linalg.select_cols(A, row), a[:, a[0] > 0], "columns by mask")
    for select, shape in ((linalg.select_rows, (14, 1)), (linalg.select_cols, (1, 15))):
        found = select(check.ctx, A, check.distribute(np.zeros(shape, np.int32)))
        check.true(found.shape == ((0, 15) if shape[1] == 1 else (14, 0)), "a mask of zeros")
    for left, right, axis in check.sample(EVERY, ("VC_STAR", "STAR_VC", "MC_MR"), (0, 1)):
        a, b = values((8, 8), "float32"), values((5, 8) if axis == 0 else (8, 5), "int64")
        C = check.linalg.concatenate(check.distribute(a, left), check.distribute(b, right), axis)
        check.same(C, np.concatenate([a, b], axis), [left, right, axis])


def diagonals_and_fills(check: Checks) -> None:
    for layout, dtype, shape in check.sample(EVERY, NUMBERS, [(9, 5), (4, 11), (1, 1), (6, 6)]):
        a = values(shape, dtype)
        A = check.distribute(a, layout)
        expected = np.diagonal(a)
        check.same(check.whole(check.linalg.diagonal(A)).reshape(-1), expected, [layout, dtype])
        trace = complex(np.trace(a))
        check.close(check.linalg.trace(A), trace, "complex128", "trace", 1e9)
        F = check.linalg.full(*shape, value=3, dtype=dtype, layout=layout)
        check.same(F, np.full(shape, 3, dtype), ["full", layout])
        Z = check.linalg.zeros(*shape, dtype=dtype, layout=layout)
        check.same(Z, np.zeros(shape, dtype), ["zeros", layout])
        check.true((F.layout, Z.layout) == (layout, layout), layout)
    for shape, layout in itertools.product([(7, 1), (1, 7), (1, 1)], EVERY):
        a = values(shape, "float32")
        D = check.linalg.diag(check.distribute(a, layout))
        check.same(D, np.diag(a.reshape(-1)), ["diag", shape, layout])


def refused(check: Checks) -> list[Any]:
    """The failures of bad calls on every rank."""
    ctx = check.ctx
    A, B = ctx.zeros((4, 3), "float64"), ctx.zeros((3, 4), "float64")
    J, Z = ctx.zeros((4, 3), "int32"), ctx.zeros((4, 3), "complex64")
    minus = linalg.full(ctx, 4, 3, -1, "int32", "MC_MR")
    says = check.refusals(linalg)
    says("add", "ShapeError: shapes 4 x 3 and 3 x 4 do not broadcast", A, B)
    says("where", "ShapeError: shapes 4 x 3 and 4 x 3 and 3 x 4 do not broadcast", A, A, B)
    says("elementwise", "BadArgumentError: op must be one of add, arctan2", "plus", A, A)
    says("apply", "BadArgumentError: op must be one of abs, arccos", "cosine", A)
    says("elementwise", "DtypeError: floor_divide is not defined for float64 and", "floor_divide",
         A, Z)  # fmt: skip
    says("apply", "DtypeError: floor is not defined for complex64", "floor", Z)
    says("elementwise_scalar", "BadArgumentError: kind must be one of", "add", A, 1, kind="double")
    says("elementwise_scalar", "BadArgumentError: 1.5 is not of kind 'int'", "add", A, 1.5,
         kind="int")  # fmt: skip
    says("elementwise_scalar", "BadArgumentError: 1j is not of kind 'float'", "add", A, 1j,
         kind="float")  # fmt: skip
    says("elementwise_scalar", "BadArgumentError: 1099511627776 cannot be held in int32", "add", J,
         2**40)  # fmt: skip
    says("elementwise", "RoutineError: integers to negative integer powers", "power", J, minus)
    says("elementwise_scalar", "RoutineError: integers to negative integer powers", "power", J, -1)
    says("astype", "DtypeError: dtype must be one of float32", A, "float128")
    says("astype", "DtypeError: complex64 to float64 would drop the imaginary parts", Z, "float64")
    says("sum", "BadArgumentError: axis must be 0", A, 2)
    says("var", "BadArgumentError: ddof=-1: it must be at least 0", A, 0, -1)
    says("column_stats", "DtypeError: A is complex64", Z)
    says("norm", "BadArgumentError: ord must be one of fro, 1, inf", A, "3")
    says("slice", "BadArgumentError: steps are (0, None)", A, row_step=0)
    says("take_rows", "BadArgumentError: A has 4 rows, and index 4 is out", A, [0, 4])
    says("take_cols", "BadArgumentError: A has 3 columns, and index -4 is", A, [-4])
    says("select_rows", "ShapeError: the mask is 4 x 3 and A is 4 x 3; it must be 4 x 1", A, A)
    says("select_cols", "ShapeError: the mask is 4 x 3 and A is 4 x 3; it must be 1 x 3", A, A)
    says("concatenate", "ShapeError: A is 4 x 3 and B is 3 x 4; their numbers of columns", A, B)
    says("concatenate", "BadArgumentError: axis=2 is neither 0 nor 1", A, A, 2)
    says("diag", "ShapeError: A is 4 x 3; it must be one row or one column", A)
    says("full", "ShapeError: -1 x 3 is not a shape", -1, 3, 1)
    says("full", "DtypeError: dtype must be one of", 2, 3, 1, "float128")
    says("full", "LayoutError: layout must be one of", 2, 3, 1, "float32", "MC_MC")
    says("full", "BadArgumentError: 1.5 cannot be held in int32", 2, 3, 1.5, "int32")
    says("full", "BadArgumentError: 1j cannot be held in float32", 2, 3, 1j, "float32")
    says("random_uniform", "ShapeError: -1 x 3 is not a shape", -1, 3, 1)
    says("matmul", "BadArgumentError: transpose_a must be one of", A, B, "X")
    says("matmul", "ShapeError: A is 3 x 4 after transposing and B is 3 x 4; A must", A, B, "T")
    return says.found


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(
        gang, sums_of_two, broadcasts, operations, functions_of_one, reductions, other_norms,
        slices, diagonals_and_fills, refused,
    )  # fmt: skip
