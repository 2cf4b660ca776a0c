"""Reasons why a node's part of a gang ended, as known to Kubernetes or to the batch system."""

from __future__ import annotations

import os

from alchemist_ray.errors import AlchemistError, GroupFailedError, LaunchError


def node_leaving(node: int, hostname: str, *, starting: bool) -> AlchemistError:
    """Return the error for a node that has announced that it is being taken away."""
    kind = LaunchError if starting else GroupFailedError
    return kind(
        f"node {hostname} is being taken away (SIGTERM): its pod is evicted, drained or deleted, "
        "or its job ends. The gang was ended on all nodes; request_workers() starts a new one "
        "on the remaining nodes",
        node=node,
        cause="node leaving",
        hostname=hostname,
    )


def ask_kubernetes(pod: str) -> str:
    """Return a hint for a pod that died without an error of its own; empty outside Kubernetes.

    A memory limit that kills a whole container leaves no process that could report it.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ:
        return ""
    namespace = os.environ.get("RAY_CLUSTER_NAMESPACE", "default")
    return (
        f" `kubectl -n {namespace} describe pod {pod}` shows the cause: OOMKilled means that the "
        "pod exceeded its own memory limit, Evicted that its node ran short of resources."
    )


def recovered_words(call: str, losses: int, restored: str) -> str:
    """Return the message for a call that was lost with ranks of a gang that has recovered."""
    why = "it is not declared pure: call it again"
    if losses > 1:
        why = f"ranks were lost in {losses} runs of it"
    return (
        f"{call} was lost with a rank. {restored}. They are as they were before the call, "
        f"which was not repeated, because {why}"
    )
