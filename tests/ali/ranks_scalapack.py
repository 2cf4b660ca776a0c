"""Rank side of test_scalapack.py: every routine against NumPy on the whole matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from ali import scalapack
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_scalapack_blocks import in_place
from tests.ali.ranks_scalapack_checks import Array, Checks, blocks, some, values
from tests.ali.ranks_scalapack_failures import ignored, refusals, renewal, troubles

FLOATS = ("float32", "float64", "complex64", "complex128")
SHAPES = [(67, 23), (23, 67), (40, 40), (1, 1), (1, 5), (5, 1), (3, 2), (16, 16)]


def cases(gang: Gang) -> list[tuple[str, tuple[int, int], str, str]]:
    """Way, shape, dtype, kind; some of them where ranks crowd the machine (see `some`)."""
    found = [
        (way, shape, dtype, "")
        for way, shape, dtype in itertools.product(("lies", "blocks"), SHAPES, FLOATS)
    ]
    kinds = ("zero", "low rank", "ill-conditioned")
    for way, dtype, kind in itertools.product(("lies", "blocks"), FLOATS, kinds):
        found += [(way, (30, 19), dtype, kind), (way, (19, 30), dtype, kind)]
    return some(gang, found)


def factorizations(gang: Gang) -> list[Any]:
    """lu, qr, lq, svd, svdvals of all shapes."""
    check = Checks(gang)
    ctx = check.ctx
    for case in cases(gang):
        way, shape, dtype, kind = case
        a, k = values(shape, dtype, kind), min(shape)
        A = check.distribution(a)
        with blocks(way):
            results = scalapack.lu(ctx, A)
            check.layouts(results, "MC_MR MC_MR STAR_STAR", ["lu", case])
            low, up, order = map(check.whole, results)
            check.product(a[order[:, 0]], low, up, what=["lu", case])
            check.true(not np.triu(low, 1).any() and not np.tril(up, -1).any(), ["lu", case])
            check.true((np.diagonal(low) == 1).all(), ["lu: unit diagonal", case])
            check.true(sorted(order[:, 0]) == list(range(shape[0])), ["lu: permutation", case])

            results = scalapack.qr(ctx, A)
            check.layouts(results, "MC_MR MC_MR", ["qr", case])
            q, r = map(check.whole, results)
            check.product(a, q, r, what=["qr", case])
            check.orthonormal(q, ["qr", case])
            check.true(not np.tril(r, -1).any(), ["qr: triangular", case])
            _real_diagonal(check, r, ["qr", case])

            low, q = map(check.whole, scalapack.lq(ctx, A))
            check.product(a, low, q, what=["lq", case])
            check.orthonormal(q.conj().T, ["lq", case])
            check.true(not np.triu(low, 1).any(), ["lq: triangular", case])
            _real_diagonal(check, low, ["lq", case])

            results = scalapack.svd(ctx, A)
            check.layouts(results, "STAR_STAR MC_MR MC_MR", ["svd", case])
            s, u, v = map(check.whole, results)
            check.product(a, u * s[:, 0], v.conj().T, what=["svd", case])
            check.orthonormal(u, ["svd: U", case])
            check.orthonormal(v, ["svd: V", case])
            exact = np.linalg.svd(a.astype("complex128"), compute_uv=False)[:, None]
            top = float(exact[0, 0]) or 1e-30
            check.close(s, exact, top, dtype, ["svd: S", case])
            alone = check.whole(scalapack.svdvals(ctx, A))
            check.close(alone, exact, top, dtype, ["svdvals", case])
            check.true(s.shape == (k, 1) and (np.diff(s[:, 0]) <= 0).all(), ["svd: S", case])
        check.true(np.array_equal(check.whole(A), a), ["A is as it was", case])
    for dtype, shape in itertools.product(("bool", "int32"), ((12, 17), (17, 12))):
        a = values(shape, dtype)
        s, u, v = map(check.whole, scalapack.svd(ctx, check.distribution(a)))
        check.product(a.astype("float64"), u * s[:, 0], v.T, what=["svd", dtype, shape])
    return check.result()


def _real_diagonal(check: Checks, r: Array, what: Any) -> None:
    diagonal = np.diagonal(r)
    check.true((diagonal.real >= 0).all() and not diagonal.imag.any(), [what, "diagonal"])


def systems(gang: Gang) -> list[Any]:
    """solve, cholesky, lstsq, eigh, condest."""
    check = Checks(gang)
    ctx = check.ctx
    choices = list(itertools.product(("lies", "blocks"), (1, 2, 7, 16, 45), FLOATS))
    for case in some(gang, choices):
        way, n, dtype = case
        a = values((n, n), dtype) + n * np.eye(n, dtype=dtype)
        h = values((n, n), dtype, seed=1)
        h = h @ h.conj().T + np.eye(n, dtype=dtype)
        b = values((n, 3), dtype, seed=2)
        A, B, H = check.distribution(a), check.distribution(b), check.distribution(h)
        with blocks(way):
            X = scalapack.solve(ctx, A, B)
            check.layouts([X], "MC_MR", ["solve", case])
            check.product(b, a, check.whole(X), what=["solve", case])

            L = check.whole(scalapack.cholesky(ctx, check.distribution(np.tril(h))))
            check.product(h, L, L.conj().T, what=["cholesky", case])
            check.true(not np.triu(L, 1).any(), ["cholesky: triangular", case])
            _real_diagonal(check, L, ["cholesky", case])

            for g in (h, np.tril(values((n, n), dtype))):  # definite, and not
                full = g if g is h else g + g.conj().T
                W, V = scalapack.eigh(ctx, check.distribution(g if g is h else np.tril(full)))
                check.layouts([W, V], "STAR_STAR MC_MR", ["eigh", case])
                w, v = check.whole(W), check.whole(V)
                check.product(full, v * w[:, 0], v.conj().T, what=["eigh", case])
                check.orthonormal(v, ["eigh", case])
                check.true((np.diff(w[:, 0]) >= 0).all(), ["eigh: ascending", case])

            for m, (kind, order) in itertools.product((a, values((n, n), dtype)), CONDITIONS):
                found = scalapack.condest(ctx, check.distribution(m), kind)
                found /= float(np.linalg.cond(m.astype("complex128"), order))
                check.true(0.2 < found < 1.01, ["condest", kind, case, found])

            for shape in ((n + 20, n), (n, n), (n, n + 20)):
                m = values(shape, dtype, seed=3)
                rhs = values((shape[0], 2), dtype, seed=4)
                X = scalapack.lstsq(ctx, check.distribution(m), check.distribution(rhs))
                check.layouts([X], "MC_MR", ["lstsq", case, shape])
                exact = np.linalg.lstsq(m, rhs, rcond=None)[0]
                size = float(np.linalg.cond(m)) * float(np.abs(exact).max())
                check.close(check.whole(X), exact, size, dtype, ["lstsq", case, shape])
        for matrix, was in ((A, a), (B, b), (H, h)):
            check.true(np.array_equal(check.whole(matrix), was), ["as it was", case])
    return check.result()


ORDERS = {"fro": "fro", "1": 1, "inf": np.inf}
CONDITIONS = (("1", 1), ("inf", np.inf))


def products(gang: Gang) -> list[Any]:
    """matmul in all transposes and mixtures of dtypes, norm in all kinds."""
    check = Checks(gang)
    ctx = check.ctx
    turned: dict[str, Callable[[Array], Array]] = {
        "N": lambda x: x,
        "T": lambda x: x.T,
        "C": lambda x: x.conj().T,
    }
    choices = itertools.product(
        ("lies", "blocks"),
        [(17, 23, 13), (1, 40, 5), (2, 3, 2)],
        FLOATS,
        ["NN", "TN", "NC", "CT", "TT"],
    )
    for way, (m, k, n), dtype, (one, two) in some(gang, list(choices)):
        a = values((m, k) if one == "N" else (k, m), dtype)
        b = values((k, n) if two == "N" else (n, k), dtype, seed=1)
        with blocks(way):
            C = scalapack.matmul(ctx, check.distribution(a), check.distribution(b), one, two)
        check.layouts([C], "MC_MR", ["matmul", way])
        expected = turned[one](a) @ turned[two](b)
        scale = float(np.linalg.norm(a) * np.linalg.norm(b))
        what = ["matmul", way, (m, k, n), dtype, one, two]
        check.close(check.whole(C), expected, scale, dtype, what)
    for one, two in itertools.product(
        (*FLOATS, "int32", "bool"), ("float64", "complex64", "int64", "bool")
    ):
        a, b = values((7, 5), one), values((5, 9), two, seed=1)
        C = check.whole(scalapack.matmul(ctx, check.distribution(a), check.distribution(b)))
        kind = np.result_type(*(np.float64 if x.dtype.kind in "bi" else x.dtype for x in (a, b)))
        check.true(C.dtype == kind, ["matmul", one, two, str(C.dtype)])
        check.close(C, a.astype(kind) @ b, 400, kind, ["matmul", one, two])
    for shape, dtype in itertools.product([(13, 7), (1, 1), (2, 50)], (*FLOATS, "int32", "bool")):
        a = values(shape, dtype)
        A = check.distribution(a)
        used = "float64" if dtype in ("int32", "bool") else dtype
        for kind, order in ORDERS.items():
            exact = float(np.linalg.norm(a.astype("complex128"), order))
            found = scalapack.norm(ctx, A, kind)
            check.close([found], [exact], exact, used, ["norm", kind, shape, dtype])
        top = np.abs(a).max()
        check.close([scalapack.norm(ctx, A, "max")], [top], top, used, ["max", shape, dtype])
    a = values((30, 20), "float64")
    check.close([scalapack.norm(ctx, check.distribution(a * 1e300))],
                [np.linalg.norm(a) * 1e300], 1e302, "float64", "no overflow")  # fmt: skip
    a[29, 19] = np.nan
    check.true(np.isnan(scalapack.norm(ctx, check.distribution(a), "max")), "norm of NaN")
    same = check.distribution(values((9, 9), "float64"), "MC_MR")
    C = scalapack.matmul(ctx, same, same)
    square = values((9, 9), "float64")
    check.close(check.whole(C), square @ square, 100, "float64", "A A")
    check.true(np.array_equal(check.whole(same), square), "A is as it was")
    return check.result()


def everything(gang: Gang) -> dict[str, Any]:
    """All of it in one launch: starting ranks takes longer than most checks."""
    try:
        scalapack.load({}, None)
    except Failure as failure:
        return {"missing": failure.message}
    functions = (
        products, factorizations, systems, in_place, refusals, troubles, renewal, ignored
    )  # fmt: skip
    return {function.__name__: function(gang) for function in functions}
