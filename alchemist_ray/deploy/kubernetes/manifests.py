"""Options -> Kubernetes objects, as plain maps in the order in which they are applied."""

from __future__ import annotations

import json
from typing import Any

import yaml

from alchemist_ray.deploy.kubernetes.dashboard import dashboard
from alchemist_ray.deploy.kubernetes.options import ClusterOptions
from alchemist_ray.deploy.kubernetes.pods import (
    HEAD_PORTS,
    container_security,
    head_group,
    labels,
    submitter,
    worker_group,
)
from alchemist_ray.deploy.kubernetes.versions import RAY_VERSION

Map = dict[str, Any]
JOB_TTL_S = 60  # how long a finished job's cluster stays, for a look at it
SCRAPE_NAMESPACE = "monitoring"  # where Prometheus usually lives


def manifests(o: ClusterOptions) -> list[Map]:
    """Everything that the options ask for."""
    found = [namespace(o), *accounts(o), ray_cluster(o) if o.job is None else ray_job(o)]
    found.append(disruption_budget(o))
    if o.network_policy:
        found.append(network_policy(o))
    if o.monitoring:
        found += monitors(o)
    return found


def to_yaml(objects: list[Map]) -> str:
    """One YAML stream."""
    text: str = yaml.safe_dump_all(objects, sort_keys=False)
    return text


def _object(o: ClusterOptions, api: str, kind: str, name: str, **fields: Any) -> Map:
    metadata: Map = {"name": name, "namespace": o.namespace, "labels": _labels(o)}
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def _labels(o: ClusterOptions) -> Map:
    return {
        "app.kubernetes.io/part-of": "alchemist-on-ray",
        "app.kubernetes.io/instance": o.name,
    }


def _members(o: ClusterOptions, *components: str) -> Map:
    """A selector of our pods; none named: of head and workers."""
    chosen = list(components or ("head", "worker"))
    return {
        "matchLabels": {"app.kubernetes.io/instance": o.name},
        "matchExpressions": [
            {"key": "app.kubernetes.io/component", "operator": "In", "values": chosen}
        ],
    }


def namespace(o: ClusterOptions) -> Map:
    """The namespace; Kubernetes itself refuses pods there that want more than they need."""
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
    """Service accounts without any rights; KubeRay adds what its autoscaler needs to one."""
    names = [o.name, f"{o.name}-autoscaler"] if o.autoscale else [o.name]
    return [
        _object(o, "v1", "ServiceAccount", name, automountServiceAccountToken=False)
        for name in names
    ]


def cluster_spec(o: ClusterOptions) -> Map:
    """The cluster, of a RayCluster or within a RayJob."""
    spec: Map = {"rayVersion": RAY_VERSION, "authOptions": {"mode": "token"}}
    if o.autoscale:
        small = {"cpu": "500m", "memory": "1Gi"}
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": o.idle_timeout_s,
            "imagePullPolicy": o.pull_policy,
            "resources": {"requests": small, "limits": dict(small)},
            "securityContext": container_security(),
            "env": [{"name": "HOME", "value": "/tmp"}],
            "volumeMounts": [{"name": "autoscaler-tmp", "mountPath": "/tmp"}],
        }
    spec["headGroupSpec"] = head_group(o)
    spec["workerGroupSpecs"] = [worker_group(o)]
    return spec


def _scheduled(o: ClusterOptions, owner: Map) -> Map:
    """What a gang scheduler looks for on a RayCluster or RayJob."""
    wanted: dict[str | None, Map] = {
        "scheduler-plugins": {"ray.io/gang-scheduling-enabled": "true"},
        "volcano": {"volcano.sh/queue-name": o.queue_name},
        "yunikorn": {
            "ray.io/gang-scheduling-enabled": "true",
            "yunikorn.apache.org/app-id": o.name,
            "yunikorn.apache.org/queue": o.queue_name,
        },
        "kueue": {"kueue.x-k8s.io/queue-name": o.queue_name},
    }
    owner["metadata"]["labels"] |= wanted.get(o.gang, {})
    # Our own command stays: tini is process 1 (see pods.START).
    owner["metadata"]["annotations"] = {"ray.io/overwrite-container-cmd": "true"}
    return owner


def ray_cluster(o: ClusterOptions) -> Map:
    """A cluster that stands until it is deleted."""
    return _scheduled(o, _object(o, "ray.io/v1", "RayCluster", o.name, spec=cluster_spec(o)))


def ray_job(o: ClusterOptions) -> Map:
    """A cluster for one command, gone after it."""
    spec: Map = {
        "entrypoint": o.job,
        "submissionMode": "K8sJobMode",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": JOB_TTL_S,
        "backoffLimit": 0,
        "submitterPodTemplate": submitter(o),
        "rayClusterSpec": cluster_spec(o),
    }
    return _scheduled(o, _object(o, "ray.io/v1", "RayJob", o.name, spec=spec))


def disruption_budget(o: ClusterOptions) -> Map:
    """No pod is evicted for convenience: it would take every gang on it along.

    A plain number: a RayCluster has no scale by which Kubernetes could reckon shares.
    """
    spec = {
        "minAvailable": o.workers + 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": _members(o),
    }
    return _object(o, "policy/v1", "PodDisruptionBudget", o.name, spec=spec)


def network_policy(o: ClusterOptions) -> Map:
    """Pods of the cluster reach each other on all ports, because a gang's ports are any free ones.

    Beside that: the operator and a job's submitter reach the dashboard's port, Prometheus reads
    metrics, and names are looked up. Everything else is refused, both ways.
    """
    anywhere: Map = {"namespaceSelector": {}}
    dashboard_port = [{"protocol": "TCP", "port": HEAD_PORTS["dashboard"]}]
    operator = {"matchLabels": {"app.kubernetes.io/component": "kuberay-operator"}}
    prometheus = {"matchLabels": {"kubernetes.io/metadata.name": SCRAPE_NAMESPACE}}
    scraped = [
        {"protocol": "TCP", "port": HEAD_PORTS[name]}
        for name in ("metrics", "as-metrics", "dash-metrics")
    ]
    names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
    egress: list[Map] = [
        {"to": [{"podSelector": _members(o)}]},
        {"to": [anywhere], "ports": names},
    ]
    if o.autoscale:
        # The Kubernetes API has no labels to be named by.
        egress.append({"ports": [{"protocol": "TCP", "port": port} for port in (443, 6443)]})
    spec = {
        "podSelector": _members(o),
        "policyTypes": ["Ingress", "Egress"],
        "ingress": [
            {"from": [{"podSelector": _members(o)}]},
            {
                "from": [
                    {**anywhere, "podSelector": operator},
                    {"podSelector": _members(o, "submitter")},
                ],
                "ports": dashboard_port,
            },
            {"from": [{"namespaceSelector": prometheus}], "ports": scraped},
        ],
        "egress": egress,
    }
    return _object(o, "networking.k8s.io/v1", "NetworkPolicy", o.name, spec=spec)


def monitors(o: ClusterOptions) -> list[Map]:
    """What the Prometheus operator and Grafana's side-car look for."""
    service = {
        "selector": {"matchLabels": {"ray.io/node-type": "head"}},
        "endpoints": [{"port": name} for name in ("metrics", "as-metrics", "dash-metrics")],
    }
    pods = {
        "selector": {"matchLabels": labels(o, "worker")},
        "podMetricsEndpoints": [{"port": "metrics"}],
    }
    name = f"{o.name}-dashboard"
    board = _object(
        o,
        "v1",
        "ConfigMap",
        name,
        data={"alchemist.json": json.dumps(dashboard(), indent=1) + "\n"},
    )
    board["metadata"]["labels"]["grafana_dashboard"] = "1"
    return [
        _object(o, "monitoring.coreos.com/v1", "ServiceMonitor", f"{o.name}-head", spec=service),
        _object(o, "monitoring.coreos.com/v1", "PodMonitor", f"{o.name}-workers", spec=pods),
        board,
    ]
