"""Cases of the routines of sparse for ranks_stated.py."""

from __future__ import annotations

import numpy as np
import scipy.sparse

from tests.ali.stated_errors import Array, Cases, far, norm


def data(m: int, n: int, size: int) -> dict[str, Array]:
    """A tall matrix (D, I, Z), a positive definite one of order m (TD, TI, TZ), and G."""
    rng = np.random.default_rng(9)
    tall = scipy.sparse.random_array((m, 3 * n), density=0.2, rng=rng, format="csr")
    steps = scipy.sparse.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(m, m))
    names = [("D", "I", "Z"), ("TD", "TI", "TZ")]
    found = {"G": rng.standard_normal((3 * n, 3))}
    for matrix, parts in zip((tall, steps.tocsr()), names, strict=True):
        found |= dict(zip(parts, dealt(matrix, size), strict=True))
    return found


def dealt(a: scipy.sparse.csr_array, size: int) -> list[Array]:
    """Elements, columns and starts of the rows of each rank, as ali/sparse has them."""
    parts = [a[rank::size] for rank in range(size)]
    longest = max(part.nnz for part in parts)
    values = np.zeros((size, longest)), np.zeros((size, longest), np.int32)
    starts = np.zeros((size, -(-a.shape[0] // size) + 4), np.int64)
    for rank, part in enumerate(parts):
        values[0][rank, : part.nnz], values[1][rank, : part.nnz] = part.data, part.indices
        starts[rank, : part.shape[0] + 1] = part.indptr
        starts[rank, -3:] = a.shape[1], a.nnz, part.shape[0]
    return [*values, starts]


def joined(values: Array, indices: Array, starts: Array) -> scipy.sparse.csr_array:
    """The matrix that `dealt` has cut."""
    n, m = int(starts[0, -3]), int(starts[:, -1].sum())
    blocks = []
    for rank, ends in enumerate(starts):
        rows, used = int(ends[-1]), int(ends[ends[-1]])
        part = values[rank, :used], indices[rank, :used], ends[: rows + 1]
        blocks.append(scipy.sparse.csr_array(part, shape=(rows, n)))
    order = np.concatenate([np.arange(m)[rank :: len(starts)] for rank in range(len(starts))])
    return scipy.sparse.vstack(blocks).tocsr()[np.argsort(order)]


TALL = {"data": "D", "indices": "I", "starts": "Z", "n": "3n"}
CASES: Cases = {
    "conjugate_gradient": [
        (
            {"data": "TD", "indices": "TI", "starts": "TZ", "n": "m", "B": "Y"},
            lambda d, i, z, b, x, *_: float(
                (norm(joined(d, i, z) @ x - b, axis=0) / norm(b, axis=0)).max()
            ),
        )
    ],
    "matmul": [(TALL | {"X": "G"}, lambda d, i, z, x, c: far(c, joined(d, i, z) @ x))],
    "transposed_matmul": [(TALL | {"X": "Y"}, lambda d, i, z, x, c: far(c, joined(d, i, z).T @ x))],
    "truncated_svd": [
        (
            TALL | {"rank": 3},
            lambda d, i, z, s, u, v: far(
                s, np.linalg.svd(joined(d, i, z).toarray(), compute_uv=False)[:3]
            ),
        )
    ],
}
