"""Kubernetes manifests for a Ray cluster with gangs; see ``kuberay/README.md``.

The renderer produces text for ``kubectl``: it imports no Kubernetes client and contacts no cluster.
"""

from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import (
    GANG_SCHEDULERS,
    KUBERAY_VERSION,
    RAY_VERSION,
    ClusterOptions,
)

__all__ = [
    "GANG_SCHEDULERS",
    "KUBERAY_VERSION",
    "RAY_VERSION",
    "ClusterOptions",
    "manifests",
    "to_yaml",
]
