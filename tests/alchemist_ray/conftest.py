"""A gang that the tests of a file share; they leave it intact."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from alchemist_ray import AlchemistSession
from mpi_workers.node.processes import descendants


@pytest.fixture(scope="module")
def gang(cluster: str, request: pytest.FixtureRequest) -> Iterator[AlchemistSession]:
    """One session for all tests of a file, with 3 workers or as many as its `WORKERS` says."""
    workers = getattr(request, "param", getattr(request.module, "WORKERS", 3))
    with AlchemistSession(workers) as opened:
        yield opened


@pytest.fixture
def als(gang: AlchemistSession) -> Iterator[AlchemistSession]:
    """The same gang without matrices; after the test it works, without other processes."""
    pids = [worker.pid for worker in gang.list_workers()]
    yield gang
    for handle in gang.list_matrices():
        handle.free()
    assert gang.run(lambda comm: comm.allreduce(1)) == len(pids)
    causes = [info.last_loss for info in AlchemistSession.list() if info.renewals]
    assert [worker.pid for worker in gang.list_workers()] == pids, causes
    assert not descendants(pids)


def refused(
    als: AlchemistSession, source: Any, kind: type[Exception], *words: str, **options: Any
) -> pytest.ExceptionInfo[Exception]:
    """Check that a source is not sent: an error that these expressions match, and no matrix."""
    before = als.list_matrices()
    with pytest.raises(kind) as caught:
        als.send_matrix(source, **options)
    for each in words:
        assert caught.match(each)
    assert [handle.id for handle in als.list_matrices()] == [handle.id for handle in before]
    return caught
