"""The facts of a gang and a matrix that a transfer needs, and the times that it reports."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpi_workers.matrix.layout import Distribution, Grid


@dataclass(slots=True)
class NodeTimes:
    """Duration of each phase of a transfer for one node, in seconds (the paper's Figure 3).

    A copy through shared memory counts as `send_s` (`receive_s` on a fetch); the other phases
    belong to streams. Threads that work at the same time are added up.
    """

    node: int
    route: str
    nbytes: int = 0
    serialize_s: float = 0.0
    send_s: float = 0.0
    receive_s: float = 0.0
    deserialize_s: float = 0.0

    def add(self, other: NodeTimes) -> None:
        self.nbytes += other.nbytes
        self.serialize_s += other.serialize_s
        self.send_s += other.send_s
        self.receive_s += other.receive_s
        self.deserialize_s += other.deserialize_s


def add_times(total: dict[int, NodeTimes], more: Mapping[int, NodeTimes]) -> None:
    """Add the times of a part of a transfer, by node."""
    for node, times in more.items():
        total.setdefault(node, NodeTimes(node, times.route)).add(times)


@dataclass(frozen=True, slots=True)
class TransferTarget:
    """A matrix of a gang: the properties that a transfer needs."""

    matrix: int
    distribution: Distribution
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The data endpoint of one node: its ranks are ``first`` to ``first + count - 1``."""

    first: int
    count: int
    addresses: tuple[str, ...]  # ``unix:`` first


@dataclass(frozen=True, slots=True)
class DataEndpoints:
    """The gang's secret, and its nodes' data endpoints in the order of their ranks."""

    token: str = field(repr=False)
    nodes: tuple[NodeAddress, ...]

    def node_of(self, rank: int) -> int:
        """The number of the node that runs a rank."""
        return bisect_right(self.nodes, rank, key=lambda node: node.first) - 1


FACTS_NBYTES = 256  # of a view


def view_ids(name: str) -> range:
    """The ids of a view's matrices: its facts, the number of each rank's last frame, two frames."""
    first = -(1 << 60) + 4 * zlib.crc32(name.encode())
    return range(first, first + 4)


def view_parts(grid: Grid) -> tuple[tuple[Distribution, str], tuple[Distribution, str]]:
    """Distribution and dtype of the first two of these."""
    size = grid[0] * grid[1]
    return (
        (Distribution("CIRC_CIRC", (FACTS_NBYTES, 1), grid), "uint8"),
        (Distribution("VC_STAR", (size, 1), grid), "int64"),
    )
