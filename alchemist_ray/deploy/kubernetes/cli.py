"""``alchemist kuberay``: print manifests for ``kubectl``, or write the folders in ``kuberay/``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.kubernetes import overlays
from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import GANG_SCHEDULERS, ClusterOptions

HELP = {
    "name": "name of the RayCluster or RayJob",
    "namespace": "its namespace",
    "image": "image with alchemist-on-ray; a fixed tag or digest",
    "pull_policy": "IfNotPresent, Always or Never",
    "workers": "number of worker pods",
    "cpus": "CPUs of each worker pod, one for each rank",
    "memory": "memory of each worker pod",
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
    "monitoring": "create a ServiceMonitor, a PodMonitor and a Grafana dashboard",
    "monitoring_namespace": "with --monitoring: namespace of Prometheus",
    "job": "shell command: render a RayJob, which creates the cluster, runs the command and ends",
}


def add_parser(commands: Any) -> None:
    """Add ``kuberay`` to the subcommands of ``alchemist``."""
    kuberay = commands.add_parser("kuberay", help="print manifests for a cluster on Kubernetes")
    verbs = kuberay.add_subparsers(dest="verb", required=True)
    render = verbs.add_parser("render", help="print manifests for `kubectl apply -f -`")
    for field in fields(ClusterOptions):
        flag = f"--{field.name.replace('_', '-')}"
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
    write = verbs.add_parser("overlays", help="write the kustomize base and overlays")
    write.add_argument("--write", type=Path, required=True, metavar="FOLDER")


def run(arguments: argparse.Namespace) -> int:
    """Run a subcommand; returns the exit code (2 for invalid options)."""
    if arguments.verb == "overlays":
        overlays.write(arguments.write)
        return 0
    chosen = {field.name: getattr(arguments, field.name) for field in fields(ClusterOptions)}
    try:
        text = to_yaml(manifests(ClusterOptions(**chosen)))
    except ValueError as error:
        sys.stderr.write(f"alchemist kuberay render: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0
