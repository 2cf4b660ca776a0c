"""Why a node's part of a gang is gone, where its surroundings know: Kubernetes, a job manager."""

from __future__ import annotations

import os

from alchemist_ray.errors import AlchemistError, GroupFailedError, LaunchError


def node_leaving(node: int, hostname: str, *, starting: bool) -> AlchemistError:
    """The error for a node that is being taken away, told by itself before it went."""
    kind = LaunchError if starting else GroupFailedError
    return kind(
        f"node {hostname} is being taken away (SIGTERM): its pod is evicted, drained or deleted, "
        "or its job ends. The gang was ended on all nodes; request_workers() starts a new one "
        "where there is room",
        node=node,
        cause="node leaving",
        hostname=hostname,
    )


def ask_kubernetes(pod: str) -> str:
    """Where to look, in a pod: a limit that kills a whole container leaves nobody to tell."""
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    namespace = os.environ.get("RAY_CLUSTER_NAMESPACE", "default")
    return (
        f" `kubectl -n {namespace} describe pod {pod}` says which: OOMKilled is the pod's own "
        "memory limit, Evicted its node's want."
    )
