"""Options -> Kubernetes objects, as plain maps in the order in which they are applied."""

from __future__ import annotations

from typing import Any

import yaml

from alchemist_ray.deploy.kubernetes.dashboard import dashboard_text
from alchemist_ray.deploy.kubernetes.network import METRICS_PORTS, network_policies
from alchemist_ray.deploy.kubernetes.objects import make_object, members
from alchemist_ray.deploy.kubernetes.options import ClusterOptions
from alchemist_ray.deploy.kubernetes.pods import (
    autoscaler,
    head_group,
    labels,
    submitter,
    worker_group,
)
from alchemist_ray.deploy.kubernetes.versions import RAY_VERSION

Map = dict[str, Any]
JOB_TTL_S = 60  # a finished job's cluster stays this long, for inspection


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _write_text)


def manifests(o: ClusterOptions) -> list[Map]:
    """Return all objects that the options ask for."""
    found = [namespace(o), *accounts(o), ray_cluster(o) if o.job is None else ray_job(o)]
    found.append(disruption_budget(o))
    if o.is_isolated:
        found += network_policies(o)
    if o.monitoring:
        found += monitors(o)
    return found


def to_yaml(objects: list[Map]) -> str:
    """Return one YAML stream."""
    text: str = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False)
    return text


def namespace(o: ClusterOptions) -> Map:
    """Return the namespace, in which Kubernetes refuses privileged pods."""
    level = "privileged" if o.host_network else "restricted"
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {
            "name": o.namespace,
            "labels": {"pod-security.kubernetes.io/enforce": level},
        },
    }


def accounts(o: ClusterOptions) -> list[Map]:
    """Return service accounts without rights; KubeRay binds a role to the autoscaler's."""
    names = [o.name, f"{o.name}-autoscaler"] if o.autoscale else [o.name]
    return [
        make_object(o, "v1", "ServiceAccount", name, automountServiceAccountToken=False)
        for name in names
    ]


def cluster_spec(o: ClusterOptions) -> Map:
    """Return the specification of the cluster, for a RayCluster or within a RayJob."""
    spec: Map = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if o.autoscale:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = autoscaler(o)
    spec["headGroupSpec"] = head_group(o)
    spec["workerGroupSpecs"] = [worker_group(o)]
    return spec


def _with_scheduler(o: ClusterOptions, owner: Map) -> Map:
    """Add the labels by which a gang scheduler finds a RayCluster or RayJob."""
    by_scheduler: dict[str | None, Map] = {
        "scheduler-plugins": {"ray.io/gang-scheduling-enabled": "true"},
        "volcano": {"volcano.sh/queue-name": o.queue_name},
        "yunikorn": {
            "ray.io/gang-scheduling-enabled": "true",
            "yunikorn.apache.org/app-id": o.name,
            "yunikorn.apache.org/queue": o.queue_name,
        },
        "kueue": {"kueue.x-k8s.io/queue-name": o.queue_name},
    }
    owner["metadata"]["labels"] |= by_scheduler.get(o.gang, {})
    # KubeRay keeps our command, with tini as process 1 (see pods.START).
    owner["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    return owner


def ray_cluster(o: ClusterOptions) -> Map:
    """Return a cluster that exists until it is deleted."""
    return _with_scheduler(
        o, make_object(o, "ray.io/v1", "RayCluster", o.name, spec=cluster_spec(o))
    )


def ray_job(o: ClusterOptions) -> Map:
    """Return a cluster for one command, deleted after it."""
    spec: Map = {
        "entrypoint": o.job,
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": JOB_TTL_S,
        "backoffLimit": 0,
        "submitterPodTemplate": submitter(o),
        "rayClusterSpec": cluster_spec(o),
    }
    return _with_scheduler(o, make_object(o, "ray.io/v1", "RayJob", o.name, spec=spec))


def disruption_budget(o: ClusterOptions) -> Map:
    """Return the budget that refuses voluntary evictions: they would end every gang on the pod.

    With `autoscale` it protects the head only. Workers are optional then, and nodes with workers
    can be drained. The numbers are absolute: a RayCluster has no scale subresource, which
    percentages need.
    """
    components = ("head",) if o.autoscale else ("head", "worker")
    spec = {
        "minAvailable": 1 if o.autoscale else o.workers + 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": members(o, *components),
    }
    return make_object(o, "policy/v1", "PodDisruptionBudget", o.name, spec=spec)


def monitors(o: ClusterOptions) -> list[Map]:
    """Return objects for the Prometheus operator and for the side-car of Grafana."""
    service = {
        "selector": {"matchLabels": {"ray.io/node-type": "head"}},
        "endpoints": [{"port": name} for name in METRICS_PORTS],
    }
    pods = {
        "selector": {"matchLabels": labels(o, "worker")},
        "podMetricsEndpoints": [{"port": "metrics"}],
    }
    data = {"alchemist.json": dashboard_text()}
    board = make_object(o, "v1", "ConfigMap", f"{o.name}-dashboard", data=data)
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    api = "monitoring.coreos.com/v1"
    return [
        make_object(o, api, "ServiceMonitor", f"{o.name}-head", spec=service),
        make_object(o, api, "PodMonitor", f"{o.name}-workers", spec=pods),
        board,
    ]
