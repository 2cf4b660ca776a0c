"""Conversions to a matrix's dtype keep every value, up to rounding."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from alchemist_ray.dtypes import as_array, check_range, chosen_dtype, common_dtype, open_table
from alchemist_ray.errors import DtypeError
from mpi_workers.matrix.arrow_columns import gathered
from mpi_workers.matrix.dtypes import castable

INT32, INT64 = np.iinfo("int32"), np.iinfo("int64")


@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        ([INT32.max + 1], "int64", "int32"),
        ([0, INT32.min - 1], "int64", "int32"),
        ([INT64.max + 1], "uint64", "int64"),
        ([1.0, 1e39], "float64", "float32"),
        ([-1e39], "float64", "float32"),
        ([1 + 1e39j], "complex128", "complex64"),
        ([0, np.nan], "float64", "int64"),
        ([np.inf], "float32", "int64"),
        ([2.0**63], "float64", "int64"),
        ([2.0**31], "float64", "int32"),
        ([-(2.0**31) - 1], "float64", "int32"),
        ([-1], "int8", "uint64"),
        ([1, -0.5], "float64", "int64"),
        ([2.0**31 - 0.5], "float64", "int32"),
        ([256], "uint16", "uint8"),
        ([1e5], "float32", "float16"),
        ([100_000, 1], "int64", "float16"),
        ([np.nan, -np.inf, -1e39, 1], "float64", "float32"),
    ],
)
def test_elements_that_do_not_fit_are_refused(values: Any, source: str, target: str) -> None:
    array = np.array(values, source)
    with pytest.raises(DtypeError, match="cannot hold"):
        check_range(array, np.dtype(target), "the array")


@pytest.mark.parametrize(
    ("values", "source", "target"),
    [
        ([INT32.max, INT32.min], "int64", "int32"),
        ([np.inf, -np.inf, np.nan, 3e38], "float64", "float32"),
        ([0.1], "float64", "float32"),
        ([], "int64", "int32"),
        ([255], "int64", "uint8"),
        ([65504], "float64", "float16"),
        ([2.0**31 - 1, -(2.0**31), -0.0], "float64", "int32"),
        ([-(2.0**63)], "float64", "int64"),
        ([np.nan, np.inf, 7], "float64", "bool"),
        ([np.inf + 1j], "complex128", "complex64"),
    ],
)
def test_elements_that_fit_are_taken(values: Any, source: str, target: str) -> None:
    check_range(np.array(values, source), np.dtype(target), "the array")


def test_fractions_are_cut_off_where_numpy_does() -> None:
    parts = np.array([2.0**31 - 0.5, -(2.0**31) - 0.5])
    check_range(parts, np.dtype("int32"), "the array", cut=True)
    with pytest.raises(DtypeError, match=r"7\.5, which int32 .*\.astype\('int32'\)"):
        check_range(parts, np.dtype("int32"), "the array")


def test_the_check_takes_little_memory() -> None:
    array = np.ones((3, 1_000_000)).T
    array[700_000, 2] = 0.25
    tracemalloc.start()
    try:
        with pytest.raises(DtypeError, match=r"element 0\.25"):
            check_range(array, np.dtype("int8"), "the array")
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_a_kind_of_numbers_is_never_changed() -> None:
    for source, wanted in (("float64", "bool"), ("complex128", "float64"), ("U3", "float64")):
        with pytest.raises(DtypeError, match="without loss"):
            chosen_dtype(np.dtype(source), wanted)


def test_the_error_names_a_dtype_that_holds_the_elements() -> None:
    with pytest.raises(DtypeError, match=r"choose one to convert to, e\.g\. dtype='float64'"):
        chosen_dtype(np.dtype(np.longdouble), None)


def test_dates_are_cast_to_dates_alone() -> None:
    date, span, count = map(np.dtype, ("M8[s]", "m8[s]", "int64"))
    assert castable(date, np.dtype("M8[us]"))
    assert castable(span, span)
    for have, want in ((date, span), (date, count), (count, date), (span, count)):
        assert not castable(have, want)
    for mixed in ([date, span], [date, count], [count, span]):
        with pytest.raises(DtypeError, match="no common dtype"):
            common_dtype(mixed)
    assert chosen_dtype(np.dtype(">M8[D]"), None) == np.dtype("M8[D]")
    assert common_dtype([np.dtype("M8[D]"), date]) == date


def test_nulls_that_lie_above_their_elements_are_nulls() -> None:
    pa = pytest.importorskip("pyarrow")
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 2]), pa.array(["a", None, "c"]))
    with pytest.raises(DtypeError, match=r"nulls \(2\)"):
        open_table(codes)
    assert gathered(open_table(codes, -1)).tolist() == [0, -1, -1, 1]  # as many categories as words
    mask = pa.array([False, True])
    structs = pa.StructArray.from_arrays([pa.array([1, 2])], names=["a"], mask=mask)
    assert as_array(structs[:1], "it")[0].tolist() == [[1]]
    with pytest.raises(DtypeError, match="1 of its rows are null"):
        as_array(structs, "it", "nan")
