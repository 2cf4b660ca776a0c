"""Rank side of test_petsc.py."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import scipy.linalg
import scipy.sparse

import ali
from ali import registry
from ali.interface import Context
from ali.sparse_matrices import from_whole, on_ranks
from mpi_workers.failures import Failure
from mpi_workers.local import local_gang
from mpi_workers.rank.gang_view import GangView

FAILED_CALLS = 200
LINE = scipy.sparse.diags_array([[-1.0] * 11, [2.0] * 12, [-1.0] * 11], offsets=[-1, 0, 1])


def missing(gang: GangView) -> list[str]:
    found = []
    for name in ("petsc", "slepc"):
        try:
            registry.load(name)
        except Failure as failure:
            found.append(f"{failure.kind}: {failure.message}")
    return found


def _whole(ctx: Context, X: Any) -> Any:
    return ctx.to_layout(X, "STAR_STAR").local


def prepared(gang: GangView) -> list[str]:
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


def errors_inside(gang: GangView) -> list[str]:
    """Errors of PETSc on one rank alone, deep in a preconditioner on all, and cancelled calls.

    Others leave PETSc within a second.
    """
    from tests.ali.test_petsc import SINGULAR, B, P, X, poisson  # noqa: PLC0415

    wrong, library = [], registry.load("petsc")
    last = scipy.sparse.diags_array(np.append(np.ones(6 * gang.size - 1), 0.0), format="csr")
    last.indices[-1] -= 1  # the last rank has an empty column: a zero pivot
    A, Z, S, L = (from_whole(gang, each).packed for each in (P, last, SINGULAR, poisson(60)))
    for number in range(2, FAILED_CALLS + 2):
        local_gang.begin(2 * number)
        gang.renew()
        ctx = Context(gang, {})
        one, gamg = ctx.new_replicated(np.ones(3)), {"method": "cg", "preconditioner": "gamg"}
        given: dict[str, Any] = (
            {"A": Z, "B": ctx.new_replicated(np.ones(6 * gang.size))},
            {"A": S, "B": one, **gamg},
            {"A": L, "B": ctx.new_replicated(np.ones(3600)), **gamg, "tol": 1e-15},
        )[number % 3]  # fmt: skip
        if number % 3 == 2:
            threading.Timer(0.01 * (number % 7), local_gang.interrupt, [2 * number]).start()
        begin = time.monotonic()
        words = ""
        try:
            with local_gang.EndedWaits():
                library.call(gang, "solve", given)
        except Exception as error:
            local_gang.interrupt(2 * number)
            words = f"{type(error).__name__} {error}"
        ended = time.monotonic()
        with local_gang.uninterruptible():
            every = gang.world.allgather((words, ended))
        late = max(end for _, end in every) - min(end for _, end in every)
        if number % 3 < 2 and not any("on its diagonal" in words for words, _ in every):
            wrong.append(f"call {number}: {every}")
        if late > 1 and number % 3 < 2:
            wrong.append(
                f"call {number}: ranks ended {late:.1f} s apart, after {ended - begin:.1f}"
            )
        if number % 25 == 0:
            gc.collect()
            local_gang.begin(2 * number + 1)
            gang.renew()
            ctx = Context(gang, {})
            good = {"A": A, "B": ctx.new_replicated(B), "tol": 1e-10}
            if not np.allclose(_whole(ctx, library.call(gang, "solve", good)[0]), X):
                wrong.append(f"after {number} calls that failed")
    return wrong


def files(gang: GangView) -> list[str]:
    """Matrices in PETSc's format are those that PETSc itself writes and reads."""
    from petsc4py import PETSc  # noqa: PLC0415  (where it is installed)

    from tests.ali.test_petsc import P, T  # noqa: PLC0415

    wrong, library, folder = [], registry.load("files"), ""
    with TemporaryDirectory() if gang.rank == 0 else contextlib.nullcontext("") as made:
        folder = gang.comm.bcast(made)
        for name, whole in (("P", P), ("T", T), ("E", scipy.sparse.csr_array((4, 0)))):
            path, A = f"{folder}/{name}.petsc", from_whole(gang, whole)
            library.call(gang, "save_sparse", {"A": A.packed, "path": path})
            read = PETSc.Mat().load(PETSc.Viewer().createBinary(path, "r", comm=gang.comm))
            starts, columns, elements = read.getValuesCSR()
            low, high = read.getOwnershipRange()
            mine = scipy.sparse.csr_array(
                (elements, columns, starts), (high - low, read.getSize()[1])
            )
            if (mine != scipy.sparse.csr_array(whole)[low:high]).nnz:
                wrong.append(f"PETSc reads {name}")
            read.view(PETSc.Viewer().createBinary(path, "w", comm=gang.comm))
            gang.comm.barrier()
            (again,) = library.call(gang, "load_sparse", {"path": path})
            if (on_ranks(gang, again).local != A.local).nnz:
                wrong.append(f"{name} of PETSc")
        gang.comm.barrier()
    return wrong


def grown(gang: GangView) -> int:
    """Bytes by which this rank has grown in many calls, a tenth of which it may."""
    from tests.ali.test_petsc import poisson  # noqa: PLC0415

    ctx, library, A = Context(gang, {}), registry.load("petsc"), from_whole(gang, poisson(150))
    B, sizes = ctx.new_replicated(np.ones(150 * 150), "VC_STAR:BLOCK"), []
    for number in range(60):
        with contextlib.suppress(Failure):  # it does not converge
            library.call(gang, "solve", {"A": A.packed, "B": B, "max_iterations": 1})
        if number % 50 == 9:
            sizes.append(psutil.Process().memory_info().rss)
    return max(ctx.comm.allgather(sizes[-1] - sizes[0]))


def documented(gang: GangView) -> float:
    """The largest error of the examples of docs/own-library.md."""
    ctx = Context(gang, {})
    text = (Path(ali.__file__).parents[1] / "docs" / "own-library.md").read_text()
    line = scipy.sparse.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(9, 9), format="csr")
    L, U0 = from_whole(gang, line), ctx.new_replicated(np.eye(9)[4])
    examples = {}
    for name in ("smoothing", "heat", "bratu"):
        (source,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", text, re.DOTALL)
        with TemporaryDirectory() as folder:
            Path(folder, f"{name}.py").write_text(source)
            examples[name] = registry.load(name, f"{folder}/{name}.py")
    arguments = {"L": L.packed, "U0": U0, "time": 0.5, "step": 0.005}
    U, _ = examples["heat"].call(gang, "heat", arguments)
    exact = scipy.linalg.expm(-0.5 * line.toarray())[:, 4]
    wrong = float(np.abs(_whole(ctx, U)[:, 0] - exact).max())
    U, _ = examples["bratu"].call(gang, "bratu", {"A": L.packed, "rate": 0.01})
    u = _whole(ctx, U)[:, 0]
    wrong = max(wrong, float(np.abs(line @ u - 0.01 * np.exp(u)).max()), float(u.max() < 0.01))
    X, D = examples["smoothing"].call(gang, "smooth", {"A": L.packed, "B": U0, "steps": 200})
    solved = np.linalg.solve(line.toarray(), np.eye(9)[4])
    inverse = on_ranks(gang, D).local.sum()
    return max(wrong, float(np.abs(_whole(ctx, X)[:, 0] - solved).max()) / 100,
               abs(float(ctx.comm.allreduce(inverse)) - 3.6))  # fmt: skip


def in_c(gang: GangView, path: str) -> list[str]:
    """The example in C, also after an error in it."""
    from tests.ali.test_petsc import B, P, X  # noqa: PLC0415

    wrong, library = [], registry.load("ksp", path)
    ring = np.roll(scipy.sparse.eye_array(25).toarray(), 1, axis=1)  # its diagonal is zero
    A, N = (from_whole(gang, each).packed for each in (P, ring))
    for number in range(2, 8):
        local_gang.begin(number)
        gang.renew()
        ctx = Context(gang, {})
        b = ctx.new_replicated(B[:, 0])
        given = {"A": A if number % 2 else N, "b": b}
        try:
            with local_gang.EndedWaits():
                x, steps = library.call(gang, "solve", given)
            if number % 2 == 0:
                wrong.append(f"call {number}: no error, {steps}")
            elif not np.allclose(_whole(ctx, x)[:, 0], X[:, 0]):
                wrong.append(f"call {number}")
        except Failure as failure:
            if number % 2 or "PETSc: " not in failure.message:
                wrong.append(f"call {number}: {failure}")
    return wrong


def pairs(gang: GangView) -> list[str]:
    """Vectors, and residuals of the results."""
    from tests.ali.test_petsc import MASS, ROUND, P, T  # noqa: PLC0415

    wrong, ctx = [], Context(gang, {})
    library = registry.load("slepc")
    A, M, S, C, grid = (
        from_whole(gang, each).packed
        for each in (P, MASS, T, ROUND, scipy.sparse.kronsum(LINE, LINE, "csr"))
    )
    for more in ({}, {"M": M}, {"sigma": 1.0}):
        W, V, residuals = library.call(gang, "eigsh", {"A": A, "k": 3, **more})
        w, v = _whole(ctx, W).ravel(), _whole(ctx, V)
        right = MASS @ v if "M" in more else v
        if not np.allclose(P @ v, w * right, atol=1e-6) or max(residuals) > 1e-7:
            wrong.append(f"eigsh {list(more)}")
    square = np.sort(np.add.outer(*[np.linalg.eigvalsh(LINE.toarray())] * 2).ravel())  # all twice
    for which, wanted in (("LM", square[-6:]), ("LA", square[-6:]), ("SA", square[:6])):
        W, V, _ = library.call(gang, "eigsh", {"A": grid, "k": 6, "which": which})
        if not np.allclose(w := _whole(ctx, W).ravel(), wanted, rtol=1e-6):
            wrong.append(f"eigsh {which} of a square: {w}, not {wanted}")
        v = _whole(ctx, V)
        if not np.allclose(v.T @ v, np.eye(6), atol=1e-6):
            wrong.append(f"eigsh {which} of a square: the vectors")
    W, V, _ = library.call(gang, "eigs", {"A": C, "k": 2})
    w, v = _whole(ctx, W).ravel(), _whole(ctx, V)
    if not np.allclose(ROUND @ v, w * v) or not np.allclose(np.sort(w.imag), [-3, 3]):
        wrong.append(f"eigs: {w}")
    Z, U, V, residuals = library.call(gang, "svds", {"A": S, "k": 3})
    s, u, v = _whole(ctx, Z).ravel(), _whole(ctx, U), _whole(ctx, V)
    if not np.allclose(T @ v, s * u, atol=1e-6) or not np.allclose(T.T @ u, s * v, atol=1e-6):
        wrong.append(f"svds: {s}")
    return wrong
