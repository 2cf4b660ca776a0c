"""Functions that test_scalapack_mkl.py runs on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import scalapack
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import Checks, orthonormal, values


def agrees(gang: Gang, path: str) -> dict[str, Any]:
    """Results of MKL's ScaLAPACK against NumPy's."""
    check = Checks(gang)
    ctx = check.ctx
    scalapack.load(ctx.state, path)
    for dtype in ("float64", "complex128"):
        a, tall, b = (values(shape, dtype) for shape in ((90, 90), (150, 60), (90, 2)))
        h = a + a.conj().T
        A, T, B, H = (check.distribute(x) for x in (a, tall, b, h))
        w, v = map(check.whole, scalapack.eigh(ctx, H))
        check.close(h @ v, v * w, dtype, [dtype, "eigh"], 100)
        orthonormal(check, v, [dtype, "eigh"])
        s, u, right = map(check.whole, scalapack.svd(ctx, T))
        check.close((u * s) @ right.conj().T, tall, dtype, [dtype, "svd"], 100)
        x = check.whole(scalapack.solve(ctx, A, B))
        check.close(x, np.linalg.solve(a, b), dtype, [dtype, "solve"], 100 * np.linalg.cond(a))
    about = scalapack.about(ctx)
    scalapack.close(ctx.state)
    return {"checks": check.result(), "about": about}
