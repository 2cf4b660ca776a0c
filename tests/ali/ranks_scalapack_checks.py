"""Checks, values and block sizes that the rank side of test_scalapack.py shares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ali import DistMatrix, scalapack
from ali.interface import Context
from ali.scalapack import cyclic, spectra
from mpi_workers.rank.gang import Gang

Array = np.ndarray[Any, Any]
LAYOUTS = itertools.cycle(["VC_STAR", "MC_MR", "STAR_STAR", "STAR_VC", "CIRC_CIRC", "MR_MC"])


class Checks:
    """Collects what is wrong by more than rounding; all ranks agree on it."""

    def __init__(self, gang: Gang) -> None:
        state: dict[str, Any] = {}
        scalapack.load(state, None)
        self.ctx = Context(gang, state)
        self.done = 0
        self.wrong: list[Any] = []

    def distribution(self, values: Array, layout: str = "") -> DistMatrix:
        return self.ctx.new_replicated(values, layout or next(LAYOUTS))

    def whole(self, matrix: DistMatrix) -> Array:
        return np.asarray(self.ctx.to_layout(matrix, "STAR_STAR").local)

    def true(self, value: bool | np.bool, what: Any) -> None:
        self.done += 1
        if not self.ctx.comm.allreduce(bool(value), MPI.LAND):
            self.wrong.append(what)

    def close(self, found: Any, expected: Any, scale: float, dtype: Any, what: Any) -> None:
        """Equal within 40 roundings of `scale` for each of the matrix's rows and columns."""
        self.done += 1
        found, expected = np.asarray(found), np.asarray(expected)
        limit = 40 * max(8, *found.shape) * float(np.finfo(dtype).eps) * scale
        error = np.inf
        if found.shape == expected.shape:
            error = float(np.abs(found - expected).max(initial=0))
        if not self.ctx.comm.allreduce(error, MPI.MAX) <= limit:
            self.wrong.append([what, str(found.shape), error, limit])

    def product(self, expected: Array, *factors: Array, what: Any) -> None:
        """The product of factors is what it should be; they have its dtype, or are real."""
        kind = expected.dtype
        same = all(f.dtype in (kind, np.zeros(0, kind).real.dtype) for f in factors)
        self.true(same, [what, "dtypes", [str(f.dtype) for f in factors]])
        found = factors[0]
        for factor in factors[1:]:
            found = found @ factor
        self.close(found, expected, max(1e-30, float(np.linalg.norm(expected))), kind, what)

    def orthonormal(self, q: Array, what: Any) -> None:
        self.close(q.conj().T @ q, np.eye(q.shape[1]), 1, q.dtype, [what, "orthonormal"])

    def layouts(self, results: Any, expected: str, what: Any) -> None:
        found = [r.layout for r in results]
        self.true(found == expected.split(), [what, "layouts", found])

    def result(self) -> list[Any]:
        scalapack.close(self.ctx.state)
        return [self.done, self.wrong]


@contextmanager
def blocks(way: str) -> Iterator[None]:
    """Blocks of one element as they lie, or copies in blocks so small that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cyclic, "BLOCK", 8)
        patch.setattr(cyclic, "MOVED", 1 << 10)
        patch.setattr(spectra, "LEAF", 5)
        patch.setattr(spectra, "WIDTH", 7)
        for kind in cyclic.BLOCKED_FROM:
            if kind != "lange":
                patch.setitem(cyclic.BLOCKED_FROM, kind, 1 if way == "blocks" else 1 << 30)
        yield


def values(shape: tuple[int, int], dtype: str, kind: str = "", seed: int = 0) -> Array:
    """Random numbers; of low rank, zero or ill-conditioned if `kind` says so."""
    rng = np.random.default_rng([seed, *shape])
    if dtype.startswith("int"):
        return rng.integers(-9, 10, shape).astype(dtype)
    found = rng.standard_normal(shape)
    if dtype == "bool":
        return found > 0
    if dtype.startswith("complex"):
        found = found + 1j * rng.standard_normal(shape)
    if kind == "zero":
        found[...] = 0
    elif kind == "low rank":
        found[:, shape[1] // 2 :] = found[:, : shape[1] - shape[1] // 2]
    elif kind == "ill-conditioned":
        u, _, vh = np.linalg.svd(found, full_matrices=False)
        found = (u * np.logspace(0, -14, min(shape))) @ vh
    return found.astype(dtype)


def some(gang: Gang, everything: list[Any]) -> list[Any]:
    """All on one rank; else some, others on each number of ranks, with every choice among them."""
    stride = {1: 1, 2: 3}.get(gang.size, 13)
    return everything[gang.size % stride :: stride]
