"""Functions that test_linalg.py runs on ranks: factorizations that stay distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from ali import DistMatrix, blocks, linalg
from ali.interface import Context
from ali.linalg.eigen import tridiagonal_eigh
from mpi_workers.rank.gang_view import GangView
from tests.ali import ranks_linalg_solvers
from tests.ali.ranks_linalg_checks import FLOATS, Checks, values
from tests.ali.ranks_routines import spread
from tests.ali.ranks_stated import PANEL, alone, peak

LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC")


SHAPES = ((24, 24), (25, 17), (17, 25), (60, 9), (9, 60), (7, 7))


def least_squares(check: Checks) -> None:
    ranks_linalg_solvers.least_squares(check, spread=True)


def leading_vectors(check: Checks) -> None:
    """Leading vectors from a Gram matrix that would not fit."""
    for shape, dtype, layout in check.sample(SHAPES, FLOATS, LAYOUTS):
        a, what = values(shape, dtype), [shape, dtype, layout]
        A = check.distribute(a, layout)
        s, u, v = map(check.whole, check.linalg.truncated_svd(A, 2, method="gram"))
        largest = np.linalg.svd(a, compute_uv=False)[:2]
        size = 20 * float(largest[0])
        check.close(s, largest, np.zeros(0, dtype).real.dtype, [*what, "S"], size)
        check.close(a @ v, u * s, dtype, [*what, "A V"], size)


def exponentials(check: Checks) -> None:
    for n, dtype, layout, size in check.sample((1, 4, 13, 40), FLOATS, LAYOUTS, (0.0, 0.1, 1, 3)):
        a = np.asarray(values((n, n), dtype) * size, dtype)
        exact = scipy.linalg.expm(a)
        found = check.linalg.expm(check.distribute(a, layout))
        scale = 10 * (1 + np.linalg.norm(a, 1)) * float(np.abs(exact).max())
        check.close(found, exact, dtype, [n, dtype, layout, size], scale)


def tridiagonals(check: Checks) -> None:
    """Clustered, multiple and zero eigenvalues, and subdiagonals of zero."""
    n = 75
    rng = np.random.default_rng(3)
    glued = np.ones(n - 1)
    glued[20::21] = 1e-14
    cases = {
        "any": (rng.standard_normal(n), rng.standard_normal(n - 1)),
        "laplacian": (np.full(n, 2.0), np.full(n - 1, -1.0)),
        "wilkinson, glued": (np.abs(np.arange(n) % 21 - 10.0), glued),
        "identity": (np.ones(n), np.full(n - 1, 1e-20)),
        "diagonal": (rng.standard_normal(n), np.zeros(n - 1)),
        "graded": (10.0 ** -np.arange(n), 10.0 ** -np.arange(n - 1)),
    }
    for what, (d, e) in cases.items():
        w, Z = tridiagonal_eigh(check.ctx, d, e)
        z, t = check.whole(Z), np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
        exact = scipy.linalg.eigvalsh_tridiagonal(d, e)
        check.close(np.sort(w), exact, "float64", what, float(np.abs(exact).max()))
        check.close(t @ z, z * w, "float64", [what, "vectors"], float(np.abs(exact).max()))
        check.orthonormal(z, what)


def everything(gang: GangView) -> dict[str, Any]:
    with spread():
        return Checks.results_of(gang, least_squares, leading_vectors, tridiagonals, exponentials)


def leading(ctx: Context, A: DistMatrix) -> Any:
    return linalg.truncated_svd(ctx, A, 5, method="gram", tol=1e-2)


def memory(gang: GangView, n: int) -> dict[str, float]:
    """The most memory that a rank takes beyond the arguments' share, in its shares of A."""
    check = alone(gang)
    blocks.PANEL = PANEL
    rng, found = np.random.default_rng(1), {}
    a = rng.standard_normal((n, n))
    for name in ("eigh", "svd", "qr", "polar", "lstsq", "pinv", "solve", "det", "ridge", "gram"):
        for size in (600, n):  # the first call loads code
            A = check.distribute(a[:size, :size])
            B: list[Any] = []
            if name in ("lstsq", "solve", "ridge"):
                B.append(check.distribute(a[:size, :2]))
            if name == "ridge":
                B.append(0.5)
            held = A.local.nbytes
            call = leading if name == "gram" else getattr(linalg, name)
            results, most = peak(gang, lambda A=A, B=B, call=call: call(check.ctx, A, *B))
            del results
        found[name] = max(gang.comm.allgather((held + most) / held))
        del A, B
    return found
