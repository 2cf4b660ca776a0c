"""A rolling upgrade: worker pods are replaced one by one under a session that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube.cluster import Cluster
from tests.kube.running import program

NAMESPACE = "upgrade"
GONE_S = 400.0  # from a pod's deletion to the gang on another one
Map = dict[str, Any]


def objects(kube: Cluster, release: str) -> list[Map]:
    """The chart's objects, with a volume that all pods share, and workers of a release."""
    found = kube.chart(
        NAMESPACE,
        volumes=[{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
        volumeMounts=[{"name": "shared", "mountPath": "/shared"}],
    )
    (cluster,) = (one for one in found if one["kind"] == "RayCluster")
    (group,) = cluster["spec"]["workerGroupSpecs"]
    group["template"]["metadata"]["labels"]["release"] = release
    return found


def volume(path: str) -> list[Map]:
    """A folder of the node as the persistent volume of the namespace."""
    size = {"storage": "1Gi"}
    modes = ["ReadWriteMany"]
    one = {
        "apiVersion": "v1", "kind": "PersistentVolume",
        "metadata": {"name": f"{NAMESPACE}-shared"},
        "spec": {
            "capacity": size, "accessModes": modes, "hostPath": {"path": path},
            "claimRef": {"namespace": NAMESPACE, "name": "shared"}, "storageClassName": "",
        },
    }  # fmt: skip
    claim = {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {"name": "shared", "namespace": NAMESPACE},
        "spec": {"accessModes": modes, "resources": {"requests": size}, "storageClassName": ""},
    }  # fmt: skip
    return [one, claim]


@pytest.fixture
def ray(kube: Cluster) -> Iterator[Cluster]:
    folder = kube.sandbox.folder / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    kube.make_namespace(NAMESPACE)
    kube.apply([*volume(str(folder)), *objects(kube, "1")])
    kube.wait_until_ready(NAMESPACE, 3)
    yield kube
    kube.delete(NAMESPACE)
    kube.kubectl("delete", "persistentvolume", f"{NAMESPACE}-shared")


def test_a_session_goes_on_while_all_workers_are_replaced(ray: Cluster) -> None:
    with program(ray, NAMESPACE, "upgrading") as gang:
        before = gang.told("hosts", 300)
        assert len(before) == 2
        ray.apply(objects(ray, "2"))  # running pods stay as they are
        with ray.timings("rolling upgrade: both worker pods replaced, the gang rebuilt twice"):
            for number, pod in enumerate(before, start=1):
                ray.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
                now = gang.told(f"hosts{number}", GONE_S)
                assert pod not in now
        assert gang.told("equal", 60) is True
        assert gang.end(60) == 0
    releases = {pod["metadata"]["labels"]["release"] for pod in ray.pods(NAMESPACE, "worker")}
    assert releases == {"2"}
