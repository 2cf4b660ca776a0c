"""Functions that test_linalg_spread.py runs on ranks: `method` of routines of linalg."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import linalg
from ali.linalg.native_libraries import close
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import Checks, failures_on_all_ranks, orthonormal, values


def routed(gang: Gang, method: str) -> dict[str, Any]:
    """Results of the library, or why it is not there; and an unknown method."""
    check = Checks(gang)
    ctx, n = check.ctx, 40
    a, b = values((n, n), "float64"), values((n, 2), "float64")
    h = a + a.T
    A, B, H = (check.distribute(x, "VC_STAR") for x in (a, b, h))
    try:
        W, V = linalg.eigh(ctx, H, method)
    except Failure as failure:
        if failure.kind == "LibraryNotFoundError":
            return {"missing": failure.message}
        raise
    found: list[Any] = [W, V, *linalg.svd(ctx, A, method), *linalg.qr(ctx, A, method)]
    found += [linalg.lstsq(ctx, A, B, method=method), linalg.solve(ctx, A, B, method=method)]
    layouts = [x.layout for x in found]
    w, v, s, u, right, q, r, x, y = map(check.whole, found)
    w, s = w.ravel(), s.ravel()  # vectors to clients only
    orthonormal(check, v, "eigh")
    check.close(h @ v, v * w, "float64", "eigh", 100)
    check.close((u * s) @ right.T, a, "float64", "svd", 100)
    check.close(q @ r, a, "float64", "qr", 100)
    size = 100 * float(np.linalg.cond(a))
    for name, one in (("lstsq", x), ("solve", y)):
        check.close(one, np.linalg.solve(a, b), "float64", name, size)
    close(ctx.state)
    said = failures_on_all_ranks(ctx, lambda: linalg.eigh(ctx, H, "lapack"))
    return {"checks": check.result(), "layouts": layouts, "unknown": said}
