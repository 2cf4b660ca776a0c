"""Sparse data that `send_matrix` takes: SciPy's matrices, and lists of blocks of one."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from alchemist_ray.arrays.rules import matrix_dtype
from alchemist_ray.dtypes import check_range, chosen_dtype
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError
from alchemist_ray.object_refs import resolved

FORMS = (
    "(rows, columns, values) with arrays of one length, or (block, row0, col0) with a sparse block "
    "of SciPy or an ObjectRef of one"
)


def is_sparse(data: Any) -> bool:
    """Whether the data is a sparse matrix or array of SciPy, of any format."""
    packages = (kind.__module__.partition(".")[0] for kind in type(data).__mro__)
    return "scipy" in packages and hasattr(data, "tocsr")


def is_sparse_blocks(data: Any) -> bool:
    """Whether the data is a list of blocks of a sparse matrix, as far as can be seen locally."""
    if not isinstance(data, list) or not data:
        return False
    return all(
        isinstance(block, tuple) and len(block) == 3
        and (is_sparse(block[0]) or all(isinstance(x, np.ndarray) and x.ndim == 1 for x in block))
        for block in data
    )  # fmt: skip


def as_csr(data: Any, shape: Any = None, dtype: Any = None) -> Any:
    """A `scipy.sparse.csr_array` of a sparse matrix, or of a list of its blocks.

    Raises
    ------
    DtypeError
        If its elements are not numbers that a matrix, or the dtype that was chosen, can have.
    ShapeError
        If it does not have two dimensions, or an element is outside of the shape.
    BadArgumentError
        If a block has another form.
    """
    if not is_sparse(data):
        if not isinstance(data, list):
            raise BadArgumentError(
                f"shape= is for a sparse matrix in blocks, not for a {type(data).__name__}: a list "
                f"of {FORMS}"
            )
        data = _joined(data, shape)
    elif shape is not None and tuple(shape) != data.shape:
        raise ShapeError(f"shape={shape!r}, but the matrix has shape {data.shape}: leave it out")
    if len(data.shape) != 2:
        raise ShapeError(f"a sparse array of shape {data.shape}: it must have two dimensions")
    rows = data.tocsr()
    if rows.dtype.kind not in "biufc":
        raise DtypeError(f"elements of dtype {rows.dtype} are not numbers")
    if dtype is None:
        return rows.astype(matrix_dtype(rows.dtype), copy=False)
    kind = chosen_dtype(rows.dtype, dtype)
    check_range(rows.data, kind, "the sparse matrix")
    return rows.astype(kind, copy=False)


def _joined(blocks: Any, shape: Any) -> Any:
    """Blocks as one matrix; elements at the same place are added, as in SciPy."""
    from scipy.sparse import coo_array  # noqa: PLC0415  (optional package)

    down: list[Any] = []
    across: list[Any] = []
    values: list[Any] = []
    least = [0, 0]
    own: tuple[Any, ...]
    for block in blocks:
        if not isinstance(block, tuple) or len(block) != 3:
            raise BadArgumentError(f"a sparse matrix or a list of its blocks: {FORMS}")
        first = resolved(block[0])
        if is_sparse(first):
            part = first.tocoo()
            try:
                row0, col0 = map(operator.index, block[1:])
            except TypeError:
                raise BadArgumentError(f"a block of a sparse matrix: {FORMS}") from None
            own = (part.row.astype(np.int64) + row0, part.col.astype(np.int64) + col0, part.data)
            ends = [row0 + part.shape[0], col0 + part.shape[1]]
        else:
            own = tuple(np.asarray(resolved(x)) for x in (first, *block[1:]))
            if any(x.ndim != 1 or len(x) != len(own[0]) for x in own):
                raise BadArgumentError(f"a block of a sparse matrix: {FORMS}")
            if any(x.dtype.kind not in "iu" and x.size for x in own[:2]):
                raise BadArgumentError("rows and columns of a sparse block must be integers")
            ends = [int(x.max()) + 1 if x.size else 0 for x in own[:2]]
        least = [max(pair) for pair in zip(least, ends, strict=True)]
        for found, mine in zip((down, across, values), own, strict=True):
            found.append(mine)
    shape = tuple(least) if shape is None else tuple(int(length) for length in shape)
    lowest = min((int(x.min()) for x in (*down, *across) if x.size), default=0)
    if len(shape) != 2 or lowest < 0 or any(n > has for n, has in zip(least, shape, strict=True)):
        raise ShapeError(
            f"blocks with elements up to row {least[0] - 1} and column {least[1] - 1} do not fit "
            f"into the shape {shape}"
        )
    places = np.concatenate(down), np.concatenate(across)
    return coo_array((np.concatenate(values), places), shape=shape)
