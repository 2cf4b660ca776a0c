"""The files in ``kuberay/``: versions, overlays, the values of the chart with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Map = dict[str, Any]
ROOT = Path(__file__).parents[3] / "kuberay"
CHART = ROOT / "chart"
DASHBOARD = CHART / "files" / "dashboard.json"
KUBERAY_VERSION = "1.6.2"
KUBERNETES_VERSIONS = ("1.33", "1.34", "1.35")  # the manifests are checked against their schemas
# By overlay: the values with which the chart gives its objects.
OVERLAYS: dict[str, Map] = {
    "autoscale": {"autoscale": True},
    "dev": {"cpus": 1, "memory": "2Gi", "headCpus": "1", "headMemory": "3Gi", "storage": "2Gi"},
    "gang-kueue": {"gang": "kueue"},
    "gang-scheduler-plugins": {"gang": "scheduler-plugins"},
    "gang-volcano": {"gang": "volcano"},
    "gang-yunikorn": {"gang": "yunikorn"},
    "gateway": {"gateway": True},
    "gpu": {"gpus": 1},
    "hostnetwork-rdma": {"hostNetwork": True, "rdmaResource": "rdma/hca_shared_devices_a"},
    "monitoring": {"monitoring": True},
    "network-policy": {"networkPolicy": True},
    "rayjob": {"job": "alchemist demo --workers 4 --out /tmp/out"},
}
FOLDERS = {"base": Map()} | {f"overlays/{name}": values for name, values in OVERLAYS.items()}


def by_name(objects: list[Map]) -> dict[tuple[str, str], Map]:
    """The objects by kind and name, of which none may occur twice."""
    found = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    assert len(found) == len(objects)
    return found


def queries() -> list[str]:
    """The queries of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]
