"""Fourier transforms have NumPy's values, dtypes and errors, along every axis and over several."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, ShapeError
from tests.alchemist_ray.arrays.checks import elements

LINES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
WHOLE = ("fftn", "ifftn", "rfftn", "irfftn", "fft2", "ifft2", "rfft2", "irfft2")
SHAPES = [(7,), (1,), (5, 4), (300, 33), (3, 400), (4, 3, 5), (2, 3, 4, 5)]
REAL = ("rfft", "ihfft")


def near(function: Any, a: Any, A: Any) -> None:
    wanted, found = function(a), function(A).fetch()
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    rounding = np.finfo(wanted.dtype).eps * 64 * max(1.0, abs(wanted).max())
    np.testing.assert_allclose(found, wanted, rtol=0, atol=rounding)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "complex64", "complex128", "int32", "bool"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_transforms(session: AlchemistSession, shape: tuple[int, ...], dtype: str) -> None:
    a = elements(shape, dtype)
    a = np.nan_to_num(a, posinf=1, neginf=1) if a.dtype.kind in "fc" else a
    A = session.send_matrix(a)
    for kind in LINES:
        if a.dtype.kind == "c" and kind in REAL:
            continue
        transform = getattr(np.fft, kind)
        for axis in range(a.ndim):
            least = 2 if kind in ("irfft", "hfft") else 1
            for n in (None, 3, 9) if a.shape[axis] >= least else (3, 9):
                norm = (None, "ortho", "forward")[axis % 3]
                near(lambda x, t=transform, n=n, i=axis, s=norm: t(x, n, i, s), a, A)
    for kind in WHOLE:
        if (kind[-1] == "2" and a.ndim < 2) or (kind.startswith("rfft") and a.dtype.kind == "c"):
            continue
        transform = getattr(np.fft, kind)
        if a.shape != (1,):
            near(transform, a, A)
        if a.ndim > 1:
            near(lambda x, t=transform: t(x, (3, 6), (0, -1), "ortho"), a, A)
    near(lambda x: np.fft.ifftshift(np.fft.fftshift(x * 1.5), axes=[0]), a, A)


@pytest.mark.parametrize("layout", ["MC_MR", "STAR_VC", "VC_STAR", "STAR_STAR", "BLOCK"])
def test_layouts_and_round_trips(session: AlchemistSession, layout: str) -> None:
    a = np.random.default_rng(0).random((200, 150))
    A = session.send_matrix(a, layout=layout)
    np.testing.assert_allclose(np.fft.irfft2(np.fft.rfft2(A)).fetch(), a, atol=1e-12)
    np.testing.assert_allclose(
        np.fft.ifft(np.fft.fft(A, axis=0), axis=0).real.fetch(), a, atol=1e-12
    )


def test_frequencies_and_the_namespace(session: AlchemistSession) -> None:
    fft = session.xp.fft
    np.testing.assert_array_equal(fft.fftfreq(9, d=0.5).fetch(), np.fft.fftfreq(9, 0.5))
    np.testing.assert_array_equal(fft.rfftfreq(8).fetch(), np.fft.rfftfreq(8))
    assert {*LINES, *WHOLE, "fftshift", "ifftshift", "fftfreq", "rfftfreq"} <= {*dir(fft)}
    with pytest.raises(AttributeError, match="has no 'dct'"):
        _ = fft.dct


def test_refusals(session: AlchemistSession) -> None:
    A = session.send_matrix(np.ones((4, 0)))
    for error, text, call in (
        (ShapeError, "0 points", lambda: np.fft.fft(A)),
        (ShapeError, "axis=3", lambda: np.fft.fft(A, axis=3)),
        (ShapeError, "-1 points", lambda: np.fft.fft(A, -1, 0)),
        (ShapeError, "different lengths", lambda: np.fft.fftn(A, (2,), (0, 1))),
        (ValueError, "norm='x'", lambda: np.fft.fft(A, axis=0, norm="x")),
        (DtypeError, "use np.fft.fft", lambda: np.fft.rfft(A.astype(complex), axis=0)),
    ):
        with pytest.raises(error, match=text):
            call()
