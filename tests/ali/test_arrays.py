"""The routines behind expressions on handles do what every library must do (`ali.testing`)."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ali import linalg
from ali.arrays import operands
from ali.interface import PythonLibrary
from ali.testing import Case, LibraryTests

A = np.random.default_rng(7).standard_normal((9, 4))
ROW = np.array([[1, 2, 3, 4]])


def told(array: Any) -> dict[str, Any]:
    values = base64.b64encode(array.tobytes()).decode("ascii")
    return {"values": values, "m": array.shape[0], "n": array.shape[1], "dtype": str(array.dtype)}


def heard(*numbers: float) -> str:
    return base64.b64encode(np.array(numbers).tobytes()).decode("ascii")


class TestOperands(LibraryTests):
    library = "ali.arrays.operands"
    sizes = (2, 3, 6)
    cases = (
        Case("array", told(A), [A]),
        Case("array", {**told(ROW), "layout": "MC_MR"}, [ROW]),
        Case("array", {**told(A), "m": 8}, raises="not the base64 of 8 x 4 elements of float64"),
        Case("array", {**told(A), "values": "?"}, raises="BadArgumentError"),
        Case("array", {**told(A), "dtype": "int8"}, raises="DtypeError"),
        Case("array", {**told(A), "layout": "AC_DC"}, raises="LayoutError"),
        Case("combine", {"op": "subtract", "A": A, **told(ROW)}, [A - ROW]),
        Case("combine", {"op": "less", "A": A, **told(ROW), "reflected": True},
             [(ROW < A).astype("int32")]),
        Case("combine", {"op": "add", "A": A.T, **told(ROW)}, raises="ShapeError"),
        Case("reduce", {"op": "max", "A": A, "axis": 0}, [heard(*A.max(axis=0)), "float64"]),
        Case("reduce", {"op": "min", "A": A, "axis": 1}, [heard(*A.min(axis=1)), "float64"]),
        Case("reduce", {"op": "max", "A": A}, [heard(A.max()), "float64"]),
        Case("reduce", {"op": "std", "A": A.round(), "ddof": 1}, [None, "float64"]),
        Case("reduce", {"op": "median", "A": A}, raises="can be one of sum, mean"),
        Case("plan", {"op": "add", "A": A, "B": A}),
        Case("plan", {"op": "matmul", "A": A, "B": A}, raises="do not go together"),
    )  # fmt: skip


def test_a_gang_finds_all_of_linalg_beside_them() -> None:
    from ali import arrays  # noqa: PLC0415 - its names are those of builtins

    found = {r["name"] for r in PythonLibrary("ali.arrays", arrays).describe()["routines"]}
    own = {r["name"] for r in PythonLibrary("operands", operands).describe()["routines"]}
    assert found == own | set(linalg.__all__)
    assert own == {"array", "combine", "plan", "reduce"}
