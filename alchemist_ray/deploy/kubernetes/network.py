"""NetworkPolicies around the pods of one cluster."""

from __future__ import annotations

from typing import Any

from alchemist_ray.deploy.kubernetes.objects import make_object, members
from alchemist_ray.deploy.kubernetes.options import ClusterOptions
from alchemist_ray.deploy.kubernetes.pods import HEAD_PORTS
from alchemist_ray.gateway.protocol import PORT

Map = dict[str, Any]
DNS_PORT = 53
API_PORTS = (443, 6443)
METRICS_PORTS = ("metrics", "as-metrics", "dash-metrics")


def network_policies(o: ClusterOptions) -> list[Map]:
    """Return the policies: the cluster's pods reach each other and little else.

    Pods of the cluster reach each other on all ports, because a gang's ports are any free ones.
    KubeRay's operator and the submitter of a job reach the dashboard port, Prometheus the metrics
    ports, clients the gateway's port, and the pods the cluster's DNS server. All other traffic is
    refused, in and out.

    Namespaces are selected by ``kubernetes.io/metadata.name``, a label that the API server sets.
    """
    policies = [_cluster_policy(o)]
    if o.autoscale:
        policies.append(_autoscaler_policy(o))
    if o.gateway:
        policies.append(_gateway_policy(o))
    return policies


def _cluster_policy(o: ClusterOptions) -> Map:
    cluster = {"podSelector": members(o, "head", "worker")}
    ingress: list[Map] = [
        {"from": [cluster]},
        {
            "from": [
                _pods_in(o.operator_namespace, {"app.kubernetes.io/component": "kuberay-operator"}),
                {"podSelector": members(o, "submitter")},
            ],
            "ports": _ports(HEAD_PORTS["dashboard"]),
        },
    ]
    if o.monitoring:
        ports = _ports(*(HEAD_PORTS[name] for name in METRICS_PORTS))
        ingress.append({"from": [_pods_in(o.monitoring_namespace)], "ports": ports})
    dns = {
        "to": [_pods_in("kube-system", {"k8s-app": "kube-dns"})],
        "ports": [*_ports(DNS_PORT, protocol="UDP"), *_ports(DNS_PORT)],
    }
    spec = {
        **cluster,
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"to": [cluster]}, dns],
    }
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", o.name, spec=spec)


def _autoscaler_policy(o: ClusterOptions) -> Map:
    """Return the head's way to the Kubernetes API, which has no labels: only an address."""
    to = [{"ipBlock": {"cidr": network}} for network in o.api_networks]
    spec = {
        "podSelector": members(o, "head"),
        "policyTypes": ["Egress"],
        "egress": [{"to": to, "ports": _ports(*API_PORTS)}],
    }
    name = f"{o.name}-autoscaler"
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _gateway_policy(o: ClusterOptions) -> Map:
    clients = [{"ipBlock": {"cidr": network}} for network in o.client_networks]
    spec = {
        "podSelector": members(o, "head"),
        "policyTypes": ["Ingress"],
        "ingress": [{"from": clients, "ports": _ports(PORT)}],
    }
    name = f"{o.name}-gateway"
    return make_object(o, "networking.k8s.io/v1", "NetworkPolicy", name, spec=spec)


def _pods_in(namespace: str, labels: Map | None = None) -> Map:
    peer: Map = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    if labels is not None:
        peer["podSelector"] = {"matchLabels": labels}
    return peer


def _ports(*numbers: int, protocol: str = "TCP") -> list[Map]:
    return [{"protocol": protocol, "port": number} for number in numbers]
