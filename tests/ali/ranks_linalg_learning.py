"""Functions that test_linalg.py runs on ranks: components, clusters, kernels."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ali import linalg
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import Array, Checks, small_panels, values

REALS = ("float32", "float64", "int32")


def components(check: Checks) -> None:
    cases = itertools.product([(60, 8), (8, 30), (3, 4)], REALS, (True, False), (True, False))
    for shape, dtype, center, scale in list(cases)[:: 1 if check.ctx.size < 4 else 5]:
        a = values(shape, dtype) * np.arange(1, shape[1] + 1) + 5
        a = a.astype(dtype)
        k = min(2, shape[0] - 1)
        layout = ("VC_STAR", "MC_MR", "STAR_VC")[check.ctx.size % 3]
        found = check.linalg.pca(check.distribute(a, layout), k, center, scale)
        parts, variance, mean, scores, ratio, deviation = (check.whole(x) for x in found)
        wide = a.astype("float64")
        used = np.dtype("float64" if dtype == "int32" else dtype)
        what = [shape, dtype, center, scale]
        divisor = wide.std(axis=0, ddof=1, keepdims=True) if scale else np.ones((1, shape[1]))
        divisor[divisor == 0] = 1
        x = (wide - wide.mean(axis=0) * center) / divisor
        _, s, vh = np.linalg.svd(x, full_matrices=False)
        vh *= np.sign(vh[np.arange(len(vh)), np.abs(vh).argmax(axis=1)])[:, None]
        top = float(s[0])
        slack = 20 * (1 + top)
        check.close(mean, (wide.mean(axis=0) * center).astype(used), used, what, 90)
        check.close(deviation, divisor[0].astype(used), used, [*what, "deviation"], 90)
        all_of_it = (wide - wide.mean(axis=0) * center) ** 2 / divisor**2
        expected = (s[:k] ** 2 / (shape[0] - 1)).astype(used)
        check.close(variance, expected, used, [*what, "variance"], slack * top)
        total = all_of_it.sum() / (shape[0] - 1)
        check.close(ratio, (expected / total).astype(used), used, [*what, "ratio"], slack)
        check.close(
            scores, (x @ parts.astype(float).T).astype(used), used, [*what, "scores"], slack
        )
        gaps = -np.diff(s[: k + 1]).min(initial=top) if len(s) > 1 else top
        check.close(parts, vh[:k].astype(used), used, [*what, "parts"], slack * top / float(gaps))
    a = np.ones((6, 3))
    a[:, 1] = np.arange(6)
    parts, _, _, _, ratio, _ = check.linalg.pca(a, 1, True, True, "randomized")
    check.close(parts, [[0.0, 1, 0]], "float64", "a constant column", 1)
    check.close(ratio, np.ones(1), "float64", "all of the variance")


def blobs(k: int, each: int) -> tuple[Array, Array]:
    """Points around k centers far from each other, and their labels."""
    rng = np.random.default_rng(k)
    centers = 50 * rng.permutation(np.eye(k, 6))
    labels = np.arange(k * each) % k
    return centers[labels] + rng.standard_normal((k * each, 6)) + 1000, labels


def clusters(check: Checks) -> dict[str, Any]:
    points, labels = blobs(5, 40)
    found: dict[str, Any] = {}
    for dtype, layout in (("float64", "VC_STAR"), ("float32", "MC_MR"), ("int32", "STAR_VC")):
        a = points.astype(dtype)
        with small_panels():
            C, L, inertia, count = check.linalg.kmeans(check.distribute(a, layout), 5, 3)
        c, mine = check.whole(C), check.whole(L)[:, 0]
        check.true((L.layout, L.dtype.name, mine.shape) == ("VC_STAR", "int32", (200,)), dtype)
        pairs = {(int(x), int(y)) for x, y in zip(mine, labels, strict=True)}
        check.true(len(pairs) == 5 and len({x for x, _ in pairs}) == 5, [dtype, sorted(pairs)])
        used = np.dtype("float64" if dtype == "int32" else dtype)
        expected = np.stack([a[mine == j].mean(axis=0, dtype="float64") for j in range(5)])
        check.close(c, expected.astype(used), used, [dtype, "centers"])
        exact = float(((a - expected[mine]) ** 2).sum())
        check.close(used.type(inertia), used.type(exact), used, [dtype, "inertia"], exact * 99)
        found[dtype] = [inertia, int(count), mine.tolist()]
    uneven = values((70, 3), "float64")
    C, L, inertia, count = check.linalg.kmeans(uneven, 7, 1, 300, 0.0)
    mine, c = check.whole(L)[:, 0], check.whole(C)
    away = ((uneven[:, None, :] - c) ** 2).sum(axis=2)
    check.true(np.array_equal(away.argmin(axis=1), mine), "each row has the nearest center")
    means = np.stack([uneven[mine == j].mean(axis=0) for j in range(7)])
    check.close(c, means, "float64", "a fixed point of Lloyd's")
    found["uneven"] = [inertia, int(count), mine.tolist()]
    few = np.repeat(np.eye(3), 4, axis=0)  # three different rows
    for seed in range(8):  # a row that is a center already is never drawn again
        C, L, inertia, _ = check.linalg.kmeans(few, 3, seed, 1)
        check.true(inertia < 1e-20 and len(set(check.whole(L)[:, 0].tolist())) == 3, ["few", seed])
    C, L, inertia, _ = check.linalg.kmeans(few, 5, 0)
    check.true(inertia < 1e-20, "more clusters than different rows")
    one = check.linalg.kmeans(uneven, 1)[0]
    check.close(one, uneven.mean(axis=0, keepdims=True), "float64", "one cluster", 1)
    check.close(check.linalg.kmeans(uneven[:1], 1)[0], uneven[:1], "float64", "one row")
    return {**found, "checks": check.result()}


def kernels(check: Checks) -> dict[str, Any]:
    x = values((80, 3), "float64")
    y = np.stack([np.sin(x[:, 0]), x[:, 1] * x[:, 2]], axis=1)
    z = check.whole(check.linalg.random_features(check.distribute(x, "MC_MR"), 2000, 1.5, 7))
    distances = ((x[:, None] - x) ** 2).sum(axis=2)
    off = float(np.abs(z @ z.T - np.exp(-distances / (2 * 1.5**2))).max())
    fewer = check.whole(check.linalg.random_features(x, 10, 1.5, 7))
    check.close(fewer * (10 / 2000) ** 0.5, z[:, :10], "float64", "fewer are the first of more", 9)
    m, lam = 80, 1e-4
    z = check.whole(check.linalg.random_features(x, 60, 2.0, 1))
    exact = np.linalg.solve(z.T @ z + m * lam * np.eye(60), z.T @ y)
    for keep, dtype in ((1 << 30, "float64"), (0, "float64"), (0, "float32")):
        used = [check.distribute(v.astype(dtype)) for v in (x, y)]
        tol = 1e-12 if dtype == "float64" else 1e-6
        with small_panels():
            W, count, residual = check.linalg.random_features_ridge(
                *used, 60, 2.0, lam, 1, tol, 2000, keep
            )
        w = check.whole(W)
        check.true(0 < count < 2000 and residual < 100 * tol, [keep, dtype, count, residual])
        normal = (z.T @ z + m * lam * np.eye(60)) @ w - z.T @ y
        relative = np.linalg.norm(normal, axis=0) / np.linalg.norm(z.T @ y, axis=0)
        check.true(relative.max() < 100 * tol, [keep, dtype, float(relative.max())])
        P = check.linalg.random_features_predict(used[0], W, 2.0, 1)
        check.close(P, (z @ w).astype(dtype), dtype, [keep, dtype, "predict"], 900)
        if dtype == "float64":
            check.close(w, exact, dtype, [keep, "weights"], 1e6)
    P = check.linalg.random_features_predict(x, check.distribute(exact, "STAR_VC"), 2.0, 1)
    fit = float(np.abs(check.whole(P) - y).max())
    same = check.whole(check.linalg.random_features(x[:3], 4, 1.0, 5))
    return {"off": off, "fit": fit, "values": same.tolist(), "checks": check.result()}


def refused(check: Checks) -> list[Any]:
    """The failures of bad calls on every rank."""
    ctx = check.ctx
    A, Z = ctx.zeros((4, 3), "float64"), ctx.zeros((4, 3), "complex64")
    bad = linalg.full(ctx, 4, 3, float("nan"))
    row, y = ctx.zeros((1, 3), "float64"), ctx.zeros((4, 1), "float64")
    says = check.refusals(linalg)
    says("pca", "DtypeError: A is complex64; it must be real", Z, 1)
    says("pca", "ShapeError: A is 1 x 3; it must have two rows or more", row, 1)
    says("pca", "BadArgumentError: k=4; it must be 1 to 3 for a 4 x 3 matrix", A, 4)
    says("pca", "LinAlgError: A contains NaN or infinity", bad, 1)
    says("kmeans", "DtypeError: A is complex64; it must be real", Z, 1)
    says("kmeans", "BadArgumentError: k=5; it must be 1 to 4, the number of rows of A", A, 5)
    says("kmeans", "BadArgumentError: max_iterations=0; it must be at least 1", A, 1, 0, 0)
    says("kmeans", "BadArgumentError: tol=-1.0; it must be at least 0", A, 1, 0, 9, -1.0)
    says("kmeans", "LinAlgError: A contains NaN or infinity", bad, 2)
    says("random_features", "BadArgumentError: features=0; it must be at least 1", A, 0, 1.0)
    says("random_features", "BadArgumentError: sigma=0.0; it must be above 0", A, 5, 0.0)
    says("random_features", "DtypeError: X is complex64; it must be real", Z, 5, 1.0)
    says("random_features_ridge", "ShapeError: X is 4 x 3 and Y is 1 x 3; the numbers", A, row, 5,
         1.0, 1.0)  # fmt: skip
    says(
        "random_features_ridge", "BadArgumentError: lam=0.0; it must be above 0", A, y, 5, 1.0, 0.0
    )
    says("random_features_ridge", "LinAlgError: the matrices contain NaN or infinity", bad,
         linalg.full(ctx, 4, 1, 1), 5, 1.0, 1.0)  # fmt: skip
    says("random_features_ridge", "LinAlgError: did not converge: a relative res",
         linalg.random_normal(ctx, 40, 2, 1), linalg.random_normal(ctx, 40, 1, 2), 30, 1.0, 1e-9, 0,
         1e-12, 2)  # fmt: skip
    says("random_features_predict", "DtypeError: W is complex64; it must be real", A, Z, 1.0)
    return says.found


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(gang, components, clusters, kernels, refused)
