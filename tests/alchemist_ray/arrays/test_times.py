"""Dates and durations on ranks, beside NumPy's: the same values, dtypes and refusals."""

from __future__ import annotations

import datetime
import operator
import pickle
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.arrays.times import TimeHandle
from alchemist_ray.errors import AlchemistError, BadArgumentError, DtypeError, MatrixError

DATES = np.array(
    [["2001-03-01", "NaT", "1969-12-31"], ["2000-02-29", "2001-03-01", "1970-01-01"]], "M8[D]"
)
HOURS = np.array([[5, -7, "NaT"], [0, 90, 7]], "m8[h]")


def same(found: Any, expected: Any) -> None:
    if isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            same(*pair)
        return
    expected = np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.fixture(scope="module")
def sent(gang: AlchemistSession) -> tuple[Any, Any]:
    D, H = gang.send_matrix(DATES), gang.send_matrix(HOURS, layout="MC_MR")
    assert isinstance(D, TimeHandle)
    same(D, DATES)
    same(H, HOURS)
    return D, H


EXPRESSIONS: dict[str, Any] = {
    "D - D": lambda D, H: D - D[::-1],
    "D + H": lambda D, H: D + H,
    "H + D": lambda D, H: H + D,
    "D - H": lambda D, H: D - H,
    "H + H": lambda D, H: H + H[0],
    "D + 1": lambda D, H: D + 1,
    "D - date": lambda D, H: D - np.datetime64("2000-01-01T12:00:00"),
    "date - D": lambda D, H: np.datetime64("2000-01-01") - D,
    "H * 3": lambda D, H: H * 3,
    "1.5 * H": lambda D, H: 1.5 * H,
    "H * nan": lambda D, H: H * np.array([np.nan, 0.1, 2.0]),
    "H / 2": lambda D, H: H / 2,
    "H / -2.5": lambda D, H: H / -2.5,
    "H // 2": lambda D, H: H // 2,
    "H / minutes": lambda D, H: H / np.timedelta64(7, "m"),
    "H // minutes": lambda D, H: H // np.timedelta64(7, "m"),
    "H % minutes": lambda D, H: H % np.timedelta64(7, "m"),
    "-H": lambda D, H: -H,
    "abs(H)": lambda D, H: abs(H),
    "isnat": lambda D, H: [np.isnat(D), np.isfinite(H), np.isnan(D), np.isinf(H)],
    "compared": lambda D, H: [
        f(D, D[::-1])
        for f in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
    ],
    "with a date": lambda D, H: [np.datetime64("2000-02-29T00") <= D, np.datetime64("NaT") != D],
    "minimum": lambda D, H: [
        f(D, D[::-1]) for f in (np.minimum, np.maximum, np.fmin, np.fmax)
    ],
    "clip": lambda D, H: np.clip(H, np.timedelta64(-1, "h"), np.timedelta64(1, "D")),
    "min": lambda D, H: [D.min(), D.max(axis=0), np.min(H, axis=1), D[1:].max(), H.min(axis=0)],
    "nanmin": lambda D, H: [np.nanmin(D[:, :1], axis=1), np.nanmax(H, axis=0), np.nanmin(H)],
    "ptp": lambda D, H: np.ptp(D, axis=0),
    "places": lambda D, H: [D.argmin(), D.argmax(), H.argmax(axis=1), H.argmin(axis=0)],
    "sort": lambda D, H: [np.sort(D, axis=0), np.sort(H, axis=1), np.sort(D, axis=None)],
    "argsort": lambda D, H: [np.argsort(D, axis=0), H.argsort(axis=1)],
    "unique": lambda D, H: np.unique(D),
    "labels": lambda D, H: np.unique(D, return_inverse=True, return_counts=True, return_index=True),
    "searchsorted": lambda D, H: np.searchsorted(np.sort(np.ravel(D)), D[0]),
    "isin": lambda D, H: [np.isin(D, D[0]), np.isin(D, DATES[1], invert=True)],
    "union1d": lambda D, H: np.union1d(D[0], D[1]),
    "diff": lambda D, H: [np.diff(D, axis=0), np.diff(H), np.diff(H, 2, axis=1)],
    "sum": lambda D, H: [np.sum(H), H.sum(axis=0), H[1].mean(), H.mean(axis=1), np.sum(H[1])],
    "cumsum": lambda D, H: np.cumsum(H, axis=1),
    "where": lambda D, H: [
        np.where(D[::-1] < D, D, np.datetime64("NaT")), np.where(H == H, H, H[0] * 2)
    ],
    "moved": lambda D, H: [
        D.T, np.concatenate([D, D + H]), np.stack([D, D]), D.reshape(3, 2), np.ravel(D), D[:, ::-1],
        np.roll(D, 1, axis=1), np.repeat(D, 2, axis=0), np.take(D, [1, 0], axis=1), D[D == D],
        np.split(D, 2), np.tile(H, (1, 2)), D[0, 0], D[[1, 0, 1]], np.squeeze(H[:1]),
    ],
    "units": lambda D, H: [
        D.astype("M8[ns]"), H.astype("m8[D]"), D.astype("M8[W]"), D.astype("int64"),
        (D.astype("M8[s]") + H).astype("M8[D]"), H.astype("int64").astype("m8[h]"),
    ],
    "functions": lambda D, H: [np.array_equal(D, D), np.array_equal(D[1], D[1]), np.shape(D)],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPRESSIONS)
@pytest.mark.filterwarnings("ignore:.*(divide|remainder|floor_divide|cast):RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The 'generic' unit:DeprecationWarning")  # of NumPy 2.5
def test_as_numpy(sent: tuple[Any, Any], name: str) -> None:
    expression = EXPRESSIONS[name]
    expected = expression(DATES, HOURS)
    found = expression(*sent)
    if isinstance(expected, list) and not hasattr(expected[0], "dtype"):
        assert found == expected
    else:
        same(found, expected)


@pytest.mark.parametrize(
    "expression",
    [
        lambda D, H: D + D, lambda D, H: D * 2, lambda D, H: D < H, lambda D, H: D < 5,
        lambda D, H: np.exp(H), lambda D, H: np.sum(D), lambda D, H: np.mean(D),
        lambda D, H: H.astype("M8[h]"), lambda D, H: np.cumsum(D),
    ],
)  # fmt: skip
def test_what_numpy_refuses_is_refused(sent: tuple[Any, Any], expression: Any) -> None:
    with pytest.raises((DtypeError, BadArgumentError)):
        expression(*sent)


def test_other_functions_refuse_with_the_reason(sent: tuple[Any, Any]) -> None:
    D, H = sent
    gang_library = D.matrix_ref
    counts = r"astype\('int64'\) gives"
    for work in (
        lambda: np.median(H), lambda: np.sign(H), lambda: np.std(H), lambda: H @ H.T,
        lambda: np.pad(D, 1), lambda: D.save("a.npy"), lambda: bool(D[0, 0]),
        lambda: np.add.reduce(H), lambda: np.zeros_like(D), lambda: D.to_spark(),
    ):  # fmt: skip
        with pytest.raises((AlchemistError, AttributeError), match=counts):
            work()
    assert gang_library.dtype == np.int64


def test_code_on_the_ranks_takes_counts(gang: AlchemistSession, sent: tuple[Any, Any]) -> None:
    D, _ = sent
    with pytest.raises(BadArgumentError, match=r"int64 on the ranks: \.astype\('int64'\)"):
        gang.load_library("linalg").norm(D)
    with pytest.raises(BadArgumentError, match="int64 on the ranks"):
        gang.run(lambda ctx, A: A.dtype.name, D)
    assert gang.run(lambda ctx, A: A.dtype.name, D.astype("int64")) == "int64"


def test_assignments(gang: AlchemistSession) -> None:
    D, expected = gang.send_matrix(DATES), DATES.copy()
    for A in (D, expected):
        A[0, 0] = np.datetime64("2026-01-02")
        A[:, 1] = datetime.date(2000, 1, 1)
        A[1] = A[0]
        A += np.timedelta64(2, "D")
    same(D, expected)
    for wrong in (5, np.timedelta64(1, "D"), np.datetime64("2000-01-01T01:00")):
        with pytest.raises(DtypeError):
            D[0, 0] = wrong
    same(D, expected)


def test_values_that_a_unit_cannot_hold_are_refused(gang: AlchemistSession) -> None:
    far = np.array(["9999-01-01", "2000-01-01"], "M8[D]")
    A = gang.send_matrix(far)
    with pytest.raises(DtypeError, match=r"9999-01-01 is beyond datetime64\[ns\]"):
        A.astype("M8[ns]")
    with pytest.raises(DtypeError, match=r"9999-01-01, which datetime64\[ns\] cannot hold"):
        gang.send_matrix(far, dtype="M8[ns]")
    with pytest.raises(DtypeError, match="cannot hold"):
        gang.send_matrix(np.array(["2000-01-01T01"], "M8[h]"), dtype="M8[D]")
    same(gang.send_matrix(far, dtype="M8[s]"), far.astype("M8[s]"))
    with pytest.raises(DtypeError, match="months have different lengths"):
        gang.send_matrix(np.array(["2000", "2001"], "M8[Y]")).astype("M8[D]")


def test_names_pickles_and_text(gang: AlchemistSession) -> None:
    A = gang.send_matrix(DATES, name="days")
    assert (A.name, A.shape, A.columns) == ("days", (2, 3), ())
    same(gang.matrix("days"), DATES)
    same(gang.fetch_matrix(A, rows=slice(1, 2), cols=0), DATES[1:2, :1])
    same(A.to_layout("MC_MR"), DATES)
    with pytest.raises(MatrixError, match="days is on the ranks already"):
        gang.send_matrix(A)
    made = A + np.timedelta64(1, "D")
    expected = DATES + np.timedelta64(1, "D")
    same(pickle.loads(pickle.dumps(made)), expected)
    same(gang.matrix(made.name), expected)
    assert "datetime64[D]" in repr(A)
    assert "2000-02-29" in str(A)
    assert A[0, 0].item() == datetime.date(2001, 3, 1)
    assert A.tolist() == DATES.tolist()
    assert [day.item() for day in A[0]] == DATES[0].tolist()
    for one in (A, made):
        one.free()
