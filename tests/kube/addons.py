"""Additions to Kubernetes: CoreDNS, KubeRay's operator, fake nodes, enforced policies."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.kube.node import DNS_IP
from tests.kube.sandbox import NODE_IP, Sandbox

ROOT = Path(__file__).resolve().parents[2]
COREFILE = """\
.:53 {{
    bind {ip}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {config} admin
        pods insecure
        ttl 5
    }}
    cache 5
}}
"""
RBAC = "rbac.authorization.k8s.io"
# Leave for the scheduler to read what coscheduling goes by.
PODGROUPS: list[dict[str, Any]] = [
    {"apiVersion": f"{RBAC}/v1", "metadata": {"name": "coscheduling"}, **told}
    for told in (
        {"kind": "ClusterRole", "rules": [{
            "apiGroups": ["scheduling.x-k8s.io"],
            "resources": ["podgroups", "podgroups/status", "elasticquotas"],
            "verbs": ["get", "list", "watch", "update", "patch"],
        }]},
        {"kind": "ClusterRoleBinding",
         "roleRef": {"apiGroup": RBAC, "kind": "ClusterRole", "name": "coscheduling"},
         "subjects": [{"apiGroup": RBAC, "kind": "User", "name": "system:kube-scheduler"}]},
    )
]  # fmt: skip


def _config(sandbox: Sandbox) -> str:
    return str(sandbox.folder / "keys" / "admin.kubeconfig")


def start_dns(sandbox: Sandbox, folder: Path) -> None:
    """CoreDNS at the address that the kubelet tells pods."""
    sandbox.run("ip", "addr", "add", f"{DNS_IP}/32", "dev", "lo")
    corefile = sandbox.folder / "Corefile"
    corefile.write_text(COREFILE.format(ip=DNS_IP, config=_config(sandbox)))
    sandbox.start("coredns", folder / "coredns", "-conf", corefile)


def start_operator(sandbox: Sandbox, folder: Path, *flags: str) -> None:
    """KubeRay's operator, which reaches heads through the API server: it is in no pod."""
    sandbox.start(
        *("operator", folder / "ray-operator", "--metrics-addr=127.0.0.1:8080"),
        *("--health-probe-bind-address=127.0.0.1:8082", "--enable-leader-election=false"),
        *("--use-kubernetes-proxy", "--log-stdout-encoder=console", *flags),
        KUBECONFIG=_config(sandbox),
    )


def start_policies(sandbox: Sandbox) -> None:
    """Our own small enforcement of NetworkPolicies, for the network here has none."""
    sandbox.start(
        *("policies", sys.executable, "-m", "tests.kube.enforce", _config(sandbox)),
        PYTHONPATH=str(ROOT),
        PYTHONDONTWRITEBYTECODE="1",
    )


def start_fakes(sandbox: Sandbox, folder: Path) -> None:
    """KWOK: nodes with its annotation, and pods on them, seem to run."""
    sandbox.start(
        *("kwok", folder / "kwok", f"--kubeconfig={_config(sandbox)}"),
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
        *("--cidr=10.250.0.0/16", f"--node-ip={NODE_IP}"),
    )
