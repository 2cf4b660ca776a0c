"""Random programs on sparse matrices give SciPy's elements, shapes and dtypes, on 1 to 5 ranks."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from alchemist_ray import AlchemistSession
from alchemist_ray.arrays.sparse import SparseHandle
from tests.support.suite import scaled

PROGRAMS = scaled(25, 1000)  # on each number of ranks
STEPS = 5
LENGTHS = [0, 1, 2, 3, 5, 8, 13, 40]
DTYPES = ["float64", "float32", "complex128", "complex64", "int64", "int32"]
FORMATS = ["csr", "csc", "coo", "bsr"]
NUMBERS = [2, -1, 0.5, 2j, np.float32(3), np.int64(2)]
Pair = tuple[Any, Any]  # what the gang has, and what SciPy has


def matrix(random: np.random.Generator, shape: tuple[int, int] | None = None) -> Any:
    """A sparse matrix of few small numbers, so that nothing is rounded."""
    shape = shape or tuple(random.choice(LENGTHS, 2).tolist())
    count = int(random.integers(0, 1 + 2 * max(shape))) if min(shape) else 0
    rows, cols = (random.integers(0, max(1, n), count) for n in shape)
    values = random.integers(-4, 5, count).astype(random.choice(DTYPES))
    if values.dtype.kind == "c":
        values = values + 1j * random.integers(-4, 5, count).astype(values.real.dtype)
    found = sp.coo_array((values, (rows, cols)), shape=shape)
    return found.asformat("coo" if not min(shape) else random.choice(FORMATS))


def step(random: np.random.Generator, session: AlchemistSession, pairs: list[Pair]) -> Pair:
    """One operation on the gang and in SciPy."""
    A, a = pairs[random.integers(len(pairs))]
    m, n = a.shape
    match random.integers(11):
        case 0:
            op = [operator.add, operator.sub, operator.mul][random.integers(3)]
            b = matrix(random, (m, n)).tocsr()
            return op(A, session.send_matrix(b)), op(a, b)
        case 1:
            number = NUMBERS[random.integers(len(NUMBERS))]
            return (A * number, a * number) if random.integers(2) else (number * A, number * a)
        case 2:
            b = matrix(random, (n, int(random.choice(LENGTHS)))).tocsr()
            return A @ session.send_matrix(b), a @ b
        case 3:
            x = random.integers(-3, 4, (n, 2)[: random.integers(1, 3)]).astype(float)
            return A @ x, a @ x
        case 4:
            x = random.integers(-3, 4, (m, 2)[: random.integers(1, 3)]).astype(float)
            return A.T @ x, a.T @ x
        case 5:
            return A.T, a.T.tocsr()
        case 6:
            rows = random.integers(-m, m, random.integers(0, 6)) if m else np.zeros(0, int)
            return A[rows], a[rows]
        case 7:
            cut = slice(*sorted(random.integers(0, m + 1, 2).tolist()), int(random.integers(1, 3)))
            return (A[cut], a[cut]) if random.integers(2) else (A.fetch(rows=cut), a[cut])
        case 8:
            k = int(random.integers(-m, n + 1)) if m and n else 0
            return A.diagonal(k), a.diagonal(k)
        case 9:
            axis = int(random.integers(2))
            return A.sum(axis=axis), a.sum(axis=axis)
    return A.astype("complex128"), a.astype("complex128")


def same(found: Any, expected: Any) -> None:
    found = found if sp.issparse(found) else found.fetch()
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == expected.dtype or not sp.issparse(expected), (found.dtype, expected.dtype)
    dense = [x.toarray() if sp.issparse(x) else x for x in (found, expected)]
    np.testing.assert_allclose(*dense, rtol=1e-5, atol=1e-5)


@pytest.mark.timeout(scaled(300, 1800))
@pytest.mark.parametrize("ranks", scaled([1, 3], [1, 2, 3, 4, 5]))
def test_programs_give_what_scipy_gives(cluster: str, ranks: int) -> None:
    with AlchemistSession(ranks) as session:
        for seed in range(PROGRAMS):
            random = np.random.default_rng([ranks, seed])
            sent = matrix(random)
            pairs = [(session.send_matrix(sent), sent.tocsr())]
            for number in range(STEPS):
                try:
                    made = step(random, session, pairs)
                    same(*made)
                except Exception as error:
                    error.add_note(f"program {seed} on {ranks} ranks, step {number}: {pairs}")
                    raise
                if isinstance(made[0], SparseHandle):
                    pairs.append(made)
