"""Manifests against the schemas of their kinds, our own policy, and each other."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from alchemist_ray.deploy.kubernetes import ClusterOptions, manifests, to_yaml
from alchemist_ray.deploy.kubernetes.manifests import DASHBOARD
from alchemist_ray.deploy.kubernetes.options import KUBERNETES_VERSIONS
from tests.deploy.kuberay import crds, kustomize, policy
from tests.deploy.kuberay.folders import CHART, DEMO, OVERLAYS, ROOT, chart_values

Map = dict[str, Any]
FOLDERS = {"base": ClusterOptions()} | {f"overlays/{name}": o for name, o in OVERLAYS.items()}


@cache
def validators() -> dict[str, Any]:
    return crds.validators()


def by_name(objects: list[Map]) -> dict[tuple[str, str], Map]:
    found = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert len(found) == len(objects)
    return found


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_is_what_the_renderer_makes(folder: str) -> None:
    assert by_name(kustomize.build(ROOT / folder)) == by_name(manifests(FOLDERS[folder]))


def test_every_folder_is_compared() -> None:
    assert {path.name for path in (ROOT / "overlays").iterdir()} == set(OVERLAYS)


def test_the_charts_values_are_the_renderers_options_and_defaults() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values == chart_values(ClusterOptions())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)
    assert (CHART / "files" / "dashboard.json").read_text() == DASHBOARD.read_text()


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_reads_the_folders_as_we_do(folder: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on this machine")
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(manifests(FOLDERS[folder]))


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_fit_their_schemas_and_our_policy(folder: str) -> None:
    objects = manifests(FOLDERS[folder])
    check_schemas(objects)
    assert policy.broken(objects) == []


CHOICES = st.builds(
    dict,
    name=st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
    namespace=st.sampled_from(["alchemist", "team-a"]),
    image=st.sampled_from(["here.example:5000/x/alchemist:1.2", "alchemist@sha256:" + "a" * 64]),
    workers=st.integers(1, 500),
    cpus=st.integers(1, 128),
    memory=st.sampled_from(["1Gi", "1500Mi", "64G", "0.5Ti"]),
    gang=st.sampled_from([None, "scheduler-plugins", "volcano", "yunikorn", "kueue"]),
    autoscale=st.booleans(),
    host_network=st.booleans(),
    network_policy=st.sampled_from([None, True, False]),
    gateway=st.booleans(),
    pull_secrets=st.sampled_from(["", "registry"]),
    node_selector=st.sampled_from(["", "disk=ssd"]),
    tolerations=st.sampled_from(["", "hpc:NoSchedule"]),
    monitoring=st.booleans(),
    job=st.sampled_from([None, "python -c 'print(1)'"]),
)


@settings(max_examples=15, deadline=None)
@given(CHOICES)
def test_whatever_is_asked_for_is_refused_or_sound(chosen: Map) -> None:
    try:
        options = ClusterOptions(**chosen)
    except ValueError:
        return
    objects = manifests(options)
    check_schemas(objects)
    assert policy.broken(objects) == []
    assert list(yaml.safe_load_all(to_yaml(objects))) == objects


def _worker(objects: list[Map]) -> Map:
    return dict(policy.templates(objects))["worker"]["spec"]


def _spoil_image(objects: list[Map]) -> None:
    _worker(objects)["containers"][0]["image"] = "alchemist-on-ray:latest"


def _spoil_privileged(objects: list[Map]) -> None:
    _worker(objects)["containers"][0]["securityContext"]["privileged"] = True


def _spoil_limits(objects: list[Map]) -> None:
    del _worker(objects)["containers"][0]["resources"]["limits"]


def _spoil_probe(objects: list[Map]) -> None:
    del _worker(objects)["containers"][0]["livenessProbe"]


def _spoil_root(objects: list[Map]) -> None:
    _worker(objects)["securityContext"]["runAsUser"] = 0


def _spoil_volume(objects: list[Map]) -> None:
    _worker(objects)["volumes"].append({"name": "node", "hostPath": {"path": "/"}})


def _spoil_network(objects: list[Map]) -> None:
    _worker(objects)["hostNetwork"] = True


def _spoil_command(objects: list[Map]) -> None:
    del _worker(objects)["containers"][0]["command"]


def _spoil_storage(objects: list[Map]) -> None:
    _worker(objects)["volumes"][0]["emptyDir"] = {}


def _spoil_egress(objects: list[Map]) -> None:
    rules = by_name(objects)["NetworkPolicy", "alchemist"]["spec"]["egress"]
    rules.append({"ports": [{"protocol": "TCP", "port": 443}]})


def _spoil_names(objects: list[Map]) -> None:
    rules = by_name(objects)["NetworkPolicy", "alchemist"]["spec"]["egress"]
    rules[1]["to"] = [{"namespaceSelector": {}}]


def _spoil_budget(objects: list[Map]) -> None:
    by_name(objects)["PodDisruptionBudget", "alchemist"]["spec"]["minAvailable"] = 1


def _spoil_token(objects: list[Map]) -> None:
    del by_name(objects)["RayCluster", "alchemist"]["spec"]["authOptions"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_spoil_image, "worker: runs whatever image is the latest"),
        (_spoil_privileged, "worker: may gain privileges"),
        (_spoil_limits, "worker: has no limits"),
        (_spoil_probe, "worker: has no livenessProbe"),
        (_spoil_root, "worker: may run as root"),
        (_spoil_volume, "worker: mounts node of the node or of others"),
        (_spoil_network, "worker: two may meet on one node's network"),
        (_spoil_command, "worker: has nobody to reap orphans"),
        (_spoil_storage, "worker: volume tmp may fill the node's disk"),
        (_spoil_egress, "NetworkPolicy: opens ports to everywhere"),
        (_spoil_names, "NetworkPolicy: trusts labels that any namespace can set"),
        (_spoil_budget, "PodDisruptionBudget: some pod may be evicted"),
        (_spoil_token, "Ray asks for no token"),
    ],
)
def test_the_policy_sees_what_is_broken(spoil: Callable[[list[Map]], None], said: str) -> None:
    objects = copy.deepcopy(manifests(ClusterOptions()))
    spoil(objects)
    assert said in policy.broken(objects)


def test_the_schemas_see_what_is_wrong() -> None:
    cluster = copy.deepcopy(by_name(manifests(ClusterOptions()))["RayCluster", "alchemist"])
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["memory"] = "8Gi"
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = "two"
    said = [error.message for error in validators()["RayCluster"].iter_errors(cluster)]
    assert any("'memory' was unexpected" in message for message in said)
    assert any("'two' is not of type 'integer'" in message for message in said)


def test_the_network_policy_knows_only_its_own() -> None:
    objects = manifests(ClusterOptions(job=DEMO))
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


def test_a_policy_admits_only_named_namespaces() -> None:
    options = ClusterOptions(
        autoscale=True,
        monitoring=True,
        operator_namespace="kuberay",
        monitoring_namespace="prometheus",
        api_server="10.0.0.5/32",
    )
    found = by_name(manifests(options))
    spec = found["NetworkPolicy", "alchemist"]["spec"]
    named = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in (*spec["ingress"], *spec["egress"])
        for peer in (*rule.get("from", []), *rule.get("to", []))
        if "namespaceSelector" in peer
    ]
    assert named == ["kuberay", "prometheus", "kube-system"]
    api = found["NetworkPolicy", "alchemist-autoscaler"]["spec"]
    assert api["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.5/32"}}]
    assert api["podSelector"]["matchExpressions"][0]["values"] == ["head"]


def test_only_the_autoscaler_has_a_token() -> None:
    cluster = by_name(manifests(ClusterOptions(autoscale=True)))["RayCluster", "alchemist"]
    pod = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    [main] = pod["containers"]
    assert [mount["name"] for mount in main["volumeMounts"]] == ["tmp"]
    mounts = cluster["spec"]["autoscalerOptions"]["volumeMounts"]
    assert {mount["name"] for mount in mounts} == {"autoscaler-tmp", "autoscaler-token"}


def test_nodes_of_optional_workers_can_be_drained() -> None:
    objects = manifests(ClusterOptions(autoscale=True))
    budget = by_name(objects)["PodDisruptionBudget", "alchemist"]["spec"]
    worker = dict(policy.templates(objects))["worker"]
    assert not policy.selects(budget["selector"], worker)


def test_a_sites_image_and_namespace_reach_all_that_name_them(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on this machine")
    shutil.copytree(ROOT, tmp_path / "kuberay")
    (tmp_path / "kustomization.yaml").write_text(
        re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
    )
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    site = ClusterOptions(
        namespace="hpc", image="registry.example/alchemist-on-ray:0.1.0", autoscale=True
    )
    assert by_name(list(yaml.safe_load_all(done.stdout))) == by_name(manifests(site))
