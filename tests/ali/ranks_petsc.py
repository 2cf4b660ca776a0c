"""Rank side of test_petsc.py."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse

import ali
from ali import registry
from ali.interface import Context
from ali.sparse_matrices import from_whole, on_ranks
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang

FAILED_CALLS = 200


def missing(gang: Gang) -> list[str]:
    found = []
    for name in ("petsc", "slepc"):
        try:
            registry.load(name)
        except Failure as failure:
            found.append(f"{failure.kind}: {failure.message}")
    return found


def _whole(ctx: Context, X: Any) -> Any:
    return ctx.to_layout(X, "STAR_STAR").local


def prepared(gang: Gang) -> list[str]:
    """A solver stays for many right-hand sides, after calls that failed, and is freed."""
    from tests.ali.test_petsc import B, P, X  # noqa: PLC0415  (it imports pytest)

    wrong, ctx = [], Context(gang, {})
    library = registry.load("petsc")
    A = from_whole(gang, P)
    (solver,) = library.call(gang, "prepare", {
        "A": A.packed, "method": "cg", "preconditioner": "gamg", "tol": 1e-10,
    })  # fmt: skip
    for turn in range(3):
        for column in (0, 1):
            right = ctx.new_replicated(B[:, column], "MC_MR")
            found, *_ = library.call(gang, "solve_prepared", {"solver": solver, "B": right})
            if not np.allclose(_whole(ctx, found)[:, 0], X[:, column]):
                wrong.append(f"turn {turn}, column {column}")
        if turn == 0:
            gang.renew()  # as after a call that failed: another communicator
    failed = 0
    for number in range(FAILED_CALLS):
        about = {"A": A.packed, "B": ctx.new_replicated(B), "max_iterations": 1}
        try:
            library.call(gang, "solve", {**about, "preconditioner": "none"})
        except Failure:
            failed += 1
        if number % 50 == 0:
            good = {"A": A.packed, "B": ctx.new_replicated(B), "tol": 1e-10}
            if not np.allclose(_whole(ctx, library.call(gang, "solve", good)[0]), X):
                wrong.append(f"after {number} calls that failed")
    if failed != FAILED_CALLS:
        wrong.append(f"{failed} calls failed")
    from ali.petsc import solvers  # noqa: PLC0415  (needs PETSc)

    del solver
    gc.collect()
    if len(solvers._prepared):
        wrong.append("the solver was not freed with its matrix")
    return wrong


def documented(gang: Gang) -> float:
    """The largest error of the examples of docs/own-library.md."""
    ctx = Context(gang, {})
    text = (Path(ali.__file__).parents[1] / "docs" / "own-library.md").read_text()
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(9, 9), format="csr")
    L, U0 = from_whole(gang, line), ctx.new_replicated(np.eye(9)[4])
    examples = {}
    for name in ("smoothing", "heat"):
        (source,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", text, re.DOTALL)
        with TemporaryDirectory() as folder:
            Path(folder, f"{name}.py").write_text(source)
            examples[name] = registry.load(name, f"{folder}/{name}.py")
    arguments = {"L": L.packed, "U0": U0, "time": 0.5, "step": 0.005}
    U, _ = examples["heat"].call(gang, "heat", arguments)
    exact = scipy.linalg.expm(-0.5 * line.toarray())[:, 4]
    wrong = float(np.abs(_whole(ctx, U)[:, 0] - exact).max())
    X, D = examples["smoothing"].call(gang, "smooth", {"A": L.packed, "B": U0, "steps": 200})
    solved = np.linalg.solve(line.toarray(), np.eye(9)[4])
    inverse = on_ranks(gang, D).local.sum()
    return max(wrong, float(np.abs(_whole(ctx, X)[:, 0] - solved).max()) / 100,
               abs(float(ctx.comm.allreduce(inverse)) - 3.6))  # fmt: skip


def pairs(gang: Gang) -> list[str]:
    """Vectors, and residuals of the results."""
    from tests.ali.test_petsc import MASS, ROUND, P, T  # noqa: PLC0415

    wrong, ctx = [], Context(gang, {})
    library = registry.load("slepc")
    A, M, S, C = (from_whole(gang, each).packed for each in (P, MASS, T, ROUND))
    for more in ({}, {"M": M}, {"sigma": 1.0}):
        W, V, residuals = library.call(gang, "eigsh", {"A": A, "k": 3, **more})
        w, v = _whole(ctx, W).ravel(), _whole(ctx, V)
        right = MASS @ v if "M" in more else v
        if not np.allclose(P @ v, w * right, atol=1e-6) or max(residuals) > 1e-7:
            wrong.append(f"eigsh {list(more)}")
    W, V, _ = library.call(gang, "eigs", {"A": C, "k": 2})
    w, v = _whole(ctx, W).ravel(), _whole(ctx, V)
    if not np.allclose(ROUND @ v, w * v) or not np.allclose(np.sort(w.imag), [-3, 3]):
        wrong.append(f"eigs: {w}")
    Z, U, V, residuals = library.call(gang, "svds", {"A": S, "k": 3})
    s, u, v = _whole(ctx, Z).ravel(), _whole(ctx, U), _whole(ctx, V)
    if not np.allclose(T @ v, s * u, atol=1e-6) or not np.allclose(T.T @ u, s * v, atol=1e-6):
        wrong.append(f"svds: {s}")
    return wrong
