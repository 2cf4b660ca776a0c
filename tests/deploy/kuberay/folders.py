"""What the files in ``kuberay/`` stand for: options of the renderer, and values of the chart."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.kubernetes import ClusterOptions
from alchemist_ray.deploy.kubernetes.manifests import DASHBOARD
from alchemist_ray.deploy.kubernetes.options import parts

ROOT = Path(__file__).parents[3] / "kuberay"
CHART = ROOT / "chart"
DEMO = "alchemist demo --workers 4 --out /tmp/out"
OVERLAYS = {
    "autoscale": ClusterOptions(autoscale=True),
    "dev": ClusterOptions(cpus=1, memory="2Gi", head_cpus="1", head_memory="3Gi", storage="2Gi"),
    "gang-kueue": ClusterOptions(gang="kueue"),
    "gang-scheduler-plugins": ClusterOptions(gang="scheduler-plugins"),
    "gang-volcano": ClusterOptions(gang="volcano"),
    "gang-yunikorn": ClusterOptions(gang="yunikorn"),
    "gateway": ClusterOptions(gateway=True),
    "hostnetwork-rdma": ClusterOptions(
        host_network=True, rdma_resource="rdma/hca_shared_devices_a"
    ),
    "monitoring": ClusterOptions(monitoring=True),
    "network-policy": ClusterOptions(network_policy=True),
    "rayjob": ClusterOptions(job=DEMO),
}
NOT_IN_THE_CHART = ("name", "namespace", "job")  # of the release; a RayJob is no installation
NODE_CHOICES = ("node_selector", "head_node_selector", "tolerations", "head_tolerations")


def chart_values(o: ClusterOptions) -> dict[str, Any]:
    """The values with which the chart gives the objects of these options."""
    names = [f.name for f in fields(ClusterOptions) if f.name not in NOT_IN_THE_CHART]
    return {_value_name(name): _value(o, name) for name in names}


def _value_name(option: str) -> str:
    first, *others = option.split("_")
    return first + "".join(word.capitalize() for word in others)


def _value(o: ClusterOptions, option: str) -> Any:
    value = getattr(o, option)
    if option == "network_policy":
        return value is not False
    if option in NODE_CHOICES:
        return o.node_choice(option)
    if option == "pull_secrets":
        return [{"name": name} for name in parts(value)]
    if option in ("api_server", "gateway_networks"):
        return parts(value)
    return "" if value is None else value


def queries() -> list[str]:
    """The queries of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
