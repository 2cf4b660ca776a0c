"""What every launcher is given, and what it must say."""

from __future__ import annotations

import os
import shlex
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpi_workers.node.specs import RANK_PROGRAM, ProxySpec

CONTAINER = "ALCHEMIST_CONTAINER"  # in a job's image: the words that run a program in it
# A runtime may give each rank a user namespace of its own, from which MPI must not read what is
# in the memory of another (CMA). MPICH's name for it, and Cray's.
APART = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "MPICH_SMP_SINGLE_COPY_MODE": "NONE"}


def rank_program(env: Mapping[str, str]) -> list[str]:
    """What a launcher has to start that is not in the job's image, if there is one."""
    return [*shlex.split(env.get(CONTAINER, "")), RANK_PROGRAM]


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """What such ranks have to be told, unless somebody has."""
    return {k: v for k, v in APART.items() if CONTAINER in env and k not in env}


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node's part of a gang.

    Attributes
    ----------
    node_id, ip : str
        Ray's name of the node, and its address.
    ranks : int
    name : str
        What the machine's own job manager calls it.
    """

    node_id: str
    ip: str
    ranks: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class GangPlan:
    """A gang before it is launched: which nodes, how many ranks on each, in rank order."""

    gang: str
    nodes: tuple[NodePlan, ...]
    threads: int
    token: str = field(repr=False)
    manager: tuple[str, ...]
    keep_bytes: int
    start_timeout_s: float = 60.0

    @property
    def size(self) -> int:
        return sum(node.ranks for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts all ranks of a gang, and what goes with it.

    Attributes
    ----------
    argv : list of str
        The command line, with `specs.RANK_PROGRAM` in place of the program of a rank.
    adds, drops : mapping, sequence
        Variables to set, and prefixes of those to take away, in its environment.
    files : mapping
        Texts of files that it needs, by the variables that get their paths.
    advice : str
        What to do if its ranks do not find each other.
    across_nodes : bool
        Whether it starts ranks on other nodes too.
    """

    argv: list[str]
    adds: Mapping[str, str] = field(default_factory=dict)
    drops: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    across_nodes: bool = False


class Launcher(ABC):
    """Turns a plan into what each node's proxy has to do.

    Parameters
    ----------
    env : mapping, optional
        The environment with its settings. Default: this process's.
    """

    name: str

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env: Mapping[str, str] = os.environ if env is None else env

    @abstractmethod
    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        """One spec per node of the plan, in order.

        Raises
        ------
        LaunchError
            If this launcher cannot start such a gang; says which can.
        """

    def order(self, names: Sequence[str]) -> list[int]:
        """The order in which this launcher numbers the ranks of these nodes: theirs, mostly."""
        return list(range(len(names)))

    def _spec(self, plan: GangPlan, node: int, kvs_name: str, start: Start | None) -> ProxySpec:
        spec = ProxySpec(
            gang=plan.gang,
            manager=list(plan.manager),
            token=plan.token,
            node=node,
            counts=[n.ranks for n in plan.nodes],
            host=plan.nodes[node].ip,
            kvs_name=kvs_name,
            threads=plan.threads,
            keep_bytes=plan.keep_bytes,
            start_timeout_s=plan.start_timeout_s,
        )
        if start is not None:
            spec.start = list(start.argv)
            spec.start_adds = dict(start.adds)
            spec.start_drops = list(start.drops)
            spec.start_files = dict(start.files)
            spec.start_advice = start.advice
            spec.across_nodes = start.across_nodes
        return spec

    def _started(self, plan: GangPlan, start: Start) -> list[ProxySpec]:
        """Specs of a gang whose ranks one command starts, run by the first node's proxy."""
        kvs_name = unique_kvs_name()
        return [self._spec(plan, node, kvs_name, start) for node in range(len(plan.nodes))]


def unique_kvs_name() -> str:
    """MPICH derives shared memory names from it: a reused one meets a stale segment."""
    return f"alchemist_{uuid.uuid4().hex[:20]}"
