"""The routines behind expressions on handles do what every library must do (`ali.testing`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import linalg
from ali.arrays import operands
from ali.python_library import PythonLibrary
from ali.testing import Case, LibraryTests
from tests.support.suite import scaled

A = np.random.default_rng(7).standard_normal((9, 4))
ROW = np.array([[1, 2, 3, 4]])


def operand(array: Any) -> dict[str, Any]:
    return {"values": array.tobytes(), "shape": list(array.shape), "dtype": str(array.dtype)}


class TestOperands(LibraryTests):
    library = "ali.arrays.operands"
    sizes = scaled((3,), (2, 3, 6))
    cases = (
        Case("array", operand(A), [A]),
        Case("array", {**operand(ROW), "layout": "MC_MR"}, [ROW]),
        Case("array", {**operand(A), "shape": [8, 4]}, raises="288 bytes"),
        Case("array", {**operand(A), "values": b"?"}, raises="BadArgumentError"),
        Case("array", {**operand(A), "dtype": "longdouble"}, raises="DtypeError"),
        Case("array", {**operand(A), "layout": "AC_DC"}, raises="LayoutError"),
        Case("combine", {"op": "subtract", "A": A, **operand(ROW)}, [A - ROW]),
        Case("combine", {"op": "less", "A": A, **operand(ROW), "reflected": True},
             [ROW < A]),
        Case("combine", {"op": "add", "A": A.T, **operand(ROW)}, raises="ShapeError"),
        *(Case("reduce", {"op": op, "A": A, "axes": None if axis is None else [axis],
                          "keepdims": True},
               [getattr(np, op)(A, axis=axis, keepdims=True)])
          for op in ("max", "min", "std", "prod", "nanmean", "argmax") for axis in (0, 1, None)),
        Case("reduce", {"op": "median", "A": A}, raises="sum, mean"),
        Case("choose", {"condition": A > 0, "A": A, **operand(np.float64(7))},
             [np.where(A > 0, A, 7.0)]),
        Case("choose", {"condition": A > 0, "B": A, **operand(ROW)}, [np.where(A > 0, ROW, A)]),
        Case("choose", {"condition": A > 0, **operand(np.array([2, 3]))}, [np.where(A > 0, 2, 3)]),
        Case("choose", {"condition": A > 0, "A": A, **operand(ROW), "values": b"?"},
             raises="BadArgumentError"),
        Case("filled", {"shape": [9, 4], "value": 2.5, "dtype": "float64"}, [np.full((9, 4), 2.5)]),
        Case("filled", {"shape": [2], "value": 1.5, "dtype": "int32"}, raises="cannot be held"),
        Case("progression", {"start": 1.0, "step": 2.0, "count": 5, "dtype": "int64"}),
        Case("plan", {"op": "add", "A": A, "B": A}),
        Case("plan", {"op": "matmul", "A": A, "B": A}, raises="do not match"),
    )  # fmt: skip


def test_the_library_also_exports_all_of_linalg() -> None:
    from ali import arrays  # noqa: PLC0415 - its names are those of builtins

    found = {r["name"] for r in PythonLibrary("ali.arrays", arrays).describe()["routines"]}
    own = {r["name"] for r in PythonLibrary("operands", operands).describe()["routines"]}
    assert own == {"array", "choose", "combine", "filled", "plan", "progression", "reduce"}
    assert found == {*arrays.__all__, *linalg.__all__}
