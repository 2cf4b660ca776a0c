"""A worker pod that is deleted: a gang with `max_failures` goes on in the pod that replaces it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kube.cluster import ROOT, Cluster
from tests.kube.running import program

NAMESPACE = "alchemist"
UP_S = 400.0


@pytest.fixture
def ray(kube: Cluster) -> Iterator[Cluster]:
    """A head and two workers."""
    kube.make_namespace(NAMESPACE)
    kube.kubectl("apply", "-k", ROOT / "kuberay" / "base")
    kube.wait_for("three ready pods", lambda: kube.is_ready(NAMESPACE, 3), UP_S)
    yield kube
    kube.kubectl("delete", "namespace", NAMESPACE, limit_s=240)


def test_a_gang_recovers_from_the_loss_of_a_pod(ray: Cluster) -> None:
    with program(ray, NAMESPACE, "recovering") as gang:
        before = gang.told("hosts", 300)
        assert len(before) == 2
        with ray.timings("a worker pod deleted: its gang recovered on KubeRay's next one"):
            ray.kubectl("delete", "pod", before[0], "-n", NAMESPACE, "--wait=false")
            again = gang.told("again", 400)
        assert len(again) == 2
        assert before[0] not in again
        assert gang.told("right", 60)
        assert gang.end(60) == 0
