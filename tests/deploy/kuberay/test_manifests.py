"""Manifests against the schemas of their kinds, our own policy, and each other."""

from __future__ import annotations

import copy
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kuberay import crds, kustomize, policy
from tests.deploy.kuberay.folders import (
    DASHBOARD,
    FOLDERS,
    KUBERAY_VERSION,
    KUBERNETES_VERSIONS,
    OVERLAYS,
    ROOT,
    Map,
    by_name,
    queries,
)
from tests.support import commands


@cache
def validators() -> dict[str, Any]:
    return crds.validators()


def check_schemas(objects: list[Map]) -> None:
    kubernetes = pytest.importorskip(
        "kubernetes_validate", reason="the extra `test` is not installed"
    )
    for o in objects:
        if o["apiVersion"].startswith("ray.io/"):
            errors = list(validators()[o["kind"]].iter_errors(o))
            assert not errors, "\n".join(f"{e.json_path}: {e.message[:200]}" for e in errors)
        elif not o["apiVersion"].startswith("monitoring.coreos.com/"):
            for version in KUBERNETES_VERSIONS:
                kubernetes.validate(o, version, strict=True)


def test_every_folder_is_checked() -> None:
    assert {path.name for path in (ROOT / "overlays").iterdir()} == set(OVERLAYS)


def test_the_dashboard_of_the_overlay_is_the_charts() -> None:
    found = by_name(kustomize.build(ROOT / "overlays" / "monitoring"))
    board = found["ConfigMap", "alchemist-dashboard"]["data"]["alchemist.json"]
    assert board == DASHBOARD.read_text()


def kubectl_kustomize(folder: Path) -> list[Map]:
    return list(yaml.safe_load_all(commands.output("kubectl", "kustomize", folder)))


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on this machine")
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_reads_the_folders_as_we_do(folder: str) -> None:
    built = kustomize.build(ROOT / folder)
    assert by_name(kubectl_kustomize(ROOT / folder)) == by_name(built)


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_fit_their_schemas_and_our_policy(folder: str) -> None:
    objects = kustomize.build(ROOT / folder)
    check_schemas(objects)
    assert policy.broken(objects) == []


GONE = object()
POLICY, BUDGET = "NetworkPolicy", "PodDisruptionBudget"


@pytest.mark.parametrize(
    ("place", "path", "value", "said"),
    [
        ("worker", "containers/0/image", "alchemist-on-ray:latest",
         "worker: runs whatever image is the latest"),
        ("worker", "containers/0/securityContext/privileged", True,
         "worker: may gain privileges"),
        ("worker", "containers/0/resources/limits", GONE, "worker: has no limits"),
        ("worker", "containers/0/livenessProbe", GONE, "worker: has no livenessProbe"),
        ("worker", "containers/0/command", GONE, "worker: has nobody to reap orphans"),
        ("worker", "securityContext/runAsUser", 0, "worker: may run as root"),
        ("worker", "volumes/0", {"name": "node", "hostPath": {"path": "/"}},
         "worker: mounts node of the node or of others"),
        ("worker", "volumes/0/emptyDir", {}, "worker: volume tmp may fill the node's disk"),
        ("worker", "hostNetwork", True, "worker: two may meet on one node's network"),
        (POLICY, "spec/egress/0", {"ports": [{"protocol": "TCP", "port": 443}]},
         "NetworkPolicy: opens ports to everywhere"),
        (POLICY, "spec/egress/1/to", [{"namespaceSelector": {}}],
         "NetworkPolicy: trusts labels that any namespace can set"),
        (BUDGET, "spec/minAvailable", 1, "PodDisruptionBudget: some pod may be evicted"),
        ("RayCluster", "spec/authOptions", GONE, "Ray asks for no token"),
    ],
)  # fmt: skip
def test_the_policy_sees_what_is_broken(place: str, path: str, value: Any, said: str) -> None:
    objects = kustomize.build(ROOT / "base")
    *way, last = path.split("/")
    pod = dict(policy.templates(objects))["worker"]["spec"]
    inside: Any = pod if place == "worker" else by_name(objects)[place, "alchemist"]
    for part in way:
        inside = inside[int(part)] if isinstance(inside, list) else inside[part]
    if value is GONE:
        del inside[last]
    else:
        inside[int(last) if isinstance(inside, list) else last] = value
    assert said in policy.broken(objects)


def test_the_schemas_see_what_is_wrong() -> None:
    cluster = by_name(kustomize.build(ROOT / "base"))["RayCluster", "alchemist"]
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["memory"] = "8Gi"
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    said = [error.message for error in validators()["RayCluster"].iter_errors(cluster)]
    assert any("'memory' was unexpected" in message for message in said)
    assert any("'two' is not of type 'integer'" in message for message in said)


def test_the_network_policy_knows_only_its_own() -> None:
    objects = kustomize.build(ROOT / "overlays" / "rayjob")
    spec = by_name(objects)["NetworkPolicy", "alchemist"]["spec"]
    everything = spec["ingress"][0]
    assert "ports" not in everything  # a gang's ports are any
    members = everything["from"][0]["podSelector"]
    stranger = {"metadata": {"labels": {"app.kubernetes.io/instance": "other"}}}
    submitter = dict(policy.templates(objects))["submitter"]
    assert not policy.selects(members, stranger)
    assert not policy.selects(members, submitter)
    handed_in = spec["ingress"][1]
    assert any(
        policy.selects(peer["podSelector"], submitter) and "namespaceSelector" not in peer
        for peer in handed_in["from"]
    )
    assert [port["port"] for port in handed_in["ports"]] == [8265]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}


def test_metrics_are_those_of_the_clusters_own_head_and_workers() -> None:
    objects = kustomize.build(ROOT / "overlays" / "monitoring")
    monitor = by_name(objects)["PodMonitor", "alchemist"]["spec"]
    pods = dict(policy.templates(objects))
    other = copy.deepcopy(pods["head"])
    other["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"
    assert all(policy.selects(monitor["selector"], pods[name]) for name in ("head", "worker"))
    assert not policy.selects(monitor["selector"], other)
    ports = {port["name"] for port in pods["head"]["spec"]["containers"][0]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports


def test_only_the_autoscaler_has_a_token() -> None:
    cluster = by_name(kustomize.build(ROOT / "overlays" / "autoscale"))["RayCluster", "alchemist"]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    [main] = pod["containers"]
    assert [mount["name"] for mount in main["volumeMounts"]] == ["tmp"]
    mounts = cluster["spec"]["autoscalerOptions"]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {"autoscaler-tmp", "autoscaler-token"}


def test_nodes_of_optional_workers_can_be_drained() -> None:
    objects = kustomize.build(ROOT / "overlays" / "autoscale")
    budget = by_name(objects)["PodDisruptionBudget", "alchemist"]["spec"]
    worker = dict(policy.templates(objects))["worker"]
    assert not policy.selects(budget["selector"], worker)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on this machine")
@pytest.mark.parametrize("namespace", ["hpc", "default"])
def test_a_sites_image_and_namespace_reach_all_that_name_them(
    tmp_path: Path, namespace: str
) -> None:
    """A namespace is the site's own: no manifest changes its labels."""
    shutil.copytree(ROOT, tmp_path / "kuberay")
    text = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    (tmp_path / "kustomization.yaml").write_text(text.replace("hpc", namespace))
    objects = kubectl_kustomize(tmp_path)
    assert {o["metadata"]["namespace"] for o in objects} == {namespace}
    assert "Namespace" not in {o["kind"] for o in objects}
    images = {
        container["image"]
        for _, template in policy.templates(objects)
        for container in template["spec"]["containers"]
    }
    assert images == {"registry.example/alchemist-on-ray:0.1.0"}


def test_versions_are_those_that_are_installed_and_tested() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT.parent / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    cluster = by_name(kustomize.build(ROOT / "base"))["RayCluster", "alchemist"]
    assert cluster["spec"]["rayVersion"] == pinned[1]
    assert crds.COPY.name == f"crds-v{KUBERAY_VERSION}.json.gz"
    table = (ROOT.parent / "docs" / "kubernetes.md").read_text()
    for what, version in (
        ("Ray", pinned[1]),
        ("KubeRay", KUBERAY_VERSION),
        ("Kubernetes", f"{KUBERNETES_VERSIONS[0]} to {KUBERNETES_VERSIONS[-1]}"),
    ):
        assert re.search(rf"^\| {what} +\| {re.escape(version)} +\|", table, re.M), what


def test_the_copy_of_the_schemas_is_kuberays() -> None:
    if not crds.has_go():
        pytest.skip("Go is not on this machine")
    words = ["go", "-C", "/", "mod", "download", "-json", f"{crds.MODULE}@v{KUBERAY_VERSION}"]
    told = commands.run(*words, env=crds.go_environment())
    if told.returncode != 0:
        pytest.skip("KubeRay's Go module is not in this machine's cache")
    folder = Path(json.loads(told.stdout)["Dir"])
    assert crds.copy(folder / "config" / "crd" / "bases") == crds.stored()


def test_ray_exports_what_the_dashboard_shows() -> None:
    ray = pytest.importorskip("ray")
    own = Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    known = "\n".join(path.read_text() for path in own.glob("*_panels.py"))
    for query in queries():
        for metric in re.findall(r"\b(?:ray|autoscaler)_(?!alchemist_)\w+", query):
            assert f"{metric}{{" in known, metric


def test_the_dashboard_counts_actors_by_their_names() -> None:
    from alchemist_ray.cluster.agent import Agent  # noqa: PLC0415 - Ray is slow to import
    from alchemist_ray.cluster.driver import Driver  # noqa: PLC0415
    from alchemist_ray.runtime.group_manager import GroupManager  # noqa: PLC0415

    actors: list[Any] = [GroupManager, Agent, Driver]
    assert f'Name=~"{"|".join(actor.__name__ for actor in actors)}"' in " ".join(queries())


def test_the_readme_names_every_overlay_and_leads_somewhere() -> None:
    readme = ROOT / "README.md"
    text = readme.read_text()
    named = set(re.findall(r"^\| \[([-a-z]+)\]", text, re.M))
    assert named == {path.name for path in (readme.parent / "overlays").iterdir()}
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (readme.parent / target).exists(), target
