"""Nodes that a job shares with other users: they can connect to the ports of MPI."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alchemist_ray.deploy.slurm.allocation import Allocation
from alchemist_ray.errors import JobError

FIRST_USER, LAST_USER = 1000, 60000  # uids of people, as in /etc/login.defs
LAST_SERVICE = 65535  # up to here systemd takes uids for services, and 65534 is nobody
SHOWN = 4


def other_users() -> list[str]:
    """Return the names of other people with processes on this machine."""
    uids = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended
                uids.add(folder.stat().st_uid)
    names = (_person(uid) for uid in uids if uid != os.getuid())
    return sorted(name for name in names if name is not None)


def _person(uid: int) -> str | None:
    """Return the name of a person; None for a service, and for a uid within a container.

    Directories (LDAP, Active Directory) give people uids far above those of local accounts, among
    which those of containers have no name.
    """
    if uid < FIRST_USER or LAST_USER < uid <= LAST_SERVICE:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid) if uid <= LAST_USER else None


def check(allocation: Allocation, nodes: Mapping[str, Mapping[str, Any]], shared: str) -> list[str]:
    """Return warnings about nodes that other users' jobs may share.

    A job of one node needs none: its gangs open no MPI port.

    Parameters
    ----------
    nodes : mapping
        By node: `cores` of the machine, and `others`, users with processes there.
    shared : {"warn", "refuse", "allow"}
        As in the site file.

    Raises
    ------
    JobError
        If such nodes are to be refused.
    """
    if shared == "allow" or len(allocation.nodes) == 1:
        return []
    reasons = []
    for node in allocation.nodes:
        cores, others = int(nodes[node.name]["cores"]), nodes[node.name]["others"]
        if others:
            names = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
            reasons.append(f"{node.name} (processes of {names})")
        elif node.cpus < cores:
            reasons.append(f"{node.name} ({node.cpus} of {cores} CPUs are this job's)")
    if not reasons:
        return []
    more = f" and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    problem = (
        f"other users may share {', '.join(reasons[:SHOWN])}{more}. They can connect to the MPI "
        "ports of gangs on several nodes, which require no token. Request whole nodes (no -c; "
        "--exclusive), or set nodes.shared = 'allow' in the site file"
    )
    if shared == "refuse":
        raise JobError(f"{problem}, where it is 'refuse'")
    return [problem]
