"""Matrices in files, and checkpoints, as a session's user meets them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import (
    BadArgumentError,
    DtypeError,
    FileError,
    GroupRecoveredError,
    MatrixError,
    MatrixNotFoundError,
    ShapeError,
)
from alchemist_ray.session import checkpoints
from ali.files import npy

h5py = pytest.importorskip("h5py", reason="needs the extra 'files'")
pandas = pytest.importorskip("pandas", reason="needs the extra 'dask'")
dask = pytest.importorskip("dask.dataframe", reason="needs the extra 'dask'")

WORKERS = 2
A = np.random.default_rng(3).standard_normal((37, 5))
SUFFIXES = [".npy", ".h5", ".zarr", ".parquet", ".csv"]


def hidden(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(".")]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_saved_matrix_loads_unchanged(als: AlchemistSession, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    als.send_matrix(A, layout="MC_MR").save(path)
    for where in (path, f"file://{path}"):
        B = als.load_matrix(where, layout="STAR_VC", name="B")
        assert (B.name, B.layout, B.dtype) == ("B", "STAR_VC", np.float64)
        assert np.array_equal(B.fetch(), A)
        B.free()
    assert hidden(tmp_path) == []


@pytest.mark.parametrize("shape", [(7, 4, 5), (2, 3, 1, 5), (0, 2, 3), (3, 0, 2)])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_arrays_of_more_axes(
    als: AlchemistSession, tmp_path: Path, suffix: str, shape: tuple[int, ...]
) -> None:
    a = np.arange(float(np.prod(shape))).reshape(shape)
    path = tmp_path / f"a{suffix}"
    if suffix in (".csv", ".parquet"):
        with pytest.raises(ShapeError, match=r"save it as \.npy, \.h5 or \.zarr, or reshape it"):
            als.send_matrix(a).save(path)
        assert os.listdir(tmp_path) == []
        return
    for layout in ("VC_STAR", "MC_MR"):
        als.send_matrix(a, layout=layout).save(path)
        B = als.load_matrix(path, layout=layout)
        assert (B.shape, B.layout) == (shape, layout)
        assert np.array_equal(B.fetch(), a)
    rows = als.load_matrix(path, rows=slice(1, None))
    assert np.array_equal(rows.fetch(), a[1:])
    with pytest.raises(BadArgumentError, match=f"a {len(shape)}-D array has no columns"):
        als.load_matrix(path, columns=[0])


def test_the_index_of_a_table_is_no_column(als: AlchemistSession, tmp_path: Path) -> None:
    frame = pandas.DataFrame(A, columns=list("uvwxy"))
    filtered = frame[frame.u > 0]
    dated = frame.set_index(pandas.date_range("2020-01-01", periods=len(A), name="day"))
    filtered.to_parquet(tmp_path / "filtered.parquet")
    dated.to_parquet(tmp_path / "dated.parquet")
    filtered.to_csv(tmp_path / "filtered.csv", float_format="%.17g")
    for file, expected in (("filtered.parquet", filtered), ("dated.parquet", dated),
                           ("filtered.csv", filtered)):  # fmt: skip
        B = als.load_matrix(tmp_path / file)
        assert list(B.columns) == list("uvwxy")
        np.testing.assert_array_equal(B.fetch(), expected)
        B = als.load_matrix(tmp_path / file, columns=["y", "u"], rows=[3, 1])
        np.testing.assert_array_equal(B.fetch(), expected[["y", "u"]].iloc[[3, 1]])
    for file, name in (("filtered.parquet", "__index_level_0__"), ("filtered.csv", "")):
        B = als.load_matrix(tmp_path / file, index=True)
        assert name in B.columns
        assert B.shape == (len(filtered), 6)
        which = list(B.columns).index(name)
        np.testing.assert_array_equal(B.fetch()[:, which], filtered.index)
    with pytest.raises(DtypeError, match="'day'"):
        als.load_matrix(tmp_path / "dated.parquet", index=True)
    np.save(tmp_path / "a.npy", A)
    with pytest.raises(BadArgumentError, match="no index"):
        als.load_matrix(tmp_path / "a.npy", index=True)


def test_the_index_that_pandas_writes_into_hdf5_is_no_column(
    als: AlchemistSession, tmp_path: Path
) -> None:
    """As `DataFrame.to_hdf` writes it, fixed and as a table; PyTables is not needed for that."""
    index = np.arange(37) * 2
    with h5py.File(tmp_path / "fixed.h5", "w") as file:
        frame = file.create_group("df")
        frame.attrs["pandas_type"] = np.bytes_("frame")
        values = {"axis0": np.arange(5), "axis1": index, "block0_items": np.arange(5)}
        for name, some in (values | {"block0_values": A}).items():
            frame[name] = some
    with h5py.File(tmp_path / "series.h5", "w") as file:
        series = file.create_group("s")
        series.attrs["pandas_type"] = np.bytes_("series")
        series["index"], series["values"] = index, A[:, 0]
    for file, expected in (("fixed.h5", A), ("series.h5", A[:, 0])):
        np.testing.assert_array_equal(als.load_matrix(tmp_path / file).fetch(), expected)
    given = als.load_matrix(tmp_path / "fixed.h5", "df/axis1")  # if it is asked for
    np.testing.assert_array_equal(given.fetch(), index)
    rows = np.rec.fromarrays([index, A], dtype=[("index", "i8"), ("values_block_0", "f8", (5,))])
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["df/table"] = rows
        file["df"].attrs["pandas_type"] = np.bytes_("frame_table")
    with pytest.raises(DtypeError, match="no data set of numbers; it has df, df/table"):
        als.load_matrix(tmp_path / "table.h5")


def test_a_format_of_a_path_without_its_suffix(als: AlchemistSession, tmp_path: Path) -> None:
    A = np.random.default_rng(3).random((40, 3))
    sent = als.send_matrix(A)
    for suffix in SUFFIXES:
        sent.save(tmp_path / f"a{suffix}")
        (tmp_path / f"a{suffix}").rename(other := tmp_path / f"{suffix[1:]}-export")
        np.testing.assert_array_equal(als.load_matrix(other, format=suffix[1:]).fetch(), A)
    rows = np.arange(40) % 2 == 0
    table = tmp_path / "parquet-export"  # a folder, as Spark and Dask write it
    np.testing.assert_array_equal(als.load_matrix(table, rows=rows).fetch(), A[rows])
    with pytest.raises(BadArgumentError, match=r"unknown suffix ''.*format="):
        als.load_matrix(tmp_path / "csv-export")
    with pytest.raises(BadArgumentError, match="unknown format 'xls'; known are npy, "):
        als.load_matrix(tmp_path / "csv-export", format="xls")


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # Dask's use of pandas
def test_the_index_of_dask_is_no_column(als: AlchemistSession, tmp_path: Path) -> None:
    frame = pandas.DataFrame(A, columns=list("uvwxy"))
    dask.from_pandas(frame, npartitions=3).to_parquet(tmp_path / "folder.parquet")
    B = als.load_matrix(tmp_path / "folder.parquet")
    assert list(B.columns) == list("uvwxy")
    np.testing.assert_array_equal(B.fetch(), A)


def test_selected_rows_and_columns_in_every_notation(als: AlchemistSession, tmp_path: Path) -> None:
    names = ["u", "v", "w", "x", "y"]
    als.send_matrix(A).save(tmp_path / "a.csv", columns=names)
    als.send_matrix(A).save(tmp_path / "a.parquet", columns=names)
    mask = A[:, 0] > 0
    rows: list[Any] = [None, slice(3, 30, 4), slice(-5, None), 7, range(2, 9), [4, -1, 4], mask]
    columns: list[Any] = [None, slice(1, 3), ["y", "u"], "w", [0, 4], np.array([3])]
    for i, some in enumerate(rows):
        chosen = columns[i % len(columns)]
        index = [names.index(name) for name in chosen or ()] if i % 6 in (2, 3) else chosen
        path = tmp_path / ("a.csv" if i % 2 else "a.parquet")
        B = als.load_matrix(path, columns=chosen, rows=some, dtype=np.complex128)
        down = slice(None) if some is None else [some] if isinstance(some, int) else some
        across = slice(None) if index is None else index
        assert np.array_equal(B.fetch(), A[down][:, across]), (some, chosen)
        assert B.dtype == np.complex128
    for bad in ({"rows": "3"}, {"rows": [1.5]}, {"rows": slice("a")}, {"columns": [[1]]}):
        with pytest.raises(BadArgumentError, match=r"indices|integers"):
            als.load_matrix(tmp_path / "a.csv", **bad)
    with pytest.raises(BadArgumentError, match=r"rows= has 36 booleans, but .* has 37 rows"):
        als.load_matrix(tmp_path / "a.csv", rows=mask[:-1])
    for none in ({"rows": []}, {"columns": []}, {"rows": np.zeros(37, bool)}):
        empty = als.load_matrix(tmp_path / "a.csv", **none)
        assert empty.fetch().shape == ((37, 0) if "columns" in none else (0, 5))


def test_an_hdf5_file_keeps_its_other_data_sets_if_asked(
    als: AlchemistSession, tmp_path: Path
) -> None:
    path = tmp_path / "all.h5"
    B = als.send_matrix(A)
    B.save(path, "first")
    B.save(path, "deep/second", append=True)
    als.send_matrix(A.astype("complex64")).save(path, "first", append=True)
    with pytest.raises(BadArgumentError, match="2 data sets: choose one"):
        als.load_matrix(path)
    assert np.array_equal(als.load_matrix(path, "first").fetch(), A.astype("complex64"))
    assert np.array_equal(als.load_matrix(path, dataset="deep/second").fetch(), A)
    B.save(path)
    assert np.array_equal(als.load_matrix(path).fetch(), A)


def test_an_error_names_file_and_rank_and_leaves_nothing(
    als: AlchemistSession, tmp_path: Path
) -> None:
    np.save(tmp_path / "cut.npy", A)
    os.truncate(tmp_path / "cut.npy", 500)
    (tmp_path / "words.csv").write_text("1,2\n3,four\n")
    before = als.list_matrices()
    for name, kind, words in (
        ("none.npy", FileError, "No such file"),
        ("cut.npy", FileError, "truncated"),
        ("words.csv", DtypeError, "row 1, column 1: 'four'"),
    ):
        path = tmp_path / name
        with pytest.raises(kind, match=words) as caught:
            als.load_matrix(path)
        assert str(path) in str(caught.value)
        rank = 1 if name == "words.csv" else 0  # each line was another rank's to read
        assert caught.value.rank == rank
        assert str(caught.value).endswith(f"(rank {rank})")
        assert caught.value.facts["path"] == str(path)
    assert len(als.list_matrices()) == len(before)
    with pytest.raises(DtypeError, match="is not a dtype"):
        als.load_matrix(path, dtype="number")
    with pytest.raises(BadArgumentError, match="not a path"):
        als.load_matrix(3)
    assert als.send_matrix(A).fetch().shape == A.shape  # the gang goes on


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(als: AlchemistSession, tmp_path: Path) -> None:
    np.save(tmp_path / "mine.npy", A)
    (tmp_path / "mine.npy").chmod(0)
    with pytest.raises(FileError, match="Permission denied"):
        als.load_matrix(tmp_path / "mine.npy")


def break_writes(comm: Any, blow: str) -> None:
    """On the last rank, the next write of a box kills it, or finds the disk full."""
    write = npy.RawSink.write

    def fails(*_: object) -> None:
        npy.RawSink.write = write
        if blow == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, os.strerror(28))

    if comm.rank == comm.size - 1:
        npy.RawSink.write = fails


@pytest.mark.parametrize("suffix", [".npy", ".h5"])
def test_a_rank_killed_while_it_writes_leaves_the_old_file(
    session: AlchemistSession, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    session.send_matrix(A).save(path)
    B = session.send_matrix(np.zeros((50, 50)))
    session.run(break_writes, "kill")
    with pytest.raises(GroupRecoveredError, match="SIGKILL"):
        B.save(path)
    assert hidden(tmp_path) == []
    assert np.array_equal(session.load_matrix(path).fetch(), A)


# --- checkpoints ---


def test_a_checkpoint_is_restored_on_a_gang_of_another_size(
    als: AlchemistSession, tmp_path: Path
) -> None:
    matrices = {
        "tall": (A, "VC_STAR"),
        "ints": (np.arange(12, dtype="int32").reshape(3, 4), "MC_MR"),
        "nan": (np.array([[np.nan, -0.0, np.inf]], "complex64"), "STAR_STAR"),
        "field": (np.arange(60.0).reshape(5, 4, 3), "VC_STAR"),
    }
    for name, (array, layout) in matrices.items():
        als.send_matrix(array, layout=layout, name=name)
    twice = als.load_library("linalg").scale(als.matrix("tall"), 2.0)
    als.checkpoint(tmp_path / "all")
    als.checkpoint(tmp_path / "all")  # a new one takes its place
    assert hidden(tmp_path) == []
    for workers in (3, None):
        with AlchemistSession.restore(tmp_path / "all", workers) as other:
            assert len(other.list_workers()) == (workers or 2)
            assert len(other.list_matrices()) == 5
            for name, (array, layout) in matrices.items():
                found = other.matrix(name)
                assert (found.name, found.layout, found.dtype) == (name, layout, array.dtype)
                assert found.fetch().tobytes() == array.tobytes()
            assert np.array_equal(other.matrix(twice.name).fetch(), 2 * A)
            ids = [other.matrix(name).id for name in ("tall", twice.name)]
            tall, scaled = other.connection.request({"op": "sources", "matrices": ids})["sources"]
            assert tall["was"]["from"] == "array"
            assert scaled["was"]["routine"] == "scale"
    with pytest.raises(MatrixNotFoundError, match="'wide'; names of matrices: field, ints"):
        als.matrix("wide")
    als.send_matrix(A, name="ints")
    with pytest.raises(MatrixError, match="2 matrices have the name 'ints'"):
        als.matrix("ints")


def test_a_checkpoint_that_fails_leaves_the_old_one(
    session: AlchemistSession, tmp_path: Path
) -> None:
    folder = tmp_path / "all"
    B = session.send_matrix(A, name="A")
    session.checkpoint(folder)
    session.send_matrix(A, name="more")
    session.run(break_writes, "full")
    with pytest.raises(FileError, match="No space left"):
        session.checkpoint(folder)
    assert hidden(tmp_path) == []
    with AlchemistSession.restore(folder) as other:
        assert [handle.name for handle in other.list_matrices()] == ["A"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(FileError, match="not a checkpoint: choose another name"):
        session.checkpoint(tmp_path / "mine")
    assert np.array_equal(B.fetch(), A)


def test_an_invalid_checkpoint_is_not_restored(als: AlchemistSession, tmp_path: Path) -> None:
    als.send_matrix(A, name="A")
    als.checkpoint(tmp_path / "all")
    told = json.loads((tmp_path / "all" / "manifest.json").read_text())
    (tmp_path / "later").mkdir()
    later = json.dumps({**told, "version": checkpoints.CHECKPOINT_VERSION + 1})
    (tmp_path / "later" / "manifest.json").write_text(later)
    for folder, words in (
        ("none", "No such file"),
        ("later", "format 2; this version of Alchemist reads 1"),
    ):
        for workers in (None, 1):
            with pytest.raises(FileError, match=words):
                AlchemistSession.restore(tmp_path / folder, workers)
    told["matrices"][0]["shape"] = [1, 1]
    (tmp_path / "all" / "manifest.json").write_text(json.dumps(told))
    with pytest.raises(FileError, match="does not match the manifest"):
        AlchemistSession.restore(tmp_path / "all", 1)
    (tmp_path / "all" / "manifest.json").write_text("{")
    with pytest.raises(FileError, match="damaged"):
        AlchemistSession.restore(tmp_path / "all", 1)
