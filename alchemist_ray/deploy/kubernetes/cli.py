"""``alchemist kuberay``: manifests on stdout, for ``kubectl apply -f -``."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, fields
from typing import Any

from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import GANG_SCHEDULERS, ClusterOptions

HELP = {
    "name": "name of the RayCluster or RayJob",
    "namespace": "its namespace",
    "image": "with alchemist-on-ray in it; a fixed tag or digest",
    "pull_policy": "IfNotPresent, Always or Never",
    "workers": "worker pods",
    "cpus": "CPUs of each worker pod: so many ranks find room in it",
    "memory": "memory of each worker pod",
    "head_cpus": "CPUs of the head pod",
    "head_memory": "memory of the head pod",
    "autoscale": "from no worker pods to --workers, as gangs ask for them",
    "idle_timeout_s": "with --autoscale: seconds after which an idle pod goes",
    "gang": "all pods or none, by this scheduler",
    "queue": "the scheduler's queue",
    "host_network": "worker pods on their node's network, one to a node",
    "rdma_resource": "with --host-network: the device plugin's name for RDMA devices",
    "network_policy": "refuse connections from and to anybody else",
    "monitoring": "ServiceMonitor, PodMonitor and a Grafana dashboard",
    "job": "a shell command: a RayJob that makes the cluster, runs it and ends",
}


def add_parser(commands: Any) -> None:
    """Add ``kuberay`` to the command line's subcommands."""
    kuberay = commands.add_parser("kuberay", help="manifests for a cluster on Kubernetes")
    verbs = kuberay.add_subparsers(dest="verb", required=True)
    render = verbs.add_parser("render", help="print manifests for `kubectl apply -f -`")
    for field in fields(ClusterOptions):
        flag = f"--{field.name.replace('_', '-')}"
        default = None if field.default is MISSING else field.default
        said = HELP[field.name]
        if default is False:
            render.add_argument(flag, action="store_true", help=said)
            continue
        shown = said if default is None else f"{said} (default: {default})"
        render.add_argument(
            flag,
            type=int if isinstance(default, int) else str,
            default=default,
            choices=GANG_SCHEDULERS if field.name == "gang" else None,
            help=shown,
        )


def run(arguments: argparse.Namespace) -> int:
    """Render; returns the exit code (2 for options that cannot be)."""
    chosen = {field.name: getattr(arguments, field.name) for field in fields(ClusterOptions)}
    try:
        text = to_yaml(manifests(ClusterOptions(**chosen)))
    except ValueError as error:
        sys.stderr.write(f"alchemist kuberay render: {error}\n")
        return 2
    sys.stdout.write(text)
    return 0
