"""The batch form: `alchemist kuberay render --job` makes a cluster, runs the demo and goes."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.kube.cluster import Cluster

NAMESPACE = "jobs"
SMALL = ("--cpus", "1", "--memory", "2Gi", "--head-cpus", "1", "--head-memory", "3Gi")


def render(*words: str) -> str:
    """The output of the command line."""
    return subprocess.run(
        [sys.executable, "-m", "alchemist_ray.cli", "kuberay", "render", *SMALL, *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


def test_the_demo_runs_as_a_job_with_a_gang_across_two_pods(kube: Cluster) -> None:
    where = ("--namespace", NAMESPACE, "--name", "demo")
    text = render(*where, "--job", "alchemist demo --workers 2 --out /tmp/out")
    with kube.timings("RayJob: head and 2 worker pods up, `alchemist demo`, done"):
        kube.kubectl("apply", "-f", "-", given=text)

        def status() -> str:
            found = kube.get("rayjob/demo", "-n", NAMESPACE).get("status", {})
            deployed: str = found.get("jobDeploymentStatus", "")
            return deployed if deployed in ("Complete", "Failed") else ""

        ended = kube.wait_for("the job's end", status, 600)
    said = kube.kubectl("logs", "job/demo", "-n", NAMESPACE, check=False)
    assert ended == "Complete", f"{said}\n{kube.state()}"
    job = kube.get("rayjob/demo", "-n", NAMESPACE)["status"]
    assert job["jobStatus"] == "SUCCEEDED"
    ranks = dict(re.findall(r"rank (\d+): pid \d+ on (\S+)", said))
    assert sorted(ranks) == ["0", "1"], said
    assert len(set(ranks.values())) == 2, ranks  # a pod each
    assert all("-worker-" in host for host in ranks.values()), ranks
    assert re.search(r"\|\|A - U S V'\|\| = [\d.]+; the best possible is", said), said
    with kube.timings("the job and its cluster deleted"):
        kube.kubectl("delete", "namespace", NAMESPACE, limit_s=240)
