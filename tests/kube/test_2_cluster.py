"""`kuberay/base`: what its pods are, who reaches them, and pods that die."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.kube import node
from tests.kube.cluster import RAY_UP_S, ROOT, Cluster
from tests.kube.running import Program, program, text

NAMESPACE = "alchemist"
IMAGE = "alchemist-on-ray:0.1.0"
ASK = """
import http.client
connection = http.client.HTTPConnection("127.0.0.1", 8265, timeout=30)
connection.request("GET", "/api/version")
answer = connection.getresponse()
print(answer.status, answer.read().decode())
"""


@pytest.fixture(scope="module")
def ray(kube: Cluster) -> Iterator[Cluster]:
    """A head and two workers, as `kubectl apply -k` makes them."""
    with kube.timings("RayCluster of kuberay/base: head and 2 worker pods ready"):
        kube.make_namespace(NAMESPACE)
        kube.kubectl("apply", "-k", ROOT / "kuberay" / "base")
        kube.wait_until_ready(NAMESPACE, 3)
    yield kube
    with kube.timings("its namespace deleted"):
        kube.delete(NAMESPACE)


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


def stranger(name: str, namespace: str) -> dict[str, Any]:
    """A pod of another user."""
    user = {"runAsNonRoot": True, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"}}
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "c", "image": IMAGE, "imagePullPolicy": "Never", "command": ["sleep", "infinity"],
        "securityContext": security,
    }  # fmt: skip
    return {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 0, "automountServiceAccountToken": False,
            "securityContext": user, "containers": [container],
        },
    }  # fmt: skip


def test_kubernetes_refuses_what_wants_more(ray: Cluster) -> None:
    greedy = stranger("greedy", NAMESPACE)
    greedy["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(RuntimeError, match='violates PodSecurity "restricted'):
        ray.apply([greedy])


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
            return json.loads(ray.kubectl("exec", "-n", space, name, "--", *knock, limit_s=120))

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


def test_a_forwarded_port_reaches_the_head(ray: Cluster) -> None:
    """As the 2019 paper's clients; the policy does not keep it out."""
    knock = (sys.executable, "-c", text("knock"), "127.0.0.1", 8265)
    with ray.forwarded(NAMESPACE, 8265):
        ray.wait_for("a forwarded port", lambda: json.loads(ray.sandbox.run(*knock)) == [8265], 60)
        asked = ray.sandbox.run(sys.executable, "-c", ASK)
    assert "ray_version" in asked or "401" in asked, asked


def delete(kube: Cluster, pod: str) -> None:
    kube.kubectl("delete", "pod", pod, "-n", NAMESPACE, "--wait=false")


@contextmanager
def lost(
    ray: Cluster, what: str, cause: Callable[[Cluster, str], None]
) -> Iterator[tuple[str, str, Program]]:
    """A pod that only the wide gang is in is lost, not its neighbour's: the pod, the error, all."""
    ray.wait_until_ready(NAMESPACE, 3)
    with program(ray, NAMESPACE, "across") as gang:
        wide, (other,) = gang.told("wide", 300), gang.told("neighbour", 300)
        (pod,) = set(wide) - {other}
        assert sorted(wide) == sorted((pod, other))
        with ray.timings(f"{what}: GroupFailedError that names it"):
            cause(ray, pod)
            error = gang.told("error", 120)
        assert gang.told("kept", 60) == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        assert gang.told("sum", 60) == 3
        yield pod, error, gang
        assert other in gang.told("again", 400)
        assert gang.told("ranks", 60) == [0, 1]
        assert gang.end(60) == 0


def test_a_pod_that_is_taken_away_says_so(ray: Cluster) -> None:
    with lost(ray, "a worker pod deleted", delete) as (pod, error, gang):
        assert f"node {pod} is being taken away (SIGTERM)" in error
        with ray.timings("KubeRay has made another, and the gang has worked on both for 8 s"):
            again = gang.told("again", 400)
        assert len(again) == 2
        assert pod not in again


def containers(*pods: dict[str, Any]) -> set[str]:
    """What containerd calls the containers that run in these pods now."""
    return {
        status["containerID"].removeprefix("containerd://")
        for pod in pods
        for status in pod["status"]["containerStatuses"]
        if "running" in status["state"]
    }


def kill(kube: Cluster, pod: str) -> None:
    """Kill all processes of a pod at once."""
    (container,) = containers(kube.get("pod", pod, "-n", NAMESPACE))
    node.ctr(kube.sandbox, "task", "kill", "--signal", "SIGKILL", container)


def test_a_pod_that_is_killed_is_named(ray: Cluster) -> None:
    with lost(ray, "a worker pod's processes killed", kill) as (pod, error, _):
        assert pod in error
        assert f"kubectl -n {NAMESPACE} describe pod {pod}" in error


def test_a_gang_with_max_failures_recovers_from_the_loss_of_a_pod(ray: Cluster) -> None:
    """It goes on in the pod that replaces the other."""
    ray.wait_until_ready(NAMESPACE, 3)
    with program(ray, NAMESPACE, "recovering") as gang:
        before = gang.told("hosts", 300)
        assert len(before) == 2
        with ray.timings("a worker pod deleted: its gang recovered on KubeRay's next one"):
            delete(ray, before[0])
            again = gang.told("again", 400)
        assert len(again) == 2
        assert before[0] not in again
        assert gang.told("right", 60)
        assert gang.end(60) == 0


def test_a_head_that_dies_takes_all_along_and_comes_back(ray: Cluster) -> None:
    ray.wait_until_ready(NAMESPACE, 3)

    def workers() -> set[str]:
        return containers(*ray.pods(NAMESPACE, "worker"))

    before = workers()
    with ray.timings("the head's processes killed: all three pods restarted, and a gang on two"):
        kill(ray, ray.head(NAMESPACE))
        ray.wait_for(
            "workers that have started again",
            lambda: (
                len(workers() - before) == 2
                and not workers() & before
                and ray.is_ready(NAMESPACE, 3)
            ),
            RAY_UP_S,
        )
        with program(ray, NAMESPACE, "wait", seconds=0.1) as gang:
            assert gang.told("sum", 300) == 3
            assert gang.end(60) == 0
