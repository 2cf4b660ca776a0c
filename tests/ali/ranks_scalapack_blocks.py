"""Rank side of test_scalapack.py: matrices in BLOCK_CYCLIC, which ScaLAPACK takes as they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ali import scalapack
from ali.scalapack.cyclic import Call, Cyclic
from ali.scalapack.native import grid_of
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_scalapack_checks import Checks, some, values


def in_place(gang: Gang) -> list[Any]:
    """Every routine, with and without moves between ScaLAPACK's own layouts."""
    check = Checks(gang)
    ctx = check.ctx

    def refuse(*_: Any) -> None:
        raise AssertionError("elements were moved to other blocks")

    cases = [
        (size, dtype, shape)
        for size in (2, 3, 8, 50)
        for dtype in ("float32", "float64", "complex128")
        for shape in ((29, 29), (37, 11), (11, 37))
    ]
    for size, dtype, shape in some(gang, cases):
        layout, what = f"BLOCK_CYCLIC:{size}", [size, dtype, shape]
        m = shape[0]
        a = values(shape, dtype)
        A = check.distribution(a, layout)
        context = grid_of(ctx).context
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Call, "_move", refuse)
            own: Cyclic = Call(ctx, "lu", "getrf", A).operand(A)
            same = own.matrix is A and np.array_equal(own.desc, A.descriptor(context))
            check.true(same, ["the descriptor", what])
            h = a @ a.conj().T + np.eye(m, dtype=dtype)
            H, B = check.distribution(h, layout), check.distribution(a[:, :2].copy())
            scale = float(np.linalg.norm(h))
            C = scalapack.matmul(ctx, A, A, "N", "C")
            check.close(check.whole(C), a @ a.conj().T, scale, dtype, ["matmul", what])
            X, L = scalapack.solve(ctx, H, B), scalapack.cholesky(ctx, H)
            check.close(h @ check.whole(X), a[:, :2], scale, dtype, ["solve", what])
            low = check.whole(L)
            check.product(h, low, low.conj().T, what=["cholesky", what])
            W, V = scalapack.eigh(ctx, H)
            w, v = check.whole(W)[:, 0], check.whole(V)
            check.close(h @ v, v * w, scale, dtype, ["eigh", what])
            lower, upper, P = scalapack.lu(ctx, A)
            order = check.whole(P)[:, 0]
            check.product(a[order], check.whole(lower), check.whole(upper), what=["lu", what])
            Q, R = scalapack.qr(ctx, A)
            check.product(a, check.whole(Q), check.whole(R), what=["qr", what])
            S, U, T = scalapack.svd(ctx, A)
            s, u, t = check.whole(S)[:, 0], check.whole(U), check.whole(T)
            check.product(a, u * s, t.conj().T, what=["svd", what])
            norm = [scalapack.norm(ctx, A)]
            check.close(norm, [np.linalg.norm(a)], scale, dtype, ["norm", what])
            found = [C, X, L, V, lower, upper, Q, R, U, T]
            check.layouts(found, " ".join([layout] * len(found)), what)
            check.true(np.array_equal(check.whole(A), a), ["A is as it was", what])
    return check.result()
