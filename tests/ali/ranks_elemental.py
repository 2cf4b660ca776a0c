"""Rank side of test_elemental.py: one launch for each number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import elemental
from ali.elemental.views import Elemental
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_elemental_checks import context, values
from tests.ali.ranks_elemental_linear import (
    factorizations,
    layouts,
    numbers,
    products,
    spectra,
    systems,
)
from tests.ali.ranks_elemental_models import factorised_data, models


def controls(gang: Gang) -> dict[str, Any]:
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


def said(gang: Gang, *calls: Any) -> list[str]:
    """The error of a call on each rank."""
    function, *arguments = calls
    try:
        function(context(gang), *arguments)
        words = "nothing"
    except Failure as failure:
        words = f"{failure.kind}: {failure.message}"
    everywhere: list[str] = gang.comm.allgather(words)
    return everywhere


def refusals(gang: Gang) -> dict[str, list[str]]:
    """Bad calls, which are refused before Elemental sees them, and what Elemental refuses."""
    ctx, e = context(gang), elemental
    tall, wide = (ctx.new_replicated(values(s, "float64")) for s in ((4, 3), (3, 4)))
    column, imaginary = ctx.new_replicated(values((4, 1), "float64")), tall
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
    return {name: said(gang, *call) for name, call in calls.items()}


def copies(gang: Gang) -> dict[str, int]:
    """How often each routine copies in Elemental, A being in MC_MR: the docstrings say it."""
    ctx, e, native = context(gang), elemental, vars(gang)["elemental"]["libEl"].call
    A, B = (ctx.new_replicated(values(s, "float64"), "MC_MR") for s in ((9, 7), (9, 2)))
    G = e.matmul(ctx, A, A, "T")
    C = ctx.new_replicated(values((7, 2), "float64"), "MC_MR")
    calls: dict[str, tuple[Any, ...]] = {
        "matmul": (A, A, "T"),
        "qr": (A,),
        "qr_pivoted": (A,),
        "lu": (A,),
        "cholesky": (G,),
        "svd": (A,),
        "svdvals": (A,),
        "polar": (A,),
        "pinv": (A,),
        "solve": (G, C),
        "lstsq": (A, B),
        "ridge": (A, B, 1.0),
        "eigh": (G,),
    }
    found = dict.fromkeys(calls, 0)
    for name, arguments in calls.items():

        def counting(function: str, *given: Any, name: str = name) -> None:
            found[name] += function.startswith("CopyDist")
            native(function, *given)

        ctx.state["libEl"].call = counting
        getattr(e, name)(ctx, *arguments)
    del ctx.state["libEl"].call
    return found


def renewals(gang: Gang) -> list[bool]:
    """After a failed call the gang has a new communicator, and Elemental a new grid."""
    found: list[bool] = []
    # MPICH has some 2000 communicators, and a grid takes ten: it must give them back.
    for _ in range(250 if gang.size == 2 else 3):
        ctx = context(gang)
        A = ctx.new_replicated(np.eye(3))
        found.append(elemental.norm(ctx, A, "inf") == 1.0 and ctx.state["grid"].comm is ctx.comm)
        gang.comm.Free()
        gang.renew()
    elemental.close(ctx.state)
    return [all(found), "grid" not in ctx.state, elemental.norm(context(gang), A, "inf") == 1.0]


def too_large(gang: Gang) -> str:
    """A matrix with more elements on a rank than a 32-bit integer counts."""
    ctx = context(gang)
    with Elemental(ctx) as el:
        if el.lib.int(1 << 40).value == 1 << 40:
            return "ShapeError: this libEl counts further"
        try:
            el._check_size((1 << 17, (1 << 15) * gang.size), "VC_STAR")
        except Failure as failure:
            return f"{failure.kind}: {failure.message}"
    return "nothing"


def found(gang: Gang) -> str:
    """Why libEl cannot be used here; empty if it can."""
    try:
        elemental.load({}, None)
    except Failure as failure:
        return failure.message
    return ""


def everything(gang: Gang) -> dict[str, Any]:
    functions = [layouts, products, factorizations, spectra, numbers, systems]
    if gang.size <= 3:  # interior points wait for each other thousands of times
        functions += [models, factorised_data]
    found: dict[str, Any] = {function.__name__: function(gang) for function in functions}
    for function in (controls, refusals, too_large, copies, renewals):
        found[function.__name__] = function(gang)
    return found
