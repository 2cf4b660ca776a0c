"""Functions that test_linalg.py runs on ranks: linalg against NumPy for difficult inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import FLOATS, NUMBERS, Array, Checks, small_panels, values
from tests.support.layouts import SOME_LAYOUTS

SCALES = (1e-30, 1.0, 1e30)
REALS = ("float32", "float64")


def columns(kind: str, shape: tuple[int, int], dtype: str) -> Array:
    """A matrix whose last column depends on the one before, or a constant one."""
    a = values(shape, dtype)
    if kind == "duplicated":
        a[:, -1] = a[:, -2]
    elif kind == "nearly dependent":
        a[:, -1] = a[:, -2] + 1e-9 * a[:, -1]
    elif kind == "constant":
        a[:, -1] = 0.1
    elif kind == "all constant":
        a[...] = 0.1
    elif kind == "zero":
        a[:, -1] = 0
    return a


KINDS = ("independent", "duplicated", "nearly dependent", "constant", "all constant", "zero")


def factors(check: Checks) -> None:
    """QR is backward stable, and its columns are orthonormal, for every matrix."""
    for dtype in FLOATS:
        for kind in KINDS:
            for scale in SCALES:
                a = (columns(kind, (120, 4), dtype) * scale).astype(dtype)
                what = [dtype, kind, scale]
                with small_panels():
                    q, r = map(check.whole, check.linalg.qr(a))
                check.orthonormal(q, what)
                size = float(np.linalg.norm(a / scale)) * scale
                check.close(q @ r, a, dtype, what, size)
                check.true(not np.tril(r, -1).any() and (np.diagonal(r).real >= 0).all(), what)
    for m in (1, 2, 3, 200):
        for n in (1, 2):
            a = values((m, n), "float64")
            q, r = map(check.whole, check.linalg.qr(a))
            check.orthonormal(q, [m, n])
            check.close(q @ r, a, "float64", [m, n])


def components(check: Checks) -> None:
    """Constant columns take no part in components, far from the origin, and of two rows.

    test_peers.py compares more with scikit-learn.
    """
    for dtype, scale, center in itertools.product(REALS, SCALES, (True, False)):
        a = values((50, 6), dtype) * np.array([1, 2, 3, 0, 5, 0]) + [9, 0, -5, 0, 1, 0]
        a[:, 3], a[:, 5] = 0.1, 1e6
        a = (a * scale).astype(dtype)
        what = [dtype, scale, center]
        P, _, _, _, _, D = check.linalg.pca(check.distribute(a, "MC_MR"), 3, center, True)
        expected = a.astype("float64").std(axis=0, ddof=1)
        expected[[3, 5]] = 1
        check.close(D, expected.astype(dtype), dtype, [*what, "deviation"])
        check.true(not center or not check.whole(P)[:, [3, 5]].any(), [*what, "constant columns"])
    far = values((2000, 3), "float64") * [3, 2, 1] + 1e11  # more than its deviation by far
    V = check.linalg.pca(far, 2)[1]
    s = np.linalg.svd(far - far.mean(axis=0), compute_uv=False)
    check.true(np.allclose(check.whole(V), s[:2] ** 2 / 1999, rtol=1e-4), "a large mean")
    two = check.linalg.pca(values((2, 1), "float64"), 1, True, True)[1]
    check.close(two, np.ones(1), "float64", "two rows")


def _nearest(check: Checks, a: Array, C: DistMatrix, L: DistMatrix, what: Any) -> None:
    """Every row has a nearest center, up to the rounding of the centers."""
    wide, c, labels = a.astype("float64"), check.whole(C).astype("float64"), check.whole(L)[:, 0]
    away = np.sqrt(((wide[:, None] - c) ** 2).sum(axis=2))
    unsure = 8 * float(np.finfo(a.dtype).eps) * float(np.abs(wide).max())
    mine = away[np.arange(len(a)), labels]
    check.true((mine <= away.min(axis=1) + unsure).all(), [*what, "nearest"])


def clusters(check: Checks) -> dict[str, Any]:
    """k-means tells clusters apart far from the origin, and at every scale."""
    found: dict[str, Any] = {}
    rng = np.random.default_rng(3)
    labels = np.arange(240) % 4
    # Two pairs: the pairs are 20,000 apart, the clusters of a pair 8.
    middle = np.array([[1e4, 0], [1e4, 8], [-1e4, 0], [-1e4, 8]])
    blobs = middle[labels] + rng.uniform(-1, 1, (240, 2))
    for dtype in REALS:
        for scale in SCALES:
            for offset in (0, 1e5):
                a = ((blobs + offset) * scale).astype(dtype)
                what = [dtype, scale, offset]
                best = math.inf
                for seed in range(3):
                    with small_panels():
                        C, L, inertia, _ = check.linalg.kmeans(a, 4, seed)
                    _nearest(check, a, C, L, what)
                    if inertia < best:
                        best, mine = inertia, check.whole(L)[:, 0]
                pairs = {(int(x), int(y)) for x, y in zip(mine, labels, strict=True)}
                check.true(len(pairs) == 4, [*what, sorted(pairs)])
                found["/".join(map(str, what))] = mine.tolist()
    same = np.full((30, 2), 0.1, "float32")
    C, L, inertia, _ = check.linalg.kmeans(same, 3)
    check.true(inertia < 1e-12 and (check.whole(L) == 0).all(), "equal rows, the first center")
    for m in (1, 2):
        a = values((m, 2), "float32")
        C, L, inertia, _ = check.linalg.kmeans(a, m)
        check.true(inertia == 0 and len(set(check.whole(L)[:, 0].tolist())) == m, [m, "rows"])
    return {**found, "checks": check.result()}


def _conditioned(n: int, condition: float, dtype: str) -> Array:
    q = np.linalg.qr(values((n, n), "float64"))[0]
    a = (q * np.geomspace(1, 1 / condition, n)) @ q.T
    return ((a + a.T) / 2).astype(dtype)


def searches(check: Checks) -> None:
    """Conjugate gradients return what they promise, or raise with the residual reached."""
    ctx = check.ctx
    scales = (1e-23, 1.0, 1e30)
    scales = scales if check.ctx.size < 3 else scales[check.ctx.size % 3 :][:1]
    for dtype in REALS:
        for condition in (1e1, 1e4, 1e7):
            a = _conditioned(12, condition, dtype)
            for scale in scales:
                b = (values((12, 2), "float64", 1) * [1, 1e-3] * scale).astype(dtype)
                what = [dtype, condition, scale]
                A, B = check.distribute(a), check.distribute(b)
                for tol in (1e-8, -1.0):
                    limit = tol if tol > 0 else {"float32": 1e-5, "float64": 1e-8}[dtype]
                    result: list[Any] = []
                    solve = lambda *args, result=result: result.extend(  # noqa: E731
                        check.linalg.conjugate_gradient(*args)
                    )
                    said = check.failures(solve, A, B, tol)
                    check.true(len(set(said)) == 1, [*what, tol, said])
                    easy = limit > 10 * condition * float(np.finfo(dtype).eps)
                    if said[0] != "nothing":
                        check.true(not easy, [*what, tol, said[0]])
                        known = "did not converge: a relative residual of", "not positive definite"
                        check.true(any(word in said[0] for word in known), [*what, tol, said[0]])
                        continue
                    X, _, residual = result
                    x, wide = check.whole(X).astype("float64"), a.astype("float64")
                    size = np.linalg.norm(b.astype("float64"), axis=0)
                    true = np.linalg.norm(b - wide @ x, axis=0) / size
                    unsure = 1e-12
                    if dtype == "float32":
                        grown = (np.abs(wide) @ np.abs(x)).max() / np.abs(b).max(axis=0).min()
                        unsure = 40 * float(np.finfo(dtype).eps) * float(grown)
                    check.true(residual <= limit and true.max() <= limit + unsure,
                               [*what, tol, residual, true.tolist()])  # fmt: skip
    for n in (1, 2):
        a, b = 3 * np.eye(n, dtype="float32"), np.full((n, 1), 6e-30, "float32")
        X, count, _ = check.linalg.conjugate_gradient(a, b)
        check.close(X, b / 3, "float32", [n, "rows"])
        check.true(count == 1, [n, count])
    zero = check.linalg.conjugate_gradient(a, ctx.zeros((2, 1), "float32"))
    check.true(not check.whole(zero[0]).any() and zero[1:] == (0, 0.0), "right-hand side 0")


def integers(check: Checks) -> None:
    """Integers at the limits of their dtypes do not wrap where the result is a float or int64."""
    for dtype in ("int32", "int64"):
        limits = np.iinfo(dtype)
        a = np.array([[limits.max, limits.min, 1]] * 5 + [[-3, 2, limits.max]], dtype)
        wide = a.astype("float64")
        A = check.distribute(a)
        top = float(np.abs(wide).max())
        check.close(check.linalg.gram(A), wide.T @ wide, "float64", dtype)
        for name, axis in (("mean", 0), ("std", 1)):
            expected = getattr(wide, name)(axis=axis, keepdims=True)
            found = getattr(check.linalg, name)(A, axis)
            check.close(found, expected, "float64", [dtype, name], top)
        norm = check.linalg.norm(A)
        check.true(math.isclose(norm, np.linalg.norm(wide), rel_tol=1e-13), [dtype, "norm"])
        check.true(check.linalg.norm(A, "max") == top, [dtype, "max"])
        S = np.linalg.svd(wide, compute_uv=False)
        check.close(check.linalg.svdvals(A), S, "float64", [dtype, "svdvals"])
    a = np.full((7, 2), np.iinfo("int32").max, "int32")
    total = a.sum(axis=0, keepdims=True, dtype="int64")
    check.close(check.linalg.sum(a, 0), total, "int64", "sum of int32")


def sums(check: Checks) -> None:
    """Sums are accurate to double precision, for any number of rows, and treat inf and nan."""
    for dtype in REALS:
        for m in (1, 2, 1023, 1024, 1025, 5000):
            for scale in (1e-30, 1e30):
                a = (values((m, 3), dtype) + 1e4).astype(dtype) * np.dtype(dtype).type(scale)
                A = check.distribute(a)
                for axis in (0, None):
                    wide = a.astype("float64")
                    exact = [[math.fsum(wide[:, j]) for j in range(3)]]
                    expected = np.array(exact if axis == 0 else [[math.fsum(exact[0])]])
                    S = check.linalg.sum(A, axis)
                    check.close(S, expected.astype(dtype), dtype, [dtype, m, scale, axis])
    a = np.abs(values((3000, 4), "float64"))
    a[5, 0], a[7, 1], a[9, 2], a[2999, 2] = np.inf, np.nan, np.inf, -np.inf
    check.same(check.linalg.sum(a, 0), a.sum(axis=0, keepdims=True), "inf and nan")


def triangles(check: Checks) -> None:
    """triu, tril and eye are NumPy's, for every diagonal, layout and dtype."""
    for index, layout in enumerate(SOME_LAYOUTS):
        for shape in ((7, 5), (3, 8), (1, 1), (1, 4)):
            dtype = NUMBERS[index % len(NUMBERS)]
            a = values(shape, dtype)
            for k in (-8, -4, -1, 0, 1, 3, 7):
                A = check.distribute(a, layout)
                what = [layout, shape, k]
                for name in ("triu", "tril"):
                    B = getattr(check.linalg, name)(A, k)
                    check.true(layout == B.layout, what)
                    check.same(B, getattr(np, name)(a, k), [name, *what])
                E = check.linalg.eye(*shape, dtype, layout, k)
                check.same(E, np.eye(*shape, k, dtype), ["eye", *what])
                check.true(E.layout == layout, ["eye", *what])


def masks(check: Checks) -> None:
    """Matrices of bool are computed in float64; products and selections stay bool, as in NumPy."""
    a = np.tril(values((9, 9), "bool")) | np.eye(9, dtype=bool)
    wide, b = a.astype("float64"), values((9, 2), "float64")
    lib, S = check.linalg, np.linalg.svd(wide, compute_uv=False)
    check.close(lib.gram(a), wide.T @ wide, "float64", "gram")
    check.close(lib.solve(a, a), np.eye(9), "float64", "solve", 1e3)
    check.close(lib.inv(a), np.linalg.inv(wide), "float64", "inv", 1e3)
    check.close(lib.lstsq(a, b), np.linalg.solve(wide, b), "float64", "lstsq", 1e4)
    check.close(lib.svdvals(a), S, "float64", "svdvals", 10)
    check.close(lib.eigh(a)[0], np.linalg.eigvalsh(wide), "float64", "eigh", 100)
    check.close(lib.kmeans(a, 1)[0], wide.mean(axis=0, keepdims=True), "float64", "kmeans")
    check.same(lib.matmul(a, a), a @ a, "matmul")
    check.same(lib.sum(a, 0), a.sum(axis=0, keepdims=True), "sum")
    check.same(lib.transpose(a), a.T, "transpose")
    check.same(lib.triu(a), np.triu(a), "triu")


def empty(check: Checks) -> None:
    """Matrices without rows or columns give NumPy's results or are refused by name."""
    ctx = check.ctx
    for m, n in ((0, 3), (3, 0), (0, 0)):
        a, b = np.zeros((m, n)), np.zeros((m, 2))
        A, B = check.distribute(a), check.distribute(b)
        k, what = min(m, n), [m, n]
        for found, expected in zip(check.linalg.qr(A), np.linalg.qr(a), strict=True):
            check.same(found, expected, [*what, "qr"])
        for found, shape in zip(check.linalg.svd(A), (0, (m, k), (n, k)), strict=True):
            check.same(found, np.zeros(shape), [*what, "svd"])
        check.true(check.linalg.matrix_rank(A) == 0, [*what, "rank"])
        check.same(check.linalg.pinv(A), np.zeros((n, m)), [*what, "pinv"])
        check.same(check.linalg.lstsq(A, B), np.zeros((n, 2)), [*what, "lstsq"])
        check.same(check.linalg.ridge(A, B, 1.0), np.zeros((n, 2)), [*what, "ridge"])
        check.same(check.linalg.gram(A), a.T @ a, [*what, "gram"])
        check.same(check.linalg.sum(A, 0), a.sum(axis=0, keepdims=True), what)
        check.true(check.linalg.norm(A) == 0, [*what, "norm"])
        for name in ("pca", "kmeans", "truncated_svd"):
            said = check.failures(getattr(check.linalg, name), A, 1)
            check.true(len(set(said)) == 1 and f" {name}: " in said[0], [*what, said])
        check.same(check.linalg.random_normal(m, n, 1), a, [*what, "normal"])
    A, B = ctx.zeros((0, 0), "float64"), ctx.zeros((0, 2), "float64")
    for found in (check.linalg.solve(A, B), check.linalg.conjugate_gradient(A, B)[0]):
        check.same(found, np.zeros((0, 2)), "solve")
    check.true(check.linalg.det(A) == 1 and check.linalg.slogdet(A) == (1, 0.0), "det")
    B = ctx.zeros((3, 0), "float64")
    check.same(check.linalg.solve(np.eye(3), B), np.zeros((3, 0)), "no right-hand sides")


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(
        gang, factors, components, clusters, searches, integers, sums, triangles, masks, empty,
    )  # fmt: skip
