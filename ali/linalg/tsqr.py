"""QR of tall matrices (TSQR): one pass over the rows, then a tree of small QRs over the ranks.

Source: Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and
sequential QR and LU factorizations", SIAM J. Sci. Comput. 34(1), 2012.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy.linalg

from ali.blocks import Array

if TYPE_CHECKING:
    from mpi_workers.rank.communicator import GangComm

TAG = 12


class _Join(NamedTuple):
    """The QR of this rank's R, with `rows` rows, stacked on the R of `partner`."""

    partner: int
    rows: int
    q: Array | None  # None: the stack was not taller than wide, and was passed on unchanged


class TallQR:
    """``X = Q R`` of a matrix whose rows are distributed over the ranks. Collective.

    Parameters
    ----------
    comm : GangComm
        The gang's communicator.
    local : ndarray, shape (local_m, n)
        This rank's rows of X, any number of them. Floating point.
    vectors : bool
        Whether Q is needed. Without it `times` may not be called; half the flops and no memory
        for Q.
    overwrite : bool
        Whether `local`, if in Fortran order, may be overwritten instead of copied.

    Attributes
    ----------
    r : ndarray, shape (min(m, n), n), or None
        Upper triangular, on rank 0; None on the other ranks.

    Notes
    -----
    The columns of Q are orthonormal for X of any rank (Householder reflections throughout).
    Cost per rank: ``4 local_m n^2 + O(n^3 log ranks)`` flops, ``n^2`` words up the tree and
    ``n k`` down in ``log2(ranks)`` messages; memory ``2 local_m n + n^2 log ranks`` words (without
    Q: ``local_m n``, or nothing with `overwrite`, until the constructor returns). A rank with at
    most n rows passes them on unchanged, so that a square matrix is gathered on rank 0.
    """

    def __init__(
        self, comm: GangComm, local: Array, *, vectors: bool = True, overwrite: bool = False
    ) -> None:
        self._comm = comm
        self._n = local.shape[1]
        self._vectors = vectors
        self._joins: list[_Join] = []
        self._parent: int | None = None
        self._q, rows = self._shrink(local, overwrite)
        rank, size, step = comm.rank, comm.size, 1
        while step < size and self._parent is None:
            if rank % (2 * step):
                self._parent = rank - step
                self._send(rows, self._parent)
            elif rank + step < size:
                other = self._receive(rank + step, rows.dtype)
                q, joined = self._shrink(np.concatenate([rows, other]))
                self._joins.append(_Join(rank + step, rows.shape[0], q))
                rows = joined
            step *= 2
        self._rows = rows.shape[0]
        self._top: Array | None = None
        self.r: Array | None = None
        if self._parent is None:
            self._top, self.r = self._thin(rows, self._q is not None or bool(self._joins))

    def times(self, factor: Array | None, columns: int, dtype: np.dtype[np.generic]) -> Array:
        """This rank's rows of ``Q @ factor``. Collective.

        Parameters
        ----------
        factor : ndarray, shape (min(m, n), columns), or None
            Read on rank 0 only.
        columns, dtype
            Of `factor`; every rank gives them.

        Returns
        -------
        ndarray, shape (local_m, columns)
        """
        if self._top is not None and factor is not None:
            part = self._top @ factor
        else:
            assert self._parent is not None
            part = np.empty((self._rows, columns), dtype)
            self._comm.Recv(part, self._parent, TAG)
        for partner, rows, q in reversed(self._joins):
            if q is not None:
                part = q @ part
            self._comm.Send(np.ascontiguousarray(part[rows:]), partner, TAG)
            part = part[:rows]
        return part if self._q is None else self._q @ part

    def _shrink(self, rows: Array, overwrite: bool = True) -> tuple[Array | None, Array]:
        """(Q, R) if that reduces the number of rows, else (None, rows)."""
        if rows.shape[0] <= rows.shape[1]:
            return None, rows
        return self._thin(rows, overwrite)

    def _thin(self, rows: Array, overwrite: bool) -> tuple[Array | None, Array]:
        # SciPy's QR of an array in Fortran order is a third faster here than NumPy's. It keeps
        # two copies of an array that it may not overwrite, and of every array with mode "r".
        rows = np.asfortranarray(rows) if overwrite else np.array(rows, order="F")
        mode = "economic" if self._vectors else "raw"
        q, r = scipy.linalg.qr(rows, overwrite_a=True, mode=mode, check_finite=False)
        return (q if self._vectors else None), r

    def _send(self, rows: Array, to: int) -> None:
        self._comm.Send(np.array([rows.shape[0]]), to, TAG)
        self._comm.Send(np.ascontiguousarray(rows), to, TAG)

    def _receive(self, source: int, dtype: np.dtype[np.generic]) -> Array:
        count = np.empty(1, np.int64)
        self._comm.Recv(count, source, TAG)
        rows = np.empty((int(count[0]), self._n), dtype)
        self._comm.Recv(rows, source, TAG)
        return rows
