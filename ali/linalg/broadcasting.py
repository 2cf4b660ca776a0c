"""NumPy's broadcasting: operands of elementwise functions are moved to matching layouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ali.blocks import shape_text
from ali.interface import Context
from ali.linalg.views import operand
from mpi_workers.failures import Failure
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import (
    ArrayShape,
    Grid,
    Shape,
    distributions,
    owners,
    sibling,
    stored_shape,
)


def broadcast_shape(name: str, operands: Sequence[DistMatrix]) -> ArrayShape:
    """The shape of the result, or a `Failure` (ShapeError)."""
    try:
        return np.broadcast_shapes(*(x.array_shape for x in operands))
    except ValueError:
        raise Failure(
            "ShapeError",
            f"{name}: shapes {' and '.join(map(shape_text, operands))} do not broadcast; sizes "
            "must be equal or 1",
        ) from None


def as_rows(operands: Sequence[DistMatrix]) -> tuple[DistMatrix, ...]:
    """The operands; vectors that meet a matrix as rows (views in the mirrored layout)."""
    if all(x.ndim < 2 for x in operands):
        return tuple(operands)
    return tuple(operand(x, "T") if x.ndim == 1 else x for x in operands)


def common_layout(operands: Sequence[DistMatrix], shape: Shape) -> str:
    """The layout, of those of the full operands, that needs the least communication.

    The cost of a move is the number of bytes that the busiest rank receives; of equals the first
    operand's layout is chosen.
    """
    full = [x for x in operands if x.shape == shape]
    if not full:  # a row with a column, or numbers
        return "VC_STAR" if shape[0] >= shape[1] else "STAR_VC"

    def cost(layout: str) -> float:
        return sum(_received(x, layout, x.grid) for x in full)

    return min(dict.fromkeys(x.layout for x in full), key=cost)


def _received(matrix: DistMatrix, layout: str, grid: Grid) -> float:
    if matrix.layout in (layout, "STAR_STAR"):
        return 0.0
    return matrix.nbytes / len(owners(layout, grid))


def part_layout(layout: str, shape: Shape, whole: Shape) -> str:
    """The layout in which a row, column or element broadcasts against a matrix in `layout`."""
    if layout == "CIRC_CIRC" or shape == whole:
        return layout
    rows, cols = (
        dist if mine == full else "STAR"
        for dist, mine, full in zip(distributions(layout), shape, whole, strict=True)
    )
    return sibling(layout, rows, cols)


def aligned(
    ctx: Context, name: str, *operands: DistMatrix
) -> tuple[ArrayShape, str, tuple[DistMatrix, ...]]:
    """Shape and layout of the result, and the operands in matching layouts. Collective.

    On every rank the operands' local blocks broadcast to that of the result.
    """
    shape = broadcast_shape(name, operands)
    whole = stored_shape(shape)
    placed = as_rows(operands)
    layout = common_layout(placed, whole)
    moved = tuple(ctx.to_layout(x, part_layout(layout, x.shape, whole)) for x in placed)
    return shape, layout, moved
