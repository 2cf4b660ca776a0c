"""Matrices that are combined element by element come to the same ranks: NumPy's broadcasting."""

from __future__ import annotations

from collections.abc import Sequence

from ali.blocks import require, shape_text
from ali.interface import Context
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.layout import Grid, Shape, owners


def broadcast_shape(name: str, operands: Sequence[DistMatrix]) -> Shape:
    """The shape of the result, or a `Failure` (ShapeError)."""
    m, n = (max(x.shape[axis] for x in operands) for axis in (0, 1))
    require(
        all(x.shape[0] in (1, m) and x.shape[1] in (1, n) for x in operands),
        "ShapeError",
        f"{name}: {' and '.join(map(shape_text, operands))} do not go together; sizes must be "
        "equal or 1",
    )
    return m, n


def common_layout(operands: Sequence[DistMatrix], shape: Shape) -> str:
    """The layout of one of the full operands to which the others have the shortest way.

    The cost of a move is what the busiest rank receives; at a tie the first wins.
    """
    full = [x for x in operands if x.shape == shape]
    if not full:  # a row with a column
        return "VC_STAR" if shape[0] >= shape[1] else "STAR_VC"

    def cost(layout: str) -> float:
        return sum(_received(x, layout, x.grid) for x in full)

    return min(dict.fromkeys(x.layout for x in full), key=cost)


def _received(matrix: DistMatrix, layout: str, grid: Grid) -> float:
    if matrix.layout in (layout, "STAR_STAR"):
        return 0.0
    return matrix.nbytes / len(owners(layout, grid))


def part_layout(layout: str, shape: Shape, whole: Shape) -> str:
    """The layout of a row, column or element that lies beside each part of a matrix in `layout`."""
    if layout == "CIRC_CIRC" or shape == whole:
        return layout
    rows, cols = layout.split("_")
    return "_".join(
        dist if mine == full else "STAR"
        for dist, mine, full in zip((rows, cols), shape, whole, strict=True)
    )


def aligned(
    ctx: Context, name: str, *operands: DistMatrix
) -> tuple[Shape, str, tuple[DistMatrix, ...]]:
    """Shape and layout of the result, and the operands where its parts are. Collective.

    Where a rank holds a part of the result, the operands' local blocks broadcast to it.
    """
    shape = broadcast_shape(name, operands)
    layout = common_layout(operands, shape)
    moved = tuple(ctx.to_layout(x, part_layout(layout, x.shape, shape)) for x in operands)
    return shape, layout, moved
