"""The batch form: the chart's value `job` makes a cluster, runs the demo and goes."""

from __future__ import annotations

import re

from tests.kube.cluster import Cluster

NAMESPACE = "demo"


def test_the_demo_runs_as_a_job_with_a_gang_across_two_pods(kube: Cluster) -> None:
    kube.make_namespace(NAMESPACE)
    objects = kube.chart(NAMESPACE, job="alchemist demo --workers 2 --out /tmp/out")
    with kube.timings("RayJob: head and 2 worker pods up, `alchemist demo`, done"):
        kube.apply(objects)

        def status() -> str:
            found = kube.get("rayjob/demo", "-n", NAMESPACE).get("status", {})
            deployed: str = found.get("jobDeploymentStatus", "")
            return deployed if deployed in ("Complete", "Failed") else ""

        ended = kube.wait_for("the job's end", status, 600)
    said = kube.kubectl("logs", "job/demo", "-n", NAMESPACE, code=None)
    assert ended == "Complete", f"{said}\n{kube.state()}"
    job = kube.get("rayjob/demo", "-n", NAMESPACE)["status"]
    assert job["jobStatus"] == "SUCCEEDED"
    ranks = dict(re.findall(r"rank (\d+): pid \d+ on (\S+)", said))
    assert sorted(ranks) == ["0", "1"], said
    assert len(set(ranks.values())) == 2, ranks  # a pod each
    assert all("-worker-" in host for host in ranks.values()), ranks
    assert re.search(r"\|\|A - U S V'\|\| = [\d.]+; the best possible is", said), said
    with kube.timings("the job and its cluster deleted"):
        kube.delete(NAMESPACE)
