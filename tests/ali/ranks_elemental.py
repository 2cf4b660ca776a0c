"""Rank side of test_elemental.py: one launch for each number of ranks.

That results of linear algebra are right is in ranks_routines.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ali import elemental
from ali.elemental.views import Elemental
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import LAYOUTS, Shape
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import FLOATS, Array, Checks, values
from tests.support.ranks_shared import failure_of


def context(gang: GangView) -> Context:
    """A context whose state lasts as long as the gang, as a loaded library's does."""
    state = vars(gang).setdefault("elemental", {})
    if not state:
        elemental.load(state, None)
    return Context(gang, state)


def checks(gang: GangView) -> Checks:
    check = Checks(gang)
    check.ctx = context(gang)
    return check


def low(shape: Shape, dtype: str, rank: int) -> Array:
    """A matrix of this rank, or of the least that the shape allows."""
    rank = min(rank, *shape)
    return values((shape[0], rank), dtype, 3) @ values((rank, shape[1]), dtype, 4)


def layouts(check: Checks) -> None:
    """Elemental reads and writes the elements that are there, in every layout."""
    shapes = [(7, 5), (2, 13), (1, 1)][: 3 if check.ctx.size <= 2 else 1]
    for layout, dtype, shape in itertools.product(LAYOUTS, FLOATS, shapes):
        a = values(shape, dtype)
        A = check.distribute(a, layout)
        with Elemental(check.ctx) as el:
            read = el.zeros(shape, dtype, "STAR_STAR")
            el("CopyDist", dtype, A, read)
            written = el.zeros(shape, dtype, layout)
            el("CopyDist", dtype, read, written)
        check.true(np.array_equal(read.local, a), ["read", layout, dtype, shape])
        check.true(np.array_equal(written.local, A.local), ["written", layout, dtype, shape])
    grid = check.ctx.state["grid"]
    check.true(len(grid.spare) <= 3 * len(LAYOUTS) * len(FLOATS), "objects are used again")


def special(check: Checks) -> None:
    """Inputs that need an answer of their own: integers, singular and low-rank matrices."""
    ctx = check.ctx
    for one, other in itertools.product(("int32", "bool", "complex64"), ("int64", "float64")):
        a, b = values((7, 5), one), values((5, 9), other, 1)
        C = elemental.matmul(ctx, check.distribute(a), check.distribute(b, "MC_MR"))
        kind = np.result_type(a, b)
        kind = np.dtype(np.float64) if kind.kind in "bi" else kind
        check.close(C, a.astype(kind) @ b, kind, [one, other])
    whole = np.arange(12).reshape(4, 3)
    norms = {kind: elemental.norm(ctx, check.distribute(whole), kind) for kind in ("fro", "max")}
    check.true(abs(norms["fro"] - np.linalg.norm(whole)) < 1e-13, "norm of integers")
    check.true(norms["max"] == 11, "max of integers")
    for kind in ("2", "1"):
        condition = elemental.cond(ctx, check.distribute(np.ones((4, 4))), kind)
        check.true(condition > 1e15, ["singular", kind])
    for shape, dtype, rank in itertools.product([(17, 17), (40, 6), (6, 31)], FLOATS, (2, 4)):
        a, what = low(shape, dtype, 2), [shape, dtype, rank]
        p, Z = map(check.whole, elemental.interpolative(ctx, check.distribute(a), rank))
        r = len(Z)  # A has rank 2, within rounding
        check.true(2 <= r <= rank and Z.shape[1] == shape[1] - r, [*what, Z.shape])
        near = a[:, p.ravel()[:r]] @ np.hstack([np.eye(r, dtype=dtype), Z])
        size = 5 * float(np.abs(a).max())
        check.close(near, a[:, p.ravel()], dtype, ["interpolative", *what], size)
        X = elemental.pinv(ctx, check.distribute(a))
        limit = max(shape) * float(np.finfo(dtype).eps)
        exact = np.linalg.pinv(a.astype(np.result_type(dtype, np.float64)), limit)
        steep = 1 + float(np.linalg.norm(a, 2) * np.linalg.norm(exact, 2))
        size = steep * float(np.abs(exact).max())
        check.close(X, exact.astype(dtype), dtype, ["pinv", *what], size)
        _, R, _ = elemental.qr_pivoted(ctx, check.distribute(a))
        fall = np.abs(np.diagonal(check.whole(R)))
        slack = 100 * float(np.finfo(dtype).eps) * float(fall[0])
        check.true((np.diff(fall) <= slack).all(), ["falling", *what])
        check.true((fall[2:] <= slack).all(), ["numerical rank", *what])
    zero = check.distribute(np.zeros((4, 3)))
    check.true(not check.whole(elemental.pinv(ctx, zero)).any(), "pinv of zero")


def factorised_data(check: Checks) -> None:
    ctx, few = check.ctx, check.ctx.size > 2
    rng = np.random.default_rng(6)
    a = rng.random((20, 3)) @ rng.random((3, 14))
    for dtype in ("float64",) if few else ("float64", "float32"):
        A = check.distribute(a.astype(dtype))
        X, Y = map(check.whole, elemental.nmf(ctx, A, 3, iterations=2 if few else 8))
        check.true(X.min() >= 0 and Y.min() >= 0 and X.dtype == dtype, ["nmf, sign", dtype])
        check.true(X.shape == (20, 3) and Y.shape == (14, 3), ["nmf, shapes", dtype])
        left = float(np.linalg.norm(a - X @ Y.T) / np.linalg.norm(a))
        check.true(left <= (0.15 if few else 0.05), ["nmf", dtype, left])
    for dtype in ("float64",) if few else FLOATS:
        plain = low((30, 24), dtype, 2)
        rare = 10 * values((30, 24), dtype, 8) * (rng.random((30, 24)) < 0.04)
        tol = 1e-4 if few or dtype in ("float32", "complex64") else 1e-6
        A = check.distribute((plain + rare).astype(dtype))
        L, S = map(check.whole, elemental.rpca(ctx, A, tol=tol))
        norm = np.linalg.norm(plain)
        check.true(np.linalg.norm(L - plain) <= 100 * tol * norm, ["rpca, L", dtype])
        check.true(np.linalg.norm(S - rare) <= 100 * tol * norm, ["rpca, S", dtype])
    zero = check.distribute(np.zeros((4, 3)))
    for found in map(check.whole, elemental.rpca(ctx, zero)):
        check.true((found == 0).all(), "rpca of zero")
    X, Y = map(check.whole, elemental.nmf(ctx, zero, 2, iterations=1))
    check.true(np.isfinite(X).all() and (X @ Y.T == 0).all(), "nmf of zero")


def controls(gang: GangView) -> dict[str, Any]:
    """Elemental's defaults, read through our structures: the layouts of both agree."""
    found = {}
    with Elemental(context(gang)) as el:
        for dtype in ("float32", "float64"):
            rpca, nnls = el.control("RPCA", dtype), el.control("NNLS", dtype)
            ends = nnls.socpCtrl.mehrotraCtrl
            found[dtype] = [
                *(rpca.useALM, rpca.progress, rpca.maxIts, rpca.beta, rpca.rho, float(rpca.tol)),
                *(nnls.approach, nnls.admmCtrl.maxIter, nnls.admmCtrl.rho, nnls.admmCtrl.inv),
                *(ends.maxIts, float(ends.maxStepRatio), ends.checkResiduals),
                0 < ends.reg2Perm < 1,
            ]
    return found


def refusals(check: Checks) -> dict[str, list[str]]:
    """Bad calls, which are refused before Elemental sees them, and what Elemental refuses."""
    ctx, e = check.ctx, elemental
    tall, wide = (ctx.new_replicated(values(s, "float64")) for s in ((4, 3), (3, 4)))
    column = ctx.new_replicated(values((4, 1), "float64"))
    imaginary = ctx.new_replicated(values((4, 3), "complex64"))
    square = ctx.new_replicated(np.diag([1.0, -1.0, 1.0]))
    broken = ctx.new_replicated(np.array([[1.0, np.nan], [0.0, 1.0]]))
    ones = ctx.new_replicated(np.ones((4, 1)))
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (e.matmul, tall, tall),
        "matmul, op": (e.matmul, tall, tall, "H"),
        "solve": (e.solve, tall, column),
        "solve, rows": (e.solve, square, column),
        "cholesky": (e.cholesky, tall),
        "eigh": (e.eigh, wide),
        "lstsq": (e.lstsq, wide, column),
        "ridge": (e.ridge, tall, column, 0.0),
        "norm": (e.norm, tall, "frobenius"),
        "cond": (e.cond, tall, "1"),
        "interpolative": (e.interpolative, tall, 3),
        "interpolative, zero": (e.interpolative, ctx.zeros((4, 3), "float64"), 1),
        "svd, nan": (e.svd, broken),
        "eigh, nan": (e.eigh, broken),
        "qr_pivoted, nan": (e.qr_pivoted, broken),
        "solve, nan": (e.solve, broken, ctx.new_replicated(np.ones((2, 1)))),
        "lasso": (e.lasso, tall, wide, 1.0),
        "lasso, weight": (e.lasso, tall, column, -1.0),
        "lasso, complex": (e.lasso, imaginary, column, 1.0),
        "basis_pursuit": (e.basis_pursuit, tall, column),
        "least_absolute": (e.least_absolute, wide, column),
        "svm": (e.svm, tall, column, 1.0),
        "nmf": (e.nmf, tall, 1),
        "nmf, rank": (e.nmf, tall, 4),
        "rpca, tol": (e.rpca, tall, 0.0, 0.0),
        "rpca, stops": (e.rpca, tall, 0.0, 1e-9, 1),
        "Elemental, cholesky": (e.cholesky, square),
        "Elemental, solve": (e.solve, ctx.zeros((4, 4), "float64"), ones),
        "after all": (e.matmul, wide, tall),
    }
    return {name: check.failures(call, ctx, *rest) for name, (call, *rest) in calls.items()}


def copies(gang: GangView) -> dict[str, int]:
    """How often each routine copies in Elemental, A being in MC_MR: the docstrings say it."""
    ctx, e, native = context(gang), elemental, vars(gang)["elemental"]["libEl"].call
    A, B = (ctx.new_replicated(values(s, "float64"), "MC_MR") for s in ((9, 7), (9, 2)))
    G = e.matmul(ctx, A, A, "T")
    C = ctx.new_replicated(values((7, 2), "float64"), "MC_MR")
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (A, A, "T"), "qr": (A,), "qr_pivoted": (A,), "lu": (A,), "cholesky": (G,),
        "svd": (A,), "svdvals": (A,), "polar": (A,), "pinv": (A,), "solve": (G, C), "lstsq": (A, B),
        "ridge": (A, B, 1.0), "eigh": (G,),
    }  # fmt: skip
    found = dict.fromkeys(calls, 0)
    for name, arguments in calls.items():

        def counting(function: str, *given: Any, name: str = name) -> None:
            found[name] += function.startswith("CopyDist")
            native(function, *given)

        ctx.state["libEl"].call = counting
        getattr(e, name)(ctx, *arguments)
    del ctx.state["libEl"].call
    return found


def renewal(check: Checks) -> None:
    A = check.ctx.new_replicated(np.eye(3))

    def norm() -> None:
        check.true(elemental.norm(check.ctx, A, "inf") == 1.0, "norm")

    check.grid_outlives_failed_calls(norm)
    elemental.close(check.ctx.state)
    norm()


def too_large(gang: GangView) -> str:
    """A matrix with more elements on a rank than a 32-bit integer counts."""
    ctx = context(gang)
    with Elemental(ctx) as el:
        if el.lib.int(1 << 40).value == 1 << 40:
            return "ShapeError: this libEl counts further"
        return failure_of(el._check_size, (1 << 17, (1 << 15) * gang.size), "VC_STAR")


def found(gang: GangView) -> str:
    """Why libEl cannot be used here; empty if it can."""
    try:
        elemental.load({}, None)
    except Failure as failure:
        return failure.message
    return ""


def everything(gang: GangView) -> dict[str, Any]:
    functions: list[Any] = [layouts, special, refusals, renewal]
    if gang.size <= 3:  # interior points wait for each other thousands of times
        functions += [factorised_data]
    found = Checks.results_of(gang, *functions, make=checks)
    for function in (controls, too_large, copies):
        found[function.__name__] = function(gang)
    return found
