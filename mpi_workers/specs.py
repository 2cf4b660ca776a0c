"""What a proxy and a rank are told when they start. Needs no MPI."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


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
    mpiexec: list[str] | None = None  # argv that starts all ranks, or None: fork them here

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

    @classmethod
    def load(cls, path: str | Path) -> RankConfig:
        return cls(**json.loads(Path(path).read_text()))
