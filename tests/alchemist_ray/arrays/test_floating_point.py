"""Floating-point errors on the ranks are treated as the caller's `numpy.errstate` says."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession

a = np.zeros((5, 3))
a[4, 2] = 1e300  # on one rank
WORK: dict[str, Callable[[Any], Any]] = {
    "divide by zero encountered in divide": lambda x: 1 / x,
    "invalid value encountered in divide": lambda x: (x * 0) / x[0, 0],
    "invalid value encountered in log": lambda x: np.log(x - 1),
    "overflow encountered in multiply": lambda x: x * 1e200,
    "overflow encountered in square": lambda x: np.square(x),
    "overflow encountered in exp": lambda x: np.exp(x),
    "divide by zero encountered in floor_divide": lambda x: (x > 0).astype(int) // 0,
    "invalid value encountered in subtract": lambda x: x / 1e-300 - x / 1e-300,
    "underflow encountered in multiply": lambda x: (1e-300 * (x + 1)) * 1e-300,
    "overflow encountered in power": lambda x: x ** np.full(3, 2.0),
}


@pytest.mark.parametrize("message", WORK)
def test_errors_and_warnings_are_those_of_numpy(session: AlchemistSession, message: str) -> None:
    work, A = WORK[message], session.send_matrix(a)
    for action in ("raise", "warn"):
        with np.errstate(all="ignore", **{KINDS[message.split(" enc")[0]]: action}):  # type: ignore[arg-type]
            for x in (a, A):
                if action == "raise":
                    with pytest.raises(FloatingPointError, match=f"^{message}"):
                        work(x)
                else:
                    with pytest.warns(RuntimeWarning, match=f"^{message}") as caught:
                        work(x)
                    assert caught[0].filename == __file__
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(work(A).fetch(), work(a))


def test_a_warning_in_code_of_a_string(session: AlchemistSession) -> None:
    with pytest.warns(RuntimeWarning, match="divide by zero"):
        exec("A / 0", {"A": session.send_matrix(np.ones((2, 2)))})  # its globals have no __name__


KINDS = {"divide by zero": "divide", "invalid value": "invalid", "overflow": "over",
         "underflow": "under"}  # fmt: skip


def test_the_caller_can_be_called_and_have_a_log(session: AlchemistSession) -> None:
    A, told, log = session.send_matrix(a), [], io.StringIO()
    with np.errstate(all="call", call=lambda text, flags: told.append((text, flags))):
        1 / A
    assert told == [("divide by zero", 1)]
    with np.errstate(all="log", call=log):  # type: ignore[arg-type]
        1 / A
    assert log.getvalue() == "Warning: divide by zero encountered in divide\n"


def test_in_place_operators_report_and_quiet_functions_do_not(session: AlchemistSession) -> None:
    A = session.send_matrix(a)
    with np.errstate(all="raise"):
        with pytest.raises(FloatingPointError, match="in divide"):
            A /= 0
        B = session.send_matrix(np.array([np.inf, np.nan, 1.0]))
        assert np.isclose(B, B).tolist() == [True, False, True]
        assert np.isclose(B, B, equal_nan=True).all()
        (B < 1).any() or (B == B).any() or np.sqrt(B) + np.where(B > 2, B, 0)


NOTHING, ONE, HOLES = np.ones((0, 3)), np.ones((1, 3)), np.array([[1, np.nan], [2, np.nan]])
SLICES: list[tuple[str, Callable[[Any], Any], Any]] = [
    ("Mean of empty slice", lambda x: np.mean(x, axis=0), NOTHING),
    ("Mean of empty slice", lambda x: x.mean(), NOTHING),
    ("Mean of empty slice", lambda x: x[x > 5].mean(), ONE),
    ("Mean of empty slice", lambda x: np.nanmean(x, axis=0), HOLES),
    ("Mean of empty slice", np.median, NOTHING),
    ("Mean of empty slice", np.average, NOTHING),
    ("Degrees of freedom <= 0", np.var, NOTHING),
    ("Degrees of freedom <= 0", lambda x: np.std(x, axis=0, ddof=1), ONE),
    ("Degrees of freedom <= 0", lambda x: np.nanvar(x, axis=0), HOLES),
    ("All-NaN slice", lambda x: np.nanmax(x, axis=0), HOLES),
    ("All-NaN slice", lambda x: np.nanmedian(x, axis=0), HOLES),
    ("All-NaN slice", lambda x: np.nanquantile(x, 0.5, axis=0), HOLES),
]


@pytest.mark.parametrize(("message", "work", "given"), SLICES)
def test_reductions_of_nothing_warn(
    session: AlchemistSession, message: str, work: Callable[[Any], Any], given: Any
) -> None:
    with np.errstate(all="ignore"):  # it does not decide on these
        for x in (given, session.send_matrix(given)):
            with pytest.warns(RuntimeWarning, match=f"^{message}") as caught:
                np.asarray(work(x))
            if x is not given:
                assert [one.filename for one in caught] == [__file__]
        full = session.send_matrix(np.ones((4, 2)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            np.asarray(work(full * 9))
