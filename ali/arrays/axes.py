"""Routines for arrays of any number of axes: axes in another order, shapes, parts, joins.

`exchanges` says how such arrays are stored. Only what concerns the first axis moves elements.
"""

from __future__ import annotations

import numpy as np

from ali.arrays.exchanges import in_rows, permuted, reshaped, with_axes
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix


@routine("B", any_axes=True)
def permute(ctx: Context, A: DistMatrix, order: list[int]) -> DistMatrix:
    """A with its axes in another order, as a copy.

    Parameters
    ----------
    A : array
    order : list of int
        The axes of A, as `numpy.transpose` takes them.

    Returns
    -------
    B : array, dtype of A

    Notes
    -----
    See `permuted`.
    """
    return _own(ctx, permuted(ctx, A, order), A)


@routine("B", any_axes=True)
def reshape(ctx: Context, A: DistMatrix, shape: list[int], copy: bool = True) -> DistMatrix:
    """The elements of A in C order in another shape.

    Parameters
    ----------
    A : array
    shape : list of int
        With as many elements.
    copy : bool
        Whether B has memory of its own in any case.

    Returns
    -------
    B : array of that shape, dtype of A
        In rows; their blocks are such that no more elements move than necessary.

    Notes
    -----
    See `reshaped`.
    """
    B = reshaped(ctx, A, shape)
    return _own(ctx, B, A) if copy else B


def _own(ctx: Context, B: DistMatrix, A: DistMatrix) -> DistMatrix:
    """B, or a copy if it has the memory of A."""
    if B.block is not A.block:
        return B
    copy = ctx.empty_like(B)
    copy.stored[...] = B.stored
    return copy


@routine("C", any_axes=True)
def join(ctx: Context, A: DistMatrix, B: DistMatrix, axis: int) -> DistMatrix:
    """A and B one after the other along an axis that is not the first.

    Parameters
    ----------
    A, B : arrays
        Of shapes that are equal but along the axis.
    axis : int

    Returns
    -------
    C : array, NumPy's common dtype

    Notes
    -----
    No communication if both have the same layout, which divides only rows.
    """
    A = in_rows(ctx, A)
    B = ctx.to_layout(B, A.layout)
    shape = list(A.array_shape)
    shape[axis] += B.array_shape[axis]
    C = ctx.empty(shape, np.result_type(A.dtype, B.dtype), A.layout)
    if C.local.size:
        np.concatenate([with_axes(A), with_axes(B)], axis=axis, out=with_axes(C))
    return C


@routine("C", any_axes=True)
def matmul_each(ctx: Context, A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """``A[i] @ B[i]`` for each i.

    Parameters
    ----------
    A, B : arrays, shapes (b, m, k) and (b, k, n)

    Returns
    -------
    C : array, shape (b, m, n), NumPy's common dtype

    Notes
    -----
    Each rank multiplies the matrices that it has; B is moved to the layout of A.
    """
    A = in_rows(ctx, A)
    B = ctx.to_layout(B, A.layout)
    shape = (*A.array_shape[:2], B.array_shape[2])
    C = ctx.empty(shape, np.result_type(A.dtype, B.dtype), A.layout)
    left, right, found = with_axes(A), with_axes(B), with_axes(C)
    for i in range(len(found)):
        ctx.check()
        found[i] = left[i] @ right[i]
    return C
