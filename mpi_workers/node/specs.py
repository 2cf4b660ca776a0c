"""What a proxy and a rank are told when they start. Needs no MPI."""

from __future__ import annotations

import glob
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

RANK_PROGRAM = "{rank}"  # in a launcher's command line: here stands the program that a rank runs
FIND_S = 30.0  # how long a rank looks for its node's proxy
POLL_INTERVAL_S = 0.02


@dataclass(slots=True)
class ProxySpec:
    """What a proxy is told: its part of a gang."""

    gang: str
    manager: list[str]
    token: str
    node: int
    counts: list[int]
    host: str
    kvs_name: str
    threads: int
    keep_bytes: int
    start: list[str] | None = None  # what node 0 runs to start all ranks; None: forked
    start_adds: dict[str, str] = field(default_factory=dict)  # to that command's environment
    start_drops: list[str] = field(default_factory=list)  # variables it must not see, by prefix
    start_files: dict[str, str] = field(default_factory=dict)  # their texts, by variables for paths
    start_advice: str = ""  # what to do if its MPI does not fit
    start_timeout_s: float = 60.0
    across_nodes: bool = False  # it starts ranks on other nodes too, by daemons that are not ours

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
    """What a rank is told before MPI starts; read from a file of mode 600."""

    token: str
    directory: str
    control: str
    size: int
    host: str | None
    threads: int
    crowded: bool
    keep_bytes: int
    start_timeout_s: float = 60.0
    advice: str = ""

    @classmethod
    def find(cls, pattern: str) -> RankConfig:
        """The one that a proxy has left on this node, as soon as it is there.

        Raises `FileNotFoundError` if there is none in `FIND_S`: the gang has no part here.
        """
        deadline = time.monotonic() + FIND_S
        while not (found := glob.glob(pattern)):
            if time.monotonic() > deadline:
                raise FileNotFoundError(
                    f"no proxy of this gang has left {pattern} on this node in {FIND_S:.0f} s: a "
                    "rank was started where the gang has no part, or TMPDIR is another one here"
                )
            time.sleep(POLL_INTERVAL_S)
        return cls(**json.loads(Path(found[0]).read_text()))
