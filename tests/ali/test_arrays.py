"""The routines behind expressions on handles do what every library must do (`ali.testing`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import linalg
from ali.arrays import operands
from ali.interface import PythonLibrary
from ali.testing import Case, LibraryTests

A = np.random.default_rng(7).standard_normal((9, 4))
ROW = np.array([[1, 2, 3, 4]])


def operand(array: Any) -> dict[str, Any]:
    m, n = array.shape
    return {"values": array.tobytes(), "m": m, "n": n, "dtype": str(array.dtype)}


def elements(*numbers: float) -> bytes:
    return np.array(numbers).tobytes()


class TestOperands(LibraryTests):
    library = "ali.arrays.operands"
    sizes = (2, 3, 6)
    cases = (
        Case("array", operand(A), [A]),
        Case("array", {**operand(ROW), "layout": "MC_MR"}, [ROW]),
        Case("array", {**operand(A), "m": 8}, raises="288 bytes; 8 x 4 elements of float64"),
        Case("array", {**operand(A), "values": b"?"}, raises="BadArgumentError"),
        Case("array", {**operand(A), "dtype": "int8"}, raises="DtypeError"),
        Case("array", {**operand(A), "layout": "AC_DC"}, raises="LayoutError"),
        Case("combine", {"op": "subtract", "A": A, **operand(ROW)}, [A - ROW]),
        Case("combine", {"op": "less", "A": A, **operand(ROW), "reflected": True},
             [(ROW < A).astype("int32")]),
        Case("combine", {"op": "add", "A": A.T, **operand(ROW)}, raises="ShapeError"),
        Case("reduce", {"op": "max", "A": A, "axis": 0}, [elements(*A.max(axis=0)), "float64"]),
        Case("reduce", {"op": "min", "A": A, "axis": 1}, [elements(*A.min(axis=1)), "float64"]),
        Case("reduce", {"op": "max", "A": A}, [elements(A.max()), "float64"]),
        Case("reduce", {"op": "std", "A": A.round(), "ddof": 1}, [None, "float64"]),
        Case("reduce", {"op": "median", "A": A}, raises="can be one of sum, mean"),
        Case("plan", {"op": "add", "A": A, "B": A}),
        Case("plan", {"op": "matmul", "A": A, "B": A}, raises="do not match"),
    )  # fmt: skip


def test_the_library_also_exports_all_of_linalg() -> None:
    from ali import arrays  # noqa: PLC0415 - its names are those of builtins

    found = {r["name"] for r in PythonLibrary("ali.arrays", arrays).describe()["routines"]}
    own = {r["name"] for r in PythonLibrary("operands", operands).describe()["routines"]}
    assert found == own | set(linalg.__all__)
    assert own == {"array", "combine", "plan", "reduce"}
