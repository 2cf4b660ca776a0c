"""Functions that test_arrays_order.py runs on ranks: sorting, scans and the like against NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ali import arrays
from ali.arrays import lookup, ordering, rearranging
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import Array, Checks
from tests.support.ranks_shared import failure_of
from tests.support.suite import scaled

LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR", "STAR_STAR", "CIRC_CIRC")
SHAPES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (40,), (500,), (0, 3), (4, 0), (1, 7), (60, 1), (300, 2), (2, 300), (17, 12),
)  # fmt: skip


@contextmanager
def everything_is_large() -> Iterator[None]:
    """No array is small enough to be gathered."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordering, "REPLY_NBYTES", -1)
        patch.setattr(lookup, "REPLICATED_NBYTES", -1)
        patch.setattr(ordering, "FEW", 8)
        patch.setattr(ordering, "QUANTILE_SAMPLES", 64)
        yield


def elements(shape: tuple[int, ...], dtype: str, nan: bool = False) -> Array:
    """Many of them equal."""
    random = np.random.default_rng([len(dtype), *shape])
    found = random.integers(-9, 10, shape).astype(dtype)
    if dtype.startswith("complex"):
        found = found + 1j * random.integers(-2, 3, shape).astype(dtype)
    if nan and found.dtype.kind in "fc":
        found[random.random(shape) < 0.1] = np.nan
    return found


def cases(check: Checks) -> Iterator[tuple[Array, Any, int | None, list[Any]]]:
    axes = (None, 0, 1)
    with everything_is_large():
        some = check.sample(SHAPES, DTYPES, LAYOUTS, (False, True))[:: scaled(5, 1)]
        for shape, dtype, layout, nan in some:
            a = elements(shape, dtype, nan)
            A = check.distribute(a, layout)
            for axis in axes[: len(shape) + 1]:
                yield a, A, axis, [shape, dtype, layout, nan, axis]


def alike(check: Checks, found: Any, expected: Any, what: Any) -> None:
    whole = check.whole(found).reshape(found.array_shape)
    expected = np.asarray(expected)
    good = (whole.shape, whole.dtype) == (expected.shape, expected.dtype)
    if good:
        rough = expected.dtype.kind in "fc"
        limit = 64 * float(np.finfo(expected.dtype).eps) if rough else 0
        with np.errstate(all="ignore"):
            good = np.allclose(whole, expected, rtol=limit, atol=limit, equal_nan=rough)
    check.true(good, [*what, str(whole)[:300], str(expected)[:300]])


def sorting(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        alike(check, arrays.sort(check.ctx, A, axis), np.sort(a, axis), ["sort", *what])
        wanted = np.argsort(a, axis, kind="stable")
        alike(check, arrays.argsort(check.ctx, A, axis), wanted, ["argsort", *what])
        alike(check, A, a, ["A is as it was", *what])


def scans(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        b = np.sign(a) if a.dtype.kind in "if" else a
        B = check.distribute(b, A.layout)
        for op, function in (("sum", np.cumsum), ("prod", np.cumprod)):
            if op == "prod" and a.dtype.kind == "c":
                continue
            x, X = (a, A) if op == "sum" else (b, B)
            expected = function(x, axis)
            alike(check, arrays.cumulative(check.ctx, op, X, axis), expected, [op, *what])
            first = np.full_like(expected.take([0] * 1, axis or 0, mode="clip"), op == "prod") \
                if expected.size else None  # fmt: skip
            if first is not None:
                with_first = np.concatenate([first, expected], axis or 0)
                found = arrays.cumulative(check.ctx, op, X, axis, True)
                alike(check, found, with_first, [op, "initial", *what])


def distinct(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        if axis is not None:
            continue
        for equal_nan in (True, False):
            expected = np.unique(a, True, True, True, equal_nan=equal_nan)
            found = arrays.unique_all(check.ctx, A, equal_nan)
            for mine, numpys in zip(found, expected, strict=True):
                alike(check, mine, numpys, ["unique_all", equal_nan, *what])
            if not (a.dtype.kind == "c" and np.isnan(a).any()):
                alike(check, arrays.unique(check.ctx, A, equal_nan), expected[0],
                      ["unique", equal_nan, *what])  # fmt: skip


def selection(check: Checks) -> None:
    q = [0.0, 0.1, 0.5, 0.73, 1.0]
    for a, A, axis, what in cases(check):
        if a.dtype.kind in "cb" or not a.size:
            continue
        for method in ("linear", "lower", "nearest", "hazen", "midpoint"):
            for skip_nan in (False, True):
                function = np.nanquantile if skip_nan else np.quantile
                expected = np.asarray(function(a, q, axis, method=method))
                found = arrays.quantile(
                    check.ctx, A, q, list(expected.shape), axis, method, skip_nan,
                    expected.dtype.name,
                )  # fmt: skip
                alike(check, found, expected, [method, skip_nan, *what])


def places(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        along = axis if a.ndim == 2 else None
        if (a.size if axis is None else a.shape[axis]) == 0:
            continue
        for name in ("argmax", "argmin", "nansum", "nanmin", "nanmax", "nanmean", "nanstd"):
            if name.startswith("nan") and (a.dtype.kind == "b" or np.isnan(a).all(axis).any()):
                continue
            expected = getattr(np, name)(a, axis)
            found = arrays.reduce(check.ctx, name, A, None if along is None else [along])
            alike(check, found, expected, [name, *what])


def places_in_bytes(check: Checks) -> None:
    """Rows of many columns, of few values: the first of equal ones counts."""
    random = np.random.default_rng(4)
    for dtype, n in itertools.product(("int8", "uint8", "bool"), (64, 65, 80, 101, 1000)):
        a = random.integers(0, 2 if dtype == "bool" else 5, (41, n)).astype(dtype)
        a[:5] = random.integers(0, 2, (5, 1))  # all equal
        for layout, name in itertools.product(("VC_STAR", "MC_MR"), ("argmax", "argmin")):
            found = arrays.reduce(check.ctx, name, check.distribute(a, layout), [1])
            alike(check, found, getattr(np, name)(a, 1), [name, dtype, n, layout])


def places_without_memory(check: Checks) -> None:
    A = check.ctx.zeros((200_000 * check.ctx.size, 2), "int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rearranging, "available_bytes", lambda: 1 << 20)
        told = failure_of(arrays.reduce, check.ctx, "argmax", A, [1])
    check.true("6.4 MB for 200000 indices" in told, [told])


def lookups(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        if axis is None:
            table = np.sort(elements((37,), a.dtype.name))
            T = check.distribute(table)
            for side in ("left", "right"):
                alike(check, arrays.searchsorted(check.ctx, T, A, side),
                      np.searchsorted(table, a, side), ["searchsorted", side, *what])  # fmt: skip
            alike(check, arrays.isin(check.ctx, A, T), np.isin(a, table), ["isin", *what])
        elif a.size:
            index = np.random.default_rng(a.size).integers(-a.shape[axis], a.shape[axis], a.shape)
            found = arrays.take_along_axis(check.ctx, A, check.distribute(index, "MC_MR"), axis)
            alike(check, found, np.take_along_axis(a, index, axis), ["take_along_axis", *what])


def rearranged(check: Checks) -> None:
    for a, A, axis, what in cases(check):
        if axis is None:
            shifts, axes = ([3], None) if a.ndim == 1 else ([-2, 5], (0, 1))
            alike(
                check, arrays.roll(check.ctx, A, shifts), np.roll(a, shifts, axes), ["roll", *what]
            )
            alike(check, arrays.tile(check.ctx, A, [2, 3], 2), np.tile(a, (2, 3)), ["tile", *what])
            if a.ndim == 1:
                found = arrays.broadcast(check.ctx, A, [3, a.size])
                alike(check, found, np.broadcast_to(a, (3, a.size)), ["broadcast", *what])
        times = np.arange(a.size if axis is None else a.shape[axis]) % 3
        found = arrays.repeat(check.ctx, A, check.distribute(times), axis)
        alike(check, found, np.repeat(a, times, axis), ["repeat", *what])


def everything(gang: GangView) -> dict[str, list[Any]]:
    return Checks.results_of(
        gang,
        sorting,
        scans,
        distinct,
        selection,
        places,
        places_in_bytes,
        places_without_memory,
        lookups,
        rearranged,
    )
