"""``alchemist kuberay render``, and what the manifests say of versions and metrics."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from alchemist_ray.cli import main
from alchemist_ray.deploy.kubernetes import KUBERAY_VERSION, RAY_VERSION, ClusterOptions, manifests
from alchemist_ray.deploy.kubernetes.options import HELP, KUBERNETES_VERSIONS
from tests.deploy.kuberay import crds
from tests.deploy.kuberay.folders import queries

ROOT = Path(__file__).parents[3]


def render(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "alchemist_ray.cli", "kuberay", "render", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_it_prints_what_was_asked_for() -> None:
    done = render(
        *("--workers", "8", "--cpus", "16", "--memory", "64Gi", "--image", "here.example/a:1"),
        *("--gang", "volcano", "--queue", "night", "--no-network-policy", "--name", "big"),
    )
    assert done.returncode == 0, done.stderr
    asked = ClusterOptions(
        name="big",
        image="here.example/a:1",
        workers=8,
        cpus=16,
        memory="64Gi",
        gang="volcano",
        queue="night",
        network_policy=False,
    )
    assert list(yaml.safe_load_all(done.stdout)) == manifests(asked)
    group = manifests(asked)[2]["spec"]["workerGroupSpecs"][0]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 8
    assert group["rayStartParams"]["object-store-memory"] == str(int(0.3 * (64 << 30)))


def test_pods_get_nodes_and_secrets_as_asked() -> None:
    asked = ClusterOptions(
        pull_secrets="a, b",
        node_selector="disk=ssd,zone=",
        tolerations="hpc=yes:NoSchedule,x:NoExecute",
    )
    cluster = manifests(asked)[2]["spec"]
    head = cluster["headGroupSpec"]["template"]["spec"]
    worker = cluster["workerGroupSpecs"][0]["template"]["spec"]
    assert head["imagePullSecrets"] == worker["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]
    assert worker["nodeSelector"] == {"disk": "ssd", "zone": ""}
    assert worker["tolerations"] == [
        {"key": "hpc", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "x", "operator": "Exists", "effect": "NoExecute"},
    ]
    assert "tolerations" not in head
    assert "nodeSelector" not in head


def test_every_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["kuberay", "render", "--help"])
    printed = capsys.readouterr().out
    for name, said in HELP.items():
        assert f"--{name.replace('_', '-')}" in printed
        assert said.split()[0] in printed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--image", "alchemist:latest"), "name a version"),
        (("--image", "registry.example:5000/alchemist"), "name a version"),
        (("--memory", "lots"), "--memory 'lots' is not a size such as 8Gi"),
        (("--memory", "100Mi"), "--memory 100Mi is 104.9 MB, too little"),
        (
            ("--memory", "8"),
            "--memory 8 is 8 B, too little for Ray and its object store: give a unit, e.g. 8Gi",
        ),
        (("--workers", "0"), "--workers 0"),
        (("--name", "Big_One"), "--name 'Big_One'"),
        (("--name", "a" * 50, "--job", "true"), "at most 47"),
        (("--gang", "kueue", "--autoscale"), "--gang and --autoscale exclude each other"),
        (("--gang", "scheduler-plugins", "--job", "true"), "KubeRay 1.6 refuses RayJobs"),
        (("--queue", "night"), "only volcano, yunikorn, kueue have queues"),
        (("--rdma-resource", "rdma/x"), "needs --host-network"),
        (("--host-network", "--network-policy"), "does not apply"),
        (("--storage", "10Mi"), "--storage 10Mi"),
        (("--autoscale", "--api-server", "0.0.0.0/0"), "must not be the whole Internet"),
        (("--node-selector", "ssd"), "give labels like zone=a,disk=ssd"),
        (("--tolerations", "hpc=yes"), "give taints like hpc=yes:NoSchedule"),
        (("--head-tolerations", "hpc:Always"), "--head-tolerations 'hpc:Always'"),
        (("--pull-secrets", "Mine"), "--pull-secrets 'Mine'"),
        (("--autoscale", "--api-server", "here"), "give networks like 10.0.0.1/32"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kuberay", "render", *words]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert not printed.out


def test_versions_are_those_that_are_installed_and_tested() -> None:
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert pinned[1] == RAY_VERSION
    assert crds.COPY.name == f"crds-v{KUBERAY_VERSION}.json"
    table = (ROOT / "docs" / "kubernetes.md").read_text()
    for what, version in (
        ("Ray", RAY_VERSION),
        ("KubeRay", KUBERAY_VERSION),
        ("Kubernetes", f"{KUBERNETES_VERSIONS[0]} to {KUBERNETES_VERSIONS[-1]}"),
    ):
        assert re.search(rf"^\| {what} +\| {re.escape(version)} +\|", table, re.M), what


def test_the_copy_of_the_schemas_is_kuberays() -> None:
    if not crds.has_go():
        pytest.skip("Go is not on this machine")
    told = subprocess.run(
        ["go", "mod", "download", "-json", f"{crds.MODULE}@v{KUBERAY_VERSION}"],
        env=crds.go_environment(),
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if told.returncode != 0:
        pytest.skip("KubeRay's Go module is not in this machine's cache")
    folder = Path(json.loads(told.stdout)["Dir"])
    assert crds.copy(folder / "config" / "crd" / "bases") == json.loads(crds.COPY.read_text())


def test_ray_exports_what_the_dashboard_shows() -> None:
    ray = pytest.importorskip("ray")
    own = Path(ray.__file__).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    known = "\n".join(path.read_text() for path in own.glob("*_panels.py"))
    for query in queries():
        for metric in re.findall(r"\b(?:ray|autoscaler)_(?!alchemist_)\w+", query):
            assert f"{metric}{{" in known, metric


def test_the_dashboard_counts_actors_by_their_names() -> None:
    from alchemist_ray.runtime.agent import Agent  # noqa: PLC0415 - Ray is slow to import
    from alchemist_ray.runtime.driver import Driver  # noqa: PLC0415
    from alchemist_ray.runtime.group_manager import GroupManager  # noqa: PLC0415

    actors: list[Any] = [GroupManager, Agent, Driver]
    assert f'Name=~"{"|".join(actor.__name__ for actor in actors)}"' in " ".join(queries())


def test_the_readme_names_every_overlay_and_leads_somewhere() -> None:
    readme = ROOT / "kuberay" / "README.md"
    text = readme.read_text()
    named = set(re.findall(r"^\| \[([-a-z]+)\]", text, re.M))
    assert named == {path.name for path in (readme.parent / "overlays").iterdir()}
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (readme.parent / target).exists(), target
    for flag in re.findall(r"`(--[a-z-]+)", text):
        assert flag.removeprefix("--").replace("-", "_") in HELP, flag
