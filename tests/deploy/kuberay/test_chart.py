"""The Helm chart: the objects of the overlays for the same values, sound ones for all others."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.deploy.kuberay import kustomize, policy
from tests.deploy.kuberay.folders import CHART, FOLDERS, ROOT, Map, by_name
from tests.deploy.kuberay.test_manifests import check_schemas
from tests.kube import binaries
from tests.support import commands

GIVEN: Map = {
    "pullSecrets": [{"name": "registry"}, {"name": "other"}],
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "hpc", "operator": "Exists", "effect": "NoSchedule"}],
    "headNodeSelector": {"zone": "b"},
    "headTolerations": [{"key": "infra", "operator": "Exists", "effect": "NoExecute"}],
    "annotations": {"example.com/team": "climate"},
    "priorityClassName": "high",
    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "gcsFaultTolerance": {"redisAddress": "redis:6379"},
}


@pytest.fixture(scope="module")
def helm() -> str:
    """A Helm on the PATH, or the one that `make test-kube` has built."""
    built = binaries.PACKAGES.folder / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not on this machine (`make test-kube` builds one)")
    return found


def run(
    helm: str, *words: str, values: Map, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    return commands.run(helm, *words, "--values", "-", given=json.dumps(values), code=code)


def rendered(helm: str, values: Map, name: str = "alchemist") -> list[Map]:
    where = (name, str(CHART), "--namespace", "alchemist")
    done = run(helm, "template", *where, values=values, code=0)
    return [one for one in yaml.safe_load_all(done.stdout) if one is not None]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_chart_and_the_overlays_mean_the_same(helm: str, folder: str) -> None:
    assert by_name(rendered(helm, FOLDERS[folder])) == by_name(kustomize.build(ROOT / folder))


def test_the_sizes_asked_for_are_those_of_pods_store_and_budget(helm: str) -> None:
    asked = {"workers": 8, "cpus": 16, "memory": "64Gi", "image": "here.example/a:1"}
    found = by_name(rendered(helm, asked, "big"))
    group = found["RayCluster", "big"]["spec"]["workerGroupSpecs"][0]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 8
    params = group["rayStartParams"]
    assert params["num-cpus"] == "16"
    assert params["object-store-memory"] == str((64 << 30) * 3 // 10)
    (container,) = group["template"]["spec"]["containers"]
    assert container["image"] == asked["image"]
    assert container["resources"]["limits"]["memory"] == "64Gi"
    assert found["PodDisruptionBudget", "big"]["spec"]["minAvailable"] == 9


def test_pods_get_what_a_site_adds(helm: str) -> None:
    cluster = by_name(rendered(helm, GIVEN))["RayCluster", "alchemist"]["spec"]
    assert cluster["gcsFaultToleranceOptions"] == GIVEN["gcsFaultTolerance"]
    head, worker = (
        group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    )
    for pod, prefix in ((head, "head"), (worker, "")):
        spec = pod["spec"]
        names = (f"{prefix}NodeSelector", f"{prefix}Tolerations") if prefix else (
            "nodeSelector", "tolerations"
        )  # fmt: skip
        assert [spec["nodeSelector"], spec["tolerations"]] == [GIVEN[name] for name in names]
        assert pod["metadata"]["annotations"] == GIVEN["annotations"]
        assert spec["priorityClassName"] == "high"
        assert spec["imagePullSecrets"] == GIVEN["pullSecrets"]
        assert GIVEN["volumes"][0] in spec["volumes"]
        assert GIVEN["volumeMounts"][0] in spec["containers"][0]["volumeMounts"]


def test_policies_admit_the_named_networks_and_no_pod_without_the_label(helm: str) -> None:
    redis = {"to": [{"podSelector": {"matchLabels": {"app": "redis"}}}]}
    values = {
        "gateway": True,
        "gatewayNetworks": ["192.0.2.0/24"],
        "autoscale": True,
        "apiServer": ["10.0.0.5/32"],
        "monitoring": True,
        "operatorNamespace": "kuberay",
        "monitoringNamespace": "prometheus",
        "egress": [redis],
    }
    found = by_name(rendered(helm, values))
    (rule,) = found["NetworkPolicy", "alchemist-gateway"]["spec"]["ingress"]
    client = {"podSelector": {"matchLabels": {"alchemist-on-ray/gateway-client": "true"}}}
    assert rule["from"] == [client, {"ipBlock": {"cidr": "192.0.2.0/24"}}]
    api = found["NetworkPolicy", "alchemist-autoscaler"]["spec"]
    assert api["egress"][0]["to"] == [{"ipBlock": {"cidr": "10.0.0.5/32"}}]
    assert api["podSelector"]["matchExpressions"][0]["values"] == ["head"]
    spec = found["NetworkPolicy", "alchemist"]["spec"]
    assert redis in spec["egress"]
    named = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for rule in (*spec["ingress"], *spec["egress"])
        for peer in (*rule.get("from", []), *rule.get("to", []))
        if "namespaceSelector" in peer
    ]
    assert named == ["kuberay", "prometheus", "kube-system"]


def test_a_head_admits_workers_on_the_networks_of_their_nodes(helm: str) -> None:
    values = {"hostNetwork": True, "nodeNetworks": ["192.0.2.0/24"], "gateway": True}
    found = by_name(rendered(helm, values))
    spec = found["NetworkPolicy", "alchemist"]["spec"]
    assert {"ipBlock": {"cidr": "192.0.2.0/24"}} in spec["ingress"][0]["from"]
    assert {"ipBlock": {"cidr": "192.0.2.0/24"}} in spec["egress"][0]["to"]
    assert ("NetworkPolicy", "alchemist-gateway") in found
    alone = by_name(rendered(helm, {"hostNetwork": True, "gateway": True}))
    assert not [name for kind, name in alone if kind == "NetworkPolicy"]


def test_two_releases_in_a_namespace_have_metrics_of_their_own(helm: str) -> None:
    first, second = (rendered(helm, {"monitoring": True}, name) for name in ("one", "two"))
    selector = by_name(first)["PodMonitor", "one"]["spec"]["selector"]
    assert all(policy.selects(selector, pod) for _, pod in policy.templates(first))
    assert not any(policy.selects(selector, pod) for _, pod in policy.templates(second))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
    st.fixed_dictionaries(
        {},
        optional={
            "image": st.sampled_from(
                ["here.example:5000/x/alchemist:1.2", "alchemist@sha256:" + "a" * 64]
            ),
            "workers": st.integers(1, 500),
            "cpus": st.integers(1, 128),
            "memory": st.sampled_from(["1Gi", "1500Mi", "64G", "0.5Ti", "1.7Gi"]),
            "headCpus": st.sampled_from(["2", "1500m"]),
            "gang": st.sampled_from(["", "scheduler-plugins", "volcano", "yunikorn", "kueue"]),
            "autoscale": st.booleans(),
            "hostNetwork": st.booleans(),
            "networkPolicy": st.booleans(),
            "gateway": st.booleans(),
            "monitoring": st.booleans(),
            "spread": st.sampled_from(["", "preferred", "required"]),
            "job": st.sampled_from(["", "python -c 'print(1)'"]),
            **{name: st.just(value) for name, value in GIVEN.items() if name != "volumes"},
        },
    ),
)
def test_whatever_is_asked_for_is_refused_or_sound(helm: str, name: str, values: Map) -> None:
    if "volumeMounts" in values:
        values["volumes"] = [{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}]
    if values.get("gang") and (
        values.get("autoscale") or (values["gang"] == "scheduler-plugins" and values.get("job"))
    ):
        run(helm, "template", name, str(CHART), values=values, code=1)
        return
    objects = rendered(helm, values, name)
    check_schemas(objects)
    assert policy.broken(objects) == []


def test_lint_finds_nothing(helm: str) -> None:
    for values in (*FOLDERS.values(), GIVEN):
        done = run(helm, "lint", "--strict", str(CHART), values=values)
        assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout, done.stdout + done.stderr


def test_every_value_has_a_default_and_a_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["properties"]) - {"global"} == set(values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": "alchemist:latest"}, "image"),
        ({"image": "registry.example:5000/alchemist"}, "image"),
        ({"memory": "lots"}, "memory"),
        ({"memory": "100Mi"}, "memory=100Mi is too little"),
        ({"memory": "8"}, "memory=8 is too little"),
        ({"storage": "10Mi"}, "storage=10Mi"),
        ({"workers": 0}, "workers"),
        ({"worker": 3}, "worker"),
        ({"gang": "slurm"}, "gang"),
        ({"gang": "volcano", "autoscale": True}, "gang and autoscale exclude each other"),
        ({"gang": "scheduler-plugins", "job": "true"}, "KubeRay 1.6 refuses RayJobs"),
        ({"rdmaResource": "rdma/x"}, "rdmaResource needs hostNetwork"),
        ({"nodeNetworks": ["192.0.2.0/24"]}, "nodeNetworks needs hostNetwork"),
        ({"gang": "scheduler-plugins", "queue": "night"}, "volcano, yunikorn, kueue have queues"),
        ({"autoscale": True, "apiServer": ["0.0.0.0/0"]}, "apiServer"),
        ({"autoscale": True, "apiServer": ["here"]}, "apiServer"),
        ({"tolerations": [{"key": "hpc", "effect": "Always"}]}, "tolerations"),
        ({"pullSecrets": [{"name": "Mine"}]}, "pullSecrets"),
        ({"spread": "always"}, "spread"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(helm: str, values: Map, said: str) -> None:
    assert said in run(helm, "template", "alchemist", str(CHART), values=values, code=1).stderr


@pytest.mark.parametrize(("values", "limit"), [({}, 53), ({"job": "true"}, 47)])
def test_names_from_which_kuberay_makes_labels_are_short(
    helm: str, values: Map, limit: int
) -> None:
    for length, code in ((limit, 0), (limit + 1, 1)):
        run(helm, "template", "a" * length, str(CHART), values=values, code=code)
