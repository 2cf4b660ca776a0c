"""Dask arrays and data frames become matrices, and matrices dask arrays, bit for bit."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, ShapeError, StaleHandleError, TransferError
from tests.alchemist_ray.conftest import refused
from tests.support import commands

dask = pytest.importorskip("dask", reason="needs alchemist-on-ray[dask]")
da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")
dd = pytest.importorskip("dask.dataframe", reason="needs alchemist-on-ray[dask]")
pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[dask]")

from ray.util.dask import ray_dask_get  # noqa: E402

RNG = np.random.default_rng(5)
A = RNG.standard_normal((200, 30))
META = np.empty((0, 0))  # else dask calls a function once to see what it returns


@ray.remote(num_cpus=0)
class Counter:
    """Counts how often tasks have run."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        self._count += 1
        return self._count

    def count(self) -> int:
        return self._count


@st.composite
def chunkings(draw: st.DrawFn, length: int) -> tuple[int, ...]:
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=4)))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, length]))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=chunkings(200),
    cols=chunkings(30),
    layout=st.sampled_from(["VC_STAR", "STAR_VC", "MC_MR", "STAR_STAR", "BLOCK", "BLOCK_CYCLIC:5"]),
    lazy=st.booleans(),
)
def test_any_chunks_arrive_as_numpy_has_them(
    als: AlchemistSession, rows: tuple[int, ...], cols: tuple[int, ...], layout: str, lazy: bool
) -> None:
    x = da.from_array(A, chunks=(rows, cols))
    expected = A
    if lazy:
        x, expected = x * 3 - 1, A * 3 - 1
    handle = als.send_matrix(x, layout=layout)
    assert (handle.shape, handle.layout, handle.dtype) == (A.shape, layout, A.dtype)
    np.testing.assert_array_equal(handle.fetch(), expected)
    out = handle.to_dask(chunks=(rows, cols))
    assert out.chunks == (rows, cols)
    np.testing.assert_array_equal(out.compute(scheduler="threads"), expected)
    handle.free()


def test_one_dimension_is_kept_and_dtypes_convert(als: AlchemistSession) -> None:
    x = da.from_array(A[:, 0], chunks=(13,)) + 0
    handle = als.send_matrix(x, name="x", dtype="float32")
    assert (handle.shape, handle.dtype, handle.name) == ((200,), np.float32, "x")
    np.testing.assert_array_equal(handle.fetch(), A[:, 0].astype("float32"))
    out = handle.to_dask(50)
    assert (out.shape, out.chunks) == ((200,), ((50,) * 4,))
    np.testing.assert_array_equal(out[20:120:3].compute(), handle.fetch()[20:120:3])


@pytest.mark.parametrize("wanted", ["complex64", "int32", "bool"])
def test_dtypes_of_dask_are_kept(als: AlchemistSession, wanted: str) -> None:
    values = (A * 100).astype(wanted)
    handle = als.send_matrix(da.from_array(values, chunks=50).map_blocks(np.copy, dtype=wanted))
    assert handle.dtype == wanted
    np.testing.assert_array_equal(handle.fetch(), values)


def test_persisted_chunks_go_from_the_store_and_are_not_computed_again(
    als: AlchemistSession, senders: None
) -> None:
    counter = Counter.remote()

    def noted(block: Any) -> Any:
        ray.get(counter.add.remote())
        return block + 1

    x = da.from_array(A, chunks=(60, -1)).map_blocks(noted, meta=META)
    kept = x.persist(scheduler=ray_dask_get)
    for _ in range(2):
        np.testing.assert_array_equal(als.send_matrix(kept).fetch(), A + 1)
    assert ray.get(counter.count.remote()) == 4


def test_tasks_shared_by_chunks_are_computed_once(als: AlchemistSession) -> None:
    counter = Counter.remote()

    def noted(block: Any) -> Any:
        ray.get(counter.add.remote())
        return block

    x = da.from_array(A, chunks=(100, -1)).map_blocks(noted, meta=META)
    shared = x + x.sum(axis=0)  # every chunk needs every source
    fine = shared.rechunk((20, 7))
    np.testing.assert_allclose(als.send_matrix(fine).fetch(), A + A.sum(axis=0))
    assert ray.get(counter.count.remote()) == 2


def test_unknown_chunk_sizes_are_determined(als: AlchemistSession, senders: None) -> None:
    x = da.from_array(A, chunks=(30, -1))
    positive = x[x[:, 0] > 0]
    assert np.isnan(positive.shape[0])
    handle = als.send_matrix(positive)
    np.testing.assert_array_equal(handle.fetch(), A[A[:, 0] > 0])
    none = als.send_matrix(x[x[:, 0] > 1e9])
    assert none.shape == none.to_dask().compute().shape == (0, 30)
    vector = als.send_matrix(x[:, 1][x[:, 0] > 0])
    np.testing.assert_array_equal(vector.fetch(), A[A[:, 0] > 0, 1])


def test_a_retried_task_is_not_counted_twice(als: AlchemistSession) -> None:
    """Its worker is killed once, Ray runs it again, and the matrix is right."""
    counter = Counter.remote()

    def dies_once(block: Any, block_info: Any = None) -> Any:
        if block_info[None]["chunk-location"] == (1, 0) and ray.get(counter.add.remote()) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return block + 1

    x = da.from_array(A, chunks=(50, -1)).map_blocks(dies_once, meta=META)
    np.testing.assert_array_equal(als.send_matrix(x).fetch(), A + 1)
    assert ray.get(counter.count.remote()) == 2


def test_no_configuration_is_changed(als: AlchemistSession) -> None:
    before = repr(dask.config.config)
    als.send_matrix(da.ones((20, 20), chunks=5) + 1).to_dask().sum().compute(scheduler="sync")
    assert repr(dask.config.config) == before
    with dask.config.set(scheduler="sync"):  # it is Dask-on-Ray for this transfer all the same
        pids = da.ones((4, 1), chunks=1).map_blocks(_pid, dtype=np.int64)
        assert als.send_matrix(pids).fetch()[0, 0] != _pid(np.ones((1, 1)))[0, 0]
    np.testing.assert_array_equal((da.ones(4, chunks=2) + 1).persist(), np.full(4, 2.0))


def _pid(block: Any) -> Any:
    return np.full(block.shape, os.getpid(), np.int64)


def _broken(block: Any) -> Any:
    raise KeyError("no data today")


@pytest.mark.parametrize("unknown", [False, True])
def test_an_error_of_a_chunk_includes_its_traceback(als: AlchemistSession, unknown: bool) -> None:
    x = da.from_array(A, chunks=(50, 15)).map_blocks(_broken, dtype=A.dtype)
    if unknown:
        x = x[x[:, 0] > 0]
    caught = refused(als, x, TransferError, r"chunk \(.*KeyError: 'no data today'")
    assert "in _broken" in (caught.value.traceback or "")
    assert als.list_matrices() == []


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda block: block[:-1], ShapeError, "was declared"),
        (lambda block: block * 1j, DtypeError, "complex128"),
        (lambda block: block.astype(str), DtypeError, "not numbers"),
        (lambda block: np.ma.masked_less(block, 0), DtypeError, "masked"),
        (lambda block: block[0, 0], ShapeError, "two dimensions"),
    ],
    ids=["shape", "dtype", "strings", "masked", "number"],
)
def test_chunks_that_contradict_their_metadata_are_refused(
    als: AlchemistSession, function: Any, error: type[Exception], words: str
) -> None:
    x = da.from_array(A, chunks=(50, -1)).map_blocks(function, dtype=A.dtype, chunks=(50, 30))
    refused(als, x, error, words)


def test_input_that_is_not_a_matrix_is_refused(als: AlchemistSession) -> None:
    for source, error, words in (
        (da.ones((1,) * 9), ShapeError, "1 to 8 axes"),
        (da.asarray(1.0), ShapeError, "1 to 8 axes"),
        (da.ones((3, 3), dtype="longdouble"), DtypeError, "dtype='float64'"),
        (da.from_array(np.array(["a", "b"])), DtypeError, "not a dtype|numbers|one of"),
        (dask.delayed(A), DtypeError, "from_delayed"),
    ):
        refused(als, source, error, words)
    assert als.list_matrices() == []
    handle = als.send_matrix(A)
    for chunks_of_handles in (da.asarray(handle), da.ones(A.shape) + da.from_array(handle)):
        refused(als, chunks_of_handles, DtypeError, r"handle\.to_dask\(\)")


# --- the way back -----------------------------------------------------------------------


def test_to_dask_is_lazy_and_takes_chunks_in_every_spelling(als: AlchemistSession) -> None:
    handle = als.send_matrix(A)
    for chunks, expected in (
        (-1, ((200,), (30,))),
        (64, ((64, 64, 64, 8), (30,))),
        ((100, -1), ((100, 100), (30,))),
        (((150, 50), (1, 29)), ((150, 50), (1, 29))),
        ({0: 100, 1: 15}, ((100, 100), (15, 15))),
        ("auto", ((200,), (30,))),
        (("auto", 10), ((200,), (10, 10, 10))),
    ):
        x = handle.to_dask(chunks=chunks)
        assert (x.chunks, x.dtype) == (expected, A.dtype)
        np.testing.assert_array_equal(x.compute(), A)
    for chunks in ("a lot", (3, 3, 3), ((100, 99), 30)):
        with pytest.raises(ShapeError, match="chunks="):
            handle.to_dask(chunks=chunks)
    with pytest.raises(ShapeError, match="0 is not a length of chunks"):
        handle.to_dask(chunks=(0, 3))
    handle.free()


def test_auto_chunks_follow_the_layout(als: AlchemistSession) -> None:
    with dask.config.set({"array.chunk-size": "16kB"}):
        for layout, whole in (("VC_STAR", 1), ("STAR_VC", 0)):
            x = als.send_matrix(A, layout=layout).to_dask()
            assert x.numblocks[whole] == 1
            assert x.numblocks[1 - whole] > 1
        assert min(als.send_matrix(A, layout="MC_MR").to_dask(("auto", "auto")).numblocks) >= 1


def test_the_name_tells_the_matrix(als: AlchemistSession) -> None:
    one, other = als.send_matrix(A), als.send_matrix(A)
    again = next(h for h in als.list_matrices() if h.id == one.id)
    assert one.to_dask(50).name == again.to_dask(50).name
    assert len({one.to_dask(50).name, one.to_dask(60).name, other.to_dask(50).name}) == 3


def test_tasks_fetch_their_own_chunks(als: AlchemistSession) -> None:
    x = als.send_matrix(A).to_dask((50, -1))
    total = (x * 2).sum(axis=1)
    np.testing.assert_allclose(total.compute(scheduler=ray_dask_get), (A * 2).sum(axis=1))
    np.testing.assert_array_equal(als.send_matrix(x + 1).fetch(), A + 1)  # round trip by tasks
    chunk = x.blocks[1, 0]  # ACIDask's `get_chunk`
    np.testing.assert_array_equal(chunk.compute(scheduler=ray_dask_get), A[50:100])
    np.testing.assert_array_equal(als.send_matrix(chunk).fetch(), A[50:100])


def test_slices_of_the_array_are_numpys(als: AlchemistSession) -> None:
    x = als.send_matrix(A).to_dask((64, 7))
    for key in (
        (slice(3, 170, 7), slice(None, None, -1)), (5,), (slice(None), 3), (5, 6),
        (-1, slice(2, 9)), ([1, 5, 100], slice(None)), (slice(None), [3, 2]), (None, 4),
        (slice(0, 0),), (slice(None), None, 2),
    ):  # fmt: skip
        np.testing.assert_array_equal(x[key].compute(), A[key])


def test_an_array_outlives_its_handle_and_not_its_gang(cluster: str) -> None:
    with AlchemistSession(1) as als:
        H = als.send_matrix(A)
        x = (H + 1).to_dask(100)  # of a temporary
        als.list_matrices()
        np.testing.assert_array_equal(x.compute(), A + 1)
        y = (H + 2).to_dask(100)
        np.testing.assert_array_equal(y.compute(scheduler=ray_dask_get), A + 2)
        np.testing.assert_array_equal(y.compute(scheduler=ray_dask_get), A + 2)
    with pytest.raises(StaleHandleError):
        y.compute(scheduler="sync")


# --- data frames --------------------------------------------------------------------------


def test_data_frames_of_numbers(als: AlchemistSession) -> None:
    frame = pd.DataFrame({"whole": np.arange(50), "half": np.arange(50) / 2})
    expected = frame.to_numpy()
    dasks = dd.from_pandas(frame, npartitions=4)
    for source in (dasks, frame, dasks[dasks.whole >= 0], frame.astype("Int64", errors="ignore")):
        handle = als.send_matrix(source)
        assert handle.dtype == np.float64
        np.testing.assert_array_equal(handle.fetch(), expected)
    series = als.send_matrix(dasks.whole)
    assert (series.shape, series.dtype) == ((50,), np.int64)
    frame["gaps"] = pd.array([1, None] * 25, dtype="Int64")
    frame["nan"] = np.nan
    frame["text"] = "a"
    for columns, words in ((["whole", "gaps"], "'gaps' has nulls"), (["text"], "'text'")):
        for source in (frame[columns], dd.from_pandas(frame[columns], npartitions=2)):
            refused(als, source, DtypeError, words)
    gaps = frame[["gaps", "nan"]].fillna({"gaps": 7})
    filled = als.send_matrix(dd.from_pandas(gaps, npartitions=2))
    np.testing.assert_array_equal(filled.fetch()[:, 0], [1, 7] * 25)
    assert np.isnan(filled.fetch()[:, 1]).all()


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        ({"a": [0.5, 1.0], "b": [1.0, 2.0]}, DtypeError, r"chunk \(1, 0\).*element 0.5.*int32"),
        ({"a": [1, 2**40], "b": [1, 2]}, DtypeError, "1099511627776"),
        ({"a": ["3", "4"], "b": [1, 2]}, DtypeError, r"chunk \(1, 0\).*'a'"),
        ({"b": [5, 6], "a": [3, 4]}, ShapeError, r"chunk \(1, 0\).*columns b, a.*a, b"),
        ({"a": [3, 4]}, ShapeError, r"chunk \(1, 0\).*columns a"),
    ],
    ids=["fractions", "large", "text", "order", "missing"],
)
def test_a_partition_that_is_not_as_declared_is_refused(
    als: AlchemistSession, part: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """NumPy would cut off fractions and high bits, and pandas would parse text."""
    whole = pd.DataFrame({"a": [1, 1, 2, 2, 3, 3], "b": 4}, dtype="int32")
    untyped = pd.DataFrame({"a": [], "b": []}, dtype=object)

    def parts(replaced: dict[int, Any]) -> Any:
        return dd.from_pandas(whole, npartitions=3).map_partitions(
            lambda some: replaced.get(some.a.iloc[0], some), meta=whole, enforce_metadata=False
        )

    refused(als, parts({2: pd.DataFrame(part)}), kind, words)
    sent = als.send_matrix(parts({2: untyped}))  # no rows
    assert sent.dtype == np.int32
    np.testing.assert_array_equal(sent.fetch(), whole[whole.a != 2])


def test_arrays_of_any_number_of_axes(session: AlchemistSession) -> None:
    x = np.arange(7 * 4 * 5.0).reshape(7, 4, 5)
    source = da.from_array(x, chunks=(3, 2, 4))
    A = session.send_matrix(source)
    np.testing.assert_array_equal(A.fetch(), x)
    for chunks in ("auto", (2, 4, 3)):
        part = (A.to_dask(chunks) + 1)[1:, :, ::2]
        np.testing.assert_array_equal(part.compute(), x[1:, :, ::2] + 1)
    unknown = source[source[:, 0, 0] > 30]  # chunks of unknown size
    np.testing.assert_array_equal(session.send_matrix(unknown).fetch(), x[x[:, 0, 0] > 30])


def test_a_program_without_ray_is_told_what_to_send() -> None:
    """As one whose session goes through a gateway, where Ray is installed."""
    program = """
        import dask.array as da
        from alchemist_ray.clients.dask.chunks import inspect
        try:
            inspect(da.ones((4, 4)), None, None, None)
        except Exception as error:
            print(type(error).__name__, error)
    """
    told = commands.python(program, code=0, limit_s=60.0).stdout
    assert told.startswith("SessionError chunks of a dask array are computed by Ray tasks")
    assert "send array.compute()" in told
