"""Checks of arguments before a call, with the same outcome on all ranks.

They must not depend on a rank's own elements. Elemental checks nothing: a release build of it
does not check dimensions.
"""

from __future__ import annotations

import math

from ali.blocks import require, shape_text
from mpi_workers.matrix.dist_matrix import DistMatrix


def column(matrix: DistMatrix, rows: int, name: str, what: str) -> None:
    """Require a matrix to be one column of this many rows."""
    require(
        matrix.shape == (rows, 1),
        "ShapeError",
        f"{name}: {what} is {shape_text(matrix)}; it must be {rows} x 1",
    )


def real(name: str, *matrices: DistMatrix) -> None:
    """Require real matrices."""
    for matrix in matrices:
        require(
            matrix.dtype.kind != "c",
            "DtypeError",
            f"{name}: a matrix is {matrix.dtype}; this routine needs a real one",
        )


def positive(name: str, what: str, value: float) -> None:
    """Require a number > 0 that is finite."""
    require(
        0 < value < math.inf,
        "BadArgumentError",
        f"{name}: {what}={value}: it must be above 0 and finite",
    )
