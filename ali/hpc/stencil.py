"""A 27-point stencil on a grid over all ranks, as HPCG has it: matrix, halo, preconditioner."""

from __future__ import annotations

import numpy as np
import scipy.sparse
from mpi4py import MPI
from numpy.typing import NDArray

from ali.interface import Context

Vector = NDArray[np.float64]
DIAGONAL, NEIGHBOUR = 26.0, -1.0


class Stencil:
    """The matrix of a 27-point stencil on a cube of n^3 points on every rank.

    Row of a point: 26 on the diagonal, -1 for each of its up to 26 neighbours in the grid of all
    ranks. Vectors are arrays of this rank's n^3 points; `exchanged` adds a halo of one point.

    Attributes
    ----------
    matrix : scipy.sparse.csr_array, shape (n^3, (n + 2)^3)
        Rows of this rank's points; columns of the points with the halo.
    nonzeros : int
        Stored elements of all ranks.
    """

    def __init__(self, ctx: Context, n: int) -> None:
        self._ctx, self._n = ctx, n
        self._dims = MPI.Compute_dims(ctx.size, 3)
        self._at = np.argwhere(np.arange(ctx.size).reshape(self._dims) == ctx.rank)[0]
        steps = (-1, 0, 1)
        offsets = np.array([(a, b, c) for a in steps for b in steps for c in steps])
        points = np.indices((n, n, n)).reshape(3, -1).T
        near = points[:, None, :] + offsets  # (n^3, 27, 3), on this rank's cube
        everywhere = near + n * self._at
        there = ((everywhere >= 0) & (everywhere < n * np.array(self._dims))).all(axis=2)
        columns = np.ravel_multi_index(tuple(np.moveaxis(near + 1, 2, 0)), (n + 2,) * 3)
        values = np.where((offsets == 0).all(axis=1), DIAGONAL, NEIGHBOUR)
        starts = np.concatenate([[0], there.sum(axis=1).cumsum()])
        self.matrix = scipy.sparse.csr_array(
            (np.broadcast_to(values, there.shape)[there], columns[there].astype(np.int32), starts),
            shape=(n**3, (n + 2) ** 3),
        )
        self.nonzeros = int(ctx.comm.allreduce(self.matrix.nnz, MPI.SUM))
        self._halo = np.zeros((n + 2,) * 3)
        colours = points % 2 @ np.array([4, 2, 1])
        places = np.asarray(np.ravel_multi_index(tuple(points.T + 1), (n + 2,) * 3))
        self._colours = [
            (rows, places[rows], self.matrix[rows])
            for rows in (np.flatnonzero(colours == colour) for colour in range(8))
            if rows.size
        ]

    def exchanged(self, x: Vector) -> Vector:
        """x with the points of neighbouring ranks around it, zero outside of the grid. Collective.

        Six messages: the planes of each direction include the halo of the directions before.
        """
        halo, comm = self._halo, self._ctx.comm
        inner = (slice(1, -1),) * 3
        halo[inner] = x.reshape((self._n,) * 3)
        for axis in range(3):
            planes = np.moveaxis(halo, axis, 0)
            below, above = self._neighbour(axis, -1), self._neighbour(axis, 1)
            for sent, target, received, source in (
                (-2, above, 0, below),
                (1, below, -1, above),
            ):
                plane = np.zeros_like(planes[0], order="C")
                MPI.Comm.Sendrecv(
                    comm, np.ascontiguousarray(planes[sent]), target, 0, plane, source, 0
                )
                planes[received] = plane
        return halo.reshape(-1)

    def _neighbour(self, axis: int, step: int) -> int:
        at = self._at.copy()
        at[axis] += step
        if not 0 <= at[axis] < self._dims[axis]:
            return int(MPI.PROC_NULL)
        return int(np.ravel_multi_index(tuple(at), self._dims))

    def product(self, x: Vector) -> Vector:
        """A x. Collective."""
        found: Vector = self.matrix @ self.exchanged(x)
        return found

    def preconditioned(self, r: Vector) -> Vector:
        """One symmetric Gauss-Seidel sweep for A z = r from z = 0, without other ranks' points.

        Points are taken in eight colours: no two of a colour are neighbours, so that each colour is
        one product with a sparse matrix.
        """
        z = np.zeros((self._n + 2) ** 3)
        for rows, places, matrix in (*self._colours, *reversed(self._colours)):
            z[places] += (r[rows] - matrix @ z) / DIAGONAL
        return z.reshape((self._n + 2,) * 3)[1:-1, 1:-1, 1:-1].reshape(-1)

    def dot(self, x: Vector, y: Vector) -> float:
        """The inner product over all ranks. Collective."""
        total = np.array([x @ y])
        MPI.Comm.Allreduce(self._ctx.comm, MPI.IN_PLACE, total)
        return float(total[0])
