"""500 worker pods that only seem to run (KWOK): what of ours grows with them stays quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from alchemist_ray.cluster.placement import check_capacity
from alchemist_ray.errors import ResourceError
from tests.kube.cluster import Cluster

NAMESPACE = "many"
WORKERS = 500
ARITHMETIC_S = 0.1
UP_S = 600.0
TAINT = "kwok.x-k8s.io/node"


@pytest.fixture
def fakes(kube: Cluster) -> Iterator[Cluster]:
    """KWOK, and a node for each worker and the head."""
    kube.start_fakes()
    kube.apply([_node(number) for number in range(WORKERS + 1)])
    yield kube
    kube.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", limit_s=600)
    kube.sandbox.stop("kwok")  # the nodes go with Kubernetes


def _node(number: int) -> dict[str, Any]:
    room = {"cpu": "16", "memory": "128Gi", "ephemeral-storage": "100Gi", "pods": "110"}
    name = f"fake-{number}"
    labels = {"type": "kwok", "kubernetes.io/hostname": name}
    return {
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": name, "annotations": {TAINT: "fake"}, "labels": labels},
        "spec": {"taints": [{"key": TAINT, "value": "fake", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    }  # fmt: skip


def _on_fakes(objects: list[dict[str, Any]]) -> None:
    """Let a cluster's pods run on fake nodes only."""
    spec = next(o["spec"] for o in objects if o["kind"] == "RayCluster")
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        group["template"]["spec"] |= {
            "nodeSelector": {"type": "kwok"},
            "tolerations": [{"key": TAINT, "operator": "Exists"}],
        }


def _arithmetic_is_quick(kube: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The capacity that a session computes from a cluster's nodes before it requests a gang.

    Ray itself would tell these nodes; here Kubernetes does.
    """
    nodes = kube.get("nodes", "-l", "type=kwok")["items"]
    told = [
        {"Alive": True, "Resources": {"CPU": float(node["status"]["allocatable"]["cpu"])}}
        for node in nodes
    ]
    monkeypatch.setattr(ray, "nodes", lambda: told)
    start = time.perf_counter()
    check_capacity(16 * len(told), 1.0)
    check_capacity(len(told), 16.0, "STRICT_SPREAD")
    with pytest.raises(ResourceError, match=f"on {len(told)} node"):
        check_capacity(len(told) + 1, 1.0, "STRICT_SPREAD")
    took = time.perf_counter() - start
    kube.timings.note(
        f"three questions whether a gang fits {len(told)} nodes", f"{1e3 * took:.1f} ms"
    )
    assert took < ARITHMETIC_S


def test_500_workers(fakes: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.make_namespace(NAMESPACE)
    objects = fakes.chart(NAMESPACE, workers=WORKERS, cpus=16, memory="64Gi")
    _on_fakes(objects)
    with fakes.timings(f"KWOK: {WORKERS} worker pods made by KubeRay, scheduled, running"):
        fakes.apply(objects)
        fakes.wait_for(f"{WORKERS + 1} running pods", lambda: _running(fakes) == WORKERS + 1, UP_S)
    # No eviction is allowed: Kubernetes has counted them all.
    budget = fakes.wait_for("a budget that has counted", lambda: _budget(fakes), 60)
    assert budget["desiredHealthy"] == WORKERS + 1
    assert budget["disruptionsAllowed"] == 0
    _arithmetic_is_quick(fakes, monkeypatch)
    with fakes.timings(f"KWOK: {WORKERS} worker pods deleted"):
        fakes.kubectl("delete", "raycluster", NAMESPACE, "-n", NAMESPACE, limit_s=240)
        fakes.wait_for("no pods", lambda: not fakes.pods(NAMESPACE), 300)


def _running(kube: Cluster) -> int:
    said = kube.kubectl(
        "get", "pods", "-n", NAMESPACE, "--field-selector=status.phase=Running", "-o", "name"
    )
    return len(said.splitlines())


def _budget(kube: Cluster) -> dict[str, Any]:
    status: dict[str, Any] = kube.get("pdb", NAMESPACE, "-n", NAMESPACE).get("status", {})
    return status if status.get("expectedPods") == WORKERS + 1 else {}
