"""Frames and arrays of any package are sent by their protocol, and matrices are read by it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, LibraryLoadError, ShapeError
from tests.support import commands

pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")

WORKERS = 2


class Stream:
    """A table that has the protocol and nothing else."""

    def __init__(self, table: Any) -> None:
        self.__arrow_c_stream__ = table.__arrow_c_stream__


class Batch:
    def __init__(self, batch: Any) -> None:
        self.__arrow_c_array__ = batch.__arrow_c_array__


class Interchanged:
    """A frame that has the older protocol alone."""

    def __init__(self, table: Any) -> None:
        self.__dataframe__ = table.__dataframe__


class Lent:
    """An array that has ``__array_interface__`` alone."""

    def __init__(self, array: Any) -> None:
        self.array, self.__array_interface__ = array, array.__array_interface__


class OnDevice:
    """An array of DLPack that says it is on device 2 (CUDA), until it is asked for a copy."""

    def __init__(self, array: Any, device: int = 2) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, *, dl_device: Any = None, **options: Any) -> Any:
        assert self.device == 1 or dl_device == (1, 0)
        return self.array.__dlpack__(dl_device=(1, 0), **options)


VALUES = np.arange(12.0).reshape(4, 3)
TABLE = pa.table({name: VALUES[:, j] for j, name in enumerate("abc")})


@pytest.mark.parametrize("of", [Stream, Interchanged, lambda table: Batch(table.to_batches()[0])])
def test_a_frame_of_a_protocol_alone(als: AlchemistSession, of: Any) -> None:
    A = als.send_matrix(of(TABLE.slice(1)))
    assert (A.columns, A.dtype) == (("a", "b", "c"), np.float64)
    np.testing.assert_array_equal(A.fetch(), VALUES[1:])


def test_an_array_of_a_protocol_alone(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    for data in (Lent(VALUES), OnDevice(VALUES, 1)):
        np.testing.assert_array_equal(als.send_matrix(data).fetch(), VALUES)
    assert "device" not in capsys.readouterr().out
    np.testing.assert_array_equal(als.send_matrix(OnDevice(VALUES)).fetch(), VALUES)
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "A OnDevice is copied from its device (2, 0) to be sent."
    with pytest.raises(DtypeError, match=r"a object cannot be sent.*__arrow_c_stream__"):
        als.send_matrix(object())


def test_a_tensor_without_elements_says_so(als: AlchemistSession) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    with pytest.raises(DtypeError, match=r"a Tensor cannot be read by DLPack.*meta"):
        als.send_matrix(torch.empty(2, device="meta"))


def test_parts_of_columns_are_sent_in_order(als: AlchemistSession) -> None:
    values = np.random.default_rng(0).integers(0, 100, (5000, 3))
    columns = {
        "a": values[:, 0].astype("int16"), "b": values[:, 1].astype("uint8"),
        "c": values[:, 2].astype("f4"),
    }  # fmt: skip
    whole = pa.table(columns)
    for lengths in ([5000], [1] * 5000, [1, 4000, 3, 996], [0, 2500, 0, 2500]):
        ends = np.cumsum([0, *lengths])
        parts = [whole.slice(a, b - a) for a, b in pairwise(ends)]
        for layout in ("VC_STAR", "MC_MR"):
            A = als.send_matrix(Stream(pa.concat_tables(parts)), layout=layout)
            assert A.dtype == np.float32
            np.testing.assert_array_equal(A.fetch(), values)
    assert als.send_matrix(whole.slice(0, 0)).shape == (0, 3)


def test_a_stream_that_fails_is_an_error_with_its_words(als: AlchemistSession) -> None:
    def batches() -> Any:
        yield TABLE.to_batches()[0]
        raise OSError("the disk is gone")

    with pytest.raises(DtypeError, match="the disk is gone"):
        als.send_matrix(pa.RecordBatchReader.from_batches(TABLE.schema, batches()))


def test_a_matrix_is_read_by_the_protocol(als: AlchemistSession) -> None:
    A = als.send_matrix(TABLE)
    assert pa.table(A).equals(TABLE)
    assert A.to_arrow().equals(TABLE)
    assert als.send_matrix(pa.table(A)).columns == ("a", "b", "c")
    B = als.send_matrix(VALUES > 2)
    assert pa.table(B).column_names == ["c0", "c1", "c2"]
    back = als.send_matrix(pa.table(B))
    assert (back.columns, back.dtype) == ((), np.bool_)
    np.testing.assert_array_equal(back.fetch(), VALUES > 2)
    assert als.send_matrix(VALUES[:, 0]).to_arrow()["c0"].to_pylist() == VALUES[:, 0].tolist()
    with pytest.raises(ShapeError, match=r"reshape\(m, -1\)"):
        als.send_matrix(VALUES.reshape(2, 2, 3)).to_arrow()
    with pytest.raises(DtypeError, match="no complex numbers"):
        als.send_matrix(VALUES * 1j).to_arrow()


def test_polars_both_ways(als: AlchemistSession) -> None:
    pl = pytest.importorskip("polars", reason="polars is not installed")
    frame = pl.from_arrow(TABLE)
    A = als.send_matrix(frame)
    np.testing.assert_array_equal(A.fetch(), VALUES)
    assert A.columns == ("a", "b", "c")
    assert A.to_polars().equals(frame)
    assert pl.DataFrame(A).equals(frame)
    assert pl.from_arrow(A).struct.unnest().equals(frame)
    assert als.send_matrix(frame.lazy().collect()["b"]).fetch().tolist() == VALUES[:, 1].tolist()


def test_duckdb_both_ways(als: AlchemistSession) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    given = TABLE
    assert given.num_rows == 4  # read by the query
    A = als.send_matrix(duckdb.sql("select * from given where a > 1"))
    assert A.columns == ("a", "b", "c")
    np.testing.assert_array_equal(A.fetch(), VALUES[1:])
    assert duckdb.sql("select sum(b) from A").fetchall() == [(VALUES[1:, 1].sum(),)]


def test_jax_arrays(als: AlchemistSession) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x = jax.numpy.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(als.send_matrix(x).fetch(), np.asarray(x))
    narrow = als.send_matrix(x.astype("bfloat16"), dtype="float32")
    np.testing.assert_array_equal(narrow.fetch(), np.asarray(x))


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("torch", "torch.ones(2, 3)"),
        ("polars", "polars.DataFrame({'a': [1.0, 1.0]})"),
        ("duckdb", "duckdb.sql('select 1.0::double a')"),
    ],
)
def test_neither_pandas_nor_pyarrow_is_imported(package: str, make: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    program = (
        f"import sys, {package}\n"
        "sys.modules.update(dict.fromkeys(['pandas', 'pyarrow']))\n"
        "from alchemist_ray.transfer.sources import source_for\n"
        f"source = source_for({make}, None, 'error', None)\n"
        "assert (source.dtype.kind, source.shape[1] > 0) == ('f', True)\n"
    )
    commands.python(program, code=0)


def test_what_pyarrow_must_do_says_so(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, frame = als.send_matrix(VALUES), Interchanged(TABLE)
    for name in ("pyarrow", "pyarrow.interchange"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(LibraryLoadError, match="this needs pyarrow: pip install pyarrow"):
        A.to_arrow()
    with pytest.raises(LibraryLoadError, match="sent by __dataframe__: pip install pyarrow"):
        als.send_matrix(frame)
