"""The Helm chart, installed by Helm."""

from __future__ import annotations

from tests.kube.cluster import RAY_UP_S, ROOT, Cluster
from tests.kube.running import program

NAMESPACE = "by-helm"
SMALL = "cpus=1,memory=2Gi,headCpus=1,headMemory=3Gi,storage=2Gi"


def test_a_release_is_installed_changed_and_removed(kube: Cluster) -> None:
    chart = ROOT / "kuberay" / "chart"
    where = ("--namespace", NAMESPACE)
    kube.make_namespace(NAMESPACE)  # as the chart's notes advise
    with kube.timings("helm install: head and 2 worker pods ready"):
        kube.helm("install", NAMESPACE, chart, *where, "--set", SMALL)
        kube.wait_until_ready(NAMESPACE, 3)
    assert kube.get("networkpolicy", NAMESPACE, "-n", NAMESPACE)
    with program(kube, NAMESPACE, "wait", seconds=0.1) as gang:
        assert gang.told("sum", 300) == 3
        assert gang.end(60) == 0
    kube.helm("upgrade", NAMESPACE, chart, *where, "--set", f"{SMALL},workers=1")
    kube.wait_for("two pods", lambda: len(kube.pods(NAMESPACE)) == 2, RAY_UP_S)
    with kube.timings("helm uninstall: nothing left"):
        kube.helm("uninstall", NAMESPACE, *where)
        kube.wait_for("no pods", lambda: not kube.pods(NAMESPACE), RAY_UP_S)
    assert not kube.get("raycluster,networkpolicy,serviceaccount", "-n", NAMESPACE, "-l",
                        "app.kubernetes.io/part-of=alchemist-on-ray")["items"]  # fmt: skip
    kube.delete(NAMESPACE)
