"""Fetches show what the ranks have: nothing remembered outlives a change, nothing is torn."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from alchemist_ray import AlchemistSession
from mpi_workers.data.transfers import MatrixReader
from tests.support.traces import wait_until

WORKERS = 2
LIMIT_S = 20.0


def add(comm: Any, matrix: Any) -> None:
    matrix.local[...] += 1


def held(path: Path) -> Callable[..., None]:
    """A function that begins, waits for the file ``go``, and adds 1."""

    def add_later(comm: Any, matrix: Any) -> None:
        (path / f"begun{comm.rank}").touch()
        limit = time.monotonic() + 20.0
        while not (path / "go").exists() and time.monotonic() < limit:
            time.sleep(0.01)
        matrix.local[...] += 1

    return add_later


def begun(path: Path) -> None:
    assert wait_until(lambda: (path / "begun0").exists(), LIMIT_S) is not None


def test_a_fetch_during_a_call_does_not_keep_old_elements(
    als: AlchemistSession, tmp_path: Path
) -> None:
    X = als.send_matrix(np.ones((4, 3)))
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(als.run, held(tmp_path), X)
        begun(tmp_path)
        during = pool.submit(X.fetch)
        time.sleep(0.3)  # enough for a fetch that does not wait
        (tmp_path / "go").touch()
        call.result(LIMIT_S)
        assert during.result(LIMIT_S).max() in (1.0, 2.0)
    np.testing.assert_array_equal(X.fetch(), np.full((4, 3), 2.0))


def test_threads_that_fetch_and_one_that_changes(als: AlchemistSession) -> None:
    X, stop = als.send_matrix(np.zeros((8, 4))), threading.Event()
    torn: list[Any] = []

    def watch() -> None:
        last = 0.0
        while not stop.is_set():
            found = X.fetch()
            if found.min() != found.max() or found.max() < last:
                torn.append((last, found))
            last = found.max()

    with ThreadPoolExecutor(3) as pool:
        watching = [pool.submit(watch) for _ in range(3)]
        try:
            for count in range(1, 31):
                als.run(add, X)
                assert X.fetch().max() == count
        finally:
            stop.set()
        for one in watching:
            one.result(LIMIT_S)
    assert not torn


def test_elements_are_not_remembered_across_a_call_that_returns_at_once(
    als: AlchemistSession, tmp_path: Path
) -> None:
    X = als.send_matrix(np.ones((4, 3)))
    library = tmp_path / "adding.py"
    library.write_text(
        "from ali import Context, DistMatrix, routine\n\n\n@routine(writes=('A',))\n"
        "def add(ctx: Context, A: DistMatrix) -> None:\n    A.local[...] += 1\n"
    )
    adding = als.load_library("adding", library)
    (tmp_path / "held").mkdir()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(als.run, held(tmp_path / "held"), als.send_matrix(np.ones((2, 2))))
        begun(tmp_path / "held")
        later = adding.add.remote(X)
        assert X.fetch().max() == 1.0  # the call has not had its turn
        (tmp_path / "held" / "go").touch()
        call.result(LIMIT_S)
        ray.get(later, timeout=LIMIT_S)
    np.testing.assert_array_equal(X.fetch(), np.full((4, 3), 2.0))


def test_matrices_that_share_memory_are_changed_together(als: AlchemistSession) -> None:
    X = als.send_matrix(np.ones((4, 3)))
    same = als.run(lambda comm, matrix: matrix, X)
    again = X.to_layout(X.layout)
    assert X.fetch().max() == same.fetch().max() == again.fetch().max() == 1.0
    als.run(add, same)
    for handle in (X, same, again):
        np.testing.assert_array_equal(handle.fetch(), np.full((4, 3), 2.0))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # fork beside threads
def test_a_forked_child_changes_a_matrix_of_its_parent(als: AlchemistSession) -> None:
    X = als.send_matrix(np.ones((4, 3)))
    assert X.fetch().max() == 1.0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            X += 1
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(X.fetch(), np.full((4, 3), 2.0))


def test_a_matrix_that_changes_faster_than_it_is_read_is_copied_first(
    als: AlchemistSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    X = als.send_matrix(np.zeros((4000, 3)))
    whole = MatrixReader.read_block
    reads: list[int] = []

    def in_halves(self: MatrixReader, out: Any, origin: tuple[int, int]) -> None:
        whole(self, out[:2000], origin)
        if self._target.matrix == X.id:
            reads.append(1)
            with ThreadPoolExecutor(1) as other:
                other.submit(als.run, add, X).result(LIMIT_S)
        whole(self, out[2000:], (2000, 0))

    monkeypatch.setattr(MatrixReader, "read_block", in_halves)
    found = X.fetch()
    assert found.min() == found.max() == len(reads)
