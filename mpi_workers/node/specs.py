"""The configuration of a proxy and of a rank. Needs no MPI."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from mpi_workers.node.cleanup import is_private, machine_tag

RANK_PROGRAM = "{rank}"  # in a launcher's command line: the placeholder for a rank's program
FIND_S = 30.0  # time limit for a rank to find its node's proxy
POLL_INTERVAL_S = 0.02


@dataclass(slots=True)
class ProxySpec:
    """A proxy's part of a gang."""

    gang: str
    manager: list[str]
    token: str = field(repr=False)
    node: int
    counts: list[int]
    host: str
    kvs_name: str
    threads: int
    keep_bytes: int
    start_timeout_s: float
    start: list[str] | None = None  # node 0's command that starts all ranks; None: forked
    start_adds: dict[str, str] = field(default_factory=dict)  # to that command's environment
    start_drops: list[str] = field(default_factory=list)  # prefixes of variables it must not get
    start_files: dict[str, str] = field(default_factory=dict)  # texts, by variables for their paths
    start_advice: str = ""  # for an MPI that does not match the launcher
    log_folder: str = (
        ""  # for the output of ranks; its name, until the node's agent makes it a path
    )
    across_nodes: bool = False  # the command starts ranks on other nodes, by daemons of the site

    @property
    def first_rank(self) -> int:
        return sum(self.counts[: self.node])

    @property
    def local_ranks(self) -> list[int]:
        return list(range(self.first_rank, self.first_rank + self.counts[self.node]))

    @property
    def size(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class RankConfig:
    """A rank's configuration. Ranks that a launcher starts read it from a file of mode 600."""

    token: str = field(repr=False)
    directory: str
    control: str
    data: str  # address of the node's data endpoint
    size: int
    host: str | None
    threads: int
    crowded: bool
    keep_bytes: int
    start_timeout_s: float
    advice: str = ""
    one_node: bool = False  # all ranks of the gang are on this node

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
                            return cls(**json.load(file))
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"no proxy of this gang has written {pattern} on this node within "
                    f"{FIND_S:.0f} s: a rank was started on a node without a part of the gang, or "
                    "TMPDIR differs there"
                )
            time.sleep(POLL_INTERVAL_S)
