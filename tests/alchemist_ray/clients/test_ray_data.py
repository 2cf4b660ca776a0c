"""Ray Datasets become matrices and matrices become Datasets, with their rows in order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from alchemist_ray.clients import ray_tasks
from alchemist_ray.cluster.placement import VARIABLE
from alchemist_ray.errors import DtypeError, ResourceError, ShapeError, TransferError
from tests.alchemist_ray.conftest import refused

data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
pa = pytest.importorskip("pyarrow", reason="needs alchemist-on-ray[data]")

A = np.random.default_rng(6).standard_normal((300, 6))


@pytest.fixture(autouse=True)
def quiet(cluster: str) -> Iterator[None]:
    context = data.DataContext.get_current()
    before, context.enable_progress_bars = context.enable_progress_bars, False
    yield
    context.enable_progress_bars = before


def arrived(als: AlchemistSession, dataset: Any, expected: np.ndarray[Any, Any], **how: Any) -> Any:
    handle = als.send_matrix(dataset, **how)
    assert handle.shape == expected.shape
    np.testing.assert_array_equal(handle.fetch(), expected)
    return handle


def test_a_dataset_whose_tasks_find_no_cpu_is_refused(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks, "FREE_CPU_S", 0.5)
    computed = data.from_numpy(A).materialize()
    # Not `available_resources`: Ray notices late that CPUs were given back.
    with AlchemistSession(int(ray.cluster_resources()["CPU"]) - len(als.list_workers())):
        refused(als, data.range(100), ResourceError, r"Ray Data needs a CPU.*materialize\(\)")
        arrived(als, computed, A)


def test_tasks_wait_for_nodes_of_an_autoscaler(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_tasks, "FREE_CPU_S", 0.3)
    cpus = int(ray.cluster_resources()["CPU"])
    with AlchemistSession(cpus - len(als.list_workers())):
        monkeypatch.setenv(VARIABLE, f"2x{cpus}")
        ray_tasks.wait_for_cpu("Ray Data", "materialize")
        monkeypatch.setenv(VARIABLE, f"1x{cpus}")  # it has grown to that
        with pytest.raises(ResourceError, match="Ray Data needs a CPU"):
            ray_tasks.wait_for_cpu("Ray Data", "materialize")


@pytest.mark.parametrize("blocks", [1, 7, 40])
@pytest.mark.parametrize("layout", ["VC_STAR", "MC_MR"])
def test_a_tensor_column_of_many_blocks(als: AlchemistSession, blocks: int, layout: str) -> None:
    dataset = data.from_numpy(np.array_split(A, blocks))
    arrived(als, dataset, A, layout=layout)
    arrived(als, dataset.materialize(), A.astype("float32"), layout=layout, dtype="float32")


def test_columns_of_numbers_from_arrow_and_pandas(als: AlchemistSession, senders: None) -> None:
    pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[data]")
    frame = pd.DataFrame(A, columns=list("abcdef"))
    frame["g"] = np.arange(300)
    expected = frame.to_numpy()
    dataset = data.from_pandas([frame[:100], frame[100:]])
    arrived(als, dataset, expected)
    arrived(als, dataset.map_batches(lambda t: t, batch_format="pyarrow"), expected)
    arrived(als, dataset.map_batches(lambda f: f * 2, batch_format="pandas"), expected * 2)


def test_a_row_is_its_columns_one_after_the_other(als: AlchemistSession) -> None:
    def batch(given: dict[str, Any]) -> dict[str, Any]:
        i = given["id"].astype(float)
        return {"one": i, "several": np.stack([i, i + 1, i + 2, i + 3], 1), "two": -i}

    dataset = data.range(100, override_num_blocks=5).map_batches(batch)
    i = np.arange(100.0)
    arrived(als, dataset, np.stack([i, i, i + 1, i + 2, i + 3, -i], 1))


def images(shape: tuple[int, ...], dtype: str, blocks: int) -> tuple[Any, np.ndarray[Any, Any]]:
    whole = np.random.default_rng(7).integers(0, 100, (50, *shape)).astype(dtype)
    return data.from_numpy(np.array_split(whole, blocks)), whole


@pytest.mark.parametrize(("dtype", "blocks"), [("uint8", 1), ("uint8", 6), ("float32", 6),
                                               ("float64", 6), ("bool", 2)])  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 5), (3, 2, 4), (1, 1)])
def test_tensors_are_an_array_of_one_axis_more(
    als: AlchemistSession, senders: None, shape: tuple[int, ...], dtype: str, blocks: int
) -> None:
    dataset, whole = images(shape, dtype, blocks)
    handle = arrived(als, dataset, whole)
    assert (handle.dtype, handle.columns) == (dtype, ())
    arrived(als, dataset.materialize(), whole.astype("float64"), dtype="float64", layout="MC_MR")


def test_tensors_beside_other_columns_are_refused(als: AlchemistSession) -> None:
    labelled = images((4, 5), "uint8", 3)[0].map_batches(lambda b: {**b, "label": b["data"][:, 0]})
    refused(als, labelled, ShapeError, r"'data' has tensors of shape \(4, 5\).*select_columns")
    assert als.send_matrix(labelled.select_columns(["data"])).shape == (50, 4, 5)
    with pytest.raises(ShapeError, match=r"tensors of 8 axes.*at most 8"):
        als.send_matrix(data.from_numpy(np.ones((2,) + (1,) * 8)))
    assert als.list_matrices() == []


@pytest.mark.parametrize("blocks", [1, 2])
def test_tensors_of_different_shapes_are_refused(als: AlchemistSession, blocks: int) -> None:
    rows = [{"x": np.ones((2, 2 + i % 2))} for i in range(8)]
    with pytest.raises(ShapeError, match=r"'x' has rows of different shapes.*map_batches can pad"):
        als.send_matrix(data.from_items(rows, override_num_blocks=blocks))
    apart = data.from_numpy([np.ones((3, 2, 2)), np.ones((3, 2, 3))])
    refused(als, apart, ShapeError, r"block 1 .*columns data \(2 x 3\), .*data \(2 x 2\)")


def test_rows_stay_in_order_where_blocks_end_in_another(als: AlchemistSession) -> None:
    def slow_first(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["id"][0] == 0:
            time.sleep(1.0)
        return batch

    dataset = data.range(60, override_num_blocks=6).map_batches(slow_first, batch_size=None)
    assert not dataset.context.execution_options.preserve_order
    arrived(als, dataset, np.arange(60)[:, None])
    assert not dataset.context.execution_options.preserve_order


def test_filtered_blocks_that_are_empty(als: AlchemistSession) -> None:
    def between(low: int, high: int) -> Any:
        blocks = data.range(100, override_num_blocks=10)
        return blocks.map_batches(lambda b: {"id": b["id"][(b["id"] >= low) & (b["id"] < high)]})

    arrived(als, between(30, 55), np.arange(30, 55)[:, None])
    refused(als, between(100, 100), ShapeError, "no rows")


@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([{"x": 1.0, "y": 1.0}, {"x": 2.0, "y": None}], DtypeError, r"'y' has nulls \(1\)"),
        ([{"x": 1.0, "s": "a"}], DtypeError, "'s' has type string"),
        ([{"x": np.ones(3)}, {"x": np.ones(4)}], ShapeError, "'x' has rows of different|columns"),
        ([{"x": 1.5, "b": True}], None, None),
    ],
)
def test_values_that_are_not_numbers_are_reported_by_column(
    als: AlchemistSession, senders: None, rows: Any, error: Any, words: Any
) -> None:
    dataset = data.from_items(rows, override_num_blocks=1)
    if error is None:
        arrived(als, dataset, np.array([[1.5, 1.0]]))
        return
    refused(als, dataset, error, words)


def test_blocks_of_different_dtypes_have_a_common_one(als: AlchemistSession) -> None:
    whole = [np.arange(20) + i for i in range(3)]
    numbers = [np.asarray(x, kind) for x, kind in zip(whole, ("i4", "f4", "f8"), strict=True)]
    for order in ([0, 1, 2], [2, 0, 1], [0, 0, 1]):
        parts = [data.from_items([{"x": v} for v in numbers[k]]) for k in order]
        A = als.send_matrix(parts[0].union(*parts[1:]))  # Ray takes blocks of its parts in turns
        expected = np.concatenate([whole[k] for k in order])
        np.testing.assert_array_equal(np.sort(A.fetch()[:, 0]), np.sort(expected))


@pytest.mark.parametrize("blocks", [1, 3])
def test_nulls_and_other_columns_in_a_later_block_are_reported(
    als: AlchemistSession, blocks: int
) -> None:
    good = data.from_items([{"x": 1.0, "y": 2.0}] * 10, override_num_blocks=blocks)
    nulls = data.from_items([{"x": 1.0, "y": None if i == 5 else 2.0} for i in range(9)])
    turned = data.from_items([{"y": 1.0, "x": 2.0}] * 10, override_num_blocks=blocks)
    for other, error, words in (
        (nulls, DtypeError, r"block \d of the Dataset: column 'y' has nulls \(1\)"),
        (turned, ShapeError, r"block \d of the Dataset.* has the columns y \(1\), x \(1\)"),
    ):
        for dataset in (good.union(other), good.union(other).materialize()):
            refused(als, dataset, error, words)


def test_tensors_and_lists_with_nulls_inside_are_refused(als: AlchemistSession) -> None:
    pairs = pa.array([[1.0, None], [3.0, 4.0]], pa.list_(pa.float64(), 2))
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float64(), [2]), pairs)
    for column in (pairs, tensors, pa.chunked_array([tensors, tensors])):
        refused(als, data.from_arrow(pa.table({"t": column})), DtypeError, "'t' has nulls")


def test_tensors_whose_axes_are_stored_in_another_order(als: AlchemistSession) -> None:
    """Their elements are sent as NumPy shows them, from one piece of memory or several."""
    kind = pa.fixed_shape_tensor(pa.float64(), [2, 3], permutation=[1, 0])
    stored = pa.array(np.arange(12.0).reshape(2, 6).tolist(), pa.list_(pa.float64(), 6))
    tensors = pa.ExtensionArray.from_storage(kind, stored)
    want = tensors.to_numpy_ndarray()
    assert want[0, 0, 1] == 3
    one = als.send_matrix(data.from_arrow(pa.table({"t": tensors})))
    np.testing.assert_array_equal(one.fetch(), want)
    both = pa.table({"t": pa.chunked_array([tensors, tensors])})
    two = als.send_matrix(data.from_arrow(both))
    np.testing.assert_array_equal(two.fetch(), np.concatenate([want, want]))


def _broken(batch: Any) -> Any:
    raise KeyError("no data today")


def test_an_error_of_a_function_includes_its_traceback(als: AlchemistSession) -> None:
    dataset = data.range(100, override_num_blocks=4).map_batches(_broken)
    caught = refused(als, dataset, TransferError, "no data today")
    assert "_broken" in (caught.value.traceback or "")
    assert als.list_matrices() == []


# --- the way back -----------------------------------------------------------------------


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("blocks", [None, 1, 9])
def test_to_dataset_and_back(als: AlchemistSession, blocks: int | None, lazy: bool) -> None:
    handle = als.send_matrix(A, layout="MC_MR")
    dataset = handle.to_dataset(override_num_blocks=blocks, lazy=lazy)
    assert (dataset.count(), dataset.columns()) == (300, ["data"])
    arrived(als, dataset, A)
    arrived(als, dataset.map_batches(lambda b: {"data": b["data"] * 2}), A * 2)


def test_a_dataset_that_is_fetched_now_needs_no_gang(als: AlchemistSession) -> None:
    handle = als.send_matrix(A)
    dataset = handle.to_dataset(override_num_blocks=4, lazy=False)
    handle.free()
    assert isinstance(dataset, data.dataset.MaterializedDataset)
    assert len(list(dataset.iter_internal_ref_bundles())) == 4
    arrived(als, dataset, A)


@pytest.mark.parametrize("lazy", [True, False])
def test_to_dataset_in_columns(als: AlchemistSession, lazy: bool) -> None:
    handle = als.send_matrix(A)
    dataset = handle.to_dataset(list("abcdef"), override_num_blocks=3, lazy=lazy)
    rows = dataset.take_all()
    assert list(rows[7]) == list("abcdef")
    np.testing.assert_array_equal([list(row.values()) for row in rows], A)
    for columns in (["a"], ["a"] * 6):
        with pytest.raises(ShapeError, match="6 different names"):
            handle.to_dataset(columns)
    with pytest.raises(DtypeError, match="complex"):
        als.send_matrix(A * 1j).to_dataset()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "bool"])
def test_arrays_of_more_axes_become_tensors(als: AlchemistSession, dtype: str, lazy: bool) -> None:
    whole = images((3, 2, 4), dtype, 1)[1]
    handle = als.send_matrix(whole)
    dataset = handle.to_dataset(override_num_blocks=4, lazy=lazy)
    arrived(als, dataset, whole)
    assert dataset.take(1)[0]["data"].shape == (3, 2, 4)
    named = handle.to_dataset(["image"], override_num_blocks=4, lazy=lazy)
    np.testing.assert_array_equal([row["image"] for row in named.take_all()], whole)
    with pytest.raises(ShapeError, match=r"one name, of the column of tensors of shape \(3, 2, 4"):
        handle.to_dataset(["a", "b"])
    assert als.send_matrix(whole[:0]).to_dataset(lazy=lazy).take_all() == []


@pytest.mark.parametrize("lazy", [True, False])
def test_vectors_masks_and_matrices_without_rows(als: AlchemistSession, lazy: bool) -> None:
    vector = als.send_matrix(A[:, 0]).to_dataset(override_num_blocks=3, lazy=lazy)
    np.testing.assert_array_equal([row["data"] for row in vector.take_all()], A[:, 0])
    arrived(als, als.send_matrix(A > 0).to_dataset(lazy=lazy), A > 0)
    for empty in (A[:0], A[:0, 0]):
        assert als.send_matrix(empty).to_dataset(lazy=lazy).take_all() == []
    assert als.send_matrix(A[:0]).to_dataset(list("abcdef"), lazy=lazy).take_all() == []
