"""``alchemist kuberay``: print manifests for ``kubectl``, or write the folders in ``kuberay/``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path

from alchemist_ray.deploy.kubernetes import overlays
from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import GANG_SCHEDULERS, ClusterOptions, flag_of
from alchemist_ray.subcommands import add_subcommand

HELP = {
    "name": "name of the RayCluster or RayJob",
    "namespace": "its namespace",
    "image": "image with alchemist-on-ray; a fixed tag or digest",
    "pull_policy": "when nodes pull the image: IfNotPresent, Always or Never",
    "workers": "number of worker pods",
    "cpus": "CPUs of each worker pod, one for each rank",
    "memory": "memory of each worker pod, with its unit (Gi: 2^30 bytes, G: 10^9)",
    "head_cpus": "CPUs of the head pod",
    "head_memory": "memory of the head pod",
    "storage": "disk space of each pod, for logs and spilled objects",
    "autoscale": "scale between 0 and --workers pods with the demand of gangs",
    "idle_timeout_s": "with --autoscale: seconds after which an idle pod is removed",
    "gang": "scheduler that starts all pods or none",
    "queue": "queue of that scheduler",
    "host_network": "worker pods use the network of their node, one pod per node",
    "rdma_resource": "with --host-network: name of the RDMA devices in the device plugin",
    "network_policy": "limit traffic by NetworkPolicies (default, except with --host-network)",
    "operator_namespace": "namespace of KubeRay's operator",
    "api_server": "with --autoscale: networks of the Kubernetes API server, as 10.0.0.1/32",
    "gateway": "start a gateway on the head, for clients without Ray",
    "gateway_networks": "with --gateway: networks of its clients, as 192.0.2.0/24",
    "monitoring": "create a ServiceMonitor, a PodMonitor and a Grafana dashboard",
    "monitoring_namespace": "with --monitoring: namespace of Prometheus",
    "job": "shell command: render a RayJob, which creates the cluster, runs the command and ends",
}


def main(argv: Sequence[str]) -> int:
    """Run ``alchemist kuberay``. Returns 0, or 2 for invalid options."""
    asked = _parser().parse_args(argv[1:])
    if asked.verb == "overlays":
        overlays.write(asked.write)
        return 0
    chosen = {field.name: getattr(asked, field.name) for field in fields(ClusterOptions)}
    try:
        text = to_yaml(manifests(ClusterOptions(**chosen)))
    except ValueError as error:
        sys.stderr.write(f"alchemist kuberay render: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="alchemist kuberay", description="Manifests of a Ray cluster with gangs on Kubernetes."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    render = add_subcommand(verbs, "render", "print manifests for `kubectl apply -f -`")
    for field in fields(ClusterOptions):
        flag = flag_of(field.name)
        default = None if field.default is MISSING else field.default
        text = HELP[field.name]
        if field.name == "network_policy":
            render.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
            continue
        if default is False:
            render.add_argument(flag, action="store_true", help=text)
            continue
        render.add_argument(
            flag,
            type=int if isinstance(default, int) else str,
            default=default,
            choices=GANG_SCHEDULERS if field.name == "gang" else None,
            help=text if default is None else f"{text} (default: {default})",
        )
    write = add_subcommand(verbs, "overlays", "write the kustomize base and overlays")
    write.add_argument(
        "--write", type=Path, required=True, metavar="FOLDER", help="folder to write to (kuberay/)"
    )
    return parser
