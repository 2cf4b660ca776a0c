"""Comparison of results on ranks with NumPy's, and input for the checks of linalg."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from scipy.sparse import issparse, vstack

from ali import DistMatrix, SparseMatrix, blocks, linalg
from ali.interface import Context
from ali.linalg import (
    arithmetic,
    collectives,
    leading,
    learning,
    local_products,
    products,
    reductions,
    triangular,
)
from ali.sparse_matrices import from_whole
from mpi_workers.matrix import pairwise
from mpi_workers.matrix.layout import Shape
from mpi_workers.rank.gang_view import GangView
from tests.support.ranks_shared import failure_of

Array = np.ndarray[Any, Any]
FLOATS = ("float32", "float64", "complex64", "complex128")
NUMBERS = (*FLOATS, "int32", "int64")


class Routines:
    """The routines of a library on these ranks; arrays among their arguments are distributed."""

    def __init__(self, ctx: Context, library: Any) -> None:
        self._ctx, self._library = ctx, library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        routine = getattr(self._library, name)

        def call(*arguments: Any, **options: Any) -> Any:
            given = (
                self._ctx.new_replicated(one, "VC_STAR") if isinstance(one, np.ndarray) else one
                for one in arguments
            )  # fmt: skip
            return routine(self._ctx, *given, **options)

        return call


class Checks:
    """Collects the differences that exceed rounding, on all ranks."""

    def __init__(self, gang: GangView) -> None:
        self.gang, self.ctx = gang, Context(gang, {})
        self.linalg = Routines(self.ctx, linalg)
        self.done = 0
        self.wrong: list[Any] = []

    def whole(self, matrix: DistMatrix) -> Array:
        """The elements, in the shape that a client gets."""
        found = np.asarray(self.ctx.to_layout(matrix, "STAR_STAR").local)
        return found.reshape(matrix.array_shape, order="F")

    def distribute(self, values: Array, layout: str = "VC_STAR") -> DistMatrix:
        return self.ctx.new_replicated(values, layout)

    def matrix(self, values: Any) -> Any:
        """A dense or sparse matrix that every rank has."""
        return from_whole(self.ctx.gang, values) if issparse(values) else self.distribute(values)

    def value(self, result: Any) -> Any:
        """A routine's result: matrices with all elements."""
        if isinstance(result, SparseMatrix):
            return vstack(self.ctx.comm.allgather(result.local)).tocsr()
        return self.whole(result) if isinstance(result, DistMatrix) else result

    @classmethod
    def results_of(cls, gang: GangView, *functions: Any, make: Any = None) -> dict[str, Any]:
        """By name what functions of checks return, or the results of their checks.

        In one launch: starting ranks takes longer than most checks.
        """
        found = {}
        for function in functions:
            check = (make or cls)(gang)
            told = function(check)
            found[function.__name__] = check.result() if told is None else told
        return found

    def _array(self, found: Any) -> Array:
        return self.whole(found) if isinstance(found, DistMatrix) else np.asarray(found)

    def close(self, found: Any, expected: Any, dtype: Any, what: Any, scale: float = 0) -> None:
        """A matrix, array or number is equal within 60 roundings of the largest number; integers
        exactly."""
        self.done += 1
        found, expected = self._array(found), np.asarray(expected)
        kind = np.dtype(dtype)
        size = scale or float(np.abs(expected).max(initial=0))
        limit = 0.0 if kind.kind in "bi" else 60 * float(np.finfo(kind).eps) * size
        error = np.inf
        if found.shape == expected.shape and found.dtype == kind:
            error = float(np.abs(found - expected).max(initial=0))
        if not error <= limit:
            self.wrong.append([what, str(found.dtype), found.shape, error, limit])

    def same(self, found: Any, expected: Array, what: Any) -> None:
        """Equal within a few roundings of each number; NaN and inf alike, integers exactly."""
        self.done += 1
        found = self._array(found)
        good = found.shape == expected.shape and found.dtype == expected.dtype
        if good and expected.dtype.kind in "bi":
            good = np.array_equal(found, expected)
        elif good:
            limit = 8 * float(np.finfo(expected.dtype).eps)
            with np.errstate(all="ignore"):
                good = np.allclose(found, expected, rtol=limit, atol=limit / 8, equal_nan=True)
        if not good:
            self.wrong.append([what, str(found.dtype), str(expected.dtype), found.shape])

    def true(self, value: bool | np.bool, what: Any) -> None:
        self.done += 1
        if not value:
            self.wrong.append(what)

    def grid_outlives_failed_calls(self, use: Callable[[], object]) -> None:
        """A library's grid is another one only if some ranks alone have left native code."""
        use()
        state = self.ctx.state
        for inside in (False, True):
            before = state["grid"]
            before.begun += inside and self.gang.rank == 0
            self.gang.renew()
            use()
            apart = inside and self.gang.size > 1
            self.true((state["grid"] is not before) == apart, ["another grid", inside])
        before = state["grid"]
        use()
        self.true(state["grid"] is before, "one grid")

    def orthonormal(self, q: Array, what: Any) -> None:
        found, unit = q.conj().T @ q, np.eye(q.shape[1], dtype=q.dtype)
        self.close(found, unit, q.dtype, [what, "orthonormal"])

    def failures(self, call: Callable[..., Any], *arguments: Any) -> list[str]:
        """The failure of every rank, as kind and message."""
        return list(self.ctx.comm.allgather(failure_of(call, *arguments)))

    def some(self, *choices: Any) -> list[Any]:
        """All combinations; every seventh of them on four ranks or more.

        Seven divides the length of none of the lists, so that every choice occurs.
        """
        return list(itertools.product(*choices))[:: 1 if self.ctx.size < 4 else 7]

    def sample(self, *choices: Any) -> list[Any]:
        """Every eleventh of all combinations (29th on three ranks or more), different ones for
        each number of ranks.

        Neither divides the length of any of the lists, so that every choice occurs.
        """
        size = self.ctx.size
        step = 11 if size < 3 else 29
        return list(itertools.product(*map(list, choices)))[size % step :: step]

    def refusals(self, library: Any, *, alone: bool = False) -> Refusals:
        """Notes the calls of a library that are refused."""
        return Refusals(self, library, alone)

    def result(self) -> list[Any]:
        """How many checks there were, and what was wrong; collective."""
        gathered = self.ctx.comm.allgather(self.wrong)
        return [self.done, [[rank, what] for rank, some in enumerate(gathered) for what in some]]


def values(shape: Shape, dtype: str, seed: int = 0) -> Array:
    rng = np.random.default_rng([seed, *shape])
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("int"):
        return rng.integers(-9, 10, shape).astype(dtype)
    found = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        return (found + 1j * rng.standard_normal(shape)).astype(dtype)
    return found.astype(dtype)


@contextmanager
def small_panels() -> Iterator[None]:
    """Panels and blocks of a few elements, so that there are many and the last is short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "PANEL", 600)
        patch.setattr(blocks, "CHUNK", 256)
        patch.setattr(collectives, "SLICE", 16)
        patch.setattr(products, "CHUNK", 64)
        patch.setattr(pairwise, "MESSAGE", 128)
        patch.setattr(learning, "PANEL", 2000)
        for module in (arithmetic, reductions, learning, leading, local_products, triangular):
            patch.setattr(module, "CHUNK", 256)
        yield


class Refusals:
    """Calls of a library that all ranks refuse, and the words with which the message begins.

    ``says("add", "ShapeError: shapes", A, B)`` calls add, for "ShapeError: add: shapes...".
    With `alone` rank 0 makes the calls: they are refused before any message.
    """

    def __init__(self, check: Checks, library: Any, alone: bool) -> None:
        self._check, self._library, self._alone = check, library, alone
        self.found: list[tuple[str, list[str]]] = []

    def __call__(self, routine: str, words: str, *arguments: Any, **options: Any) -> None:
        ctx = self._check.ctx
        call = functools.partial(getattr(self._library, routine), ctx, *arguments, **options)
        kind, _, rest = words.partition(": ")
        begins = f"{kind}: {routine}: {rest}" if rest else words
        if not self._alone:
            self.found.append((begins, self._check.failures(call)))
            return
        said = failure_of(call) if ctx.rank == 0 else ""
        self.found.append((begins, [ctx.comm.bcast(said)] * ctx.size))
