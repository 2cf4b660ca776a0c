"""Shared by ranks_elemental*.py: checks that all ranks agree on, and matrices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from mpi4py import MPI

from ali import DistMatrix, elemental
from ali.interface import Context
from mpi_workers.matrix.layout import Shape
from mpi_workers.rank.gang import Gang

Array = np.ndarray[Any, Any]
FLOATS = ("float32", "float64", "complex64", "complex128")


class Checks:
    """Collects what is wrong by more than rounding, and inputs that were changed."""

    def __init__(self, gang: Gang) -> None:
        self.ctx = context(gang)
        self.done = 0
        self.wrong: list[Any] = []
        self.given: list[tuple[DistMatrix, Array]] = []

    def whole(self, *matrices: DistMatrix) -> list[Array]:
        return [np.array(self.ctx.to_layout(m, "STAR_STAR").local) for m in matrices]

    def give(self, values: Array, layout: str = "VC_STAR") -> DistMatrix:
        matrix = self.ctx.new_replicated(values, layout)
        self.given.append((matrix, np.array(matrix.local)))
        return matrix

    def close(self, found: Array, expected: Array, what: Any, limit: float = 60) -> None:
        """Equal within `limit` roundings of the largest number."""
        self.done += 1
        error = np.inf
        if found.shape == expected.shape:
            scale = float(np.abs(expected).max(initial=0)) or 1.0
            precision = max(np.finfo(a.dtype).eps for a in (found, expected))
            error = float(np.abs(found - expected).max(initial=0)) / float(precision) / scale
        if not self.ctx.comm.allreduce(error, MPI.MAX) <= limit:
            self.wrong.append([what, str(found.dtype), found.shape, expected.shape, error])

    def true(self, value: Any, what: Any) -> None:
        self.done += 1
        if not self.ctx.comm.allreduce(bool(value), MPI.LAND):
            self.wrong.append(what)

    def orthonormal(self, columns: Array, what: Any, limit: float = 60) -> None:
        identity = np.eye(columns.shape[1], dtype=columns.dtype)
        self.close(adjoint(columns) @ columns, identity, what, limit)

    def result(self) -> list[Any]:
        for matrix, before in self.given:
            self.true(np.array_equal(matrix.local, before), [matrix.shape, "was changed"])
        return [self.done, self.wrong]


def context(gang: Gang) -> Context:
    """A context whose state lasts as long as the gang, as a loaded library's does."""
    state = vars(gang).setdefault("elemental", {})
    if not state:
        elemental.load(state, None)
    return Context(gang, state)


def some(gang: Gang, *choices: Any) -> list[Any]:
    """Combinations of the choices: some of all, and of them fewer where ranks crowd the machine.

    No stride divides the length of a list, so that every choice has its turn.
    """
    return list(itertools.product(*choices))[:: 7 if gang.size <= 2 else 31]


def values(shape: Shape, dtype: str, seed: int = 0) -> Array:
    rng = np.random.default_rng([seed, *shape])
    found = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        found = found + 1j * rng.standard_normal(shape)
    return found.astype(dtype)


def low(shape: Shape, dtype: str, rank: int) -> Array:
    """A matrix of this rank, or of the least that the shape allows."""
    rank = min(rank, *shape)
    return values((shape[0], rank), dtype, 3) @ values((rank, shape[1]), dtype, 4)


def ill(n: int, dtype: str) -> Array:
    """Singular values from 1 down to the rounding of the dtype."""
    q, r = np.linalg.qr(values((n, n), dtype)), np.linalg.qr(values((n, n), dtype, 1))
    steep = np.logspace(0, np.log10(np.finfo(dtype).eps), n)
    return ((q[0] * steep) @ adjoint(r[0])).astype(dtype)


def adjoint(a: Array) -> Array:
    return a.conj().T
