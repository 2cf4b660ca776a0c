"""Elemental's linear algebra against NumPy, and every layout against ours."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ali import elemental
from ali.elemental.views import Elemental
from mpi_workers.matrix.layout import LAYOUTS
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_elemental_checks import FLOATS, Checks, adjoint, ill, low, some, values

SHAPES = [(17, 17), (40, 6), (6, 31), (9, 8), (1, 1)]


def layouts(gang: Gang) -> list[Any]:
    """Elemental reads and writes the elements that are there, in every layout."""
    check = Checks(gang)
    shapes = [(7, 5), (2, 13), (1, 1)][: 3 if gang.size <= 2 else 1]
    for layout, dtype, shape in itertools.product(LAYOUTS, FLOATS, shapes):
        a = values(shape, dtype)
        A = check.give(a, layout)
        with Elemental(check.ctx) as el:
            read = el.zeros(shape, dtype, "STAR_STAR")
            el("CopyDist", dtype, A, read)
            written = el.zeros(shape, dtype, layout)
            el("CopyDist", dtype, read, written)
        check.true(np.array_equal(read.local, a), ["read", layout, dtype, shape])
        check.true(np.array_equal(written.local, A.local), ["written", layout, dtype, shape])
    grid = check.ctx.state["grid"]
    check.true(len(grid.spare) <= 3 * len(LAYOUTS) * len(FLOATS), "objects are used again")
    return check.result()


def products(gang: Gang) -> list[Any]:
    check = Checks(gang)
    ops = {"N": np.asarray, "T": np.transpose, "C": adjoint}
    for (m, k, n), dtype, (left, right), (ta, tb) in some(
        gang,
        [(17, 23, 13), (1, 9, 5), (30, 2, 30)],
        FLOATS,
        [
            ("MC_MR", "MC_MR"),
            ("VC_STAR", "STAR_VR"),
            ("CIRC_CIRC", "MD_STAR"),
            ("BLOCK", "BLOCK_CYCLIC:4"),
        ],
        ["NN", "TN", "CN", "NT", "NC", "TC"],
    ):
        a, b = values((m, k), dtype), values((k, n), dtype, 1)
        A = check.give(a if ta == "N" else np.ascontiguousarray(ops[ta](a)), left)
        B = check.give(b if tb == "N" else np.ascontiguousarray(ops[tb](b)), right)
        C = elemental.matmul(check.ctx, A, B, ta, tb)
        check.true(C.layout == "MC_MR" and C.dtype == dtype, ["C is", C.layout, str(C.dtype)])
        check.close(*check.whole(C), a @ b, [(m, k, n), left, right, ta, tb])
    for one, other in some(gang, ("int32", "int64", "bool", *FLOATS), ("int64", "bool", *FLOATS)):
        a = (10 * values((7, 5), one)).astype(one)
        b = (10 * values((5, 9), other)).astype(other)
        C = elemental.matmul(check.ctx, check.give(a), check.give(b, "MC_MR"))
        kind = np.result_type(a, b)
        check.true(C.dtype == (np.float64 if kind.kind in "bi" else kind), [one, other])
        check.close(*check.whole(C), a.astype(C.dtype) @ b, [one, other])
    a = check.give(values((9, 9), "float64"))
    check.close(
        *check.whole(elemental.matmul(check.ctx, a, a)),
        values((9, 9), "float64") @ values((9, 9), "float64"),
        "A A",
    )
    return check.result()


def factorizations(gang: Gang) -> list[Any]:
    check = Checks(gang)
    ctx = check.ctx
    for shape, dtype, layout, form in some(
        gang, SHAPES, FLOATS, ["VC_STAR", "MC_MR", "BLOCK", "BLOCK_CYCLIC:3"], ["full", "low"]
    ):
        a = low(shape, dtype, 3) if form == "low" else values(shape, dtype)
        A, k, what = check.give(a, layout), min(shape), [shape, dtype, layout, form]
        Q, R = check.whole(*elemental.qr(ctx, A))
        check.close(Q @ R, a, ["qr", *what])
        check.orthonormal(Q, ["Q of qr", *what])
        diagonal = np.diagonal(R)
        check.true((diagonal.real >= 0).all() and (diagonal.imag == 0).all(), ["diag(R)", *what])
        check.true(np.array_equal(R, np.triu(R)), ["R of qr", *what])
        Q, R, p = check.whole(*elemental.qr_pivoted(ctx, A))
        check.close(Q @ R, a[:, p[:, 0]], ["qr_pivoted", *what])
        check.orthonormal(Q, ["Q of qr_pivoted", *what])
        check.true(sorted(p[:, 0]) == list(range(shape[1])), ["p of qr_pivoted", *what])
        fall = np.abs(np.diagonal(R))
        slack = 100 * float(np.finfo(dtype).eps) * float(fall[0])
        check.true((np.diff(fall) <= slack).all(), ["falling", *what])
        if form == "low":
            check.true((fall[3:] <= slack).all(), ["numerical rank", *what])
            continue
        L, U, p = check.whole(*elemental.lu(ctx, A))
        check.close(L @ U, a[p[:, 0]], ["lu", *what])
        check.true(L.shape == (shape[0], k) and U.shape == (k, shape[1]), ["lu's shapes", *what])
        check.true(np.array_equal(np.tril(L, -1) + np.eye(*L.shape), L), ["L of lu", *what])
        check.true(np.array_equal(np.triu(U), U), ["U of lu", *what])
        check.true(np.abs(L).max() < 1.5, ["pivots", *what])
        h = a @ adjoint(a) + np.eye(shape[0], dtype=dtype)
        (L,) = check.whole(elemental.cholesky(ctx, check.give(np.tril(h), layout)))
        check.close(L @ adjoint(L), h, ["cholesky", *what])
        check.true(np.array_equal(L, np.tril(L)), ["L of cholesky", *what])
    for shape, dtype, rank in some(gang, SHAPES[:4], FLOATS, [2, 4]):
        a = low(shape, dtype, 2)
        p, Z = check.whole(*elemental.interpolative(ctx, check.give(a), rank))
        what = ["interpolative", shape, dtype, rank]
        r = len(Z)  # A has rank 2, within rounding
        check.true(2 <= r <= rank and Z.shape[1] == shape[1] - r, [*what, Z.shape])
        near = a[:, p[:r, 0]] @ np.hstack([np.eye(r, dtype=dtype), Z])
        check.close(near, a[:, p[:, 0]], what, 300)
    return check.result()


def spectra(gang: Gang) -> list[Any]:
    check = Checks(gang)
    ctx = check.ctx
    for shape, dtype, form in some(gang, SHAPES, FLOATS, ["full", "low", "ill", "zero"]):
        a = values(shape, dtype)
        if form != "full":
            a = {"low": low(shape, dtype, 3), "zero": 0 * a}.get(form, ill(shape[0], dtype))
        A, what = check.give(a), [shape, dtype, form]
        limit = 3000 if form == "ill" else 100  # MRRR, and eigenvalues in a heap at zero
        S, U, V = check.whole(*elemental.svd(ctx, A))
        expected = np.linalg.svd(a, compute_uv=False)
        check.true(S.dtype == expected.dtype and (np.diff(S[:, 0]) <= 0).all(), ["S is", *what])
        check.close(S[:, 0], expected, ["S", *what])
        check.close((U * S[:, 0]) @ adjoint(V), a, ["svd", *what], limit)
        check.orthonormal(U, ["U", *what], limit)
        check.orthonormal(V, ["V", *what], limit)
        (S,) = check.whole(elemental.singular_values(ctx, A))
        check.close(S[:, 0], expected, ["singular_values", *what])
        Q, P = check.whole(*elemental.polar(ctx, A))
        check.close(Q @ P, a, ["polar", *what], limit)
        check.true(np.array_equal(P, adjoint(P)), ["P is Hermitian", *what])
        check.true(np.linalg.eigvalsh(P)[0] >= -1e-5 * expected[0], ["P is positive", *what])
        narrow = Q if len(a) >= a.shape[1] else adjoint(Q)
        check.orthonormal(narrow, ["Q of polar", *what], limit)
        (X,) = check.whole(elemental.pinv(ctx, A))
        if form == "ill":  # what counts as zero decides; this must hold whatever it is
            check.true(np.isfinite(X).all(), ["pinv", *what])
        else:
            rcond = max(a.shape) * float(np.finfo(dtype).eps)
            steep = expected[0] / expected[expected > rcond * expected[0]].min(initial=np.inf)
            exact = np.linalg.pinv(a.astype(np.result_type(dtype, np.float64)), rcond=rcond)
            check.close(X, exact.astype(dtype), ["pinv", *what], 60 * (1 + steep))
        if a.shape[0] == a.shape[1]:
            h = (a + adjoint(a)).astype(dtype)
            W, V = check.whole(*elemental.eigh(ctx, check.give(np.tril(h))))
            check.close(W[:, 0], np.linalg.eigvalsh(h), ["W", *what])
            check.close((V * W[:, 0]) @ adjoint(V), h, ["eigh", *what], limit)
            check.orthonormal(V, ["V of eigh", *what], limit)
    return check.result()


def numbers(gang: Gang) -> list[Any]:
    check = Checks(gang)
    kinds: dict[str, Any] = {"fro": "fro", "1": 1, "inf": np.inf, "2": 2, "nuc": "nuc"}
    for shape, dtype, layout, (kind, order) in some(
        gang, SHAPES[:3], FLOATS, ["VC_STAR", "STAR_MD", "MR_STAR"], list(kinds.items())
    ):
        a = values(shape, dtype)
        A, what = check.give(a, layout), [shape, dtype, layout, kind]
        found = np.array([elemental.norm(check.ctx, A, kind)], a.real.dtype)
        check.close(found, np.array([np.linalg.norm(a, order)], a.real.dtype), ["norm", *what])
        check.true(
            elemental.norm(check.ctx, A, "max") == np.abs(a).max() or a.dtype.kind == "c",
            ["max", *what],
        )
        if kind != "nuc" and shape[0] == shape[1]:
            exact = float(np.linalg.cond(a, order))
            ratio = np.array([elemental.cond(check.ctx, A, kind) / exact], a.real.dtype)
            check.close(ratio, np.ones(1, a.real.dtype), ["cond", *what], 60 * exact)
    whole = np.arange(12).reshape(4, 3)
    check.true(
        abs(elemental.norm(check.ctx, check.give(whole)) - np.linalg.norm(whole)) < 1e-13,
        "integers",
    )
    singular = check.give(np.ones((4, 4)))
    for kind in ("2", "1"):
        check.true(elemental.cond(check.ctx, singular, kind) > 1e15, ["singular", kind])
    return check.result()


def systems(gang: Gang) -> list[Any]:
    check = Checks(gang)
    ctx = check.ctx
    for shape, dtype, k, form in some(gang, SHAPES, FLOATS, [1, 5], ["full", "ill"]):
        a = values(shape, dtype) if form == "full" else ill(shape[0], dtype)
        if form == "ill" and shape[0] < 9:
            continue
        b, what = values((len(a), k), dtype, 2), [shape, dtype, k, form]
        A, B = check.give(a), check.give(b, "MC_MR")
        if a.shape[0] == a.shape[1]:
            (X,) = check.whole(elemental.solve(ctx, A, B))
            # Backward error: what X solves exactly is within rounding of A.
            scale = np.abs(a).sum(1).max() * np.abs(X).max() + np.abs(b).max()
            check.close((a @ X - b) / scale, 0 * b, ["solve", *what])
        if form == "ill":
            continue
        (X,) = check.whole(elemental.lstsq(ctx, A, B))
        check.close(X, np.linalg.lstsq(a, b)[0].astype(dtype), ["lstsq", *what], 3000)
        for lam in (0.25, 100.0):
            (X,) = check.whole(elemental.ridge(ctx, A, B, lam))
            gram = adjoint(a) @ a + lam * np.eye(a.shape[1])
            exact = np.linalg.solve(gram, adjoint(a) @ b).astype(dtype)
            check.close(X, exact, ["ridge", lam, *what], 1000)
    return check.result()
