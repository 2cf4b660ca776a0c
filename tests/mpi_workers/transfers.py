"""For tests of transfers: six ranks, the routes to them, and matrices to send."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpi_workers.data.description import TransferTarget
from mpi_workers.data.node_connections import NodeConnections
from mpi_workers.data.transfers import MatrixReader, MatrixWriter
from mpi_workers.matrix.copy_kernels import ArrayBlock
from mpi_workers.matrix.layout import Distribution, copies, default_grid
from tests.support import ranks as support
from tests.support.layouts import SOME_LAYOUTS

RANKS = 6
SINGLE = [name for name in SOME_LAYOUTS if copies(name, (2, 3)) == 1]
COPIED = [name for name in SOME_LAYOUTS if copies(name, (2, 3)) > 1]
WAIT_S = 10.0

Array = np.ndarray[Any, Any]
ids = itertools.count(1)


def distribution_of(name: str, shape: tuple[int, int], size: int = RANKS) -> Distribution:
    return Distribution(name, shape, default_grid(size))


def numbers(shape: tuple[int, int], dtype: str = "float64", seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.integers(-1000, 1000, shape).astype(dtype)
    return values * (1 + 2j) if values.dtype.kind == "c" else values


def new(host: support.Host, distribution: Distribution, dtype: Any = "float64") -> TransferTarget:
    target = TransferTarget(next(ids), distribution, np.dtype(dtype))
    host.new(target.matrix, distribution, dtype)
    return target


def send(
    ranks: NodeConnections, target: TransferTarget, *blocks: tuple[Array, tuple[int, int]]
) -> MatrixWriter:
    with MatrixWriter(ranks, target) as writer:
        writer.write_blocks(ArrayBlock(*block) for block in blocks)
    return writer


@contextlib.contextmanager
def sealed(
    host: support.Host, ranks: NodeConnections, array: Array, name: str = "VC_STAR",
    size: int = RANKS, blocks: Sequence[tuple[Array, tuple[int, int]]] = (),
) -> Iterator[TransferTarget]:  # fmt: skip
    """A matrix of the elements of an array, which are sent as one block or in these."""
    target = new(host, distribution_of(name, array.shape, size), array.dtype)
    send(ranks, target, *(blocks or [(array, (0, 0))]))
    host.seal(target.matrix)
    yield target
    host.free(target.matrix)


def fetch(ranks: NodeConnections, target: TransferTarget, out: Array | None = None) -> Array:
    if out is None:
        out = np.empty(target.distribution.shape, target.dtype)
    with MatrixReader(ranks, target) as reader:
        reader.read_block(out, (0, 0))
    return out
