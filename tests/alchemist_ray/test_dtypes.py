"""Conversions to a matrix's dtype keep every value, up to rounding."""

from __future__ import annotations

import fractions
import tracemalloc
from typing import Any

import numpy as np
import pytest

from alchemist_ray.dtypes import (
    as_array,
    check_range,
    chosen_dtype,
    common_dtype,
    frame_values,
    open_table,
)
from alchemist_ray.errors import DtypeError
from mpi_workers.columns.arrow_columns import gathered
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


EARLY, LATE = np.array(["2000-01-01"], "M8[ns]"), np.array(["3000-01-01"], "M8[s]")


def test_dates_that_the_finest_unit_cannot_hold_are_refused_in_frames_and_tables() -> None:
    """NumPy and pandas make 1830-11-23 of 3000-01-01."""
    pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
    pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
    durations = {"late": np.array([10**12], "m8[s]"), "early": np.array([10**9], "m8[ns]")}
    frames = [pd.DataFrame({"early": EARLY, "late": LATE}), pd.DataFrame(durations)]
    zone = frames[0].assign(late=frames[0].late.dt.tz_localize("Europe/Paris"))
    for frame in (*frames, zone, frames[0].astype({"late": pd.ArrowDtype(pa.timestamp("s"))})):
        with pytest.raises(DtypeError, match=r"column 'late' has the element .*choose another un"):
            frame_values(frame)
        with pytest.raises(DtypeError, match="column 'late' has the element"):
            as_array(pa.Table.from_pandas(frame), "it")
        unit = frame_values(frame.late).dtype
        np.testing.assert_array_equal(
            frame_values(frame, wanted=unit), frame.to_numpy(unit) if frame is not zone else
            np.column_stack([EARLY.astype(unit), frame_values(zone.late)]),
        )  # fmt: skip
    fitting = frame_values(pd.DataFrame({"early": EARLY, "other": EARLY.astype("M8[s]")}))
    np.testing.assert_array_equal(fitting, [[EARLY[0], EARLY[0]]])


CATEGORIES: list[tuple[list[Any], Any]] = [
    ([10, 20, 10], np.int64), ([1.5, 2.5, 1.5], np.float64), ([True, False, True], np.bool_),
    ([*EARLY, *LATE.astype("M8[D]"), *EARLY], "M8[us]"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "dtype"), CATEGORIES)
def test_categories_that_are_numbers_or_dates_are_these(values: list[Any], dtype: Any) -> None:
    pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
    pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
    plain = np.array(values, dtype)
    table = pa.table({"a": pa.array(plain).dictionary_encode()})
    column = pd.Series(plain, dtype="category")
    coded = pd.ArrowDtype(pa.dictionary(pa.int8(), pa.array(plain).type))
    objects = pd.Series(pd.Categorical(plain.tolist(), categories=pd.Index(
        list(dict.fromkeys(plain.tolist())), dtype=object)))  # fmt: skip
    found = [frame_values(column), frame_values(column.astype(coded)), gathered(open_table(table))]
    for one in found if plain.dtype.kind == "M" else (*found, frame_values(objects)):
        assert one.dtype == plain.dtype
        np.testing.assert_array_equal(one.ravel(), plain)
    lists = pa.array([[1.5, 2.5], None, [0.5, 0], [1.5, 2.5]], pa.list_(pa.float32(), 2))
    with pytest.raises(DtypeError, match=r"the column has nulls \(2\)"):
        open_table(pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), lists.slice(0, 2)))
    rows = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1]), lists.slice(2))
    assert gathered(open_table(rows)).tolist() == [[1.5, 2.5], [0.5, 0.0], [1.5, 2.5]]


def test_texts_among_other_categories_are_refused() -> None:
    pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
    with pytest.raises(DtypeError, match=r"'a' has categories of several types \(int, str\)"):
        frame_values(pd.DataFrame({"a": pd.Categorical([1, "1"])}))
    found: dict[int, Any] = {}
    frame = pd.DataFrame({"a": pd.cut([1, 5, 9], [0, 4, 10])})
    assert frame_values(frame, categories=found).ravel().tolist() == [0, 1, 1]
    assert found == {0: ["(0, 4]", "(4, 10]"]}


def test_sparse_columns_of_pandas_have_two_ways_in() -> None:
    pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
    frame = pd.DataFrame({"a": pd.arrays.SparseArray([0.0, 0, 3], fill_value=0.0), "b": [1, 2, 3]})
    words = r"'a' is Sparse\[float64, 0.*sparse.to_coo\(\).*astype\(\{'a': 'float64'\}\)"
    with pytest.raises(DtypeError, match=words):
        frame_values(frame)
    assert frame_values(frame.astype({"a": "float64"})).tolist() == [[0, 1], [0, 2], [3, 3]]
    assert frame[["a"]].sparse.to_coo().nnz == 1


def test_an_instant_that_is_no_null_is_never_nat() -> None:
    pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
    least = pa.array([-(2**63), 5, None]).view(pa.timestamp("ns"))
    for column in (least, least.dictionary_encode(), pa.array([[-(2**63)]]).cast(
            pa.list_(pa.duration("s"))), pa.table({"a": least})):  # fmt: skip
        with pytest.raises(DtypeError, match=r"has 1 elements of the least int64 that are not nul"):
            open_table(column, "nan")
    assert np.isnat(gathered(open_table(least.slice(1), "nan"))).tolist() == [False, True]


def test_decimals_become_the_nearest_float64() -> None:
    pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
    rng = np.random.default_rng(0)
    for bits, digits in ((32, 9), (64, 18), (128, 38), (256, 76)):
        make = getattr(pa, f"decimal{bits}")
        for scale in (0, 3, digits // 2, digits, -5):
            texts = ["".join(map(str, rng.integers(0, 10, rng.integers(1, digits + 1))))
                     for _ in range(300)]  # fmt: skip
            whole = [0, 10**digits - 1, 1 - 10**digits, *map(int, texts), *(-int(t) for t in texts)]
            whole += [n for n in (2**53 + 1, -(2**54 + 3), 2**64 + 1, -(2**63)) if n < 10**digits]
            whole = [n for n in whole if abs(n) < 10**digits]
            stored = b"".join(n.to_bytes(bits // 8, "little", signed=True) for n in whole)
            column = pa.Array.from_buffers(
                make(digits, scale), len(whole), [None, pa.py_buffer(stored)]
            )
            expected = [float(fractions.Fraction(n) / fractions.Fraction(10) ** scale)
                        for n in whole]  # fmt: skip
            assert gathered(open_table(column)).ravel().tolist() == expected, (bits, scale)
