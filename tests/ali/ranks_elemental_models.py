"""Elemental's optimisation models: planted answers, and conditions of optimality."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import elemental
from mpi_workers.matrix.layout import Shape
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_elemental_checks import FLOATS, Array, Checks, low, values


def models(gang: Gang) -> list[Any]:
    """On data whose answer is known, or by the conditions of optimality."""
    check = Checks(gang)
    if gang.size > 2:  # interior points wait for each other thousands of times
        _regressions(check, "float64", (10, 4))
    else:
        for dtype in ("float64", "float32"):
            _regressions(check, dtype, (24, 9))
            _other_regressions(check, dtype)
    return check.result()


def _sparse_data(shape: Shape, dtype: str) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(5)
    a = rng.standard_normal(shape).astype(dtype)
    truth = np.zeros((shape[1], 1), dtype)
    truth[[1, 3]] = [[2], [-3]]
    return a, truth, (a @ truth + 0.01 * rng.standard_normal((shape[0], 1))).astype(dtype)


def _regressions(check: Checks, dtype: str, shape: Shape) -> None:
    fine = 1e-5 if dtype == "float64" else 3e-2
    a, truth, b = _sparse_data(shape, dtype)
    A, B = check.give(a), check.give(b)
    for name, lam2 in (("lasso", 0.0), ("elastic_net", 0.5)):
        weights = (2.0, lam2) if lam2 else (2.0,)
        (x,) = check.whole(getattr(elemental, name)(check.ctx, A, B, *weights))
        # The slope is 2 sign(x) where x is not zero, else between -2 and 2.
        slope, there = a.T @ (b - a @ x) - 2 * lam2 * x, np.abs(x) > 1e-2
        check.true((np.abs(slope) <= 2 + fine).all(), [name, "bound", dtype])
        check.true((np.abs(slope - 2 * np.sign(x))[there] <= fine).all(), [name, "sign", dtype])
        check.true((there == (truth != 0)).all(), [name, "support", dtype])


def _other_regressions(check: Checks, dtype: str) -> None:
    ctx, rng = check.ctx, np.random.default_rng(7)
    fine = 1e-5 if dtype == "float64" else 3e-2
    a, truth, _ = _sparse_data((24, 9), dtype)
    A = check.give(a)
    wide = rng.standard_normal((9, 16)).astype(dtype)
    rare = np.zeros((16, 1), dtype)
    rare[[3, 7]] = [[1], [-2]]
    (x,) = check.whole(elemental.basis_pursuit(ctx, check.give(wide), check.give(wide @ rare)))
    check.true(np.abs(x - rare).max() <= fine, ["basis pursuit", dtype])
    spoilt = a @ truth
    spoilt[[3, 8]] += 100
    (x,) = check.whole(elemental.least_absolute(ctx, A, check.give(spoilt)))
    check.true(np.abs(x - truth).max() <= fine, ["least absolute", dtype])
    points = rng.standard_normal((24, 2)).astype(dtype)
    sides = np.sign(points @ [[1], [-2]] + 0.3).astype(dtype)
    points += 0.5 * sides * np.array([1, -2], dtype)
    w, bias = elemental.svm(ctx, check.give(points), check.give(sides), 10.0)
    margins = sides * (points @ check.whole(w)[0] + bias)
    check.true((margins > 0).all(), ["svm separates", dtype])
    check.true(margins.min() >= 0.95, ["svm's margin", dtype])
    targets = rng.standard_normal((24, 2)).astype(dtype)
    (x,) = check.whole(elemental.nnls(ctx, A, check.give(targets)))
    slope = a.T @ (targets - a @ x)  # is 0 where x > 0, else not above 0
    check.true(x.min() >= -1e-6, ["nnls, sign", dtype])
    check.true(slope.max() <= 10 * fine, ["nnls, bound", dtype])
    check.true((np.abs(slope * x) <= 10 * fine).all(), ["nnls, complementary", dtype])


def factorised_data(gang: Gang) -> list[Any]:
    check = Checks(gang)
    ctx, few = check.ctx, gang.size > 2
    rng = np.random.default_rng(6)
    a = rng.random((20, 3)) @ rng.random((3, 14))
    for dtype in ("float64",) if few else ("float64", "float32"):
        A = check.give(a.astype(dtype))
        X, Y = check.whole(*elemental.nmf(ctx, A, 3, iterations=2 if few else 8))
        check.true(X.min() >= 0 and Y.min() >= 0 and X.dtype == dtype, ["nmf, sign", dtype])
        check.true(X.shape == (20, 3) and Y.shape == (14, 3), ["nmf, shapes", dtype])
        left = float(np.linalg.norm(a - X @ Y.T) / np.linalg.norm(a))
        check.true(left <= (0.15 if few else 0.05), ["nmf", dtype, left])
    for dtype in ("float64",) if few else FLOATS:
        plain = low((30, 24), dtype, 2)
        rare = 10 * values((30, 24), dtype, 8) * (rng.random((30, 24)) < 0.04)
        tol = 1e-4 if few or dtype in ("float32", "complex64") else 1e-6
        A = check.give((plain + rare).astype(dtype))
        L, S = check.whole(*elemental.rpca(ctx, A, tol=tol))
        norm = np.linalg.norm(plain)
        check.true(np.linalg.norm(L - plain) <= 100 * tol * norm, ["rpca, L", dtype])
        check.true(np.linalg.norm(S - rare) <= 100 * tol * norm, ["rpca, S", dtype])
    zero = check.give(np.zeros((4, 3)))
    for found in check.whole(*elemental.rpca(ctx, zero)):
        check.true((found == 0).all(), "rpca of zero")
    X, Y = check.whole(*elemental.nmf(ctx, zero, 2, iterations=1))
    check.true(np.isfinite(X).all() and (X @ Y.T == 0).all(), "nmf of zero")
    return check.result()
