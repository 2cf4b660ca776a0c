"""The elementwise functions, and the dtypes of their results."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali.blocks import require
from mpi_workers.matrix.dist_matrix import DTYPES, DistMatrix

BINARY: dict[str, Any] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.true_divide,
    "floor_divide": np.floor_divide, "remainder": np.remainder, "power": np.power,
    "minimum": np.minimum, "maximum": np.maximum, "arctan2": np.arctan2, "hypot": np.hypot,
    "equal": np.equal, "not_equal": np.not_equal, "less": np.less,
    "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor,
    "left_shift": np.left_shift, "right_shift": np.right_shift, "logaddexp": np.logaddexp,
    "copysign": np.copysign, "nextafter": np.nextafter,
    "fmin": np.fmin, "fmax": np.fmax, "fmod": np.fmod, "float_power": np.float_power,
}  # fmt: skip
UNARY: dict[str, Any] = {
    "negative": np.negative, "abs": np.absolute, "sign": np.sign, "conj": np.conjugate,
    "square": np.square, "sqrt": np.sqrt, "reciprocal": np.reciprocal, "exp": np.exp,
    "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "log2": np.log2, "log10": np.log10,
    "sin": np.sin, "cos": np.cos, "tan": np.tan, "arcsin": np.arcsin, "arccos": np.arccos,
    "arctan": np.arctan, "sinh": np.sinh, "cosh": np.cosh, "tanh": np.tanh,
    "arcsinh": np.arcsinh, "arccosh": np.arccosh, "arctanh": np.arctanh,
    "floor": np.floor, "ceil": np.ceil, "rint": np.rint, "isnan": np.isnan,
    "isinf": np.isinf, "isfinite": np.isfinite, "logical_not": np.logical_not,
    "trunc": np.trunc, "signbit": np.signbit, "invert": np.invert, "cbrt": np.cbrt,
    "exp2": np.exp2, "degrees": np.degrees, "radians": np.radians, "fabs": np.fabs,
}  # fmt: skip
PARTS = ("real", "imag")  # not ufuncs in NumPy
WIDER = {np.dtype(np.int8): np.dtype(np.int32), np.dtype(np.float16): np.dtype(np.float32)}


def function_of(name: str, op: str, table: dict[str, Any]) -> Any:
    known = [*table, *(PARTS if table is UNARY else ())]
    require(
        op in table, "BadArgumentError", f"{name}: op must be one of {', '.join(known)}; got {op!r}"
    )
    return table[op]


def result_dtype(
    name: str, function: Any, A: DistMatrix, other: Any, op: str = "", reflected: bool = False
) -> np.dtype[Any]:
    """The dtype of the result; `other`: a dtype, a Python type, or None."""
    other = np.dtype(bool) if other is bool else other  # a Python bool is as strong as an array
    types = (A.dtype, None) if other is None else (A.dtype, other, None)
    if reflected:
        types = (other, A.dtype, None)
    try:
        found: np.dtype[Any] = function.resolve_dtypes(types)[-1]
    except TypeError:
        found = np.dtype(object)
    what = str(A.dtype) if other is None else f"{A.dtype} and {getattr(other, '__name__', other)}"
    if found in WIDER:  # of two bool, where NumPy has its smallest types
        found = WIDER[found]
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
    if kind == "int" or (kind == "" and whole and dtype.kind == "i"):
        require(whole, "BadArgumentError", f"{name}: {real} is not of kind 'int'")
        return int(real)
    return float(real)


def check_range(name: str, number: complex | float | int, dtype: np.dtype[Any]) -> None:
    if dtype.kind != "i" or not isinstance(number, int):
        return
    limits = np.iinfo(dtype)
    require(
        limits.min <= number <= limits.max,
        "BadArgumentError",
        f"{name}: {number} cannot be held in {dtype}",
    )
