"""Sparse matrices: products, decomposition and solver agree with SciPy; the rest is refused."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from typing import Any

import dask.array as da
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import ray
import scipy.io
import scipy.sparse as sp

from alchemist_ray import AlchemistSession
from alchemist_ray.arrays.sparse import SparseHandle
from alchemist_ray.errors import (
    BadArgumentError,
    BadIndexError,
    DtypeError,
    FileError,
    LayoutError,
    LinAlgError,
    ResourceError,
    RoutineError,
    ShapeError,
)

OTHER = [
    lambda A: A + 1, lambda A: A * np.ones(A.shape), lambda A: np.exp(A), lambda A: np.asarray(A),
    lambda A: np.sum(A), lambda A: A > 0, list, lambda A: np.linalg.norm(A, 2),
    lambda A: np.sum(A.T), bool, lambda A: ~A, lambda A: A // 2, lambda A: A == A, lambda A: 1 in A,
    lambda A: A.T + 1, lambda A: A.T > 0, lambda A: A / A, lambda A: np.ones(A.shape) + A,
]  # fmt: skip


def sparse(m: int, n: int, dtype: str = "float64", density: float = 0.1) -> Any:
    found = sp.random_array((m, n), density=density, rng=np.random.default_rng([m, n]))
    if dtype.startswith("complex"):
        found = found + 1j * sp.random_array((m, n), density=density, rng=np.random.default_rng(7))
    return found.astype(dtype).tocsr()


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (50, 20)), ("float64", (20, 50)), ("complex128", (2, 30)), ("int64", (1, 1)),
        ("complex128", (0, 4)), ("float64", (7, 7)), ("int64", (20, 50)), ("float32", (7, 7)),
    ],
)  # fmt: skip
def test_products(session: AlchemistSession, shape: tuple[int, int], dtype: str) -> None:
    m, n = shape
    a = sparse(m, n, dtype)
    A = session.send_matrix(a)
    random = np.random.default_rng(1)
    assert (A.shape, A.dtype, A.nnz, A.T.shape) == (a.shape, a.dtype, a.nnz, (n, m))
    for columns in ((), (3,)):
        x, y = random.standard_normal((n, *columns)), random.standard_normal((m, *columns))
        for found, expected in [
            (A @ x, a @ x), (A @ session.send_matrix(x, layout="MC_MR"), a @ x),
            (A.T @ y, a.T @ y), (A.T @ session.send_matrix(y), a.T @ y),
        ]:  # fmt: skip
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(A.norm(), sp.linalg.norm(a.astype(complex)), rtol=1e-6)
    fetched = A.fetch()
    assert (fetched != a).nnz == 0
    assert fetched.dtype == a.dtype


@pytest.mark.parametrize("form", ["coo", "csc", "lil", "csr_matrix"])
def test_every_format_of_scipy_is_taken(session: AlchemistSession, form: str) -> None:
    a = sparse(30, 11)
    given = sp.csr_matrix(a) if form == "csr_matrix" else a.asformat(form)
    assert (session.send_matrix(given).fetch() != a).nnz == 0


def test_truncated_svd(session: AlchemistSession) -> None:
    a = sparse(300, 60)
    S, U, V = session.send_matrix(a).truncated_svd(5)
    expected = np.linalg.svd(a.toarray(), compute_uv=False)[:5]
    np.testing.assert_allclose(np.asarray(S), expected, rtol=1e-8)
    near = np.asarray(U) * np.asarray(S) @ np.asarray(V).T
    u, s, vt = sp.linalg.svds(a, 5)
    np.testing.assert_allclose(near, u * s @ vt, atol=1e-7)
    with pytest.raises(BadArgumentError, match="rank=0"):
        session.send_matrix(a).truncated_svd(0)


def test_conjugate_gradient(session: AlchemistSession) -> None:
    n = 400
    a = sp.diags_array([-1.0, 2.5, -1.0], offsets=[-1, 0, 1], shape=(n, n)).tocsr()
    b = np.random.default_rng(0).standard_normal(n)
    x, iterations, residual = session.send_matrix(a).conjugate_gradient(b)
    np.testing.assert_allclose(np.asarray(x), sp.linalg.spsolve(a.tocsc(), b), atol=1e-7)
    assert x.shape == (n,)
    _, without, _ = session.send_matrix(a).conjugate_gradient(b, preconditioner="none")
    assert 0 < iterations < without < n
    assert residual <= 1e-8
    with pytest.raises(RoutineError, match="not positive definite"):
        session.send_matrix(-a).conjugate_gradient(b)
    with pytest.raises(ShapeError, match="square"):
        session.send_matrix(a[:, :7]).conjugate_gradient(b[:7])


@pytest.mark.parametrize("work", OTHER)
def test_other_operations_are_refused_with_advice(session: AlchemistSession, work: Any) -> None:
    A = session.send_matrix(sparse(9, 4))
    with pytest.raises(BadArgumentError, match=r"A\.fetch\(\)\.toarray\(\)"):
        work(A)


def test_bad_input(session: AlchemistSession) -> None:
    a = sparse(9, 4)
    A = session.send_matrix(a)
    with pytest.raises(ShapeError, match="must have 4 rows"):
        A @ np.ones(9)
    with pytest.raises(ShapeError, match="A is 9 x 4, and B 9 x 4"):
        A @ a
    with pytest.raises(BadArgumentError, match=r"A\[rows\].T\[columns\].T"):
        A[:, 1]
    with pytest.raises(BadIndexError, match="9"):
        A[[0, 9]]
    outside = a.copy()
    outside.indices[-1] = 4
    before = len(session.list_matrices())
    with pytest.raises(ShapeError, match="to 4 of a matrix with 4 columns"):
        session.send_matrix(outside)
    with pytest.raises(LayoutError, match="for sparse matrices"):
        session.send_matrix(np.ones(3), layout=A.matrix_ref.layout)
    with pytest.raises(BadArgumentError, match="a dense matrix, and this one is sparse"):
        session.load_library("linalg").svd(A)
    with pytest.raises(BadArgumentError, match="requires 'A' to be a sparse matrix"):
        session.load_library("sparse").norm(session.send_matrix(np.ones((2, 2))))
    with pytest.raises(BadArgumentError, match="send it first"):
        session.load_library("sparse").norm(a)
    assert len(session.list_matrices()) == before
    with pytest.raises(DtypeError):
        session.send_matrix(a.astype(np.longdouble))
    for value, dtype in ((1 << 40, "int32"), (1e300, "float32")):
        large = a.tolil()
        large[2, 3] = value
        with pytest.raises(DtypeError, match=f"{dtype} cannot hold"):
            session.send_matrix(large.astype(type(value)), dtype=dtype)


def test_rows_and_negatives_that_are_none(session: AlchemistSession) -> None:
    A = session.send_matrix(sparse(9, 4))
    for key in (np.zeros(0, bool), np.ones(8, bool), True, np.ones((9, 1), bool)):
        with pytest.raises(BadIndexError, match=r"a mask of . elements for a matrix with 9|dim"):
            A[key]
    for key in (9, -10, [0, 9], np.uint64(2**63)):
        with pytest.raises(BadIndexError, match="is outside a matrix with 9 rows"):
            A[key]
    for key in (1.0, [0.5], None, "row", 2**70):
        with pytest.raises(BadIndexError, match=r"rows are integers, not|dimensions"):
            A[key]
    with pytest.raises(DtypeError, match=r"negative of a sparse matrix of bools: astype\('int8'"):
        -A.astype(bool)
    with pytest.raises(ResourceError, match=r"shape \(1073741824000, 3\) needs .* for the starts"):
        session.send_matrix(sp.coo_array(([1.0], ([2**33], [1])), shape=(2**30 * 1000, 3)))


def test_a_row_of_many_takes_no_memory_here(session: AlchemistSession) -> None:
    A = session.send_matrix(sp.csr_array((2_000_000, 3)))
    tracemalloc.start()
    try:
        assert A[5].shape == (1, 3)
        assert A[-2:].shape == (2, 3)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20  # all numbers of rows are 16 MB
    finally:
        tracemalloc.stop()


def test_singular_values_and_norms_at_the_limits(session: AlchemistSession) -> None:
    A = sparse(60, 50)
    whole = np.linalg.svd(A.toarray(), compute_uv=False)[:2]
    for factor in (0.0, 1e160, 1e-170):
        sent = session.send_matrix(A * factor)
        S, U, V = sent.truncated_svd(2)
        np.testing.assert_allclose(np.asarray(S), factor * whole, rtol=1e-6)
        for basis in (np.asarray(U), np.asarray(V)):
            np.testing.assert_allclose(basis.T @ basis, np.eye(2), atol=1e-6)
        assert sent.norm() == pytest.approx(factor * np.linalg.norm(A.toarray()), abs=0)
    for value, words in ((np.nan, "contains NaN"), (1.7e308, "the norm of A overflows: scale it")):
        wrong = A.copy()
        wrong.data[:9] = value
        with pytest.raises(LinAlgError, match=words):
            session.send_matrix(wrong).truncated_svd(2)
    square = sp.eye_array(9).tocsr()
    square.data[3] = np.nan
    for matrix, b in ((square, np.ones(9)), (sp.eye_array(9), np.full(9, np.inf))):
        with pytest.raises(LinAlgError, match="A or B contains NaN or infinity"):
            session.send_matrix(matrix).conjugate_gradient(b)


def test_a_sparse_matrix_is_freed_with_its_last_handle(session: AlchemistSession) -> None:
    before = len(session.list_matrices())
    A = session.send_matrix(sparse(90, 40))
    assert len(session.list_matrices()) == before + 1
    del A
    session.xp.ones(1)
    assert len(session.list_matrices()) == before


def test_attributes_that_are_missing_are_refused_with_advice(session: AlchemistSession) -> None:
    A = session.send_matrix(sparse(9, 4))
    for name in ("min", "mean", "toarray", "reshape", "columns"):
        with pytest.raises(AttributeError, match=r"A\.fetch\(\)\.toarray\(\)"):
            getattr(A, name)
    assert not hasattr(A, "_nothing")


@ray.remote
def product(A: Any, x: Any) -> Any:
    return np.asarray(A @ x), np.asarray(A.T @ np.ones(A.shape[0])), A.norm(), A.nnz


def test_a_task_of_ray_takes_a_sparse_handle(session: AlchemistSession) -> None:
    a = sparse(40, 11)
    A = session.send_matrix(a)
    x = np.arange(11.0)
    forwards, backwards, norm, nnz = ray.get(product.remote(A, x), timeout=120)
    np.testing.assert_allclose(forwards, a @ x)
    np.testing.assert_allclose(backwards, a.T @ np.ones(40))
    assert (norm, nnz) == (pytest.approx(sp.linalg.norm(a)), a.nnz)
    B = pickle.loads(pickle.dumps(A))
    assert (B.shape, B.nnz, B.dtype) == (A.shape, A.nnz, A.dtype)
    assert (B.fetch() != a).nnz == 0


def test_a_sparse_matrix_is_found_by_its_name(session: AlchemistSession) -> None:
    a = sparse(23, 9, "float32")
    session.send_matrix(a, name="L")
    L = session.matrix("L")
    assert (type(L), L.name, L.shape, L.nnz) == (SparseHandle, "L", (23, 9), a.nnz)
    assert (L.fetch() != a).nnz == 0
    L.free()
    assert not session.list_matrices()


def test_blocks_in_coordinate_form(session: AlchemistSession) -> None:
    a = sparse(30, 20).tocoo()
    half = a.nnz // 2
    triples = [
        (a.row[:half], a.col[:half], a.data[:half]),
        (a.row[half:], a.col[half:], a.data[half:]),
    ]
    found = session.send_matrix(triples, shape=(30, 20)).fetch()
    assert (found != a).nnz == 0
    assert session.send_matrix(triples).shape == (a.row.max() + 1, a.col.max() + 1)
    twice = session.send_matrix(triples * 2, shape=(30, 20), dtype="complex64").fetch()
    assert (twice.dtype, abs(twice - 2 * a).max() < 1e-6) == (np.complex64, True)
    whole = a.tocsr()
    blocks = [
        (whole[:10].tocsc(), 0, 0), (whole[10:, :5].tocoo(), 10, 0), (whole[10:, 5:], 10, 5)
    ]  # fmt: skip
    assert (session.send_matrix(blocks).fetch() != a).nnz == 0
    refs = [(ray.put(block), row, col) for block, row, col in blocks]
    sent = session.send_matrix(refs, shape=(30, 20), name="blocks")
    assert (sent.fetch() != a).nnz == 0
    assert (session.matrix("blocks") @ np.ones(20)).shape == (30,)


def test_triplets_of_dask(session: AlchemistSession) -> None:
    a = sparse(30, 20).tocoo()
    table = pd.DataFrame({"row": a.row, "col": a.col, "value": a.data})
    for source in (
        dd.from_pandas(table, npartitions=3), da.from_array(table.to_numpy(), chunks=(17, 3)),
    ):  # fmt: skip
        found = session.send_matrix(source, shape=(30, 20)).fetch()
        assert (found != a).nnz == 0
    with pytest.raises(ShapeError, match="three columns"):
        session.send_matrix(da.ones((4, 2)), shape=(3, 3))
    with pytest.raises(BadArgumentError, match="integers"):
        session.send_matrix(da.full((4, 3), 0.5), shape=(3, 3))


@pytest.mark.parametrize(
    ("blocks", "shape", "words"),
    [
        ([(np.array([3]), np.array([0]), np.array([1.0]))], (3, 1), "row 3 and column 0"),
        ([(np.array([-1]), np.array([0]), np.array([1.0]))], None, "do not fit"),
        ([(np.array([0.5]), np.array([0]), np.array([1.0]))], None, "integers"),
        ([(np.array([0, 1]), np.array([0]), np.array([1.0]))], None, "row0, col0"),
        ([(sp.eye_array(2), 0.5, 0)], None, "row0, col0"),
        (np.ones((3, 3)), (3, 3), "row0, col0"),
        ([(sp.csr_array(np.eye(3)), 1, 0)], (3, 3), "row 3"),
        *(
            ([(sp.eye_array(2), 0, 0)], wrong, "must be .rows, columns.")
            for wrong in ((3.5, 3), (-1, 3), (3, 3, 3), 3, "33")
        ),
    ],
)
def test_bad_blocks(session: AlchemistSession, blocks: Any, shape: Any, words: str) -> None:
    with pytest.raises((ShapeError, BadArgumentError), match=words):
        session.send_matrix(blocks, shape=shape)


def same(found: Any, expected: Any) -> None:
    """A handle has these elements; of a sparse matrix also the dtype."""
    fetched = found.fetch()
    assert fetched.shape == expected.shape
    if not sp.issparse(expected):
        np.testing.assert_allclose(fetched, expected, rtol=1e-6, atol=1e-6)
        return
    assert fetched.dtype == expected.dtype
    assert fetched.nnz == 0 == expected.nnz or abs(fetched - expected).max() < 1e-6


@pytest.mark.parametrize(
    "work",
    [
        lambda A, B: A + B, lambda A, B: A - B, lambda A, B: A * B, lambda A, B: A * 2,
        lambda A, B: np.float32(2) * A, lambda A, B: A / 4, lambda A, B: -A, lambda A, B: A * 1j,
        lambda A, B: A @ B.T, lambda A, B: A.T @ B, lambda A, B: A.T + A.T, lambda A, B: 0 + A,
        lambda A, B: A[[5, -1, 0, 5]], lambda A, B: A[2:7:3], lambda A, B: A[::-1],
        lambda A, B: A[np.arange(9) % 2 == 0], lambda A, B: A[:0], lambda A, B: A.T[[1]].T,
        lambda A, B: A.diagonal(), lambda A, B: A.diagonal(-3), lambda A, B: A.diagonal(4),
        lambda A, B: A.diagonal(-30), lambda A, B: A.diagonal(10**6), lambda A, B: A[...],
        lambda A, B: A[[]], lambda A, B: A[np.uint8([8])], lambda A, B: A[np.zeros(9, bool)],
        lambda A, B: -A.astype("uint8"), lambda A, B: -(100 * A).astype("uint64"),
        lambda A, B: B.astype("uint8") - A.astype("uint8"), lambda A, B: -A.astype("int8"),
        lambda A, B: A.sum(axis=0),
        lambda A, B: A.sum(axis=1), lambda A, B: np.arange(9.0) @ A, lambda A, B: A.astype("int32"),
        lambda A, B: np.ones((2, 9)) @ A, lambda A, B: A + sp.eye_array(9, 4),
    ],
)  # fmt: skip
def test_operations_are_those_of_scipy(session: AlchemistSession, work: Any) -> None:
    a, b = 10 * sparse(9, 4, density=0.5), sparse(9, 4, density=0.3)
    same(work(session.send_matrix(a), session.send_matrix(b)), work(a, b))


def test_numbers_and_parts(session: AlchemistSession) -> None:
    a = sparse(30, 11)
    A = session.send_matrix(a)
    assert float(A.sum()) == pytest.approx(a.sum())
    for order in ((), ("fro",), (None,)):
        assert np.linalg.norm(A, *order) == pytest.approx(sp.linalg.norm(a))
    with pytest.raises(DtypeError, match="a matrix cannot have dtype"):
        A * np.longdouble(2)
    assert session.load_library("sparse").norm(A) == A.norm()
    for rows in (slice(3, 25), slice(None, None, 4), slice(20, 5), 7, slice(29, 2, -3)):
        expected = a[rows] if isinstance(rows, slice) else a[[rows]]
        assert (session.fetch_matrix(A, rows=rows) != expected).nnz == 0
    assert (A.fetch(rows=slice(0, 0)).shape, A.layout) == ((0, 11), "ROWS")
    with pytest.raises(BadArgumentError, match=r"cols= is for dense matrices: .*A\.T\[cols\]\.T"):
        session.fetch_matrix(A, cols=slice(0, 2))
    same(copy.deepcopy(A), a)
    for dtype, number in (("f4", 2), ("i4", np.float32(3)), ("c8", 2), ("?", 4)):
        same(session.send_matrix(a.astype(dtype)) / number, a.astype(dtype) / number)
    same(session.send_matrix(a != 0) * True, (a != 0) * True)
    with pytest.raises(DtypeError, match="'nonsense' is not a dtype"):
        A.astype("nonsense")
    whole, large = sp.csr_array([[1, 0], [0, -3]]), 2**53 + 1  # which a float64 rounds
    for number in (large, -large, np.int64(large), np.uint64(large)):
        same(session.send_matrix(whole) * number, whole * number)
    operator = sp.linalg.aslinearoperator(A)
    np.testing.assert_allclose(operator @ np.ones(11), a @ np.ones(11))
    np.testing.assert_allclose(operator.H @ np.ones(30), a.T @ np.ones(30))


def test_duplicates_are_added(session: AlchemistSession) -> None:
    twice = sp.csr_array(([1.0, 2.0, 4.0], [1, 1, 0], [0, 2, 2, 3]), shape=(3, 2))
    A = session.send_matrix(twice)
    assert A.norm() == pytest.approx(5)
    np.testing.assert_array_equal((A @ np.ones(2)).fetch(), [3, 0, 4])
    np.testing.assert_array_equal(A.T.fetch().toarray(), twice.T.toarray())


def test_a_function_on_the_ranks_takes_and_makes_sparse_matrices(session: AlchemistSession) -> None:
    def doubled(comm: Any, A: Any) -> Any:
        import ali  # noqa: PLC0415  (on the ranks)

        ctx = ali.context()
        lines = np.arange(ctx.rank, 4, ctx.size)
        eye = ctx.sparse_from_triplets(lines, lines, np.ones(len(lines)), (4, 4))
        return ctx.new_sparse(2 * A.local, A.shape[0]), eye, type(A).__name__, len(A.rows)

    a = sparse(10, 4)
    B, eye, kind, rows = session.run(doubled, session.send_matrix(a))
    assert (B.fetch() != 2 * a).nnz == 0
    assert (eye.fetch() != sp.eye_array(4)).nnz == 0
    assert (kind, rows) == ("SparseMatrix", 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        ("new_sparse(csr_array((2, 4 + rank)), 2 * size)", r"shapes \[\(\d, 4\), \(\d, 5\)"),
        ("new_sparse(csr_array((2, 4), dtype='f4' if rank else 'f8'), 2 * size)", "float32, floa"),
        ("sparse_from_triplets(at, at, np.ones(2, 'f4' if rank else 'f8'), (4, 4))", "float32"),
        ("sparse_from_triplets(at, at, np.ones(2 + rank), (4, 4))", "vectors of one length"),
        ("sparse_from_triplets(at / 2, at, np.ones(2), (4, 4))", "they must be integers"),
        ("sparse_from_triplets(at, at + 3, np.ones(2), (4, 4))", "column 4 is outside"),
    ],
)
def test_parts_that_make_no_sparse_matrix_are_refused(
    session: AlchemistSession, make: str, words: str
) -> None:
    def made(comm: Any) -> Any:
        import ali  # noqa: PLC0415  (on the ranks)

        names = {"rank": comm.rank, "size": comm.size, "at": np.arange(2), "np": np}
        return eval(f"ctx.{make}", {**names, "csr_array": sp.csr_array, "ctx": ali.context()})

    with pytest.raises((ShapeError, DtypeError), match=words):
        session.run(made)


def test_triplets_have_places_of_any_integers(session: AlchemistSession) -> None:
    def made(comm: Any) -> Any:
        import ali  # noqa: PLC0415  (on the ranks)

        at = np.array([comm.rank, 200 + comm.rank], np.uint8)
        return ali.context().sparse_from_triplets(at, list(at), [1.0, 2.0], (300, 300))

    ranks = len(session.list_workers())
    at = [first + rank for first in (0, 200) for rank in range(ranks)]
    expected = sp.coo_array((np.repeat([1.0, 2.0], ranks), (at, at)), shape=(300, 300))
    assert (session.run(made).fetch() != expected).nnz == 0


@pytest.mark.parametrize("suffix", ["npz", "mtx", "mtx.gz", "petsc"])
def test_files(session: AlchemistSession, tmp_path: Any, suffix: str) -> None:
    a = sparse(12, 5, "complex128")
    path = tmp_path / f"a.{suffix}"
    session.send_matrix(a).save(path)
    loaded = session.load_matrix(path, name="from file")
    assert loaded.name == "from file"
    assert loaded.dtype == a.dtype
    assert abs(loaded.fetch() - a).max() < 1e-15
    if suffix != "petsc":  # tests/ali/test_petsc.py compares those
        read = sp.load_npz(path) if suffix == "npz" else scipy.io.mmread(path, spmatrix=False)
        assert abs(read - a).max() < 1e-15
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    loaded.free()
    for options in ({"rows": slice(2)}, {"columns": [0]}, {"dtype": "f4"}, {"missing": 0}):
        with pytest.raises(BadArgumentError, match=r"= is not an option .*A\.T\[columns\]\.T"):
            session.load_matrix(path, **options)
    path.write_text("nothing")
    with pytest.raises(FileError, match="is not a sparse matrix"):
        session.load_matrix(path)


def test_checkpoints_keep_sparse_matrices(session: AlchemistSession, tmp_path: Any) -> None:
    a = sparse(23, 9, "float32")
    session.send_matrix(a, name="L")
    session.checkpoint(tmp_path / "kept")
    session.matrix("L").free()
    for workers in (1, 5):
        with AlchemistSession.restore(tmp_path / "kept", workers) as als:
            L = als.matrix("L")
            assert (L.fetch() != a).nnz == 0
            same(L @ np.ones(9), a @ np.ones(9))


def test_masked_elements_are_refused(session: AlchemistSession) -> None:
    places, holes = np.arange(3), np.ma.masked_equal([1.0, 2.0, 3.0], 2)
    with pytest.raises(DtypeError, match="a block of a sparse matrix is masked"):
        session.send_matrix([(places, places, holes)], shape=(3, 3))
    with pytest.raises(DtypeError, match="operand is masked"):
        session.send_matrix(sp.eye_array(3)) @ holes
