"""The interface of launchers."""

from __future__ import annotations

import os
import shlex
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpi_workers.node.specs import RANK_PROGRAM, ProxySpec

CONTAINER = "ALCHEMIST_CONTAINER"  # in a job's image: the command prefix that runs a program in it
# A runtime may give each rank a user namespace of its own. MPI cannot read the memory of another
# rank (CMA) then. MPICH's variable for it, and Cray's.
NO_CMA = {"MPIR_CVAR_CH4_CMA_ENABLE": "0", "MPICH_SMP_SINGLE_COPY_MODE": "NONE"}


def rank_program(env: Mapping[str, str]) -> list[str]:
    """Return the command of a rank for a launcher outside the job's image."""
    return [*shlex.split(env.get(CONTAINER, "")), RANK_PROGRAM]


def rank_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return variables that such ranks need, unless they are set."""
    return {k: v for k, v in NO_CMA.items() if CONTAINER in env and k not in env}


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node's part of a gang.

    Attributes
    ----------
    node_id, ip : str
        Ray's name of the node, and its address.
    ranks : int
    name : str
        Its name in the batch system.
    """

    node_id: str
    ip: str
    ranks: int
    name: str = ""


@dataclass(frozen=True, slots=True)
class GangPlan:
    """A gang before its launch: its nodes and their numbers of ranks, in rank order."""

    gang: str
    nodes: tuple[NodePlan, ...]
    threads: int
    token: str = field(repr=False)
    manager: tuple[str, ...]
    keep_bytes: int
    start_timeout_s: float
    log_folder: str = ""

    @property
    def size(self) -> int:
        return sum(node.ranks for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts all ranks of a gang, with its environment.

    Attributes
    ----------
    argv : list of str
        The command line, with `specs.RANK_PROGRAM` for the program of a rank.
    adds, drops : mapping, sequence
        Variables to set, and prefixes of variables to remove, in its environment.
    files : mapping
        Texts of files that it needs, by the variables for their paths.
    advice : str
        Remedy if its ranks do not form one MPI world.
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
    """Converts a plan to the specs of the nodes' proxies.

    Parameters
    ----------
    env : mapping, optional
        The environment with the launcher's settings. Default: this process's.
    """

    name: str

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self.env: Mapping[str, str] = os.environ if env is None else env

    @abstractmethod
    def specs(self, plan: GangPlan) -> list[ProxySpec]:
        """Return one spec per node of the plan, in order.

        Raises
        ------
        LaunchError
            If this launcher cannot start such a gang; the message names one that can.
        """

    def order(self, names: Sequence[str]) -> list[int]:
        """Return the order in which this launcher numbers the nodes' ranks."""
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
            log_folder=plan.log_folder,
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
        """Return specs for ranks that one command starts, run by the first node's proxy."""
        kvs_name = unique_kvs_name()
        return [self._spec(plan, node, kvs_name, start) for node in range(len(plan.nodes))]


def unique_kvs_name() -> str:
    """Return a new name: MPICH derives names of segments from it, and reused ones may be stale."""
    return f"alchemist_{uuid.uuid4().hex[:20]}"
