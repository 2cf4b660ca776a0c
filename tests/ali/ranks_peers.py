"""Functions that test_peers.py runs on ranks: results of linalg for difficult data."""

from __future__ import annotations

from typing import Any

import numpy as np

from ali import linalg
from mpi_workers.rank.gang import Gang
from tests.ali import peer_data
from tests.ali.ranks_linalg_checks import Checks, failures_on_all_ranks


def everything(gang: Gang) -> dict[str, Any]:
    check = Checks(gang)
    functions = (components, regressions, spectra, systems, clusters, refusals)
    return {function.__name__: function(check) for function in functions}


def components(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        if len(a) < 3:
            continue
        for scale in (False, True):
            k = min(2, a.shape[1])
            results = linalg.pca(check.ctx, check.distribute(a, "MC_MR"), k, True, scale)
            found[f"{name}/{scale}"] = [check.whole(x).tolist() for x in results]
    return found


def regressions(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        A, B = check.distribute(a), check.distribute(peer_data.right_sides(a), "STAR_VC")
        lam = peer_data.LAMBDA * float(np.linalg.norm(a.astype("float64"))) ** 2
        found[name] = [check.whole(linalg.lstsq(check.ctx, A, B)).tolist()]
        if np.isfinite(np.float32(lam)) and lam > 1e-37:
            found[name].append(check.whole(linalg.ridge(check.ctx, A, B, lam)).tolist())
    return found


def spectra(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        A = check.distribute(a)
        S, U, V = linalg.truncated_svd(check.ctx, A, min(2, *a.shape))
        s, u, v = (check.whole(x) for x in (S, U, V))
        with np.errstate(over="ignore"):
            product = (u * s) @ v.T
        found[name] = [
            s.tolist(),
            product.tolist(),
            check.whole(linalg.svdvals(check.ctx, A)).tolist(),
            linalg.matrix_rank(check.ctx, A),
            check.whole(linalg.pinv(check.ctx, A)).tolist(),
            linalg.norm(check.ctx, A),
        ]
    return found


def systems(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.matrices().items():
        p = peer_data.definite(a)
        P, B = check.distribute(p, "MC_MR"), check.distribute(p[:, :1] * 3 + 1)
        W, V = linalg.eigh(check.ctx, P)
        w, v = check.whole(W), check.whole(V)
        found[name] = [
            check.whole(linalg.solve(check.ctx, P, B)).tolist(),
            check.whole(linalg.solve(check.ctx, P, B, "positive")).tolist(),
            check.whole(linalg.conjugate_gradient(check.ctx, P, B, 1e-10)[0]).tolist(),
            check.whole(linalg.cholesky(check.ctx, P)).tolist(),
            check.whole(linalg.inv(check.ctx, P)).tolist(),
            w.tolist(),
            ((v * w) @ v.T).tolist(),
            [*linalg.slogdet(check.ctx, P)][1],
            linalg.condest(check.ctx, P),
        ]
    return found


def clusters(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.blobs().items():
        C, L, inertia, _ = linalg.kmeans(check.ctx, check.distribute(a), 4, 0, 300, 0.0)
        labels = check.whole(L).reshape(-1).tolist()
        found[name] = [check.whole(C).tolist(), labels, inertia]
    return found


def refusals(check: Checks) -> dict[str, Any]:
    found = {}
    for name, a in peer_data.spoiled().items():
        A, B = check.distribute(a), check.distribute(peer_data.right_sides(np.ones((60, 1))))
        calls: dict[str, Any] = {
            "pca": lambda A=A: linalg.pca(check.ctx, A, 2),
            "kmeans": lambda A=A: linalg.kmeans(check.ctx, A, 2),
            "lstsq": lambda A=A, B=B: linalg.lstsq(check.ctx, A, B),
            "ridge": lambda A=A, B=B: linalg.ridge(check.ctx, A, B, 1.0),
            "truncated_svd": lambda A=A: linalg.truncated_svd(check.ctx, A, 2),
            "svdvals": lambda A=A: linalg.svdvals(check.ctx, A),
        }
        for routine, call in calls.items():
            found[f"{name}/{routine}"] = failures_on_all_ranks(check.ctx, call)
    return found
