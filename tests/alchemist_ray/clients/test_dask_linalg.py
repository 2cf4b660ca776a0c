"""The replacements for dask.array.linalg give dask's results after changing one import."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import RoutineError, SessionError, ShapeError

da = pytest.importorskip("dask.array", reason="needs alchemist-on-ray[dask]")

from alchemist_ray.clients.dask import linalg  # noqa: E402
from tests.support import traces  # noqa: E402

pytestmark = pytest.mark.usefixtures("gang")
RNG = np.random.default_rng(3)
A = RNG.standard_normal((60, 12))
B = RNG.standard_normal((60, 3))
SPD = A.T @ A + np.eye(12)


def chunked(array: np.ndarray[Any, Any], *chunks: Any) -> Any:
    return da.from_array(array, chunks=chunks)


@pytest.mark.parametrize("name", [n for n in linalg.__all__ if n not in ("engine", "matmul")])
def test_signatures_are_dasks_and_a_session(name: str) -> None:
    ours = inspect.signature(getattr(linalg, name)).parameters
    theirs = inspect.signature(getattr(da.linalg, name)).parameters
    *same, session = ours.values()
    assert session.name == "session"
    assert session.kind == session.KEYWORD_ONLY
    assert [(p.name, p.default) for p in same] == [(p.name, p.default) for p in theirs.values()]


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_svd_is_dasks_with_its_signs(dtype: str) -> None:
    values = (A + 1j * np.roll(A, 5) if dtype == "complex128" else A).astype(dtype)
    x = chunked(values, (7, 20, 33), -1)
    u, s, v = linalg.svd(x)
    assert all(isinstance(part, da.Array) for part in (u, s, v))
    assert (u.chunks[0], u.shape, s.shape, v.shape) == (x.chunks[0], (60, 12), (12,), (12, 12))
    tight = {"float32": 2e-5}.get(dtype, 1e-12)
    np.testing.assert_allclose(s.compute(), np.linalg.svd(values)[1], rtol=tight)
    np.testing.assert_allclose((u * s @ v).compute(), values, atol=50 * tight)
    if dtype != "complex128":  # phases of complex vectors are no signs
        for ours, dasks in zip((u, s, v), da.linalg.svd(x), strict=True):
            assert ours.dtype == dasks.dtype
            np.testing.assert_allclose(ours.compute(), dasks.compute(), atol=50 * tight)


def test_svd_of_wide_and_of_chunks_in_both_directions() -> None:
    for x in (chunked(A.T, 5, 7), chunked(A, 11, 5), chunked(A, -1, -1)):
        u, s, v = linalg.svd(x)
        np.testing.assert_allclose((u * s @ v).compute(), x.compute(), atol=1e-12)
    with pytest.raises(NotImplementedError):
        linalg.svd(x, full_matrices=True)


@pytest.mark.parametrize("iterator", ["power", "QR"])
def test_svd_compressed_finds_a_low_rank(iterator: str) -> None:
    low = RNG.standard_normal((200, 6)) @ RNG.standard_normal((6, 50))
    x = chunked(low, 40, 25)
    u, s, v = linalg.svd_compressed(x, 6, iterator=iterator, n_power_iter=1, seed=1)
    for ours, dasks in zip(
        (u, s, v), da.linalg.svd_compressed(x, 6, n_power_iter=1, seed=1), strict=True
    ):
        np.testing.assert_allclose(ours.compute(), dasks.compute(), atol=1e-9)
    again = linalg.svd_compressed(x, 6, iterator=iterator, n_power_iter=1, seed=1, compute=True)
    np.testing.assert_array_equal(s.compute(), again[1].compute())
    drawn = linalg.svd_compressed(x, 6, seed=np.random.default_rng(0), coerce_signs=False)
    np.testing.assert_allclose(drawn[1].compute(), s.compute(), rtol=1e-9)
    with pytest.raises(ValueError, match="iterator"):
        linalg.svd_compressed(x, 6, iterator="ARPACK")


@pytest.mark.parametrize("function", ["qr", "tsqr"])
def test_qr_is_dasks_up_to_the_signs_of_its_rows(function: str) -> None:
    x = chunked(A, (30, 30), -1)
    q, r = getattr(linalg, function)(x)
    theirs_q, theirs_r = (part.compute() for part in getattr(da.linalg, function)(x))
    signs = np.where(np.diag(theirs_r) < 0, -1, 1)
    np.testing.assert_allclose(q.compute(), theirs_q * signs, atol=1e-13)
    np.testing.assert_allclose(r.compute(), theirs_r * signs[:, None], atol=1e-12)
    assert (q.chunks, r.chunks) == (x.chunks, ((12,), (12,)))


def test_tsqr_gives_the_svd_too() -> None:
    u, s, v = linalg.tsqr(chunked(A, 20, -1), compute_svd=True)
    np.testing.assert_allclose((u * s @ v).compute(), A, atol=1e-12)


def test_matmul_of_one_and_two_dimensions() -> None:
    M, x, y = chunked(A, 25, 5), chunked(A[0], 5), chunked(A[:, 0], 11)
    for left, right in ((M, M.T), (M, x), (y, M), (x, x), (M, SPD)):
        ours, dasks = linalg.matmul(left, right), da.matmul(left, right)
        assert (ours.shape, ours.dtype) == (dasks.shape, dasks.dtype)
        np.testing.assert_allclose(ours.compute(), dasks.compute(), rtol=1e-12, atol=1e-12)
    with pytest.raises(ShapeError, match="dimensions"):
        linalg.matmul(M[None], M)


@pytest.mark.parametrize("right", [B, B[:, 0]], ids=["2-D", "1-D"])
def test_lstsq_is_dasks(right: np.ndarray[Any, Any]) -> None:
    x, b = chunked(A, 20, -1), da.from_array(right, chunks={0: 20})
    for ours, dasks in zip(linalg.lstsq(x, b), da.linalg.lstsq(x, b), strict=True):
        assert ours.shape == dasks.shape
        np.testing.assert_allclose(ours.compute(), dasks.compute(), rtol=1e-10)


@pytest.mark.parametrize("lower", [False, True])
def test_cholesky_is_dasks(lower: bool) -> None:
    x = chunked(SPD, 4, 4)
    ours = linalg.cholesky(x, lower=lower)
    np.testing.assert_allclose(ours.compute(), da.linalg.cholesky(x, lower).compute(), atol=1e-12)
    assert ours.chunks == x.chunks
    with pytest.raises(RoutineError, match="positive definite"):
        linalg.cholesky(-x)
    with pytest.raises(ShapeError, match="square"):
        linalg.cholesky(chunked(A, 5, 5))


@pytest.mark.parametrize("right", [B[:12], B[:12, 0]], ids=["2-D", "1-D"])
def test_solve_is_dasks(right: np.ndarray[Any, Any]) -> None:
    x, b = chunked(SPD, 4, 4), da.from_array(right, chunks={0: 4})
    dasks = da.linalg.solve(x, b)
    for assume_a in ("gen", "pos"):
        ours = linalg.solve(x, b, assume_a=assume_a)
        assert ours.shape == dasks.shape
        np.testing.assert_allclose(ours.compute(), dasks.compute(), rtol=1e-9)
    with pytest.warns(FutureWarning, match="assume_a"):
        linalg.solve(x, b, sym_pos=True)
    with pytest.raises(ValueError, match="assume_a"):
        linalg.solve(x, b, assume_a="sym")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("int64", "int64"), ("int32", "int64"), ("int16", "int16"), ("uint8", "int8"),
        ("uint64", "uint64"), ("bool", "bool"), ("bool", "int32"), ("int8", "float32"),
        ("int64", "float32"), ("float16", "float16"), ("int32", "complex64"),
    ],
)  # fmt: skip
def test_matmul_has_numpys_dtype_and_wraps_as_numpy(left: str, right: str) -> None:
    def extreme(dtype: str, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
        if np.dtype(dtype).kind not in "iu":
            return (RNG.standard_normal(shape) > 0).astype(dtype)
        limits = np.iinfo(dtype)
        return RNG.integers(limits.min, limits.max, shape, dtype=dtype, endpoint=True)

    a, b = extreme(left, (9, 6)), extreme(right, (6, 4))
    with np.errstate(over="ignore"):
        expected = a @ b
    ours = linalg.matmul(chunked(a, 4, 3), chunked(b, 3, 2))
    found = ours.compute()
    assert ours.dtype == found.dtype == expected.dtype
    if found.dtype.kind in "biu":
        np.testing.assert_array_equal(found, expected)
        dasks = da.matmul(chunked(a, 9, 6), chunked(b, 6, 4)).compute()
        np.testing.assert_array_equal(found, dasks.astype(expected.dtype))
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_integers_are_promoted_as_numpy_does() -> None:
    whole = RNG.integers(-9, 9, (20, 4), dtype=np.int16)
    u, s, v = linalg.svd(chunked(whole, 5, -1))
    assert s.dtype == np.float64
    np.testing.assert_allclose((u * s @ v).compute(), whole, atol=1e-12)


def test_matrices_are_freed_with_the_arrays_that_stand_for_them(gang: AlchemistSession) -> None:
    def present() -> set[int]:
        return {handle.id for handle in gang.list_matrices()}

    before = present()
    u, s, v = linalg.svd(chunked(A, 20, -1))
    results = present() - before
    assert len(results) == 3  # the matrix that was sent is freed already
    kept = u[:10].compute(scheduler="threads")
    del u, s, v
    assert traces.wait_until(lambda: not results & present(), 5, 0.05) is not None
    assert kept.shape == (10, 12)


def test_which_session_it_is(gang: AlchemistSession) -> None:
    x = chunked(A, 20, -1)
    with AlchemistSession(1) as other:
        with pytest.raises(SessionError, match="2 sessions"):
            linalg.qr(x)
        with linalg.engine(other):
            q, _ = linalg.qr(x)
            assert len(other.list_matrices()) == 2
        _, r = linalg.qr(x, session=gang)
        np.testing.assert_allclose((q @ r).compute(), A, atol=1e-12)
    gang.yield_workers()
    with pytest.raises(SessionError, match="no open session"):
        linalg.qr(x)
    gang.request_workers(3)
