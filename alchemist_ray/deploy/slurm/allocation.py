"""A job's allocation: its number, its nodes, their CPUs and memory."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from alchemist_ray.errors import JobError
from alchemist_ray.launchers.hostlist import expand

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

    scheduler: str
    job: str
    nodes: tuple[Node, ...]
    uses_srun: bool

    @property
    def cpus(self) -> int:
        return sum(node.cpus for node in self.nodes)


def is_same_node(name: str, other: str) -> bool:
    """Return whether two names mean the same node: they may differ in the domain."""
    return name.partition(".")[0] == other.partition(".")[0]


def is_this_node(name: str) -> bool:
    """Return whether a name in the job's list of nodes means the node of this process."""
    slurm = os.environ.get("SLURMD_NODENAME")
    return name == slurm or is_same_node(name, os.uname().nodename)


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
    return Allocation("slurm", job, tuple(nodes), uses_srun=True)


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
    return Allocation("pbs", job, tuple(nodes), uses_srun="SLURM_JOB_ID" in env)
