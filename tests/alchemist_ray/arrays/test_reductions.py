"""Reductions on the gang give NumPy's shapes, dtypes and numbers."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.arrays import rules
from alchemist_ray.errors import BadArgumentError, ShapeError
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.arrays.cases import METHODS
from tests.alchemist_ray.arrays.checks import dtypes, few, layouts, lengths, same, values
from tests.support.suite import part


@given(
    what=st.sampled_from(METHODS), m=lengths, n=lengths, dtype=dtypes, layout=layouts,
    axis=st.sampled_from([None, 0, 1, -1, -2, (0, 1), (1,)]), keepdims=st.booleans(),
    function=st.booleans(), two=st.booleans(),
)  # fmt: skip
@few
def test_a_reduction(
    session: AlchemistSession, what: str, m: int, n: int, dtype: str, layout: str, axis: Any,
    keepdims: bool, function: bool, two: bool,
) -> None:  # fmt: skip
    a = values((m, n) if two else (m,), dtype)
    if dtype.startswith("int"):
        a -= 2
    axis = axis if two or axis in (None, 0, -1) else 0
    A = session.send_matrix(a, layout=layout)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # means of nothing
        try:
            expected = getattr(a, what)(axis=axis, keepdims=keepdims)
        except ValueError:
            with pytest.raises(ShapeError, match="no elements"):
                getattr(A, what)(axis=axis, keepdims=keepdims)
            return
        work = partial(getattr(np, what), A) if function else getattr(A, what)
        found = work(axis=axis, keepdims=keepdims)
    if what in ("mean", "var", "std", "sum") and dtype in ("float32", "complex64"):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-5)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    else:
        same(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_further_reductions(session: AlchemistSession, dtype: str) -> None:
    a = values((8, 5), dtype)
    A = session.send_matrix(a, layout="MC_MR")
    same(A.std(axis=0, ddof=1), a.std(axis=0, ddof=1))
    same(np.var(A, axis=1, ddof=1), np.var(a, axis=1, ddof=1))
    same(np.var(A, axis=1, correction=1.5), np.var(a, axis=1, ddof=1.5))
    same(np.std(A, correction=-0.5), np.std(a, ddof=-0.5))
    same(np.count_nonzero(A > 1, axis=0), np.count_nonzero(a > 1, axis=0))
    if dtype != "bool":
        same(np.ptp(A, axis=0), np.ptp(a, axis=0))
    same(A.sum(dtype="complex128"), a.sum(dtype="complex128"))
    for ord in (None, "fro", 1, np.inf, 2, "nuc"):
        wide = a.astype("float64") if a.dtype.kind != "c" else a  # NumPy has none of float16
        np.testing.assert_allclose(
            float(A.norm(ord)), np.linalg.norm(wide, ord), rtol=1e-2 if dtype == "float16" else 1e-5
        )
    for ord in (None, 1, 2, 3, np.inf, -np.inf):
        for axis in (0, 1):
            np.testing.assert_allclose(
                np.asarray(np.linalg.norm(A, ord, axis=axis)),
                np.linalg.norm(1.0 * a, ord, axis=axis),
                rtol=1e-5,
            )


@pytest.mark.parametrize(
    ("mean", "shape"), [(1e6, (1000,)), (1.7e9, (300, 7)), (1e12, (7, 40_000))]
)
def test_a_large_mean_costs_deviations_no_digits(
    session: AlchemistSession, mean: float, shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    a = mean + random.random(shape)
    holes = np.where(random.random(shape) < 0.1, np.nan, a)
    A, H = session.send_matrix(a), session.send_matrix(holes)
    exact, rest = a.astype(np.longdouble), holes.astype(np.longdouble)
    some = a > mean + 0.3
    pairs = [
        *((np.var(A, axis=i), np.var(exact, axis=i)) for i in (None, 0, -1)),
        *((np.nanvar(H, axis=i), np.nanvar(rest, axis=i)) for i in (None, 0, -1)),
        (np.std(A, axis=0, ddof=1), np.std(exact, axis=0, ddof=1)),
        (np.nanstd(H, axis=0), np.nanstd(rest, axis=0)),
        ((A + 0.0).var(), np.var(exact)), (A[mean + 0.3 < A].var(), np.var(exact[some])),
        (session.send_matrix(a + 1j * a).var(), 2 * np.var(exact)),
    ]  # fmt: skip
    for found, expected in pairs:
        np.testing.assert_allclose(np.asarray(found), expected.astype(float), rtol=1e-11)


def test_covariances_are_no_less_accurate_than_those_of_numpy(session: AlchemistSession) -> None:
    a = 1.7e9 + np.random.default_rng(0).random((300, 7))
    A, apart = session.send_matrix(a), a.astype(np.longdouble)
    apart = apart - apart.mean(axis=0)
    exact = (apart.T @ apart / 299).astype(float)
    deviations = np.sqrt(np.diag(exact))
    near = {"rtol": 0, "atol": 1e-11}
    np.testing.assert_allclose(np.cov(A, rowvar=False).fetch(), exact, **near)
    correlated = exact / deviations / deviations[:, None]
    np.testing.assert_allclose(np.corrcoef(A, rowvar=False).fetch(), correlated, **near)
    linalg = session.load_library("linalg")
    variances = np.linalg.eigvalsh(exact)[::-1]
    np.testing.assert_allclose(
        linalg.pca(A, 7).explained_variance.fetch(), variances, rtol=1e-13, atol=0
    )
    found = linalg.column_stats(A)[1].fetch().ravel()
    np.testing.assert_allclose(found, np.sqrt((apart**2).mean(0)).astype(float), rtol=1e-13)


def test_long_results_have_the_shapes_of_short_ones(session: AlchemistSession) -> None:
    m = rules.INLINE_NBYTES // 8 + 1
    A = session.xp.ones((m, 2))
    sums = A.sum(axis=1)
    assert sums.shape == A.T.sum(axis=0).shape == (m,)
    assert A.sum(axis=0).shape == (2,)
    assert float((A - sums[:, None]).sum()) == -2 * m
    assert (A @ np.array([1.0, -1.0])).shape == (m,)
    with pytest.raises(ShapeError, match="do not broadcast"):
        A - sums


def test_centring_moves_no_data(session: AlchemistSession) -> None:
    a = values((9, 5), "float64")
    A = session.send_matrix(a)
    rows = A.mean(axis=1, keepdims=True)
    same(A - A.mean(axis=1)[:, None], a - a.mean(axis=1)[:, None])
    same(A - A.mean(axis=0), a - a.mean(axis=0))
    assert A.plan("subtract", rows).moved_nbytes == (0, 0)
    same(A - rows, a - a.mean(axis=1, keepdims=True))
    assert A.plan("subtract", A.mean(axis=0, keepdims=True)).moved_nbytes == (0, 0)


def test_unsupported_arguments_are_refused(session: AlchemistSession) -> None:
    A = session.xp.ones((3, 3))
    with pytest.raises(ShapeError, match="axis=2 is not an axis"):
        A.sum(axis=2)
    with pytest.raises(ShapeError, match="twice"):
        A.sum(axis=(0, 0))
    with pytest.raises(BadArgumentError, match=r"np\.var\(A\.fetch\(\), mean=\.\.\.\)"):
        np.var(A, mean=np.eye(3))


@pytest.mark.parametrize(("dtype", "method"), part([*itertools.product(DTYPES, METHODS)], 0, 7))
def test_masks_broadcast_and_methods_agree(
    session: AlchemistSession, method: str, dtype: str
) -> None:
    a = values((8, 5), dtype)
    A, B = session.send_matrix(a, layout="MC_MR"), session.xp.zeros(5, dtype="complex128")
    options: dict[str, Any] = {"initial": 1} if method in ("min", "max") else {}
    for mask in ([True, False, True, True, False], a[:, :1] != 1, abs(a) > 1):
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # means of nothing
            wanted = getattr(a, method)(axis=0, where=mask, **options)
        with np.errstate(all="ignore"):
            for some in (mask, session.xp.asarray(mask), session.xp.asarray(mask).astype("int32")):
                same(getattr(A, method)(axis=0, where=some, **options), wanted)
            assert getattr(A, method)(0, out=B, where=mask, **options) is B
        near = 1e-2 if dtype == "float16" else 1e-5
        np.testing.assert_allclose(B.fetch(), wanted, rtol=near)
    same(getattr(np, method)(A, 0, *[None] * (method in ("sum", "mean", "var", "std"))),
         getattr(np, method)(a, 0))  # fmt: skip


def test_a_result_is_written_to_out(session: AlchemistSession) -> None:
    a, b = values((7, 4), "float64"), values((7, 4), "float32")
    A, B = session.send_matrix(a), session.send_matrix(b, layout="STAR_VC")
    alias, held = session.matrix(B.name), B.id
    assert np.multiply(A[0], 2, out=B) is B  # broadcasts, and is cast
    np.multiply(a[0], 2, out=b, casting="same_kind")
    same(B, b)
    same(alias, b)
    assert B.id == held
    np.exp(A, out=B, where=A > 1)
    np.exp(a, out=b, where=a > 1)
    same(B, b)
    quotient, rest = session.xp.zeros((7, 4)), session.xp.zeros((7, 4))
    assert np.divmod(A, 2, out=(quotient, rest))[1] is rest
    same(quotient, a // 2)
    same(rest, a % 2)
    np.add([1.0, 2, 3, 4], 1, out=B)
    same(B, np.broadcast_to(np.float32([2, 3, 4, 5]), (7, 4)))
    total = session.xp.zeros(4)
    assert np.sum(A, 0, None, total) is total
    same(total, a.sum(0))
    same(np.clip(A, 0, 1, out=A), np.clip(a, 0, 1))
