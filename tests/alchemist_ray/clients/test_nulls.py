"""One rule for columns of every producer: no null becomes a number, no integer is rounded."""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import scipy.sparse

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AlchemistError, BadArgumentError, DtypeError, ShapeError
from mpi_workers.columns import pandas_columns
from tests.support import traces

pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs alchemist-on-ray[data]")

BIG = 2**53 + 1  # float64 rounds it
Send = Callable[..., Any]
DOCS = Path(__file__).parents[3] / "docs" / "transfer.md"


class Frame:
    """A table that is known by Arrow's protocol alone, as those of polars and DuckDB are."""

    def __init__(self, table: Any) -> None:
        self.columns = table.column_names
        self.__arrow_c_stream__ = table.__arrow_c_stream__


def polars(table: Any) -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").from_arrow(table)


def parquet(als: AlchemistSession, table: Any, folder: Path, **options: Any) -> Any:
    pq.write_table(table, folder / "a.parquet")
    return als.load_matrix(folder / "a.parquet", **options)


def dataset(als: AlchemistSession, table: Any, folder: Path, **options: Any) -> Any:
    data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
    return als.send_matrix(data.from_arrow(table), **options)


def dask(als: AlchemistSession, table: Any, folder: Path, **options: Any) -> Any:
    dd = pytest.importorskip("dask.dataframe", reason="needs alchemist-on-ray[dask]")
    return als.send_matrix(dd.from_pandas(pandas(table), npartitions=1), **options)


def pandas(table: Any) -> Any:
    return table.to_pandas(types_mapper=pd.ArrowDtype)


def sends(make: Callable[[Any], Any]) -> Send:
    return lambda als, table, _, **options: als.send_matrix(make(table), **options)


NAMED: dict[str, Send] = {
    "Arrow": sends(lambda table: table),
    "a batch": sends(lambda table: table.to_batches()[0]),
    "the protocol": sends(Frame),
    "polars": sends(polars),
    "pandas": sends(pandas),
    "Parquet": parquet,
    "Ray Data": dataset,
}
BLOCKS: dict[str, Send] = {
    "the object store": lambda als, table, _, **options: als.send_matrix(
        [(ray.put(table), 0, 0)], **options
    ),
    "an iterator": lambda als, table, _, **options: als.send_blocks(
        [table], **{"shape": (2, 2), "dtype": "int64", **options}
    ),
}


@pytest.mark.parametrize("producer", [*NAMED, *BLOCKS])
def test_integers_arrive_exactly_and_nulls_are_refused(
    als: AlchemistSession, tmp_path: Path, producer: str
) -> None:
    send = (NAMED | BLOCKS)[producer]
    A = send(als, pa.table({"a": [BIG, 2], "b": [3, 4]}), tmp_path)
    assert (A.dtype, A.fetch().tolist()) == (np.int64, [[BIG, 3], [2, 4]])
    assert A.columns == (("a", "b") if producer in NAMED else ())
    for column in ([BIG, None], [1.5, None], [True, None]):
        with pytest.raises(DtypeError, match=r"column 'a' has nulls \(1\).*: fill"):
            send(als, pa.table({"a": column, "b": [3, 4]}), tmp_path)


@pytest.mark.parametrize("producer", [*NAMED, *BLOCKS])
def test_text_and_times_of_day_are_refused_with_the_remedy(
    als: AlchemistSession, tmp_path: Path, producer: str
) -> None:
    send = (NAMED | BLOCKS)[producer]
    for column, remedy in (
        ([datetime.time(3, 4)] * 2, "cast it to a duration"), (["x", "y"], "drop or convert it"),
    ):  # fmt: skip
        with pytest.raises(DtypeError, match=f"column 'a' has type .*not numeric.*{remedy}"):
            send(als, pa.table({"a": column, "b": [3, 4]}), tmp_path)


DAY = datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)


@pytest.mark.parametrize("producer", [*NAMED, "the object store", "Dask"])
def test_dates_and_durations_arrive_in_the_finest_unit(
    als: AlchemistSession, tmp_path: Path, producer: str
) -> None:
    send = (NAMED | BLOCKS | {"Dask": dask})[producer]
    dates = {"a": [DAY.date()] * 2, "b": pa.array([DAY] * 2, pa.timestamp("ms", "Asia/Tokyo"))}
    A = send(als, pa.table(dates), tmp_path)
    assert A.dtype == np.dtype("M8[ms]")
    expected = np.array([["2026-01-02", "2026-01-02T03"]] * 2, "M8[ms]")
    np.testing.assert_array_equal(A.fetch(), expected)
    assert A.columns == (("a", "b") if producer != "the object store" else ())
    np.testing.assert_array_equal((A[:, 1] - A[:, 0]).fetch(), np.array([3, 3], "m8[h]"))
    B = send(als, pa.table({"a": pa.array([5, -7], pa.duration("s"))}), tmp_path)
    np.testing.assert_array_equal(B.fetch(), np.array([[5], [-7]], "m8[s]"))
    with pytest.raises(DtypeError, match=r"have no common dtype: send dates, durations and numb"):
        send(als, pa.table({"a": [DAY] * 2, "b": [3, 4]}), tmp_path)


def test_dates_of_pandas_numpy_and_polars(als: AlchemistSession) -> None:
    frame = pd.DataFrame({"t": pd.to_datetime(["2026-01-02T03", None])})
    frame["local"] = frame.t.dt.tz_localize("Asia/Tokyo")
    expected = np.array([["2026-01-02T03", "2026-01-01T18"], ["NaT", "NaT"]], frame.t.dtype)
    A = als.send_matrix(frame)
    np.testing.assert_array_equal(A.fetch(), expected)
    np.testing.assert_array_equal(als.send_matrix(frame.t).fetch(), expected[:, 0])
    table = A.to_arrow()
    assert table["t"].null_count == 1
    np.testing.assert_array_equal(als.send_matrix(table, missing="nan").fetch(), expected)
    stored = pa.Table.from_pandas(frame[["t"]])  # in which NaT is null
    np.testing.assert_array_equal(als.send_matrix(stored).fetch(), expected[:, :1])
    hours = als.send_matrix(np.array([1, 2], "m8[h]"))
    with pytest.raises(DtypeError, match=r"astype\('M8\[s\]'\)"):
        hours.to_arrow()
    assert hours.astype("m8[s]").to_arrow()["c0"].to_pylist()[1] == datetime.timedelta(hours=2)
    pl = pytest.importorskip("polars", reason="polars is not installed")
    days = pl.DataFrame({"d": [DAY.date()]})
    assert als.send_matrix(days).to_polars().equals(days)


def test_dates_keep_their_unit(als: AlchemistSession) -> None:
    days = np.array(["2026-01-02", "NaT"], "M8[D]")
    A = als.send_matrix(days, dtype="datetime64")  # NumPy's: of any unit
    assert A.dtype == days.dtype
    np.testing.assert_array_equal(A.fetch(), days)
    with pytest.raises(DtypeError, match="'nonsense' is not a dtype"):
        als.send_matrix(days, dtype="nonsense")


def test_dates_stay_in_checkpoints_and_blocks(als: AlchemistSession, tmp_path: Path) -> None:
    days = np.arange("2000-01-01", "2000-03-01", dtype="M8[D]").reshape(-1, 2)
    A = als.send_blocks(iter(np.split(days, 3)), shape=days.shape, dtype="M8[s]", name="dated")
    np.testing.assert_array_equal(A.fetch(), days.astype("M8[s]"))
    day = np.timedelta64(1, "D")
    later = (A + day).keep()
    als.checkpoint(tmp_path / "checkpoint")
    with AlchemistSession.restore(tmp_path / "checkpoint", 1) as restored:
        np.testing.assert_array_equal(restored.matrix("dated").fetch(), days)
        np.testing.assert_array_equal(restored.matrix(later.name).fetch(), days + day)
    da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")
    B = als.send_matrix(da.from_array(days, chunks=(7, 1)))
    np.testing.assert_array_equal(B.to_dask().compute(), days)
    A.free()
    later.free()


def test_single_columns_and_operands_follow_it(als: AlchemistSession) -> None:
    whole, some = pa.array([BIG, 1]), pa.array([BIG, None])
    assert als.send_matrix(whole).fetch().tolist() == [BIG, 1]
    for column in (some, pa.chunked_array([some]), [(ray.put(some), 0, 0)]):
        with pytest.raises(DtypeError, match=r"the column has nulls \(1\)"):
            als.send_matrix(column)
    A = als.send_matrix(np.eye(2))
    nullable = pd.Series([BIG, None], dtype="Int64")
    for given in (some, nullable):
        with pytest.raises(DtypeError, match=r"operand has nulls \(1\)"):
            A[:, 0] = given
    with pytest.raises(DtypeError, match=r"block 0 \(row 0\): column 'a' has nulls \(1\)"):
        als.send_blocks([pd.DataFrame({"a": nullable})], shape=(2, 1))


def test_indexes_and_arrays_of_pandas_are_columns(als: AlchemistSession) -> None:
    days = pd.date_range("2026", periods=2, tz="Asia/Tokyo")
    np.testing.assert_array_equal(als.send_matrix(days).fetch(), days.to_numpy("M8[us]"))
    A = als.send_matrix(pd.CategoricalIndex(["b", "a"], name="c"))
    assert (A.fetch().tolist(), A.categories) == ([1, 0], {"c": ("a", "b")})
    holes = pd.array([BIG, None], "Int64")
    with pytest.raises(DtypeError, match=r"the column has nulls \(1\)"):
        als.send_matrix(holes)
    assert als.send_matrix(holes, missing=-1).fetch().tolist() == [BIG, -1]
    assert als.send_matrix(pd.Index([1, 2])).fetch().tolist() == [1, 2]


def test_polars_series_have_their_names(als: AlchemistSession) -> None:
    pl = pytest.importorskip("polars", reason="polars is not installed")
    assert als.send_matrix(pl.Series("a", [BIG, 2])).columns == ("a",)
    with pytest.raises(DtypeError, match=r"column 'a' has nulls \(1\)"):
        als.send_matrix(pl.Series("a", [BIG, None]))


def test_nan_of_pandas_is_nan_again(als: AlchemistSession, tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, np.nan, 3.0], "n": [BIG, 2, 3]}).iloc[[2, 1, 0]]
    table = pa.Table.from_pandas(frame)  # in which NaN is null, and the index is a column
    assert table["a"].null_count == 1
    for A in (als.send_matrix(table.select(["a"])), parquet(als, table, tmp_path)):
        np.testing.assert_array_equal(A.fetch()[:, 0], [3.0, np.nan, 1.0])
    assert als.send_matrix(table).columns == ("a", "n")
    nullable = pa.Table.from_pandas(pd.DataFrame({"a": pd.array([1.5, None], "Float64")}))
    with pytest.raises(DtypeError, match=re.escape("column 'a' has nulls (1)")):
        parquet(als, nullable, tmp_path)


def test_columns_without_names_get_none(als: AlchemistSession, tmp_path: Path) -> None:
    pd.DataFrame(np.eye(2)).to_parquet(tmp_path / "numbered.parquet")
    als.send_matrix(np.eye(2)).save(tmp_path / "unnamed.parquet")
    for name, columns in (("numbered", ["1"]), ("unnamed", ["c1"])):
        assert als.load_matrix(tmp_path / f"{name}.parquet").columns == ()
        some = als.load_matrix(tmp_path / f"{name}.parquet", columns=columns)
        assert (some.columns, some.fetch().tolist()) == ((), [[0.0], [1.0]])
    assert als.send_matrix(pa.Table.from_pandas(pd.DataFrame(np.eye(2)))).columns == ()
    assert list(pd.read_parquet(tmp_path / "unnamed.parquet")) == ["c0", "c1"]


def test_tensors_of_torch(als: AlchemistSession) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    narrow = torch.ones(2, dtype=torch.bfloat16)
    with pytest.raises(DtypeError, match=r"cannot have dtype torch.bfloat16.*dtype='float32'"):
        als.send_matrix(narrow)
    assert als.send_matrix(narrow, dtype="float32").fetch().tolist() == [1, 1]
    with pytest.raises(DtypeError, match=r"a Tensor cannot become a NumPy array.*detach\(\)"):
        als.send_matrix(torch.ones(2, requires_grad=True))


# --- what becomes of each kind of column: the table in the docs ---

D = decimal.Decimal
KINDS: dict[str, Any] = {
    "bool": pa.array([True, None]),
    "int8, int16": pa.array([-1, None], pa.int8()),
    "int32": pa.array([7, None], pa.int32()),
    "int64 up to 2^53": pa.array([2**53, None]),
    "int64 beyond it": pa.array([BIG, None]),
    "float32": pa.array([1.5, None], pa.float32()),
    "float64": pa.array([np.nan, None]),
    "decimal": pa.array([D("-2.25"), None], pa.decimal128(9, 2)),
    "categories": pa.array(["low", None]).dictionary_encode(),
    "categories of int64": pa.array([7, None]).dictionary_encode(),
    "categories of dates": pa.array([DAY.date(), None]).dictionary_encode(),
    "list of 2 float32": pa.array([[1.5, 2.5], None], pa.list_(pa.float32(), 2)),
    "date": pa.array([DAY.date(), None]),
    "timestamp of a time zone": pa.array([DAY, None], pa.timestamp("us", "UTC")),
    "duration": pa.array([5, None], pa.duration("ms")),  # polars has no seconds
    "text": pa.array(["2026-01-02", None]),
}
MISSING = {"no null": "error", "null": "error", '`missing="nan"`': "nan", "`missing=-1`": -1}


def masked(als: AlchemistSession, table: Any, _: Path, **options: Any) -> Any:
    column = table["a"]
    dated = pa.types.is_temporal(column.type)
    values = (column if dated else column.fill_null(0)).to_numpy().reshape(-1, 1)
    mask = column.is_null().to_numpy().reshape(-1, 1)
    return als.send_matrix(np.ma.masked_array(values, mask), **options)


SOURCES = NAMED | {"Dask": dask, "a masked array": masked}
HAS_NOT = {
    "Dask": {"categories", "list of 2 float32"},  # see `test_dask_says_what_it_does_not_know`
    "a masked array": {
        "bool",
        "decimal",
        "categories",
        "categories of int64",
        "categories of dates",
        "list of 2 float32",
        "text",
    },
}


def came(send: Send, als: AlchemistSession, kind: str, column: str, folder: Path) -> Any:
    values = KINDS[kind].slice(0, 1) if column == "no null" else KINDS[kind]
    try:
        return send(als, pa.table({"a": values}), folder, missing=MISSING[column])
    except DtypeError as error:
        assert "'a'" in str(error) or "the array" in str(error)  # noqa: PT017
        return None


def test_the_docs_have_the_table(als: AlchemistSession, tmp_path: Path) -> None:
    lines = [f"| column | {' | '.join(MISSING)} |", "|---" * (1 + len(MISSING)) + "|"]
    for kind in KINDS:
        found = [came(NAMED["Arrow"], als, kind, column, tmp_path) for column in MISSING]
        lines.append(
            f"| {kind} | {' | '.join('error' if A is None else A.dtype.name for A in found)} |"
        )
    table = "\n".join(lines)
    assert table in DOCS.read_text(), f"docs/transfer.md must have this table:\n{table}"


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_does_what_the_table_says(
    als: AlchemistSession, tmp_path: Path, source: str
) -> None:
    for kind in KINDS:
        if kind in HAS_NOT.get(source, ()):
            continue
        for column in MISSING:
            expected = came(NAMED["Arrow"], als, kind, column, tmp_path)
            A = came(SOURCES[source], als, kind, column, tmp_path)
            assert (A is None) == (expected is None), (kind, column)
            if A is not None:
                assert (A.dtype, A.categories) == (expected.dtype, expected.categories), kind
                np.testing.assert_array_equal(A.fetch(), expected.fetch())


def test_dask_says_what_it_does_not_know(als: AlchemistSession, tmp_path: Path) -> None:
    for kind, words in (
        ("categories", r"'a'.*categorize\(\)"),
        ("list of 2 float32", "'a'.*compute"),
    ):
        with pytest.raises(DtypeError, match=words):
            dask(als, pa.table({"a": KINDS[kind]}), tmp_path)
    dd = pytest.importorskip("dask.dataframe", reason="needs alchemist-on-ray[dask]")
    frame = dd.from_pandas(pd.DataFrame({"a": ["x", "y", "x"]}), npartitions=2)
    frame = frame.astype({"a": "category"})
    with pytest.raises(DtypeError, match=r"'a' are not known.*categorize\(\)"):
        als.send_matrix(frame)
    A = als.send_matrix(frame.categorize())
    assert [A.categories["a"][int(code)] for code in A.fetch()[:, 0]] == ["x", "y", "x"]


@pytest.mark.parametrize("source", ["Arrow", "Parquet", "Ray Data"])
def test_categories_of_all_parts_are_counted_together(
    als: AlchemistSession, tmp_path: Path, source: str
) -> None:
    words = [["b", "a", "b"], ["c", "b", "c"], ["a"]]
    parts = [pa.table({"a": pa.array(some).dictionary_encode()}) for some in words]
    if source == "Parquet":
        for k, part in enumerate(parts):
            (tmp_path / "all").mkdir(exist_ok=True)
            pq.write_table(part, tmp_path / "all" / f"{k}.parquet")
        A = als.load_matrix(tmp_path / "all")
    elif source == "Ray Data":
        data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
        A = als.send_matrix(data.from_arrow(parts))
    else:
        A = als.send_matrix(pa.concat_tables(parts))
    assert (A.dtype, A.categories) == (np.int32, {"a": ("b", "a", "c")})
    expected = [word for some in words for word in some]
    assert [A.categories["a"][code] for code in A.fetch()[:, 0]] == expected
    assert A[1:3].categories == A.categories
    assert A.to_arrow()["a"].to_pylist() == expected
    assert A.columns == ("a",)
    A = A.to_layout("MC_MR")
    assert A.categories == {"a": ("b", "a", "c")}


def test_codes_of_other_categories_are_not_mixed(als: AlchemistSession) -> None:
    def sent(*words: str) -> Any:
        return als.send_matrix(pd.DataFrame({"c": pd.Categorical(words)}))

    A, B, same = sent("x", "y"), sent("y", "z"), sent("y", "x")
    first = slice(0, 1)
    for work in (
        lambda: np.concatenate([A, B]), lambda: np.equal(A, B),
        lambda: A.__setitem__(first, B[first]),
    ):  # fmt: skip
        with pytest.raises(DtypeError, match="column 'c' count other categories in both: send"):
            work()
    both = np.concatenate([A, same])
    assert [both.categories["c"][code] for code in both.fetch()[:, 0]] == ["x", "y", "y", "x"]
    assert not (same == A).fetch().any()


def test_categories_of_pandas_stay_in_checkpoints(als: AlchemistSession, tmp_path: Path) -> None:
    frame = pd.DataFrame({"n": [1, 2, 3], "c": pd.Categorical(["x", None, "z"])})
    with pytest.raises(DtypeError, match=r"column 'c' has nulls \(1\).*missing='nan'"):
        als.send_matrix(frame)
    A = als.send_matrix(frame, missing=-1, name="coded")
    assert (A.dtype, A.categories) == (np.int64, {"c": ("x", "z")})
    assert A.fetch().tolist() == [[1, 0], [2, -1], [3, 1]]
    als.checkpoint(tmp_path / "checkpoint")
    with AlchemistSession.restore(tmp_path / "checkpoint", 1) as restored:
        assert restored.matrix("coded").categories == A.categories
    assert als.send_matrix(frame.c, missing="nan").categories == {"c": ("x", "z")}
    A.free()


def test_blocks_of_pandas_count_the_categories_that_are_known_first() -> None:
    coded = pd.ArrowDtype(pa.dictionary(pa.int32(), pa.string()))
    for dtype in ("category", coded):
        known = {0: ["z", "b"]}
        values = pandas_columns.values_of(pd.Series(["b", "a"], dtype=dtype), "error", known)
        words = [known[0][code] for code in values]
        assert (words, known[0][:2]) == (["b", "a"], ["z", "b"])


def test_columns_without_names_keep_their_categories(als: AlchemistSession) -> None:
    words = ["b", "a", "b"]
    coded = pa.array(words).dictionary_encode()
    frame = pd.DataFrame({0: pd.Categorical(words)})
    given = [coded, pd.Series(words, dtype="category"), frame, pa.Table.from_pandas(frame)]
    pl = pytest.importorskip("polars", reason="polars is not installed")
    for column in (*given, pl.Series(words, dtype=pl.Categorical)):
        A = als.send_matrix(column)
        ((name, found),) = A.categories.items()
        assert name == ("0" if len(A.shape) == 2 else "c0")
        assert [found[code] for code in A.fetch().ravel()] == words
        assert A.to_arrow()[name].to_pylist() == words
    with pytest.raises(DtypeError, match="the column has the element 300, which int8"):
        als.send_matrix(pa.array([300]), dtype="int8")


def test_codes_that_would_lose_their_categories_are_refused(als: AlchemistSession) -> None:
    """In blocks each block would count its own; in lists and of binary words there are none."""
    table = pa.table({"n": [1, 2], "a": pa.array(["x", "y"]).dictionary_encode()})
    for block in (table, table.to_pandas()):
        with pytest.raises(DtypeError, match=r"block 0.* has categories \(in column 1\).*Dataset"):
            als.send_matrix([(ray.put(block), 0, 0)])
        with pytest.raises(DtypeError, match=r"block 0.* has categories"):
            als.send_blocks([block], shape=(2, 2), dtype="int64")
    coded = pa.dictionary(pa.int32(), pa.string())
    for column, words in (
        (pa.array([["a", "b"], ["c", "a"]], pa.list_(coded, 2)), "type list of categories"),
        (pa.array([["a", "b"], ["c", "a"]], pa.list_(coded)), "type list of categories"),
        (pa.array([b"x", b"y"]).dictionary_encode(), "type binary"),
    ):
        with pytest.raises(DtypeError, match=f"column 'a' has {words}, which is not numeric"):
            als.send_matrix(pa.table({"a": column}))


def test_many_categories_are_counted_at_once(als: AlchemistSession) -> None:
    words = pd.Series([f"w{k}" for k in range(20_000)], dtype="category", name="a")
    begun = traces.clock()
    A = als.send_matrix(words)
    assert traces.clock() - begun < 5  # a list was searched for each: 3 s, and 300 of 200,000
    assert A.categories["a"][int(A[7:8].fetch()[0])] == "w7"


def test_lists_and_tensors_are_another_axis(als: AlchemistSession, tmp_path: Path) -> None:
    values = np.arange(24.0).reshape(2, 3, 4)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    table = pa.table({"t": tensors})
    mixed = pa.table({"n": [1.0, 2.0], "v": pa.array([[1, 2], [3, 4]], pa.list_(pa.int8(), 2))})
    for send in (NAMED["Arrow"], parquet, dataset):
        np.testing.assert_array_equal(send(als, table, tmp_path).fetch(), values)
        A = send(als, mixed, tmp_path)
        assert (A.fetch().tolist(), A.columns) == ([[1, 1, 2], [2, 3, 4]], ())
        with pytest.raises(ShapeError, match=r"'t' has tensors of shape \(3, 4\).*beside other"):
            send(als, pa.table({"t": tensors, "n": [1, 2]}), tmp_path)
        with pytest.raises(ShapeError, match=r"'v' has lists"):
            send(als, pa.table({"v": [[1.0], [2.0, 3.0]]}), tmp_path)
    pq.write_table(pa.table({"n": [1, 2], "t": tensors}), tmp_path / "b.parquet")
    A = als.load_matrix(tmp_path / "b.parquet", columns=["t"])
    np.testing.assert_array_equal(A.fetch(), values)
    assert als.load_matrix(tmp_path / "b.parquet", columns=["n"]).columns == ("n",)


def test_the_option_is_checked(als: AlchemistSession, tmp_path: Path) -> None:
    for wrong in ("zero", None, [0]):
        with pytest.raises(BadArgumentError, match="must be 'error', 'nan' or a number"):
            als.send_matrix(np.eye(2), missing=wrong)
    np.save(tmp_path / "a.npy", np.eye(2))
    with pytest.raises(BadArgumentError, match=r"\.npy files have no nulls"):
        als.load_matrix(tmp_path / "a.npy", missing=0)
    for value, kind in (
        (1.5, pa.int8()),
        (300, pa.int8()),
        (1e300, pa.float32()),
        (2j, pa.float64()),
    ):
        words = re.escape(f"missing={value} is no element of column 'a'")
        with pytest.raises(AlchemistError, match=words):
            als.send_matrix(pa.table({"a": pa.array([1, None], kind)}), missing=value)


@pytest.mark.parametrize("source", [*NAMED, *BLOCKS, "NumPy", "HDF5", "sparse"])
def test_dtype_converts_what_it_holds(als: AlchemistSession, tmp_path: Path, source: str) -> None:
    """Floats that are whole numbers become integers; another element is named."""
    send = {
        **NAMED,
        **BLOCKS,
        "NumPy": sends(lambda table: table.to_pandas().to_numpy()),
        "HDF5": _hdf5,
        "sparse": sends(lambda table: scipy.sparse.csr_array(table.to_pandas().to_numpy())),
    }[source]
    A = send(als, pa.table({"a": [1.0, 2.0], "b": [-3.0, 4.0]}), tmp_path, dtype="int32")
    found = A.fetch()
    found = found.toarray() if scipy.sparse.issparse(found) else found
    assert (A.dtype, found.tolist()) == (np.int32, [[1, -3], [2, 4]])
    for wrong in (4.5, 2.0**31):
        with pytest.raises(DtypeError, match=rf"{wrong}, which int32 cannot hold"):
            send(als, pa.table({"a": [1.0, 2.0], "b": [-3.0, wrong]}), tmp_path, dtype="int32")


def _hdf5(als: AlchemistSession, table: Any, folder: Path, **options: Any) -> Any:
    h5py = pytest.importorskip("h5py", reason="needs alchemist-on-ray[files]")
    with h5py.File(folder / "a.h5", "w") as file:
        file["x"] = table.to_pandas().to_numpy()
    return als.load_matrix(folder / "a.h5", **options)
