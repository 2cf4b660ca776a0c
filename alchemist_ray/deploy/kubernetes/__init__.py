"""Kubernetes manifests for a Ray cluster with gangs, from a few options; see ``kuberay/README.md``.

Imports no Kubernetes client and talks to no cluster: what it makes is text for ``kubectl``.
"""

from alchemist_ray.deploy.kubernetes.manifests import manifests, to_yaml
from alchemist_ray.deploy.kubernetes.options import GANG_SCHEDULERS, ClusterOptions
from alchemist_ray.deploy.kubernetes.versions import KUBERAY_VERSION, RAY_VERSION

__all__ = [
    "GANG_SCHEDULERS",
    "KUBERAY_VERSION",
    "RAY_VERSION",
    "ClusterOptions",
    "manifests",
    "to_yaml",
]
