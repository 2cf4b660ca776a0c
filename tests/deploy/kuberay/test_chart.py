"""The Helm chart gives the objects of the renderer, for the same options."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemist_ray.deploy.kubernetes import GANG_SCHEDULERS, ClusterOptions, manifests
from tests.deploy.kuberay.folders import CHART, OVERLAYS, chart_values
from tests.kube import binaries

Map = dict[str, Any]
OPTIONS = {name: o for name, o in OVERLAYS.items() if o.job is None} | {
    "defaults": ClusterOptions(),
    "choice of nodes": ClusterOptions(
        pull_secrets="registry,other",
        node_selector="disk=ssd,zone=a",
        tolerations="hpc=yes:NoSchedule,gpu:NoExecute",
        head_node_selector="zone=b",
        head_tolerations="infra:NoSchedule",
    ),
}


@pytest.fixture(scope="module")
def helm() -> str:
    """A Helm on the PATH, or the one that `make test-kube` has built."""
    built = binaries.PACKAGES.folder / "helm"
    found = str(built) if built.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is not on this machine (`make test-kube` builds one)")
    return found


def run(helm: str, *words: str, values: Map | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm, *words, "--values", "-"], input=json.dumps(values or {}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def by_name(objects: list[Map]) -> dict[tuple[str, str], Map]:
    found = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert len(found) == len(objects)
    return found


def check_same(helm: str, options: ClusterOptions) -> None:
    where = (options.name, str(CHART), "--namespace", options.namespace)
    done = run(helm, "template", *where, values=chart_values(options))
    assert done.returncode == 0, done.stderr
    made = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    wanted = by_name(manifests(options))
    del wanted["Namespace", options.namespace]
    assert by_name(made) == wanted


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_the_chart_gives_the_renderers_objects(helm: str, options: ClusterOptions) -> None:
    check_same(helm, options)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.builds(
        dict,
        name=st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True),
        namespace=st.sampled_from(["alchemist", "team-a"]),
        image=st.sampled_from(
            ["here.example:5000/x/alchemist:1.2", "alchemist@sha256:" + "a" * 64]
        ),
        workers=st.integers(1, 500),
        cpus=st.integers(1, 128),
        memory=st.sampled_from(["1Gi", "1500Mi", "64G", "0.5Ti", "1.7Gi"]),
        head_cpus=st.sampled_from(["2", "1500m"]),
        gang=st.sampled_from([None, *GANG_SCHEDULERS]),
        autoscale=st.booleans(),
        host_network=st.booleans(),
        network_policy=st.sampled_from([None, False]),
        gateway=st.booleans(),
        gateway_networks=st.sampled_from(["192.0.2.0/24", "192.0.2.0/24,198.51.100.7/32"]),
        monitoring=st.booleans(),
        tolerations=st.sampled_from(["", "hpc:NoSchedule"]),
    )
)
def test_the_chart_follows_whatever_is_asked_for(helm: str, chosen: Map) -> None:
    try:
        options = ClusterOptions(**chosen)
    except ValueError:
        return
    check_same(helm, options)


def test_lint_finds_nothing(helm: str) -> None:
    for options in OPTIONS.values():
        done = run(helm, "lint", "--strict", str(CHART), values=chart_values(options))
        assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"image": "alchemist:latest"}, "image"),
        ({"image": "alchemist"}, "image"),
        ({"memory": "lots"}, "memory"),
        ({"workers": 0}, "workers"),
        ({"worker": 3}, "worker"),
        ({"gang": "slurm"}, "gang"),
        ({"gang": "volcano", "autoscale": True}, "gang and autoscale exclude each other"),
        ({"rdmaResource": "rdma/x"}, "rdmaResource needs hostNetwork"),
        ({"gang": "scheduler-plugins", "queue": "night"}, "volcano, yunikorn, kueue have queues"),
    ],
)
def test_wrong_values_are_refused_with_a_reason(helm: str, values: Map, said: str) -> None:
    done = run(helm, "template", "alchemist", str(CHART), values=values)
    assert done.returncode != 0
    assert said in done.stderr
