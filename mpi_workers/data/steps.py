"""The steps of a transfer: regions of blocks, small enough to report progress in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from mpi_workers.data.description import TransferTarget
from mpi_workers.matrix.copy_kernels import Array, ArrayBlock
from mpi_workers.matrix.layout import Shape
from mpi_workers.matrix.regions import Region

STEP_BYTES = 64 << 20  # 64 MiB: progress is reported, and the ranks are checked, this often
UNCUT_BYTES = 512 << 20  # 512 MiB: up to this size a block is one step if progress is not reported


class Step(NamedTuple):
    """A region of the matrix that moves in one step, or a part of it."""

    array: Array
    region: Region

    def cut(self, count: int) -> Iterator[Step]:
        """The step in `count` parts, across the axis with the larger stride."""
        array, region = self
        by_row = abs(array.strides[0]) > abs(array.strides[1])
        length = len(array) if by_row else array.shape[1]
        for k in range(count):
            start, stop = length * k // count, length * (k + 1) // count
            if start == stop:
                continue
            if by_row:
                part = region._replace(row0=region.row0 + start, row1=region.row0 + stop)
                yield Step(array[start:stop], part)
            else:
                part = region._replace(col0=region.col0 + start, col1=region.col0 + stop)
                yield Step(array[:, start:stop], part)

    def holders(self, target: TransferTarget, ranks: Iterable[int]) -> list[int]:
        """The ranks that hold an element of the region."""
        return [r for r in ranks if self.region.of(target.distribution.local_indices(r)).size]


def steps_of(
    blocks: Iterable[ArrayBlock], shape: Shape, *, watched: bool, buffer_bytes: int | None = None
) -> Iterator[list[Step]]:
    """Cut blocks of a matrix into steps that move together.

    Each moves at most `buffer_bytes` if they are given, but at least one element; otherwise about
    `STEP_BYTES`, and a block up to `UNCUT_BYTES` whole if no progress is reported.
    """
    most = STEP_BYTES if buffer_bytes is None else buffer_bytes
    limit = most if watched or buffer_bytes is not None else UNCUT_BYTES
    steps: list[Step] = []
    nbytes = 0
    for array, (row, col) in blocks:
        bounds = [row, row + array.shape[0], col, col + array.shape[1]]
        whole = Step(array, Region.checked(list(map(int, bounds)), shape))
        parts = _parts(whole, most) if array.nbytes > limit else [whole] if array.size else []
        for part in parts:
            if steps and nbytes + part.array.nbytes > most:
                yield steps
                steps, nbytes = [], 0
            steps.append(part)
            nbytes += part.array.nbytes
    if steps:
        yield steps


def _parts(whole: Step, most: int) -> Iterator[Step]:
    """The step in parts of at most `most` bytes."""
    array, region = whole
    height, width = _largest(array, most)
    for i in range(0, len(array), height):
        for j in range(0, array.shape[1], width):
            part = array[i : i + height, j : j + width]
            row0, col0 = region.row0 + i, region.col0 + j
            yield Step(part, Region(row0, row0 + part.shape[0], col0, col0 + part.shape[1]))


def _largest(array: Array, most: int) -> tuple[int, int]:
    """Rows and columns of a part of at most this many bytes: whole rows if one of them fits."""
    width = min(array.shape[1], max(1, most // array.itemsize))
    return max(1, most // (width * array.itemsize)), width
