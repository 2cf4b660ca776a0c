"""Eigenvectors of a diagonal matrix plus a rank-one matrix, and deflation.

Source: Gu, Eisenstat, "A divide-and-conquer algorithm for the symmetric tridiagonal eigenproblem",
SIAM J. Matrix Anal. Appl. 16(1), 1995; LAPACK's laed2, laed3 and laed4.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ali.blocks import CHUNK, Array, panels, require
from ali.interface import Context
from ali.lapack import Routine

EPS = float(np.finfo(np.float64).eps)


class Deflated(NamedTuple):
    """Which eigenvectors of ``diag(d) + rho z z^T`` are known, and the problem that is left.

    Attributes
    ----------
    d : ndarray, shape (n,)
        After the rotations.
    kept, known : ndarray of int64
        Positions in d of the remaining problem, ascending by value, and of eigenvalues.
    z : ndarray, shape (len(kept),)
    rho : float
    rotations : list of (int, int, float, float)
        p, q, c, s: columns p and q became ``c p + s q`` and ``c q - s p``.
    """

    d: Array
    kept: Array
    known: Array
    z: Array
    rho: float
    rotations: list[tuple[int, int, float, float]]


def deflate(d: Array, z: Array, rho: float) -> Deflated:
    """Find eigenvalues of ``diag(d) + rho z z^T``, rho > 0, that are elements of d to rounding."""
    length = float(np.linalg.norm(z))
    d, z, rho = d.copy(), z / length, rho * length * length
    tol = 8 * EPS * max(float(np.abs(d).max()), float(np.abs(z).max()))
    kept: list[int] = []
    known: list[int] = []
    rotations: list[tuple[int, int, float, float]] = []
    if rho * float(np.abs(z).max()) <= tol:
        return Deflated(d, np.empty(0, np.int64), np.arange(len(d)), z[:0], rho, [])
    for q in np.argsort(d, kind="stable").tolist():
        if rho * abs(z[q]) <= tol:
            known.append(q)
            continue
        if kept:
            p = kept[-1]
            both = float(np.hypot(z[p], z[q]))
            c, s = float(z[q] / both), float(-z[p] / both)
            if abs((d[q] - d[p]) * c * s) <= tol:
                z[q], z[p] = both, 0.0
                rotations.append((p, q, c, s))
                d[p], d[q] = d[p] * c * c + d[q] * s * s, d[p] * s * s + d[q] * c * c
                known.append(kept.pop())
        kept.append(q)
    index = np.array(kept, np.int64)
    return Deflated(d, index, np.array(known, np.int64), z[index], rho, rotations)


class RankOne:
    """The eigenpairs of ``diag(d) + rho z z^T``, d ascending and distinct, no zero in z.

    Attributes
    ----------
    values : ndarray, shape (k,)
        Ascending, the same on every rank.

    Notes
    -----
    Each rank solves for its share of the values: ``O(k^2 / ranks)`` flops; ``4 k`` words.
    """

    def __init__(self, ctx: Context, d: Array, z: Array, rho: float) -> None:
        k = len(d)
        self._d, self._explicit = d, None
        if k <= 2:  # where laed4 returns something else
            self.values, self._explicit = np.linalg.eigh(np.diag(d) + rho * np.outer(z, z))
            return
        # Of each value: itself, its nearest pole, and its distance from it, which is accurate.
        mine = np.zeros((3, len(range(ctx.rank, k, ctx.size))))
        failure = 0
        delta = np.empty(k)
        for at, i in enumerate(range(ctx.rank, k, ctx.size)):
            value, info = _laed4(i, d, z, delta, rho)
            nearest = int(np.abs(delta).argmin())
            mine[:, at] = value, nearest, delta[nearest]
            failure = failure or info
        require(not any(ctx.comm.allgather(failure)), "LinAlgError", "eigh: a root was not found")
        both = np.empty((3, k))
        for q, part in enumerate(ctx.comm.allgather(mine)):
            both[:, q :: ctx.size] = part
        self.values, self._poles, self._off = both[0], d[both[1].astype(np.int64)], both[2]
        own = range(ctx.rank, k, ctx.size)
        squares = np.empty(len(own))
        for some in panels(len(own), max(1, CHUNK // (8 * k))):
            rows = np.asarray(own[some])
            ratios = self._differences(d[rows])
            gaps = d[rows, None] - d
            gaps[range(len(rows)), rows] = -1
            squares[some] = np.prod(ratios / gaps, axis=1)
        self._z = np.empty(k)
        for q, part in enumerate(ctx.comm.allgather(squares)):
            self._z[q :: ctx.size] = np.sqrt(part)
        self._z = np.copysign(self._z, z)

    def _differences(self, d: Array, some: slice = slice(None)) -> Array:
        """``d_i - values_j`` to full relative accuracy."""
        found: Array = (d[:, None] - self._poles[some]) + self._off[some]
        return found

    def vectors(self, some: slice) -> Array:
        """Eigenvectors of a slice of the values, as columns."""
        if self._explicit is not None:
            return self._explicit[:, some]
        found: Array = self._z[:, None] / self._differences(self._d, some)
        found /= np.linalg.norm(found, axis=0)
        return found


_dlaed4 = Routine("dlaed4", 8)


def _laed4(i: int, d: Array, z: Array, delta: Array, rho: float) -> tuple[float, int]:
    """Value i, from 0; delta is overwritten by ``d - value``. Also LAPACK's INFO."""
    info, value = ctypes.c_int(0), ctypes.c_double(0)
    _dlaed4(len(d), i + 1, d, z, delta, rho, value, info)
    return value.value, info.value
