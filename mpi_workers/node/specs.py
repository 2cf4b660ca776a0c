"""The configuration of a gang's proxies and ranks. Needs no MPI."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mpi_workers.node.cleanup import is_private, machine_tag

RANK_VARIABLE = "ALCHEMIST_RANK"  # is set in ranks and in the processes that they start
RANK_PROGRAM = "{rank}"  # in a launcher's command line: the placeholder for a rank's program
FIND_S = 30.0  # time limit for a rank to find its node's proxy
POLL_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class Start:
    """A command that starts all ranks of a gang, with its environment.

    Attributes
    ----------
    argv : list of str
        The command line, with `RANK_PROGRAM` for the program of a rank.
    adds, drops : mapping, tuple
        Variables to set, and prefixes of variables to remove, in its environment.
    files : mapping
        Texts of files that it needs, by the variables for their paths.
    advice : str
        Remedy if its ranks do not form one MPI world.
    across_nodes : bool
        Whether it starts ranks on other nodes too, by daemons of the site.
    """

    argv: list[str]
    adds: Mapping[str, str] = field(default_factory=dict)
    drops: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    advice: str = ""
    across_nodes: bool = False


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node's part of a gang.

    Attributes
    ----------
    ip : str
        Its address.
    ranks : int
    name : str
        Its name in the batch system.
    devices : tuple of mapping
        What each of its ranks sees of the node's GPUs, as environment variables.
    """

    ip: str
    ranks: int
    name: str = ""
    devices: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RankOptions:
    """The options of a user for the ranks of a gang.

    Attributes
    ----------
    threads : int
        Of BLAS and OpenMP in each rank.
    start_timeout_s : float
        Limit for the start of all ranks.
    mpi_waits : {"interruptible", "plain"}
        See `GangOptions`.
    gpu : {"auto", "off"}
        Whether products run on the rank's GPU.
    env : mapping
        Environment variables, besides those of `threads`.
    """

    threads: int = 1
    start_timeout_s: float = 60.0
    mpi_waits: str = "interruptible"
    gpu: str = "auto"
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GangPlan:
    """One launch of a gang: its nodes and their numbers of ranks, in rank order.

    Attributes
    ----------
    gang : str
        Name of the launch, which its folders have.
    manager : sequence of str
        Addresses of the GroupManager.
    log_folder : str
        For the output of ranks; its name, until the node's agent makes it a path.
    start : Start, optional
        The command that starts all ranks, run by the first node's proxy. None: each node's proxy
        forks them.
    kvs_name : str
        MPICH derives names of segments from it, and reused ones may be stale.
    """

    gang: str
    nodes: tuple[NodePlan, ...]
    token: str = field(repr=False)
    manager: tuple[str, ...]
    keep_bytes: int
    options: RankOptions = RankOptions()
    log_folder: str = ""
    start: Start | None = None
    kvs_name: str = field(default_factory=lambda: f"alchemist_{uuid.uuid4().hex[:20]}")

    @property
    def counts(self) -> list[int]:
        return [node.ranks for node in self.nodes]

    @property
    def size(self) -> int:
        return sum(self.counts)

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        first = sum(self.counts[:node])
        return range(first, first + self.nodes[node].ranks)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """A rank's configuration. Ranks that a launcher starts read it from a file of mode 600."""

    token: str = field(repr=False)
    directory: str
    control: str
    data: str  # address of the node's data endpoint
    size: int
    host: str | None
    crowded: bool
    keep_bytes: int
    options: RankOptions
    advice: str = ""
    one_node: bool = False  # all ranks of the gang are on this node
    first: int = 0  # rank of this node
    ranks: int = 1  # of this node
    devices: Sequence[Mapping[str, str]] = ()  # of its ranks; see `NodePlan`
    renewal: int = 0  # how often the ranks were started again before

    @classmethod
    def find(cls, pattern: str) -> RankConfig:
        """Read the file that a proxy on this machine has written, when it is there.

        Files of other users, of folders that others can enter, and of other machines that share
        TMPDIR are ignored.

        Raises
        ------
        FileNotFoundError
            If it does not appear within `FIND_S`: the gang has no proxy here.
        """
        deadline = time.monotonic() + FIND_S
        while True:
            for path in map(Path, glob.glob(pattern)):
                with contextlib.suppress(OSError):
                    if is_private(path.parent) and f"-{machine_tag()}-" in path.parent.name:
                        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                        with open(fd) as file:
                            about = json.load(file)
                        options = RankOptions(**about.pop("options"))
                        return cls(**about, options=options)
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"no proxy of this gang has written {pattern} on this node within "
                    f"{FIND_S:.0f} s: a rank was started on a node without a part of the gang, or "
                    "TMPDIR differs there"
                )
            time.sleep(POLL_INTERVAL_S)
