"""Errors for the loss of ranks and nodes, with the causes that are known."""

from __future__ import annotations

import os

from alchemist_ray.errors import NEXT_GANG, AlchemistError, GroupFailedError, LaunchError
from mpi_workers.wire.frames import Body


def rank_ended(body: Body, doing: str, *, starting: bool) -> AlchemistError:
    """Return the error for a rank that has ended; `doing`: what the ranks ran."""
    kind = LaunchError if starting else GroupFailedError
    while_what = "while the gang was starting" if starting else "so the gang was ended on all nodes"
    if doing:
        while_what = f"in {doing}, {while_what}"
    tail = body.get("tail", "")
    said = f"\n--- last output of rank {body['rank']} ---\n{tail}" if tail else ""
    if frames := body.get("frames"):
        said = f"\nit crashed in {' < '.join(frames)}{said}"
    return kind(
        f"rank {body['rank']} (pid {body['pid']} on {body['hostname']}) {body['cause']}, "
        f"{while_what}. {NEXT_GANG}{said}",
        rank=body["rank"],
        cause=body["cause"],
        hostname=body["hostname"],
        tail=tail,
    )


def endpoint_ended(body: Body, *, starting: bool) -> AlchemistError:
    """Return the error for a node's data endpoint that has ended."""
    kind = LaunchError if starting else GroupFailedError
    return kind(
        f"the gang's data endpoint (pid {body['pid']} on {body['hostname']}) {body['cause']}, so "
        f"the gang was ended on all nodes. {NEXT_GANG}",
        cause=body["cause"],
        hostname=body["hostname"],
    )


def node_leaving(node: int, hostname: str, *, starting: bool) -> AlchemistError:
    """Return the error for a node that has announced that it is being taken away."""
    kind = LaunchError if starting else GroupFailedError
    return kind(
        f"node {hostname} is being taken away (SIGTERM): its pod is evicted, drained or deleted, "
        f"or its job ends. The gang was ended on all nodes; {NEXT_GANG} on the remaining nodes",
        node=node,
        cause="node leaving",
        hostname=hostname,
    )


def node_lost(node: int, hostname: str) -> GroupFailedError:
    """Return the error for a node whose proxy has ended without a word."""
    return GroupFailedError(
        f"node {hostname} was lost: its part of the gang was killed, or the network to it was cut."
        f"{ask_kubernetes(hostname)} The gang was ended on all nodes; {NEXT_GANG}",
        node=node,
        cause="node lost",
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
        f"{call} was interrupted by the loss of a rank. {restored}. The call was not repeated, "
        f"because {why}"
    )
