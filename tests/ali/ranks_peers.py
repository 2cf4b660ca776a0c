"""Functions that test_peers.py runs on ranks: results of linalg for difficult data."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpi_workers.rank.gang_view import GangView
from tests.ali import peer_data
from tests.ali.ranks_linalg_checks import Checks


def everything(gang: GangView) -> dict[str, Any]:
    return Checks.results_of(gang, components, regressions, spectra, systems, clusters, refusals)


def lists(check: Checks, *matrices: Any) -> list[Any]:
    return [check.whole(A).tolist() for A in matrices]


def components(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        A, k = check.distribute(a, "MC_MR"), min(2, a.shape[1])
        for scale in (False, True) if len(a) > 2 else ():
            found[f"{name}/{scale}"] = lists(check, *check.linalg.pca(A, k, True, scale))
    return found


def regressions(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        A, B = check.distribute(a), check.distribute(peer_data.right_sides(a), "STAR_VC")
        lam = peer_data.LAMBDA * float(np.linalg.norm(a.astype("float64"))) ** 2
        found[name] = lists(check, check.linalg.lstsq(A, B))
        if np.isfinite(np.float32(lam)) and lam > 1e-37:
            found[name] += lists(check, check.linalg.ridge(A, B, lam))
    return found


def spectra(check: Checks) -> dict[str, Any]:
    found, lib = {}, check.linalg
    for name, a in peer_data.matrices().items():
        A = check.distribute(a)
        s, u, v = map(check.whole, lib.truncated_svd(A, min(2, *a.shape)))
        with np.errstate(over="ignore"):
            product = (u * s) @ v.T
        every, inverse = lists(check, lib.svdvals(A), lib.pinv(A))
        rank, norm = lib.matrix_rank(A), lib.norm(A)
        found[name] = [s.tolist(), product.tolist(), every, rank, inverse, norm]
    return found


def systems(check: Checks) -> dict[str, Any]:
    found, lib = {}, check.linalg
    for name, a in peer_data.matrices().items():
        p = peer_data.definite(a)
        P, B = check.distribute(p, "MC_MR"), check.distribute(p[:, :1] * 3 + 1)
        w, v = map(check.whole, lib.eigh(P))
        solutions = (
            lib.solve(P, B),
            lib.solve(P, B, "positive"),
            lib.conjugate_gradient(P, B, 1e-10)[0],
        )
        matrices = lists(check, *solutions, lib.cholesky(P), lib.inv(P))
        again, log = ((v * w) @ v.T).tolist(), lib.slogdet(P)[1]
        found[name] = [*matrices, w.tolist(), again, log, lib.condest(P)]
    return found


def clusters(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.blobs().items():
        C, L, inertia, _ = check.linalg.kmeans(a, 4, 0, 300, 0.0)
        found[name] = [*lists(check, C), check.whole(L).reshape(-1).tolist(), inertia]
    return found


def refusals(check: Checks) -> dict[str, Any]:
    found, B = {}, peer_data.right_sides(np.ones((60, 1)))
    calls: dict[str, tuple[Any, ...]] = {
        "pca": (2,), "kmeans": (2,), "lstsq": (B,), "ridge": (B, 1.0), "truncated_svd": (2,),
        "svdvals": (),
    }  # fmt: skip
    for name, a in peer_data.spoiled().items():
        for routine, rest in calls.items():
            call = getattr(check.linalg, routine)
            found[f"{name}/{routine}"] = check.failures(call, a, *rest)
    return found
