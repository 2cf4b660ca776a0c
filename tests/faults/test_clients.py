"""A task, an agent or a rank ends while a client's data are being sent."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray.errors import TransferError
from tests.faults.conftest import Gang, inject_during, kill, refused
from tests.faults.test_transfers import held_by, stopped_in_a_send
from tests.support import commands, traces

da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")

from ray.util.dask import ray_dask_get  # noqa: E402

META = np.empty((0, 0))  # else dask calls a function here to see what it returns


def slow(block: Any) -> Any:
    time.sleep(0.2)
    return block + 1


def suicide(block: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)
    return block


def chunked(n: int = 12, rows: int = 10_000) -> Any:
    return da.ones((n * rows, 20), chunks=(rows, 20))


@pytest.mark.cell("client", "sending", "private", "TransferError")
def test_a_task_that_is_killed_at_every_retry(gang: Gang) -> None:
    known = len(gang.session.list_matrices())
    x = chunked(1).map_blocks(suicide, meta=META)
    fault, words = "a dask task that always dies", r"chunk .* could not be computed"
    with refused(fault, TransferError, words, most_s=60.0):
        gang.session.send_matrix(x)
    assert len(gang.session.list_matrices()) == known
    assert gang.works()


@pytest.mark.cell("rank", "sending", "private", "renewed")
def test_a_rank_killed_while_chunks_are_computed_and_sent(gang: Gang) -> None:
    x = chunked().map_blocks(slow, meta=META)
    outcome = inject_during(
        lambda: kill(gang.ranks[1]), lambda: gang.session.send_matrix(x), after_s=0.6
    )
    assert np.array_equal(outcome.result.fetch(), np.full(x.shape, 2.0))
    gang.goes_on("kill -9 of a rank while dask chunks are sent", outcome.seconds)


def test_a_rank_killed_while_it_is_sent_a_dataset(
    gang: Gang, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pytest.importorskip("ray.data", reason="needs alchemist-on-ray[data]")
    data.DataContext.get_current().enable_progress_bars = False
    dataset = data.from_numpy(np.ones((100_000, 20))).materialize()
    with stopped_in_a_send(gang.ranks[1], monkeypatch):  # so that the sender waits in the middle
        outcome = inject_during(
            lambda: kill(gang.ranks[1]), lambda: gang.session.send_matrix(dataset), after_s=1.0
        )
    assert np.array_equal(outcome.result.fetch(), np.ones((100_000, 20)))
    gang.goes_on("kill -9 of a rank while a Dataset is sent", outcome.seconds)


@pytest.mark.cell("rank", "fetching", "private", "renewed")
def test_a_rank_killed_while_tasks_fetch(gang: Gang) -> None:
    H = gang.session.send_matrix(np.ones((120_000, 20)))
    x = H.to_dask((10_000, -1)).map_blocks(slow, meta=META)
    assert x.sum().compute(scheduler=ray_dask_get) == 2 * H.shape[0] * H.shape[1]  # workers are up
    outcome = inject_during(
        lambda: kill(gang.ranks[2]), lambda: x.sum().compute(scheduler=ray_dask_get), after_s=0.6
    )
    assert outcome.result == 2 * H.shape[0] * H.shape[1]
    gang.goes_on("kill -9 of a rank while tasks fetch", outcome.seconds)


def test_workers_release_their_mappings(gang: Gang) -> None:
    """Ray keeps its workers; they must not keep the memory of a gang that has ended."""

    @ray.remote
    def fetched(handle: Any) -> tuple[int, int]:
        block = handle.to_dask((1000, -1)).blocks[0].compute(scheduler="sync")
        return os.getpid(), len(block)

    H = gang.session.send_matrix(np.ones((200_000, 20)))
    pid, rows = ray.get(fetched.remote(H))
    assert rows == 1000
    assert traces.wait_until(lambda: held_by(pid) == 0, 10, 0.1) is not None
    H.free()


_LARGE = """
    import json, os, resource, sys, time
    import dask.array as da, numpy as np, ray
    from pathlib import Path
    from alchemist_ray import AlchemistSession

    store, n, rows = 100 << 20, 84, 6_400
    ray.init(num_cpus=4, object_store_memory=store, include_dashboard=False, log_to_driver=False,
             _temp_dir=sys.argv[1])
    i = da.arange(n * rows, chunks=rows, dtype=float)
    x = i[:, None] + da.arange(100, chunks=-1, dtype=float)[None, :]
    assert x.nbytes > 4 * store, x.nbytes
    with AlchemistSession(1) as als:
        als.send_matrix(da.ones((100, 100), chunks=50) + 1).free()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        handle = als.send_matrix(x)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        some = handle.fetch(rows=slice(0, None, 9_973), cols=slice(0, 100, 33))
    expected = np.arange(n * rows)[::9_973, None] + np.arange(0, 100, 33)
    spilled = [str(f) for f in Path(sys.argv[1]).rglob("*spilled*/*")]
    equal = bool((some == expected).all())
    print(json.dumps({"grown_kb": grown, "equal": equal, "spilled": spilled}))
"""


def test_an_array_larger_than_the_object_store_passes_through(tmp_path_factory: Any) -> None:
    """Four times the store: nothing is spilled to disk, and this process never holds all of it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="al-") as folder:
        done = commands.python(_LARGE, folder, code=0, limit_s=140)
    outcome = json.loads(done.stdout.splitlines()[-1])
    assert outcome["equal"]
    assert outcome["spilled"] == []
    assert outcome["grown_kb"] < 200_000, outcome  # of 430 MB; a part of the store may be mapped
