"""ScaLAPACK: dense linear algebra that stays distributed, for matrices that are not tall.

The site's own ScaLAPACK (Cray LibSci, MKL, a distribution's) is found and loaded on
the ranks; ``load_library("scalapack", "/path/to/lib.so")`` or ``SCALAPACK_LIB`` names one,
`about` says which it is.

Every routine takes matrices in any layout and leaves them as they are; results
come in MC_MR (Elemental's, which is ScaLAPACK's block-cyclic distribution with
blocks of one element), small vectors in STAR_STAR. A matrix in ``BLOCK_CYCLIC:64`` is used without
a copy in blocks, and results have its layout. float32, float64, complex64 and complex128
are computed as they are, integers and bool as float64. A native call cannot be interrupted: a call
that is cancelled, or has failed on another rank, ends when ScaLAPACK returns.

"Error" and "Peak memory" of docstrings are those of `ali.linalg`, measured for matrices of order
200 (errors) and 1200 (memory) and of 2000 x 20 and 100000 x 40 numbers.
"""

from __future__ import annotations

from typing import Any

from ali.interface import Context, collect_routines, routine
from ali.scalapack import native

__all__ = ["about", *collect_routines(__name__)]

PURE = True  # no routine has other effects than its results


def load(state: dict[str, Any], path: str | None) -> None:
    """Find and load ScaLAPACK on this rank's node; see native.py."""
    state["native"] = native.load(path)


def close(state: dict[str, Any]) -> None:
    """Release the BLACS grid. The library stays loaded."""
    native.close(state)


@routine("library")
def about(ctx: Context) -> str:
    """The ScaLAPACK and the BLAS of this gang: rank 0's files, one per line.

    Also lists candidates that could not be used, and warns of a reference BLAS.

    Notes
    -----
    The BLAS determines the speed. The reference BLAS has no tuned kernels: after ``apt-get
    install libopenblas0-pthread`` the loader uses OpenBLAS instead (``update-alternatives
    --config libblas.so.3-x86_64-linux-gnu`` shows the choice).
    """
    return native.describe(ctx.state["native"])
