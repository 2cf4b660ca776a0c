"""Dask arrays and frames under a `distributed.Client` go to a gang and come back."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import ShapeError, TransferError
from tests.alchemist_ray.conftest import refused

da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")
dd = pytest.importorskip("dask.dataframe", reason="needs alchemist-on-ray[dask]")
pd = pytest.importorskip("pandas", reason="needs alchemist-on-ray[dask]")
distributed = pytest.importorskip("distributed", reason="needs alchemist-on-ray[dask]")


X = np.random.default_rng(5).standard_normal((600, 40))
META = np.empty((0, 0))  # else dask calls a function once to see what it returns


CLUSTER = """
import sys
from distributed import LocalCluster
with LocalCluster(n_workers=1, threads_per_worker=2, dashboard_address="127.0.0.1:0") as cluster:
    print(cluster.scheduler_address, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """A cluster in other processes, which have no Ray; its worker has two threads."""
    words = [sys.executable, "-c", CLUSTER]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with distributed.Client(process.stdout.readline().decode().strip()) as connected:
                yield connected
            process.stdin.close()
            process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize("persisted", [False, True])
def test_chunks_are_sent_by_the_workers_that_hold_them(
    als: AlchemistSession, client: Any, persisted: bool
) -> None:
    x = da.from_array(X, chunks=(170, 13)) + 1
    if persisted:
        x = client.persist(x)
    A = als.send_matrix(x, layout="MC_MR", print_times=True)
    np.testing.assert_array_equal(A.fetch(), X + 1)


def test_results_are_fetched_by_the_workers(als: AlchemistSession, client: Any) -> None:
    A = als.send_matrix(X)
    x = A.to_dask(chunks=(200, 20))
    np.testing.assert_array_equal(client.compute(x + x).result(), X + X)
    chunk = x.blocks[1, 0]  # ACIDask's `get_chunk`
    np.testing.assert_array_equal(client.compute(chunk).result(), X[200:400, :20])
    np.testing.assert_array_equal(als.send_matrix(chunk).fetch(), X[200:400, :20])
    np.testing.assert_array_equal(x[5:400:7, [3, 1]].compute(), X[5:400:7, [3, 1]])
    v = als.send_matrix(X[:, 0])
    np.testing.assert_array_equal(v.to_dask().compute(), X[:, 0])
    A.free()
    with pytest.raises(Exception, match="freed"):
        (x + 1).compute()


def test_chunks_of_unknown_sizes_are_counted_first(als: AlchemistSession, client: Any) -> None:
    x = da.from_array(X, chunks=(170, -1))
    np.testing.assert_array_equal(als.send_matrix(x[x[:, 0] > 0]).fetch(), X[X[:, 0] > 0])


def test_a_data_frame_keeps_its_names(als: AlchemistSession, client: Any) -> None:
    frame = dd.from_pandas(pd.DataFrame(X[:, :3], columns=["a", "b", "c"]), npartitions=3)
    A = als.send_matrix(frame)
    np.testing.assert_array_equal(A.fetch(), X[:, :3])
    assert list(A.columns) == ["a", "b", "c"]


def test_chunks_that_are_not_as_declared_leave_no_matrix(
    als: AlchemistSession, client: Any
) -> None:
    def fails(block: Any) -> Any:
        raise ValueError("no such block")

    x = da.from_array(X, chunks=(200, -1))
    before = len(als.list_matrices())
    refused(als, x.map_blocks(fails, dtype=float, meta=META), TransferError, "no such block")
    with pytest.raises(ShapeError, match=r"has shape \(1, 40\)"):
        als.send_matrix(x.map_blocks(lambda block: block[:1], dtype=float, meta=META))
    assert len(als.list_matrices()) == before
