"""Comparison of nodes: versions, connections between them, clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from alchemist_ray.observe.doctor.finding import BAD, OK, WARN, Finding

SHOWN = 4
CLOCK_WARN_S, CLOCK_BAD_S = 1.0, 60.0


def same_versions(versions: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Check that all nodes (and this process, under its own name) have the same versions.

    Parameters
    ----------
    versions : mapping
        By node, then by package.
    """
    findings = []
    packages = list(dict.fromkeys(package for told in versions.values() for package in told))
    agreed = []
    for package in packages:
        counted = Counter(told.get(package, "none") for told in versions.values())
        usual, _ = counted.most_common(1)[0]
        agreed.append(f"{package} {usual}")
        for node, told in versions.items():
            if (has := told.get(package, "none")) != usual:
                findings.append(
                    Finding(
                        "versions", BAD, f"{package} {has}, the others have {usual}",
                        "install the same version there (one environment on a shared file system, "
                        "or one image); check PYTHONPATH",
                        node=node,
                    )
                )  # fmt: skip
    return findings or [Finding("versions", OK, ", ".join(agreed))]


def reached(dialled: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Check that nodes reach each other; `dialled` has the results of `network.dial` by node."""
    pairs = [(node, told) for node, calls in dialled.items() for told in calls]
    failed = [(node, told) for node, told in pairs if told["why"]]
    if not pairs:
        return []
    if not failed:
        return [Finding("between nodes", OK, f"{len(pairs)} connections, in both directions")]
    shown = [f"{node} -> {told['to']}: {told['why']}" for node, told in failed[:SHOWN]]
    more = f", and {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    return [
        Finding(
            "between nodes", BAD,
            f"{len(failed)} of {len(pairs)} connections fail: {'; '.join(shown)}{more}",
            "allow TCP between the nodes on all ports of net.ipv4.ip_local_port_range, which gangs "
            "and MPI use: firewalld, iptables, NetworkPolicy; or select another interface "
            "(nodes.interface of the site file)",
            node=failed[0][0] if len({node for node, _ in failed}) == 1 else "",
        )
    ]  # fmt: skip


def clocks(dialled: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Check that the nodes' clocks agree, within the accuracy of the round trips."""
    offsets = [
        (abs(told["ahead"]) - told["within"], told, node)
        for node, calls in dialled.items()
        for told in calls
        if not told["why"]
    ]
    if not offsets:
        return []
    least, told, node = max(offsets, key=lambda entry: entry[0])
    exactly = f"known to {told['within'] * 1e3:.1f} ms"
    message = f"{told['to']} is {told['ahead']:+.3f} s from {node} ({exactly})"
    status = BAD if least >= CLOCK_BAD_S else WARN if least >= CLOCK_WARN_S else OK
    advice = (
        "run chronyd or ntpd on every node: munge and tokens fail between different times, make "
        "rebuilds too much or too little, and logs cannot be compared"
    )
    return [Finding("clocks", status, message, "" if status == OK else advice)]
