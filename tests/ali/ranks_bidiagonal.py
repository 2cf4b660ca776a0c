"""Rank side of test_bidiagonal.py: singular vectors of bidiagonal matrices, without ScaLAPACK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ali.scalapack import spectra
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import Array, Checks, orthonormal

SLACK = 2.0  # LAPACK neglects numbers of up to 64 roundings


def cases(n: int) -> Iterator[tuple[str, Array, Array]]:
    """Any values; clustered, multiple, zero and graded ones; matrices that fall into parts."""
    rng = np.random.default_rng(n)
    any_d, any_e = rng.standard_normal(n), rng.standard_normal(max(0, n - 1))
    glued = np.ones(len(any_e))
    glued[20::21] = 1e-14
    yield "any", any_d, any_e
    yield "large", 1e300 * any_d, 1e300 * any_e
    yield "small", 1e-300 * any_d, 1e-300 * any_e
    yield "ones", np.ones(n), np.ones(len(any_e))
    yield "diagonal", any_d, np.zeros(len(any_e))
    yield "no diagonal", np.zeros(n), any_e
    yield "identity", np.ones(n), np.full(len(any_e), 1e-20)
    yield "graded", 10.0 ** -np.arange(n), 10.0 ** -np.arange(len(any_e))
    yield "glued", np.abs(np.arange(n) % 21 - 10.0), glued
    yield "zero", np.zeros(n), np.zeros(len(any_e))


def bidiagonals(gang: Gang) -> list[Any]:
    check = Checks(gang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectra, "WIDTH", 11)
        for n, leaf in ((1, 3), (3, 3), (4, 3), (12, 5), (51, 5), (90, 48), (75, 7)):
            patch.setattr(spectra, "LEAF", leaf)
            for name, d, e in cases(n):
                what = [n, leaf, name]
                values, U, V = spectra.bidiagonal_svd(check.ctx, d, e)
                u, v = check.whole(U), check.whole(V)
                b = np.diag(d) + np.diag(e, 1)
                exact = np.linalg.svd(b, compute_uv=False)
                size = SLACK * float(exact[0])
                check.close(np.sort(values)[::-1], exact, "float64", [*what, "S"], size)
                check.close((u * values) @ v.T, b, "float64", [*what, "U S V^T"], size)
                orthonormal(check, u, [*what, "U"])
                orthonormal(check, v, [*what, "V"])
    return check.result()
