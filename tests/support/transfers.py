"""What tests of transfers share: six ranks, the ways to them, and matrices to send."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from mpi_workers import layout
from mpi_workers.client import Ranks, Reader, Target, Writer
from mpi_workers.layout import Spread, copies, default_grid
from mpi_workers.tiles import Block
from tests.support import ranks as support

RANKS = 6
SINGLE = [name for name in layout.LAYOUTS if copies(name, (2, 3)) == 1]
COPIED = [name for name in layout.LAYOUTS if copies(name, (2, 3)) > 1]
WAIT_S = 10.0

Array = np.ndarray[Any, Any]
ids = itertools.count(1)
routes = pytest.mark.parametrize("route", ["near", "far"])


def spread_of(name: str, shape: tuple[int, int], size: int = RANKS) -> Spread:
    return Spread(name, shape, default_grid(size))


def numbers(shape: tuple[int, int], dtype: str = "float64", seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    values = rng.integers(-1000, 1000, shape).astype(dtype)
    return values * (1 + 2j) if values.dtype.kind == "c" else values


def new(host: support.Host, spread: Spread, dtype: Any = "float64") -> Target:
    target = Target(next(ids), spread, np.dtype(dtype))
    host.new(target.matrix, spread, dtype)
    return target


def send(ranks: Ranks, target: Target, *blocks: tuple[Array, tuple[int, int]]) -> Writer:
    with Writer(ranks, target) as writer:
        writer.write_blocks(Block(*block) for block in blocks)
    return writer


def fetch(ranks: Ranks, target: Target, out: Array | None = None) -> Array:
    if out is None:
        out = np.empty(target.spread.shape, target.dtype)
    with Reader(ranks, target) as reader:
        reader.read_block(out, (0, 0))
    return out
