"""Sparse matrices: sending, products, PETSc and SLEPc behind handles, against SciPy and mpiexec.

``python -m benchmarks.sparse`` starts a Ray for it; not in ``make bench``. ``GRID=300``: a smaller
mesh. Without PETSc (``make petsc``) its rows are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sl

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import LibraryNotFoundError
from benchmarks.harness import Report, alone, in_turns, timed

CORES = min(2, len(os.sched_getaffinity(0)))
GRID = int(os.environ.get("GRID", "1000"))  # points along a side
ROUNDS = int(os.environ.get("ROUNDS", "3"))
ELEMENTS = 50 * GRID**2  # of the matrix that is sent
HAND = "import benchmarks.sparse as s; s.by_hand({n})"
SOLVER = ("cg", "gamg", 1e-8)


def poisson(n: int) -> Any:
    """The five-point matrix of order n^2."""
    line = sp.diags_array([-1.0, 2, -1], offsets=[-1, 0, 1], shape=(n, n))
    return sp.csr_array(sp.kron(sp.eye_array(n), line) + sp.kron(line, sp.eye_array(n)))


def by_hand(n: int) -> None:
    """The program with petsc4py that ``mpiexec`` runs: the second solve counts, as on a gang."""
    import petsc4py

    petsc4py.init([])
    from petsc4py import PETSc

    matrix = poisson(n)
    A = PETSc.Mat().createAIJ([n * n, n * n])
    low, high = A.getOwnershipRange()
    own = matrix[low:high]
    seconds = []
    for _ in range(1 + ROUNDS):
        begin = time.perf_counter()
        A = PETSc.Mat().createAIJ([n * n, n * n], csr=(own.indptr, own.indices, own.data))
        solver = PETSc.KSP().create()
        solver.setOperators(A)
        solver.setType(SOLVER[0])
        solver.getPC().setType(SOLVER[1])
        solver.setTolerances(rtol=SOLVER[2])
        x, b = A.createVecs()
        b.set(1.0)
        solver.solve(b, x)
        seconds.append(time.perf_counter() - begin)
    if PETSc.COMM_WORLD.rank == 0:
        print(json.dumps(min(seconds[1:])), flush=True)


def run() -> Report:
    report = Report("sparse")
    with AlchemistSession(CORES, progress=False) as als:
        _sent(report, als)
        matrix = poisson(GRID)
        A = als.send_matrix(matrix)
        _products(report, als, A, matrix)
        try:
            petsc, slepc = als.load_library("petsc"), als.load_library("slepc")
        except LibraryNotFoundError as error:
            report.notes.append(f"Without PETSc: {str(error).split('(')[0].strip()}.")
            return report
        _solved(report, als, petsc, A, matrix)
        _eigenvalues(report, als, slepc)
    return report


def _sent(report: Report, als: AlchemistSession) -> None:
    rows, each = GRID * GRID, 50
    starts = np.arange(0, ELEMENTS + 1, each, dtype=np.int32)
    columns = np.tile(np.arange(each, dtype=np.int32), rows)
    matrix = sp.csr_array((np.ones(ELEMENTS), columns, starts), shape=(rows, each))
    copies = [np.ones_like(x) for x in (matrix.indptr, matrix.indices, matrix.data)]

    def copy() -> None:
        for to, frm in zip(copies, (matrix.indptr, matrix.indices, matrix.data), strict=True):
            np.copyto(to, frm)

    times = in_turns({"copy": copy, "send": lambda: als.send_matrix(matrix).free()}, ROUNDS)
    report.add(
        f"send of {ELEMENTS / 1e6:.0f} million entries",
        times["copy"] / times["send"],
        0.5,
        "of np.copyto",
        detail=f"{times['send']:.3f} s; np.copyto of the three arrays {times['copy']:.3f} s",
    )


def _products(report: Report, als: AlchemistSession, A: Any, matrix: Any) -> None:
    x = np.ones(matrix.shape[1])
    X = als.send_matrix(x, layout="VC_STAR:BLOCK")
    last: dict[str, Any] = {}  # as in a program's loop, whose variable gets the next product

    def product(name: str, A: Any, x: Any) -> Callable[[], None]:
        return lambda: last.update({name: A @ x})

    times = in_turns({"scipy": product("scipy", matrix, x), "gang": product("gang", A, X)}, 20)
    report.add(
        f"A @ x, {matrix.shape[0]:,} rows",
        times["gang"] / times["scipy"],
        0.6,
        "x SciPy on one core",
        at_most=True,
        detail=f"{CORES} ranks; {1e3 * times['gang']:.1f} ms, SciPy {1e3 * times['scipy']:.1f} ms",
    )


def _solved(report: Report, als: AlchemistSession, petsc: Any, A: Any, matrix: Any) -> None:
    b = np.ones(matrix.shape[0])
    B = als.send_matrix(b, layout="VC_STAR:BLOCK")
    found: list[Any] = []

    def whole() -> None:
        sent = als.send_matrix(matrix)
        petsc.solve(sent, als.send_matrix(b), *SOLVER).X.fetch()

    works = {"gang": lambda: found.append(petsc.solve(A, B, *SOLVER)), "whole": whole}
    petsc.solve(A, B, *SOLVER)
    times = in_turns(works, ROUNDS)
    hand, direct = _hand(), _spsolve(matrix, b)
    about = f"{found[-1].iterations} iterations, residual {found[-1].residual:.1e}"
    label = f"2-D Poisson, {matrix.shape[0]:,} unknowns, cg + gamg"
    for what, value, target, unit, more in (
        (label, times["gang"] / hand, 1.05, "x mpiexec", f"{about}; by hand {hand:.2f} s"),
        (label, times["gang"] / direct, 0.25, "x spsolve", f"spsolve {direct:.1f} s"),
        (f"{label}, with transfers", times["whole"] / direct, 0.4, "x spsolve", ""),
    ):
        seconds = times["whole" if "transfers" in what else "gang"]
        detail = f"{CORES} ranks; {seconds:.2f} s; {more}".rstrip("; ")
        report.add(what, value, target, unit, at_most=True, detail=detail)


def _hand() -> float:
    """Seconds of the program under mpiexec, whose ranks yield as a gang's do."""
    mpiexec = Path(sys.executable).parent / "mpiexec"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if len(os.sched_getaffinity(0)) - 1 < CORES:
        env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    done = subprocess.run(
        [mpiexec, "-n", str(CORES), sys.executable, "-c", HAND.format(n=GRID)],
        env=env, stdout=subprocess.PIPE, check=True, timeout=900,
    )  # fmt: skip
    return float(json.loads(done.stdout))


def _spsolve(matrix: Any, b: Any) -> float:
    columns = matrix.tocsc()
    return timed(lambda: sl.spsolve(columns, b))


def _eigenvalues(report: Report, als: AlchemistSession, slepc: Any) -> None:
    matrix = poisson(GRID // 2)
    A = als.send_matrix(matrix)
    found: list[Any] = []
    times = in_turns(
        {
            "gang": lambda: found.append(slepc.eigsh(A, 20, sigma=0.0)),
            "scipy": lambda: sl.eigsh(matrix.tocsc(), 20, sigma=0.0),
        },
        1,
    )
    report.notes.append(
        f"20 smallest eigenvalues, {matrix.shape[0]:,} unknowns, by shift and invert (no target: "
        f"each rank factors the whole matrix): {times['gang']:.1f} s, {CORES} ranks, SciPy "
        f"{times['scipy']:.1f} s; the largest residual is {max(found[-1].residuals):.1e}."
    )


if __name__ == "__main__":
    alone(run, cpus=4)
