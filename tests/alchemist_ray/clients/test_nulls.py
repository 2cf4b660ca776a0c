"""One rule for columns of every producer: no null becomes a number, no integer is rounded."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError

pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
pq = pytest.importorskip("pyarrow.parquet", reason="needs alchemist-on-ray[data]")

BIG = 2**53 + 1  # float64 rounds it
Send = Callable[[AlchemistSession, Any, Path], Any]


class Frame:
    """A table that is known by Arrow's protocol alone, as those of polars and DuckDB are."""

    def __init__(self, table: Any) -> None:
        self.columns = table.column_names
        self.__arrow_c_stream__ = table.__arrow_c_stream__


def polars(table: Any) -> Any:
    return pytest.importorskip("polars", reason="polars is not installed").from_arrow(table)


def parquet(als: AlchemistSession, table: Any, folder: Path) -> Any:
    pq.write_table(table, folder / "a.parquet")
    return als.load_matrix(folder / "a.parquet")


def dataset(als: AlchemistSession, table: Any, folder: Path) -> Any:
    data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
    return als.send_matrix(data.from_arrow(table))


NAMED: dict[str, Send] = {
    "Arrow": lambda als, table, _: als.send_matrix(table),
    "a batch": lambda als, table, _: als.send_matrix(table.to_batches()[0]),
    "the protocol": lambda als, table, _: als.send_matrix(Frame(table)),
    "polars": lambda als, table, _: als.send_matrix(polars(table)),
    "pandas": lambda als, table, _: als.send_matrix(table.to_pandas(types_mapper=pd.ArrowDtype)),
    "Parquet": parquet,
    "Ray Data": dataset,
}
BLOCKS: dict[str, Send] = {
    "the object store": lambda als, table, _: als.send_matrix([(ray.put(table), 0, 0)]),
    "an iterator": lambda als, table, _: als.send_blocks([table], shape=(2, 2), dtype="int64"),
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
def test_dates_and_text_are_refused_with_the_remedy(
    als: AlchemistSession, tmp_path: Path, producer: str
) -> None:
    day, send = datetime.datetime(2026, 1, 2), (NAMED | BLOCKS)[producer]
    for column, remedy in (
        ([day.date()] * 2, "cast it to an integer"), ([day] * 2, "cast it to an integer"),
        ([day - day] * 2, "cast it to an integer"), (["x", "y"], "drop or convert it"),
    ):  # fmt: skip
        with pytest.raises(DtypeError, match=f"column 'a' has type .*not numeric.*{remedy}"):
            send(als, pa.table({"a": column, "b": [3, 4]}), tmp_path)


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
    with pytest.raises(DtypeError, match=r"block 0 \(row 0\): it has nulls \(1\)"):
        als.send_blocks([pd.DataFrame({"a": nullable})], shape=(2, 1))


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
