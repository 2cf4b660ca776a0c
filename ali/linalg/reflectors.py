"""Products of Householder reflections in compact WY form, of vectors in VC_STAR.

A panel of reflections is ``I - Y T Y^H``. Y is unit lower trapezoidal; it lies below the diagonal
of a matrix in VC_STAR, in the place of the elements that it has eliminated. Source: Schreiber, Van
Loan, "A storage-efficient WY representation", SIAM J. Sci. Stat. Comput. 10(1), 1989; LAPACK's
larfb.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ali.blocks import CHUNK, Array, panels
from ali.interface import Context
from ali.linalg.collectives import sum_over_ranks
from ali.linalg.cyclic_rows import owned_rows, rows_before


class Panel(NamedTuple):
    """One panel of reflections.

    Attributes
    ----------
    columns : slice
        Where Y lies in the matrix.
    first, last : int
        Y has the rows from `first`, that of its first diagonal element, to before `last`.
    t : ndarray
        T, upper triangular, the same on every rank.
    """

    columns: slice
    first: int
    last: int
    t: Array


def vectors(ctx: Context, local: Array, panel: Panel) -> tuple[slice, Array]:
    """Which of this rank's rows Y has, and a copy of them."""
    me, size = ctx.rank, ctx.size
    rows = slice(rows_before(panel.first, me, size), rows_before(panel.last, me, size))
    y = np.array(local[rows, panel.columns], order="F")
    width = y.shape[1]
    triangle = np.tri(width, k=-1, dtype=bool)[owned_rows(panel.first, me, size)]
    y[: len(triangle)][~triangle] = 0
    diagonal = range(width)[owned_rows(panel.first, me, size)]
    y[range(len(triangle)), diagonal] = 1
    return rows, y


def apply(ctx: Context, y: Array, t: Array, x: Array) -> None:
    """``X = (I - Y T Y^H) X``, in place; y, x: this rank's rows of them. Collective.

    Notes
    -----
    ``4 m b r / ranks`` flops; ``2 b r`` words are sent and received.
    """
    if not x.shape[1]:
        return
    inner = t @ sum_over_ranks(ctx.comm, y.conj().T @ x)
    strip = max(32, 4 * CHUNK // max(1, len(x) * x.itemsize))
    for some in panels(x.shape[1], strip):
        x[:, some] -= y @ inner[:, some]


def triangle_of(gram: Array, taus: Array) -> Array:
    """T of ``H_1 ... H_b`` with ``H_i = I - tau_i v_i v_i^H``, from the Gram matrix of the v_i."""
    t = np.diag(taus).astype(gram.dtype)
    for i in range(1, len(taus)):
        t[:i, i] = -taus[i] * (t[:i, :i] @ gram[:i, i])
    return t
