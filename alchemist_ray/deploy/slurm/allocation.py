"""A job's allocation: number, nodes, their CPUs, memory and ports; nodes shared with others.

A block is below the kernel's range (32768 and up) and the same on every node. Ray's workers use
ports that the kernel chooses, which cannot collide.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from alchemist_ray.errors import JobError
from alchemist_ray.launchers.srun import expand
from alchemist_ray.plural import listed

REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
MEBI = 1 << 20
NOT_IN_A_JOB = (
    "not inside a Slurm or PBS job (neither SLURM_JOB_ID nor PBS_JOBID is set): get an allocation "
    "with `salloc -N 2`, or submit with `alchemist slurm submit -N 2 -- ...`"
)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a job: its name, and the CPUs and bytes of memory (None: all) of the job there."""

    name: str
    cpus: int
    memory_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Allocation:
    """The job that this process is in."""

    job: str
    nodes: tuple[Node, ...]
    uses_srun: bool


def is_same_node(name: str, other: str) -> bool:
    """Return whether two names mean the same node: they may differ in the domain."""
    return name.partition(".")[0] == other.partition(".")[0]


def is_this_node(name: str) -> bool:
    """Return whether a name in the job's list of nodes means the node of this process."""
    return name == this_node() or is_same_node(name, os.uname().nodename)


def this_node() -> str:
    """Return this node's name in Slurm, or its host name."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def current(env: Mapping[str, str]) -> Allocation:
    """Return the job that a process with this environment is in.

    Raises
    ------
    JobError
        Outside a job, or if the variables of the batch system are inconsistent.
    """
    if "PBS_JOBID" in env and "PBS_NODEFILE" in env:
        return _pbs(env)
    if "SLURM_JOB_ID" in env:
        return _slurm(env)
    raise JobError(NOT_IN_A_JOB)


def per_node(text: str) -> list[int]:
    """Expand Slurm's list of numbers per node: ``4(x2),3`` is 4, 4, 3. Raises `ValueError`."""
    found: list[int] = []
    for part in text.split(","):
        match = REPEATED.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a list of numbers per node")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm(env: Mapping[str, str]) -> Allocation:
    job = env["SLURM_JOB_ID"]
    try:
        names = expand(env["SLURM_JOB_NODELIST"])
        cpus = per_node(env["SLURM_JOB_CPUS_PER_NODE"])
        given, each = env.get("SLURM_MEM_PER_NODE"), env.get("SLURM_MEM_PER_CPU")
        memory = [int(given) if given else int(each or 0) * n for n in cpus]
    except KeyError as error:
        raise JobError(
            f"Slurm job {job}: {error.args[0]} is not set; is this process inside the job?"
        ) from None
    except ValueError as error:
        raise JobError(f"Slurm job {job}: {error}") from None
    if len(names) != len(cpus):
        raise JobError(
            f"Slurm job {job} has {len(names)} nodes, but CPU counts for {len(cpus)}: "
            f"{env['SLURM_JOB_NODELIST']}, {env['SLURM_JOB_CPUS_PER_NODE']}"
        )
    nodes = [
        Node(name, n, mebibytes * MEBI or None)
        for name, n, mebibytes in zip(names, cpus, memory, strict=True)
    ]
    return Allocation(job, tuple(nodes), uses_srun=True)


def _pbs(env: Mapping[str, str]) -> Allocation:
    job = env["PBS_JOBID"]
    try:
        lines = Path(env["PBS_NODEFILE"]).read_text().split()
    except OSError as error:
        raise JobError(f"PBS job {job}: cannot read its list of nodes: {error}") from None
    if not lines:
        raise JobError(f"PBS job {job}: the list of nodes {env['PBS_NODEFILE']} is empty")
    counted = Counter(lines)  # a line for each CPU; with PBS Pro, for each chunk
    each = int(env.get("NCPUS") or env.get("PBS_NUM_PPN") or 1)
    nodes = [Node(name, max(times, each)) for name, times in counted.items()]
    return Allocation(job, tuple(nodes), uses_srun="SLURM_JOB_ID" in env)


ASK_TIMEOUT_S = 5.0


def squeue(job: str, fields: str) -> list[str]:
    """Return fields of a job (``"%T|%L"``) as squeue shows them; empty where it does not answer."""
    said = _asked("squeue", "--noheader", "--jobs", job, "--format", fields)
    return said.splitlines()[0].split("|") if said else []


def slurm_settings() -> dict[str, str]:
    """Return Slurm's own settings (``KillWait``: ``30 sec``); empty where it does not answer."""
    pairs = (line.partition("=") for line in _asked("scontrol", "show", "config").splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _asked(*words: str) -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


FIRST, END = 10240, 32768
BLOCK_PORTS = 16
BLOCKS = (END - FIRST) // BLOCK_PORTS
TRIES = 8  # blocks to check before giving up
NAMES = (
    "gcs",
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
    "dashboard-port",
)
# Metrics of the head's own processes: variables, not options, whose defaults are the same numbers
# for every Ray. With a number that is no port, Ray's process logs the failure and serves none.
METRICS = ("AUTOSCALER_METRIC_PORT", "DASHBOARD_METRIC_PORT")
NO_PORT = 65536


def block(job: str, attempt: int = 0) -> int:
    """Return the first port of a job's block, or of the block `attempt` places after it.

    Jobs whose numbers differ by less than `BLOCKS` - `TRIES` never share a block.
    """
    digits = re.findall(r"\d+", job.partition(".")[0])  # PBS: 123.server, 123[4].server
    number = sum(map(int, digits)) if digits else sum(job.encode())
    return FIRST + (number + attempt) % BLOCKS * BLOCK_PORTS


def ports(first: int) -> dict[str, int]:
    """Return the ports of a block, by purpose."""
    return {name: first + i for i, name in enumerate(NAMES)}


def metrics_ports(first: int, *, are_open: bool) -> dict[str, int]:
    """Return the variables for the ports of the head's metrics."""
    start = first + len(NAMES)
    return {name: start + i if are_open else NO_PORT for i, name in enumerate(METRICS)}


def is_free(first: int, address: str) -> bool:
    """Return whether every port of a block is free on this node, at this address."""
    with contextlib.ExitStack() as stack:
        for port in range(first, first + len(NAMES) + len(METRICS)):
            for host in ("", address):
                sock = stack.enter_context(socket.socket())
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections
                try:
                    sock.bind((host, port))
                except OSError:
                    return False
                sock.close()
    return True


def free_attempts(job: str, address: str) -> list[int]:
    """Return the attempts (see `block`) whose blocks are free on this node."""
    return [attempt for attempt in range(TRIES) if is_free(block(job, attempt), address)]


FIRST_USER, LAST_USER = 1000, 60000  # uids of people, as in /etc/login.defs
LAST_SERVICE = 65535  # up to here systemd takes uids for services, and 65534 is nobody
SHOWN = 4


def other_users() -> list[str]:
    """Return the names of other people with processes on this machine."""
    uids = {process.info["uids"].effective for process in psutil.process_iter(["uids"])}
    return sorted(filter(None, map(_person, uids - {os.getuid()})))


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
            reasons.append(f"{node.name} (processes of {listed(others, SHOWN)})")
        elif node.cpus < cores:
            reasons.append(f"{node.name} ({node.cpus} of {cores} CPUs are this job's)")
    if not reasons:
        return []
    problem = (
        f"other users may share {listed(reasons, SHOWN)}. They can connect to the MPI "
        "ports of gangs on several nodes, which require no token. Request whole nodes (no -c; "
        "--exclusive), or set nodes.shared = 'allow' in the site file"
    )
    if shared == "refuse":
        raise JobError(f"{problem}, where it is 'refuse'")
    return [problem]
