"""A rolling upgrade: worker pods are replaced one by one under a session that goes on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from alchemist_ray.deploy.kubernetes import ClusterOptions, manifests
from tests.kube.cluster import Cluster
from tests.kube.running import program

NAMESPACE = "upgrade"
UP_S = 400.0
GONE_S = 400.0  # from a pod's deletion to the gang on another one
OPTIONS = ClusterOptions(
    name=NAMESPACE, namespace=NAMESPACE, cpus=1, memory="2Gi", head_cpus="1", head_memory="3Gi",
    storage="2Gi",
)  # fmt: skip
Map = dict[str, Any]


def objects(release: str) -> list[Map]:
    """The renderer's objects, with a volume that all pods share, and workers of a release."""
    found = manifests(OPTIONS)
    (cluster,) = (one for one in found if one["kind"] == "RayCluster")
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for group in groups:
        spec = group["template"]["spec"]
        claim = {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}
        spec["volumes"].append(claim)
        spec["containers"][0]["volumeMounts"].append({"name": "shared", "mountPath": "/shared"})
    worker = groups[1]["template"]
    worker["metadata"]["labels"] = {**worker["metadata"]["labels"], "release": release}
    return copy.deepcopy(found)


def volume(path: str) -> list[Map]:
    """A folder of the node as the persistent volume of the namespace."""
    size = {"storage": "1Gi"}
    modes = ["ReadWriteMany"]
    one = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{NAMESPACE}-shared"},
        "spec": {
            "capacity": size,
            "accessModes": modes,
            "hostPath": {"path": path},
            "claimRef": {"namespace": NAMESPACE, "name": "shared"},
            "storageClassName": "",
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared", "namespace": NAMESPACE},
        "spec": {"accessModes": modes, "resources": {"requests": size}, "storageClassName": ""},
    }
    return [one, claim]


@pytest.fixture
def ray(kube: Cluster) -> Iterator[Cluster]:
    folder = kube.sandbox.folder / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    first = objects("1")
    kube.apply([first[0], *volume(str(folder)), *first[1:]])
    kube.wait_for("three ready pods", lambda: kube.is_ready(NAMESPACE, 3), UP_S)
    yield kube
    kube.kubectl("delete", "namespace", NAMESPACE, limit_s=240)
    kube.kubectl("delete", "persistentvolume", f"{NAMESPACE}-shared")


def test_a_session_goes_on_while_all_workers_are_replaced(ray: Cluster) -> None:
    with program(ray, NAMESPACE, "upgrading") as gang:
        before = gang.told("hosts", 300)
        assert len(before) == 2
        ray.apply(objects("2"))  # running pods stay as they are
        with ray.timings("rolling upgrade: both worker pods replaced, the gang rebuilt twice"):
            for number, pod in enumerate(before, start=1):
                ray.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
                now = gang.told(f"hosts{number}", GONE_S)
                assert pod not in now
        assert gang.told("equal", 60) is True
        assert gang.end(60) == 0
    releases = {pod["metadata"]["labels"]["release"] for pod in ray.pods(NAMESPACE, "worker")}
    assert releases == {"2"}
