"""Functions that sort, accumulate, count and look up give NumPy's values, shapes and dtypes."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.arrays.rules import INSTEAD
from alchemist_ray.errors import (
    BadArgumentError,
    BadIndexError,
    DtypeError,
    MatrixError,
    ResourceError,
    ShapeError,
)
from tests.alchemist_ray.arrays.cases import ALONG, FETCHING, KEEPING, OTHERS, REFUSED
from tests.alchemist_ray.arrays.checks import as_in_numpy, dtypes, elements, few, layouts, same
from tests.support.suite import part

SHAPES = [(7,), (6, 4), (1, 1), (0,), (0, 3), (3, 0), (30, 2), (2, 30)]
AXES = (None, 0, 1, -1)


@given(
    what=st.sampled_from(ALONG), shape=st.sampled_from(SHAPES), dtype=dtypes, layout=layouts,
    axis=st.sampled_from(AXES), keepdims=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
@few
def test_along_an_axis(
    session: AlchemistSession, what: str, shape: tuple[int, ...], dtype: str, layout: str,
    axis: Any, keepdims: bool, seed: int,
) -> None:  # fmt: skip
    a = elements(shape, dtype, seed)
    A = session.send_matrix(a, layout=layout)
    if what == "diff" and axis is None:
        return
    options = {"keepdims": keepdims} if what in KEEPING else {}
    as_in_numpy(lambda x: getattr(np, what)(x, axis=axis, **options), a, A)


OF_OTHERS = list(
    itertools.product(
        [(7,), (6, 4), (1, 1)], ["float64", "float32", "int32", "int64", "bool", "complex64"]
    )
)


def test_other_functions(session: AlchemistSession, subtests: pytest.Subtests) -> None:
    for turn, what in enumerate(OTHERS):
        for shape, dtype in part(OF_OTHERS, turn, 9):
            if (what, dtype) != ("weighted bincount", "complex64"):
                with subtests.test(what=what, shape=shape, dtype=dtype):
                    a = elements(shape, dtype)
                    as_in_numpy(OTHERS[what], a, session.send_matrix(a))


@pytest.mark.parametrize("what", ["sort", "argsort", "cumsum", "unique", "median", "argmax"])
@pytest.mark.parametrize("dtype", ["float64", "int32", "bool"])
def test_large_vectors_on_all_ranks(session: AlchemistSession, what: str, dtype: str) -> None:
    a = elements((70_000,), dtype)
    A = session.send_matrix(a)
    if what == "argsort":
        as_in_numpy(lambda x: np.argsort(x, kind="stable"), a, A)
    else:
        as_in_numpy(getattr(np, what), a, A)


@pytest.mark.parametrize("session", [1, 3], indirect=True)
@pytest.mark.parametrize("shape", [(300_000,), (100_000, 3)])
def test_sums_in_float32_are_accumulated_in_float64(
    session: AlchemistSession, shape: tuple[int, ...]
) -> None:
    a = np.random.default_rng(4).random(shape, np.float32)
    expected = np.cumsum(a, axis=0, dtype=np.float64)
    found = np.cumsum(session.send_matrix(a), axis=0).fetch()
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=2**-23)
    z = (a + 1j * a).astype(np.complex64)
    found = np.cumsum(session.send_matrix(z), axis=0).fetch()
    np.testing.assert_allclose(found.imag, expected, rtol=2**-23)


EXACT = {
    "max": np.max, "min": np.min, "argmax": np.argmax, "argmin": np.argmin, "any": np.any,
    "all": np.all, "count_nonzero": np.count_nonzero, "sort": np.sort, "unique": np.unique,
}  # fmt: skip
EXACT_OF_INTEGERS = {"sum": np.sum, "prod": np.prod, "cumsum": np.cumsum}


@pytest.mark.parametrize("session", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_what_docs_call_exact_is_exact_on_any_number_of_ranks(
    session: AlchemistSession, dtype: str
) -> None:
    rng = np.random.default_rng(6)
    if dtype == "float64":
        a = rng.standard_normal(50_000)
    else:
        a = rng.integers(-(2**62), 2**62, 50_000).astype(dtype) | np.array(1, dtype)
    A = session.send_matrix(a)
    for name, function in (EXACT | (EXACT_OF_INTEGERS if dtype != "float64" else {})).items():
        found: Any = np.asarray(function(A))
        assert np.array_equal(found, function(a)), name
    few = rng.integers(0, 50, 50_000)
    assert np.array_equal(np.bincount(session.send_matrix(few)).fetch(), np.bincount(few))


def test_many_bins_are_distributed(session: AlchemistSession) -> None:
    rng = np.random.default_rng(5)
    for most, count in ((3_000_000, 200_000), (9_000_000, 1000)):
        a, w = rng.integers(0, most, count), rng.random(count)
        A = session.send_matrix(a)
        assert np.array_equal(np.bincount(A).fetch(), np.bincount(a))
        found = np.bincount(A, weights=session.send_matrix(w)).fetch()
        np.testing.assert_allclose(found, np.bincount(a, weights=w))


def test_bins_that_fit_into_no_memory_are_refused(session: AlchemistSession) -> None:
    A = session.send_matrix(np.array([1, 30_000_000_000]))  # 240 GB
    with pytest.raises(ResourceError):
        np.bincount(A)
    assert np.array_equal(A.fetch(), [1, 30_000_000_000])


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64", "int8", "bool", "uint64"])
@pytest.mark.parametrize("shape", [(90,), (90, 7), (90, 3, 4)])
def test_sums_of_segments(session: AlchemistSession, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(8)
    x, segments = (rng.random(shape) * 100).astype(dtype), rng.integers(0, 9, 90)
    wanted = np.zeros((9, *shape[1:]), np.sum(x).dtype)
    np.add.at(wanted, segments, x)
    for layout in ("VC_STAR", "MC_MR") if len(shape) == 2 else ("VC_STAR",):
        A = session.send_matrix(x, layout=layout)
        found = session.xp.segment_sum(A, segments)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found.fetch(), wanted, rtol=1e-5)
        many = session.xp.segment_sum(A, session.send_matrix(segments + 700), 709).fetch()
        np.testing.assert_allclose(many[700:], wanted, rtol=1e-5)
        assert not many[:700].any()


WRONG_SEGMENTS = {
    "too few": (ShapeError, [0, 1]),
    "not integers": (DtypeError, [0.0, 1.0, 2.0]),
    "out of range": (BadIndexError, [0, 1, 9]),
    "negative": (BadIndexError, [0, -1, 2]),
}


@pytest.mark.parametrize("what", WRONG_SEGMENTS)
def test_wrong_segments_are_refused(session: AlchemistSession, what: str) -> None:
    A = session.send_matrix(np.ones((3, 2)))
    error, segments = WRONG_SEGMENTS[what]
    with pytest.raises(error, match="segment"):
        session.xp.segment_sum(A, np.array(segments), 9)
    assert A.sum() == 6


MANY = 10**12
TOO_LARGE = {
    "repeat": lambda x: np.repeat(x, MANY),
    "tile": lambda x: np.tile(x, MANY),
    "broadcast": lambda x: np.broadcast_to(x, (MANY, 10)),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_indices_that_fit_into_no_memory_are_refused_before_they_are_made(
    session: AlchemistSession, what: str
) -> None:
    A = session.send_matrix(np.arange(10))
    with pytest.raises(ResourceError, match=r"for \d+ indices, and its node has"):
        TOO_LARGE[what](A)
    assert np.array_equal(np.repeat(A, 2).fetch(), np.repeat(np.arange(10), 2))


@pytest.mark.parametrize("what", ["median", "nanmedian", "quantile", "nanquantile", "percentile"])
def test_quantiles_of_no_elements(session: AlchemistSession, what: str) -> None:
    q = () if what.endswith("median") else (0.3,)
    for shape, axis in [((0,), None), ((0, 3), 0), ((3, 0), 0), ((3, 0), 1)]:
        a = np.zeros(shape)
        work = functools.partial(getattr(np, what), axis=axis)
        as_in_numpy(lambda x, work=work: work(x, *q), a, session.send_matrix(a))


def test_methods_are_the_functions(session: AlchemistSession) -> None:
    a = elements((9, 4), "int64")
    A = session.send_matrix(a)
    for found, expected in [
        (A.argmax(), a.argmax()), (A.argmin(0), a.argmin(0)),
        (A.argsort(0), a.argsort(0, "stable")),
        (A.cumsum(1), a.cumsum(1)), (A.cumprod(), a.cumprod()), (A.prod(0), a.prod(0)),
        (A.repeat(2, 1), a.repeat(2, 1)), (A.take([2, 0], 0), a.take([2, 0], 0)),
        (A.swapaxes(0, 1), a.swapaxes(0, 1)), (A[0].searchsorted(3), a[0].searchsorted(3)),
        (A.argmax(1, keepdims=True), a.argmax(1, keepdims=True)),
    ]:  # fmt: skip
        same(found, expected)
    for found, expected in zip(A.nonzero(), a.nonzero(), strict=True):
        same(found, expected)
    A.sort(0)
    a.sort(0)
    same(A, a)
    with pytest.raises(MatrixError, match="is a copy of elements"):
        A[:3].sort()


def test_advice_of_what_is_missing_runs(session: AlchemistSession, tmp_path: Any) -> None:
    A = session.send_matrix(np.random.default_rng(0).standard_normal((6, 6)))
    for name, advice in INSTEAD.items():
        code = re.split(r", a | for ", advice)[0].replace("matrix.", f"{tmp_path}/matrix.")
        exec(code, {"np": np, "A": A.copy()})  # the code that users are told to write
        assert not hasattr(np, name) or name not in dir(session.xp)
    with pytest.raises(BadArgumentError, match=r"A\.T\[::-1\]"):
        np.rot90(A)


@pytest.mark.parametrize("code", REFUSED)
def test_refusals_say_what_to_do(session: AlchemistSession, code: str) -> None:
    A = session.send_matrix(np.ones((6, 4)))
    with pytest.raises((BadArgumentError, ShapeError, TypeError), match=REFUSED[code]):
        eval(code, {"np": np, "A": A, "B": np.ones((6, 4))})


@pytest.mark.parametrize("code", FETCHING)
def test_calls_that_are_missing_are_told_as_code_that_runs(
    session: AlchemistSession, code: str
) -> None:
    a = np.arange(24.0).reshape(6, 4)
    names = {"np": np, "A": session.send_matrix(a), "B": session.send_matrix(a[:, 1])}
    if "A" not in code:
        code = code.replace("B", "A")
        names["A"] = names["B"]
    told = re.sub(r"\b([AB])\b", r"\1.fetch()", code)
    with pytest.raises(BadArgumentError, match=re.escape(told)):
        eval(code, names)
    eval(told, names)


def test_the_namespace_sorts_and_counts_by_the_standard(session: AlchemistSession) -> None:
    xp, a = session.xp, np.array([3.0, 1.0, 3.0, 2.0, 1.0])
    A = xp.asarray(a)
    same(xp.sort(A, descending=True), np.sort(a)[::-1])
    same(xp.argsort(A, descending=True), np.array([0, 2, 3, 1, 4]))
    same(xp.unique_counts(A).counts, np.array([2, 1, 2]))
    same(xp.unique_all(A).inverse_indices, np.array([2, 0, 2, 1, 0]))
    same(xp.expand_dims(A), a[None])
    same(xp.std(A, axis=()), np.zeros(5))
    same(xp.bitwise_invert(A > 1), ~(a > 1))
    same(xp.from_dlpack(a), a)
    same(np.from_dlpack(A) + A, 2 * a)
    same(xp.linalg.outer(A, A), np.outer(a, a))
    same(xp.linalg.cross(A[:3], A[2:]), np.cross(a[:3], a[2:]))
    for found, expected in zip(xp.meshgrid(A, A[:2], indexing="ij"),
                               np.meshgrid(a, a[:2], indexing="ij"), strict=True):  # fmt: skip
        same(found, expected)
    assert [type(x) for x in (xp.finfo(xp.float32).eps, xp.broadcast_arrays(A, 1.0))] == [
        float,
        list,
    ]
    with pytest.raises(ShapeError, match="nonzero"):
        xp.nonzero(A[0])


@pytest.mark.parametrize("axes", [0, 1, 2, ([0], [1]), ([1, 0], [0, 1]), ([0, 1], [0, 1])])
def test_tensordot(session: AlchemistSession, axes: Any) -> None:
    a = np.arange(9.0).reshape(3, 3)
    for one in (a, a[0], a[:0, :0]):
        for other in (a.T + 1, a[1], a[:0, :0]):
            try:
                expected = np.tensordot(one, other, axes)
            except (ValueError, IndexError):
                continue
            A, B = session.send_matrix(one), session.send_matrix(other)
            same(np.tensordot(A, B, axes), expected)


def test_a_generator_draws_on_the_ranks(session: AlchemistSession) -> None:
    one, other = (session.xp.random.default_rng(5) for _ in range(2))
    drawn = [
        lambda g: g.normal(3, 2, (300, 70)), lambda g: g.uniform(-1, 4, 20_000),
        lambda g: g.integers(-3, 9, (40, 500)), lambda g: g.random((5,), dtype="float32"),
        lambda g: g.exponential(2.0, 20_000), lambda g: g.permutation(3000),
    ]  # fmt: skip
    first, second = [draw(one) for draw in drawn], [draw(other) for draw in drawn]
    for x, y in zip(first, second, strict=True):
        assert isinstance(x, Handle)
        np.testing.assert_array_equal(x.fetch(), y.fetch())
    again = drawn[0](one)
    assert not np.array_equal(again, first[0])  # the generator has moved on
    normal, uniform, integers = (x.fetch() for x in first[:3])
    np.testing.assert_allclose([normal.mean(), normal.std()], [3, 2], rtol=0.03)
    assert uniform.min() >= -1 < uniform.max() < 4
    assert abs(uniform.mean() - 1.5) < 0.05
    assert set(np.unique(integers)) == set(range(-3, 9))
    assert (first[3].dtype, first[4].min() >= 0) == (np.float32, True)
    np.testing.assert_array_equal(np.sort(first[5].fetch()), np.arange(3000))
    assert session.xp.random.default_rng(1).integers(5).shape == ()


def test_bins_of_small_integers_far_apart(session: AlchemistSession) -> None:
    a = np.arange(-100, 101, dtype=np.int8)
    A = session.send_matrix(a)
    for bins in ("auto", "sqrt", "doane"):
        for found, wanted in zip(np.histogram(A, bins), np.histogram(a, bins), strict=True):
            same(found, wanted)


def test_rows_are_chosen_and_shuffled(session: AlchemistSession) -> None:
    a = np.arange(120.0).reshape(40, 3)
    A, random = session.send_matrix(a), session.xp.random.default_rng(3)
    shuffled = random.permutation(A)
    same(np.sort(shuffled, 0), a)
    assert not np.array_equal(shuffled, a)
    chosen = random.choice(A, 15, replace=False).fetch()
    assert len(np.unique(chosen[:, 0])) == 15
    assert set(chosen[:, 0]) <= set(a[:, 0])
    assert random.choice(A, 100).shape == (100, 3)
    assert random.choice(A[:, 0]).shape == ()
    cubes = np.arange(24).reshape(2, 3, 4)
    C = session.send_matrix(cubes)
    same(np.sort(random.permutation(C, axis=2), 2), cubes)
    assert random.choice(C, (5, 6), axis=2).shape == (2, 3, 5, 6)
    assert random.choice(C, axis=1).shape == (2, 4)
    picked = random.choice(3, 4000, p=[0.5, 0.0, 0.5]).fetch()
    assert set(picked) == {0, 2}
    assert abs((picked == 0).mean() - 0.5) < 0.05
    random.shuffle(A)
    same(np.sort(A, 0), a)
    with pytest.raises(ShapeError, match="41 of 40"):
        random.choice(A, 41, replace=False)
    with pytest.raises(BadArgumentError, match="sum"):
        random.choice(2, 3, p=[0.5, 0.1])
    with pytest.raises(BadArgumentError, match="the range"):
        random.integers(3, 3)


def test_weights_of_integers_are_added_as_integers(session: AlchemistSession) -> None:
    a, big = np.array([1.0, 2, 3, 4, 5]), np.array([2**60 + 1, 1, 2, 3, 4])
    A, B = session.send_matrix(a), session.send_matrix(big)
    for bins in (2, [1, 3, 5]):
        same(np.histogram(A, bins, weights=B)[0], np.array([2**60 + 2, 9]))
    for kind in ("int8", "uint64", "bool", "float32", "complex128"):
        weights = (big % 100).astype(kind)
        for bins in (2, [0, 2, 9])[: 1 if kind == "bool" else 2]:  # NumPy adds no bool up
            expected = np.histogram(a, bins, weights=weights)[0]
            same(np.histogram(A, bins, weights=session.send_matrix(weights))[0], expected)


@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_counts_of_fewer_elements_than_ranks(session: AlchemistSession, n: int) -> None:
    x, weights = np.arange(n) % 3, np.full(n, 0.5)
    X = session.send_matrix(x)
    same(np.bincount(X, minlength=2), np.bincount(x, minlength=2))
    if n:  # NumPy takes no weights of nothing for floats
        same(np.bincount(X, weights=weights), np.bincount(x, weights=weights))
        same(np.bincount(X, weights=X + 1), np.bincount(x, weights=x + 1))
    y = session.send_matrix(np.arange(100.0))
    few = y[y > 97]
    same(np.bincount(few.astype("i8") % 3, weights=few), np.bincount([2, 0], weights=[98.0, 99]))


@pytest.mark.parametrize("shape", [(48 << 20,), (2, 24 << 20), (6 << 20, 8)])
def test_places_of_extreme_elements_take_little_memory(
    session: AlchemistSession, shape: tuple[int, ...]
) -> None:
    a = np.zeros(shape, "int8")
    a.flat[a.size - 5] = 1
    A = session.send_matrix(a)

    def status(comm: Any, field: str, reset: bool) -> int:
        if reset:  # the peak begins here
            Path("/proc/self/clear_refs").write_text("5")
        text = Path("/proc/self/status").read_text()
        return comm.allreduce(int(text.split(f"{field}:")[1].split()[0]) << 10)

    int(A.argmax())  # what it needs once
    before = session.run(status, "VmRSS", True)
    assert (int(A.argmax()), int(A.argmin())) == (a.size - 5, 0)
    if shape[0] == 2:  # few results
        assert A.argmax(axis=-1)[-1].item() == a.argmax(axis=-1)[-1]
    assert session.run(status, "VmHWM", False) - before < a.nbytes / 2


def test_distinct_small_integers(session: AlchemistSession) -> None:
    for kind in ("int8", "uint8", "int16", "uint16", "bool"):
        a = (
            np.random.default_rng(0)
            .integers(0, 2 if kind == "bool" else 200, (40, 30))
            .astype(kind)
        )
        for layout in ("VC_STAR", "STAR_VR", "MC_MR"):
            same(np.unique(session.send_matrix(a, layout=layout)), np.unique(a))
        same(np.unique(session.send_matrix(a[:0])), np.unique(a[:0]))
