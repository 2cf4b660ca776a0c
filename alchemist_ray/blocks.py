"""What an agent does with the blocks that lie on its node: look at them, send them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray

from alchemist_ray.panels import panels
from mpi_workers.client import Doors, Ranks, RankTimes, Target, Writer
from mpi_workers.housekeeping import runs_here
from mpi_workers.sockets import reachable_here

Origin = tuple[int, int]


OPENED = 64 << 20  # 64 MiB: what is opened at once to be looked at


def together(sizes: Sequence[int]) -> Iterator[slice]:
    """Which objects to open at once: one by one costs three times as much, all may be too large.

    Sizes are those in the store, and 0 where Ray does not know them.
    """
    start = nbytes = 0
    for i, size in enumerate(sizes):
        nbytes += size or OPENED
        if nbytes >= OPENED or i + 1 == len(sizes):
            yield slice(start, i + 1)
            start, nbytes = i + 1, 0


@dataclass(frozen=True, slots=True)
class LookJob:
    """Tells the shape and dtype of each block; runs in the agent of the node that holds them."""

    sizes: tuple[int, ...]

    def run(self, blocks: Sequence[ray.ObjectRef]) -> list[tuple[tuple[int, ...], str]]:
        return [
            (block.shape, block.dtype.str if block.dtype.kind != "O" else "object")
            for some in together(self.sizes)
            for block in map(np.asarray, ray.get(list(blocks[some])))
        ]


@dataclass(frozen=True, slots=True)
class SendJob:
    """Sends blocks to the ranks; runs in the agent of the node that holds them."""

    gang: str
    doors: Doors
    target: Target
    origins: tuple[Origin, ...]

    def run(self, blocks: Sequence[ray.ObjectRef]) -> dict[int, RankTimes]:
        near = any(reachable_here(addresses[0]) for addresses in self.doors.addresses)
        ranks = _ranks_of(self.gang, self.doors) if near else Ranks(self.doors)
        try:
            arrays, origins = self.opened(blocks)
            with Writer(ranks, self.target) as writer:
                for panel, origin in panels(arrays, origins, self.target.dtype):
                    writer.write_block(panel, origin)
            return writer.times
        finally:
            if not near:
                ranks.close()

    def opened(self, blocks: Sequence[ray.ObjectRef]) -> tuple[list[Any], Sequence[Origin]]:
        """The blocks as they lie in the object store, 2-D, and where each belongs."""
        return [_as_matrix(np.asarray(block)) for block in ray.get(list(blocks))], self.origins


# The agent's warm connections and mappings, for the gangs that have ranks on its node.
_warm: dict[str, Ranks] = {}


def _ranks_of(gang: str, doors: Doors) -> Ranks:
    found = _warm.get(gang)
    if found is None or found.doors != doors:
        forget()
        found = _warm[gang] = Ranks(doors)
    return found


def forget() -> None:
    """Close what this process keeps warm for gangs that have ended: it holds their memory."""
    for gang in list(_warm):
        if not runs_here(gang) and (ranks := _warm.pop(gang, None)):
            ranks.close()


def _as_matrix(block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return block[:, np.newaxis] if block.ndim == 1 else block
