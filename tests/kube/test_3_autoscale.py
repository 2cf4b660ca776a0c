"""A cluster that grows from no workers to two for a gang, and shrinks again; and want of memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube.cluster import Cluster
from tests.kube.running import program

NAMESPACE = "grows"
LIMIT = 2 << 30  # bytes, of a worker pod


@pytest.fixture(scope="module")
def ray(kube: Cluster) -> Iterator[Cluster]:
    """A head alone, from which the cluster grows."""
    kube.make_namespace(NAMESPACE)
    with kube.timings("RayCluster with autoscale: head ready, no workers"):
        kube.apply(kube.chart(NAMESPACE, autoscale=True, idleTimeoutS=10))
        kube.wait_until_ready(NAMESPACE, 1)
    yield kube
    kube.delete(NAMESPACE)


def workers(kube: Cluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.pods(NAMESPACE, "worker")]


def test_pods_come_with_a_gang(ray: Cluster) -> None:
    assert workers(ray) == []
    with (
        ray.timings("0 to 2 worker pods: from a session's call to its gang"),
        program(ray, NAMESPACE, "wait", seconds=1.0) as gang,
    ):
        hosts = gang.told("hosts", 500)
        assert gang.told("sum", 60) == 3
        assert gang.end(120) == 0
    assert sorted(hosts) == sorted(workers(ray))
    assert len(hosts) == 2


def test_a_rank_that_the_kernel_kills_for_memory_is_named(ray: Cluster) -> None:
    with program(ray, NAMESPACE, "greedy") as gang:
        hosts = gang.told("hosts", 500)
        error = gang.told("error", 120)
        assert "rank 1" in error
        assert hosts[1] in error
        assert "OOM killer (signal 9): the memory limit" in error
        assert f"({LIMIT} bytes)" in error
        assert gang.told("rank", 10) == 1
        assert gang.told("again", 300) == 2
        assert gang.end(60) == 0


def test_idle_pods_go(ray: Cluster) -> None:
    with ray.timings("2 to 0 worker pods, after 10 s idle (an idle agent: 30 s more)"):
        ray.wait_for("no workers", lambda: not workers(ray), 300)
