"""Functions that test_linalg.py runs on ranks: factorizations that stay distributed."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.linalg

from ali import DistMatrix, blocks, linalg
from ali.interface import Context
from ali.linalg.eigen import tridiagonal_eigh
from mpi_workers.rank.gang import Gang
from tests.ali import ranks_linalg_solvers
from tests.ali.ranks_linalg_checks import FLOATS, Checks, orthonormal, sample, values
from tests.ali.ranks_routines import spread
from tests.ali.ranks_stated import PANEL, alone, peak

LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR", "CIRC_CIRC")


SHAPES = ((24, 24), (25, 17), (17, 25), (60, 9), (9, 60), (7, 7))


def least_squares(gang: Gang) -> list[Any]:
    return ranks_linalg_solvers.least_squares(gang, spread=True)


def leading_vectors(gang: Gang) -> list[Any]:
    """Leading vectors from a Gram matrix that would not fit."""
    check = Checks(gang)
    for shape, dtype, layout in sample(gang, SHAPES, FLOATS, LAYOUTS):
        a, what = values(shape, dtype), [shape, dtype, layout]
        found = linalg.truncated_svd(check.ctx, check.distribute(a, layout), 2, method="gram")
        s, u, v = (check.whole(x) for x in found)
        largest = np.linalg.svd(a, compute_uv=False)[:2]
        size = 20 * float(largest[0])
        check.close(s, largest, np.zeros(0, dtype).real.dtype, [*what, "S"], size)
        check.close(a @ v, u * s, dtype, [*what, "A V"], size)
    return check.result()


def exponentials(gang: Gang) -> list[Any]:
    check = Checks(gang)
    for n, dtype, layout, size in sample(gang, (1, 4, 13, 40), FLOATS, LAYOUTS, (0.0, 0.1, 1, 3)):
        a = np.asarray(values((n, n), dtype) * size, dtype)
        exact = scipy.linalg.expm(a)
        found = check.whole(linalg.expm(check.ctx, check.distribute(a, layout)))
        scale = 10 * (1 + np.linalg.norm(a, 1)) * float(np.abs(exact).max())
        check.close(found, exact, dtype, [n, dtype, layout, size], scale)
    return check.result()


def tridiagonals(gang: Gang) -> list[Any]:
    """Clustered, multiple and zero eigenvalues, and subdiagonals of zero."""
    check, n = Checks(gang), 75
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
        orthonormal(check, z, what)
    return check.result()


def everything(gang: Gang) -> dict[str, Any]:
    functions = (least_squares, leading_vectors, tridiagonals, exponentials)
    with spread():
        return {function.__name__: function(gang) for function in functions}


def leading(ctx: Context, A: DistMatrix) -> Any:
    return linalg.truncated_svd(ctx, A, 5, method="gram", tol=1e-2)


def memory(gang: Gang, n: int) -> dict[str, float]:
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
