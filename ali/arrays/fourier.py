"""Discrete Fourier transforms of the lines of a matrix."""

from __future__ import annotations

import numpy as np
import scipy.fft

from ali.arrays.ordering import canonical, restored, whole_columns
from ali.blocks import block, panel_width, panels, require_choice
from ali.interface import Context, routine
from mpi_workers.matrix.dist_matrix import DistMatrix

KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@routine("F")
def fourier(
    ctx: Context, A: DistMatrix, kind: str, n: int, axis: int = 0, norm: str = "backward"
) -> DistMatrix:
    """One of the transforms of `scipy.fft`, of all lines along an axis.

    Parameters
    ----------
    A : array
    kind : str
        The name in `scipy.fft`: fft, ifft, rfft, irfft, hfft or ihfft.
    n : int
        Length of a transform: lines are cut, or filled with zeros.
    axis : int
    norm : str
        "backward", "ortho" or "forward".

    Returns
    -------
    F : array, float or complex, of the precision of A
        Computed at least in float32; layout as in `sort`.

    Notes
    -----
    A line is transformed by one rank: one long vector by the first. Each element crosses the
    network once where a line has parts on several ranks.
    Memory: three copies of the rank's lines.
    """
    require_choice("fourier", "kind", kind, KINDS)
    transform = getattr(scipy.fft, kind)
    work = canonical(ctx, A, axis)
    whole = whole_columns(ctx, work) or ctx.to_layout(work, "STAR_VC")
    like = transform(np.zeros(1, A.dtype), n)
    dtype = A.dtype if A.dtype.kind == like.dtype.kind else like.dtype  # also float16
    R = ctx.empty((like.size, work.shape[1]), dtype, whole.layout)
    lines, found = block(whole), block(R)
    for some in panels(lines.shape[1], panel_width(max(len(lines), like.size), like.itemsize)):
        ctx.check()
        found[:, some] = transform(lines[:, some], n, axis=0, norm=norm)
    return restored(ctx, R, A, axis)
