"""The names of columns are kept from the data that was sent or loaded, and given back."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from alchemist_ray import AlchemistSession

pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
dd = pytest.importorskip("dask.dataframe", reason="needs alchemist-on-ray[dask]")

FRAME = pd.DataFrame({"height": [1.5, 2.5, 3.5], "weight": [4.0, 5.0, 6.0]})
NAMES = ("height", "weight")


def test_pandas_names_are_kept_and_numbers_are_not(als: AlchemistSession) -> None:
    A = als.send_matrix(FRAME, name="people")
    assert A.columns == NAMES
    assert A.to_layout("MC_MR").columns == NAMES
    assert pickle.loads(pickle.dumps(A)).columns == NAMES
    assert als.matrix("people").columns == NAMES
    assert als.send_matrix(FRAME.weight).columns == ("weight",)
    assert als.send_matrix(pd.DataFrame(np.eye(2))).columns == ()
    assert als.send_matrix(pd.Series([1.0, 2.0])).columns == ()
    assert (A + 1).columns == ()
    A.free()


def test_levels_of_names_and_dates_are_kept_as_parquet_writes_them(
    als: AlchemistSession, tmp_path: Path
) -> None:
    levels = FRAME.set_axis(pd.MultiIndex.from_tuples([("body", "height"), (1, 2)]), axis=1)
    assert als.send_matrix(levels).columns == ("('body', 'height')", "(1, 2)")
    assert als.send_matrix(levels[[(1, 2)]]).columns == ("(1, 2)",)
    strings = FRAME.set_axis(pd.MultiIndex.from_product([["body"], NAMES]), axis=1)
    expected = ("('body', 'height')", "('body', 'weight')")
    assert als.send_matrix(strings).columns == expected
    assert als.send_matrix(dd.from_pandas(strings, npartitions=2)).columns == expected
    strings.to_parquet(tmp_path / "a.parquet")
    assert als.load_matrix(str(tmp_path / "a.parquet")).columns == expected
    days = FRAME.set_axis(pd.to_datetime(["2026-01-01", "2026-01-02"]), axis=1)
    assert als.send_matrix(days).columns == ("2026-01-01 00:00:00", "2026-01-02 00:00:00")
    assert als.send_matrix(pd.DataFrame(np.eye(3)).iloc[:, 1:]).columns == ()


def test_ray_data_gets_them_back(als: AlchemistSession) -> None:
    data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
    A = als.send_matrix(FRAME)
    dataset = A.to_dataset()
    assert dataset.schema().names == list(NAMES)
    back = als.send_matrix(dataset)
    assert back.columns == NAMES
    np.testing.assert_array_equal(back.fetch(), FRAME)
    vector = als.send_matrix(FRAME.weight).to_dataset()
    assert vector.take_all() == [{"weight": value} for value in FRAME.weight]
    assert als.send_matrix(data.from_numpy(np.eye(3))).columns == ()
    both = pd.concat([FRAME.weight, FRAME.weight], axis=1)  # one name twice names nothing
    assert als.send_matrix(both).to_dataset().schema().names == ["data"]


def test_arrow_tables_keep_them(als: AlchemistSession) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")
    table = pyarrow.Table.from_pandas(FRAME)
    A = als.send_matrix(table)
    assert A.columns == NAMES
    np.testing.assert_array_equal(A.fetch(), FRAME)
    np.testing.assert_array_equal(als.send_matrix(table["weight"]).fetch(), FRAME.weight)


def test_dask_frames_keep_them(als: AlchemistSession) -> None:
    frame = dd.from_pandas(FRAME, npartitions=2)
    A = als.send_matrix(frame)
    assert A.columns == NAMES
    again = dd.from_dask_array(A.to_dask(), columns=list(A.columns)).compute()
    pd.testing.assert_frame_equal(again.reset_index(drop=True), FRAME)
    assert als.send_matrix(frame.weight).columns == ("weight",)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_in_files_have_them(als: AlchemistSession, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    als.send_matrix(FRAME).save(path)
    written = pd.read_csv(path) if suffix == "csv" else pd.read_parquet(path)
    pd.testing.assert_frame_equal(written, FRAME, check_dtype=False)
    assert als.load_matrix(path).columns == NAMES
    some = als.load_matrix(path, columns=["weight"], rows=slice(1, None))
    assert (some.columns, some.shape) == (("weight",), (2, 1))
    some.save(path, columns=["kg"])
    assert als.load_matrix(path).columns == ("kg",)
    als.send_matrix(FRAME).save(tmp_path / "a.npy")  # which has no names
    assert als.load_matrix(tmp_path / "a.npy").columns == ()


def test_checkpoints_have_them(als: AlchemistSession, tmp_path: Path) -> None:
    A = als.send_matrix(FRAME, name="people")
    als.checkpoint(tmp_path / "checkpoint")
    with AlchemistSession.restore(tmp_path / "checkpoint", 1) as restored:
        assert restored.matrix("people").columns == NAMES
    A.free()
