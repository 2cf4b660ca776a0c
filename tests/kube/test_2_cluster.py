"""`kuberay/base`: what its pods are, who reaches them, and pods that die."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kube import node
from tests.kube.cluster import ROOT, Cluster
from tests.kube.running import Program, program, text

NAMESPACE = "alchemist"
UP_S = 400.0
IMAGE = "alchemist-on-ray:0.1.0"


@pytest.fixture(scope="module")
def ray(kube: Cluster) -> Iterator[Cluster]:
    """A head and two workers, as `kubectl apply -k` makes them."""
    with kube.timings("RayCluster of kuberay/base: head and 2 worker pods ready"):
        kube.make_namespace(NAMESPACE)
        kube.kubectl("apply", "-k", ROOT / "kuberay" / "base")
        kube.wait_for("three ready pods", lambda: kube.is_ready(NAMESPACE, 3), UP_S)
    yield kube
    with kube.timings("its namespace deleted"):
        kube.kubectl("delete", "namespace", NAMESPACE, limit_s=240)


def inside(kube: Cluster, pod: str, *command: str) -> str:
    return kube.kubectl("exec", "-n", NAMESPACE, pod, "--", *command)


def names(kube: Cluster) -> list[str]:
    return [pod["metadata"]["name"] for pod in kube.pods(NAMESPACE)]


def test_pods_are_what_the_manifests_say(ray: Cluster) -> None:
    for pod in names(ray):
        first = inside(ray, pod, "cat", "/proc/1/cmdline").split("\0")
        assert first[:2] == ["tini", "--"], first
        status = inside(ray, pod, "cat", "/proc/1/status")
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert facts["Uid"].split() == ["1000"] * 4
        assert facts["Seccomp"] == "2"  # a filter
        assert facts["NoNewPrivs"] == "1"
        assert int(facts["CapEff"], 16) == int(facts["CapBnd"], 16) == 0
        with pytest.raises(RuntimeError, match="Read-only file system"):
            inside(ray, pod, "touch", "/home/x")
        inside(ray, pod, "touch", "/tmp/x")
        shm = inside(ray, pod, "df", "--output=size", "-B1", "/dev/shm").split()[1]
        assert int(shm) == (8 << 30 if "-head-" in pod else 16 << 30)  # the memory limit
        with pytest.raises(RuntimeError, match="No such file"):
            inside(ray, pod, "ls", "/var/run/secrets/kubernetes.io/serviceaccount")


def test_orphans_are_reaped(ray: Cluster) -> None:
    pod = ray.pods(NAMESPACE, "worker")[0]["metadata"]["name"]
    inside(ray, pod, "bash", "-c", "(sleep 1 & exec true)")

    def zombies() -> str:
        look = "import pathlib,sys\nfor p in pathlib.Path('/proc').glob('[0-9]*/stat'):\n"
        look += " f=p.read_text().rpartition(')')[2].split()\n"
        look += " if f[0]=='Z' and f[1]=='1': print(p)"
        return inside(ray, pod, "python", "-c", look)

    ray.wait_for("no zombies of process 1", lambda: not zombies(), 20)


def test_kubernetes_refuses_what_wants_more(ray: Cluster) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "greedy", "namespace": NAMESPACE},
        "spec": {
            "containers": [{"name": "c", "image": IMAGE, "securityContext": {"privileged": True}}]
        },
    }
    with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
        ray.apply([pod])


def stranger(name: str, namespace: str) -> dict[str, Any]:
    """A pod of another user."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "c",
                    "image": IMAGE,
                    "imagePullPolicy": "Never",
                    "command": ["sleep", "infinity"],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }


def test_a_stranger_reaches_no_port_of_a_gang(ray: Cluster) -> None:
    ray.apply([stranger("stranger", NAMESPACE), stranger("stranger", "default")])
    for space in (NAMESPACE, "default"):
        ray.kubectl("wait", "-n", space, "--for=condition=Ready", "pod/stranger", "--timeout=100s")
    with program(ray, NAMESPACE, "wait", seconds=600.0) as gang:
        host = gang.told("hosts", 300)[0]
        gang.told("sum", 60)
        pod = ray.get("pod", host, "-n", NAMESPACE)
        address = pod["status"]["podIP"]
        ports = json.loads(inside(ray, host, "python", "-c", text("listening")))
        knock = ("python", "-c", text("knock"), address, *map(str, ports))

        def opened(space: str, name: str) -> list[int]:
            found: list[int] = json.loads(
                ray.kubectl("exec", "-n", space, name, "--", *knock, limit_s=120)
            )
            return found

        # What others of the cluster reach; a gang's own ports are among them.
        friends = opened(NAMESPACE, ray.head(NAMESPACE))
        fixed = {6380, 6381, 6382, 6383, 8080, 52365, *range(11000, 12000)}
        assert set(friends) - fixed, f"no port of a gang among {ports}"
        assert opened(NAMESPACE, "stranger") == []
        assert opened("default", "stranger") == []
        # It is the policy that keeps them out, nothing else.
        policy = ray.get("networkpolicy/alchemist", "-n", NAMESPACE)
        ray.kubectl("delete", "networkpolicy/alchemist", "-n", NAMESPACE)
        ray.wait_for(
            "without a policy, an open door", lambda: opened("default", "stranger") == friends, 60
        )
        ray.apply(
            [
                {k: policy[k] for k in ("apiVersion", "kind", "spec")}
                | {"metadata": {k: policy["metadata"][k] for k in ("name", "namespace", "labels")}}
            ]
        )
        ray.wait_for("the policy again", lambda: opened("default", "stranger") == [], 60)
    ray.kubectl("delete", "pod/stranger", "-n", NAMESPACE)
    ray.kubectl("delete", "pod/stranger", "-n", "default")


def _lost(gang: Program) -> tuple[str, str]:
    """The pod that only the wide gang is in, and the neighbour's."""
    wide, neighbour = gang.told("wide", 300), gang.told("neighbour", 300)
    assert len(wide) == 2
    assert len(neighbour) == 1
    assert neighbour[0] in wide
    return next(host for host in wide if host not in neighbour), neighbour[0]


def _neighbour_is_unharmed(gang: Program) -> None:
    assert gang.told("kept", 60) == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert gang.told("sum", 60) == 3


def test_a_pod_that_is_taken_away_says_so(ray: Cluster) -> None:
    with program(ray, NAMESPACE, "across") as gang:
        pod, other = _lost(gang)
        with ray.timings("a worker pod deleted: GroupFailedError that names it"):
            ray.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")
            error = gang.told("error", 60)
        assert f"node {pod} is being taken away (SIGTERM)" in error
        _neighbour_is_unharmed(gang)
        with ray.timings("KubeRay has made another, and the gang has worked on both for 8 s"):
            again = gang.told("again", 400)
        assert len(again) == 2
        assert other in again
        assert pod not in again
        assert gang.told("ranks", 60) == [0, 1]
        assert gang.end(60) == 0


def containers(kube: Cluster, component: str) -> set[str]:
    """Of the pods of a component, what containerd calls the containers that run in them now."""
    return {
        status["containerID"].removeprefix("containerd://")
        for pod in kube.pods(NAMESPACE, component)
        for status in pod["status"]["containerStatuses"]
        if "running" in status["state"]
    }


def kill(kube: Cluster, pod: str) -> None:
    """Kill all processes of a pod at once."""
    status = kube.get("pod", pod, "-n", NAMESPACE)["status"]["containerStatuses"][0]
    container = status["containerID"].removeprefix("containerd://")
    node.ctr(kube.sandbox, "task", "kill", "--signal", "SIGKILL", container)


def test_a_pod_that_is_killed_is_named(ray: Cluster) -> None:
    ray.wait_for("three ready pods", lambda: ray.is_ready(NAMESPACE, 3), UP_S)
    with program(ray, NAMESPACE, "across") as gang:
        pod, other = _lost(gang)
        with ray.timings("a worker pod's processes killed: GroupFailedError that names it"):
            kill(ray, pod)
            error = gang.told("error", 120)
        assert pod in error
        assert f"kubectl -n {NAMESPACE} describe pod {pod}" in error
        _neighbour_is_unharmed(gang)
        assert other in gang.told("again", 400)
        assert gang.told("ranks", 60) == [0, 1]
        assert gang.end(60) == 0


def test_a_head_that_dies_takes_all_along_and_comes_back(ray: Cluster) -> None:
    ray.wait_for("three ready pods", lambda: ray.is_ready(NAMESPACE, 3), UP_S)
    before = containers(ray, "worker")
    with ray.timings("the head's processes killed: all three pods restarted, and a gang on two"):
        kill(ray, ray.head(NAMESPACE))
        ray.wait_for(
            "workers that have started again",
            lambda: (
                len(containers(ray, "worker") - before) == 2
                and not containers(ray, "worker") & before
                and ray.is_ready(NAMESPACE, 3)
            ),
            UP_S,
        )
        with program(ray, NAMESPACE, "wait", seconds=0.1) as gang:
            assert gang.told("sum", 300) == 3
            assert gang.end(60) == 0
