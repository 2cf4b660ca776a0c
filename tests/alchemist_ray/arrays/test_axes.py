"""Arrays of three to five axes, in every layout, as NumPy has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import BadArgumentError, BadIndexError, DtypeError, ShapeError
from tests.alchemist_ray.arrays.checks import as_in_numpy, same, values
from tests.support.layouts import SOME_LAYOUTS
from tests.support.suite import part

a = np.random.default_rng(0).standard_normal((7, 4, 5))
m, v = a[0], a[0, 0]
c = np.random.default_rng(1).standard_normal((7, 5, 3))
AXES = (None, 0, 1, 2, -1, (0, 1), (1, 2), (0, 2), (0, 1, 2), ())

ALONG: list[Any] = [
    np.sort, np.argmax, np.argmin, lambda x, i: np.argsort(x, i, kind="stable"), np.cumsum,
    lambda x, i: np.diff(x, axis=i), lambda x, i: np.roll(x, 2, i), lambda x, i: np.repeat(x, 2, i),
    lambda x, i: np.unique(x, axis=i), lambda x, i: np.take(x, [1, 0, 1], i),
    lambda x, i: np.gradient(x, axis=i), lambda x, i: np.stack([x, x], i),
    lambda x, i: np.concatenate([x, 2 * x], i), np.expand_dims, np.flip, np.median,
    lambda x, i: np.take_along_axis(x, np.argsort(x, i), i), lambda x, i: np.array_split(x, 2, i),
    lambda x, i: np.average(x, i, np.arange(1.0, x.shape[i] + 1)),
    lambda x, i: np.quantile(x, [0.1, 0.5], i), lambda x, i: np.moveaxis(x, i, 0),
    lambda x, i: np.unstack(x, axis=i), lambda x, i: np.percentile(x, 30, i, keepdims=True),
]  # fmt: skip
WHOLE: list[Any] = [
    lambda x: x + x, lambda x: 2 * x - 1, lambda x: x - v, lambda x: x * m, lambda x: m / x,
    lambda x: x.T, lambda x: x.mT, lambda x: np.transpose(x, (2, 0, 1)), lambda x: x.astype("f4"),
    lambda x: np.transpose(x, (1, 0, 2)), lambda x: np.where(x > 0, x, 0), lambda x: x @ c,
    lambda x: x @ v, lambda x: x @ m.T, lambda x: m @ np.swapaxes(x, 1, 2),
    lambda x: x[:, :1] * x[:1], lambda x: v[:4] @ x,
    lambda x: np.tensordot(x, c, ([0, 2], [0, 1])), lambda x: np.tensordot(x, v, 1),
    lambda x: np.einsum("ijk->kij", x), lambda x: np.einsum("ijk,ikl->ijl", x, c),
    lambda x: np.einsum("ijk,kl,im->jlm", x, m.T, x[:, 0]), lambda x: np.einsum("ijk,ijk->i", x, x),
    lambda x: np.einsum("ijk,j->i", x.astype("f4"), v[:4]),
    lambda x: np.einsum("j,ijk->i", v[:4], x), lambda x: np.einsum("ijk,jk->i", x > 0, m),
    lambda x: np.einsum("ijk->", x), lambda x: np.einsum("i...,...->i...", x, m),
    lambda x: np.einsum("...k,k", x, v), lambda x: np.einsum("iji->j", x[:4, :, :4]),
    lambda x: np.einsum("ijk, kj", x, m.T), lambda x: np.nonzero(x > 0), np.trace, np.triu,
    lambda x: np.argwhere(x > 0), lambda x: np.tile(x, (2, 1, 2)),
    lambda x: np.isin(x, [a[0, 0, 0]]),
    lambda x: np.searchsorted(np.arange(3.0), x), lambda x: np.diagonal(x, 1, 0, 2), np.unique,
    lambda x: np.unique(x, return_inverse=True), lambda x: np.histogram(x)[0], np.ravel,
    lambda x: np.round(x, 1), lambda x: np.clip(x, -1, 1), lambda x: np.pad(x, 1), np.nan_to_num,
    lambda x: np.squeeze(x[:, :1]), lambda x: np.broadcast_to(x[0], (3, 4, 5)),
    lambda x: np.interp(x, [-1.0, 1.0], [0.0, 1.0]), lambda x: np.ravel(x, order="F"),
    lambda x: x[..., 0][:, None] + x[..., 0], np.cumsum, lambda x: np.linalg.norm(x, axis=1),
    lambda x: np.meshgrid(x[0, 0], x[0, :, 0], x[:, 0, 0]), np.zeros_like,
    lambda x: np.cross(x[..., :3], x[..., 2:]),
    lambda x: np.var(x, axis=(0, 2), where=x > 0),
]  # fmt: skip
SHAPES = [
    (-1,), (28, 5), (7, 20), (35, 4), (4, 35), (2, 70), (5, 4, 7), (7, 2, 2, 5), (1, 140), (140, 1),
    (7, 1, 4, 5), (20, 7), (2, 2, 5, 7, 1), (140, 1, 1),
]  # fmt: skip
KEYS: list[Any] = [
    np.s_[1], np.s_[1:3], np.s_[:, 1], np.s_[..., 2], np.s_[1, 2, 3], np.s_[::2, 1:, ::-1],
    np.s_[[0, 2]], np.s_[:, [0, 2]], np.s_[..., [0, 2, 1]], np.s_[:, None], np.s_[None, ..., None],
    np.s_[1, :, None], np.s_[[0, 1], [2, 3]], np.s_[[0, 1], :, [2, 3]], np.s_[:, [0, 1], [2, 3]],
    np.s_[[0, 1], [2, 3], [1, 1]], np.s_[1, :, [0, 1]], np.s_[:, [[0, 1], [1, 0]]], a > 0,
    a[:, 0, 0] > 0, a[:, :, 0] > 0, (slice(None), a[0] > 0), np.s_[5:2], np.s_[-1, -2:],
    np.s_[::-1], (a[:, 0, 0] > 0, 1), np.s_[[], 1], np.s_[6:0:-2, [1, 0], 2:],
    np.s_[:, np.array(1)], np.s_[np.array(1), :, [0, 1]], np.s_[[0, 1], :, np.array(2)],
    np.s_[np.array(1), 1:, np.array(2)], (a[:, :, 0] > 0, 1), (2, a[0] > 0),
]  # fmt: skip


OTHER_SHAPES: list[tuple[int, ...]] = [
    (0, 3, 2), (3, 0, 2), (1, 1, 1, 1), (2, 3, 4, 2, 2), (1, 5, 6), (2, 3, 1), (1,) * 8,
]  # fmt: skip
ON_OTHERS: list[Any] = [
    lambda x: x + x, lambda x: x.sum(0), lambda x: x.sum(-1), lambda x: x.T,
    lambda x: x.reshape(-1), lambda x: x[:1], lambda x: x[..., :0],
]  # fmt: skip
Check = Callable[[Iterable[Callable[[Any], Any]]], None]


@pytest.fixture
def check(session: AlchemistSession, subtests: pytest.Subtests) -> Check:
    """Compare functions of `a` with NumPy's, each in some of the layouts."""
    sent = [session.send_matrix(a, layout=layout) for layout in SOME_LAYOUTS]

    def every(works: Iterable[Callable[[Any], Any]]) -> None:
        for turn, work in enumerate(works):
            for A in part(sent, turn, 7):
                with subtests.test(row=turn, layout=A.layout):
                    as_in_numpy(work, a, A)

    return every


def test_reductions(check: Check) -> None:
    names = ("sum", "mean", "std", "max", "prod", "any")
    check(
        partial(getattr(np, name), axis=axis, keepdims=name != "mean")
        for axis, name in itertools.product(AXES, names)
    )


def test_along_an_axis(session: AlchemistSession, subtests: pytest.Subtests) -> None:
    sent = [session.send_matrix(a, layout=layout) for layout in ("VC_STAR", "MC_MR")]
    for turn, work in enumerate(ALONG):
        for axis, A in part([*itertools.product((0, 1, -1), sent)], turn, 2):
            with subtests.test(row=turn, axis=axis, layout=A.layout):
                as_in_numpy(lambda x: work(x, axis), a, A)  # noqa: B023


def test_whole_arrays(check: Check) -> None:
    check(WHOLE)


def test_shapes(check: Check) -> None:
    check(lambda x, shape=shape: x.reshape(shape) for shape in SHAPES)
    check(lambda x, shape=shape: x.reshape(shape).reshape(a.shape) for shape in SHAPES)


def test_parts(check: Check) -> None:
    check(lambda x, key=key: x[key] for key in KEYS)


def test_assignments(session: AlchemistSession, subtests: pytest.Subtests) -> None:
    for turn, key in enumerate(KEYS):
        for layout in part(("VC_STAR", "MC_MR"), turn, 2):
            with subtests.test(key=key, layout=layout):
                A, b = session.send_matrix(a, layout=layout), a.copy()
                A[key] = b[key] = 5
                same(A, b)
                if a[key].size:
                    b[key] = value = -np.abs(a[key])
                    A[key] = session.xp.asarray(value)
                    same(A, b)


@pytest.mark.parametrize("layout", part(SOME_LAYOUTS, 0, 3))
def test_in_place(session: AlchemistSession, layout: str) -> None:
    A, b = session.send_matrix(a, layout=layout), a.copy()
    for operand in (3, v, m, a[:, :1], a):
        A += operand
        b += operand
        A *= A
        b *= b
    same(A, b)
    with pytest.raises(ShapeError):
        A += np.ones((2, 7, 4, 5))
    same(A, b)


def test_other_shapes_and_dtypes(session: AlchemistSession, subtests: pytest.Subtests) -> None:
    dtypes = ("float32", "complex128", "int64", "bool")
    for turn, shape in enumerate(OTHER_SHAPES):
        for dtype in part(dtypes, turn, 2):
            with subtests.test(shape=shape, dtype=dtype):
                b = values(shape, dtype)
                B = session.send_matrix(b)
                same(B, b)
                for work in ON_OTHERS:
                    as_in_numpy(work, b, B)
                assert all((x == y).all() for x, y in zip(B, b, strict=True))


def test_values_in_this_process(session: AlchemistSession) -> None:
    A = session.send_matrix(a)
    assert (A.shape, A.ndim, len(A), A.size) == ((7, 4, 5), 3, 7, 140)
    assert A.item(17) == a.item(17) == A.item(0, 3, 2)
    assert str(A) == str(a)
    assert "7 x 4 x 5 float64" in repr(A)
    np.testing.assert_array_equal(A.fetch(rows=slice(1, 6, 2)), a[1:6:2])
    large = np.arange(60_000.0).reshape(50, 60, 20)
    assert str(session.send_matrix(large)) == str(large)
    assert session.run(lambda comm, X: comm.allreduce(X.local[..., 1].sum()), A) == pytest.approx(
        a[..., 1].sum()
    )


def test_refusals_name_what_to_do(session: AlchemistSession) -> None:
    A = session.send_matrix(a)
    linalg = session.load_library("linalg")
    advice = r"svd: A has the shape \(7, 4, 5\).*A\.reshape\(len\(A\), -1\)"
    for wrong, kind, words in (
        (lambda: linalg.svd(A), ShapeError, advice),
        (lambda: A + np.ones((2, 5)), ShapeError, "do not broadcast"),
        (lambda: A.sum(3), ShapeError, "axis=3 is not an axis of a 3-D array"),
        (lambda: A[0, 0, 9], BadIndexError, "index 9 is out of range for 5 elements of axis 2"),
        (lambda: A[0, 0, 0, 0], BadIndexError, "4 indices"),
        (lambda: A[:, np.ones(3, bool)], BadIndexError, "mask of 3 elements does not fit 4"),
        (lambda: A[:, [0.5]], BadIndexError, "by integers"),
        (lambda: np.concatenate([A, A[:, :1]], 2), ShapeError, "cannot be joined along axis 2"),
        (lambda: A @ A, ShapeError, "do not match"),
        (lambda: A.reshape((1,) * 9), ShapeError, "cannot become"),
        (lambda: session.send_matrix(np.ones((1,) * 9)), ShapeError, "more than 8 axes"),
        (lambda: A.fetch(cols=1), ShapeError, r"A\[\.\.\.\]\.fetch\(\)"),
        (lambda: np.einsum(A, [0, 1, 2]), BadArgumentError, "without subscripts"),
        (lambda: A.__setitem__(0, np.ones((3, 3))), ShapeError, "does not broadcast"),
        (lambda: A.astype("int64").__setitem__(0, np.nan), DtypeError, "cannot hold"),
    ):
        with pytest.raises(kind, match=words):
            wrong()
    same(A, a)
