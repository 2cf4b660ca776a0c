"""All pods or none: two clusters by coscheduling on a node that has room for one and a half."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import pytest

from tests.kube.cluster import Cluster

FIRST, SECOND = "gang-one", "gang-two"
WATCH_S = 30.0
SITE = """\
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: {name}
resources: [kuberay/overlays/gang-scheduler-plugins]
"""


@pytest.fixture
def gangs(kube: Cluster) -> Iterator[Cluster]:
    """KubeRay's operator, as it is with coscheduling."""
    kube.restart_operator("--batch-scheduler=scheduler-plugins")
    yield kube
    kube.delete(SECOND, FIRST)
    kube.restart_operator()


def placed(kube: Cluster, name: str) -> list[bool]:
    """Of each pod, whether it has a node."""
    return ["nodeName" in pod["spec"] for pod in kube.pods(name)]


def has_three_pods(kube: Cluster, name: str) -> bool:
    return len(kube.pods(name)) == 3


def test_a_gang_is_scheduled_whole_or_not_at_all(gangs: Cluster) -> None:
    # 10 CPUs each, and the node has 16: a head and a worker of the second would find room.
    for name in (FIRST, SECOND):
        gangs.make_namespace(name)
        gangs.kubectl("apply", "-k", gangs.kustomized(name, SITE.format(name=name)))
        gangs.wait_for("three pods", partial(has_three_pods, gangs, name), 60)
        if name == FIRST:
            with gangs.timings("gang overlay: all three pods scheduled"):
                gangs.wait_for("all scheduled", lambda: all(placed(gangs, FIRST)), 60)
    end = time.monotonic() + WATCH_S
    while time.monotonic() < end:
        assert placed(gangs, SECOND) == [False] * 3
        time.sleep(2)
    schedulers = {pod["spec"]["schedulerName"] for pod in gangs.pods(SECOND)}
    assert schedulers == {"scheduler-plugins-scheduler"}
    group = gangs.get("podgroup", "-n", SECOND)["items"][0]
    assert group["spec"]["minMember"] == 3
    with gangs.timings("the first gone: all three pods of the waiting one scheduled"):
        gangs.delete(FIRST)
        gangs.wait_for("all of the second", lambda: placed(gangs, SECOND) == [True] * 3, 400)
