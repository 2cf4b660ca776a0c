"""Fourier transforms along any axis, in any layout, as NumPy's; `cases.OTHERS` has the rest."""

from __future__ import annotations

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, ShapeError
from tests.alchemist_ray.arrays.cases import FOURIER
from tests.alchemist_ray.arrays.checks import as_in_numpy

NORMS = (None, "ortho", "forward", "backward")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((300, 33), "f4"), ((3, 400), "c16"), ((4, 3, 5), "f4"), ((2, 3, 4, 5), "c16")],
)
def test_along_any_axis(session: AlchemistSession, shape: tuple[int, ...], dtype: str) -> None:
    a = np.random.default_rng(0).random(shape).astype(dtype)
    A = session.send_matrix(a)
    for kind in FOURIER:
        for axis in range(a.ndim):
            as_in_numpy(
                lambda x, i=axis, kind=kind: getattr(np.fft, kind)(x, None, i, NORMS[i]) / 9, a, A
            )
        if f"{kind}n" in dir(session.xp.fft):
            as_in_numpy(lambda x, kind=kind: getattr(np.fft, f"{kind}n")(x) / 999, a, A)


@pytest.mark.parametrize("layout", ["MC_MR", "STAR_VC", "VC_STAR", "STAR_STAR", "BLOCK"])
def test_layouts_and_round_trips(session: AlchemistSession, layout: str) -> None:
    a = np.random.default_rng(0).random((200, 150))
    A = session.send_matrix(a, layout=layout)
    np.testing.assert_allclose(np.fft.irfft2(np.fft.rfft2(A)).fetch(), a, atol=1e-12)
    back = np.fft.ifft(np.fft.fft(A, axis=0), axis=0)
    np.testing.assert_allclose(back.real.fetch(), a, atol=1e-12)


def test_frequencies_and_the_namespace(session: AlchemistSession) -> None:
    fft = session.xp.fft
    np.testing.assert_array_equal(fft.fftfreq(9, d=0.5).fetch(), np.fft.fftfreq(9, 0.5))
    np.testing.assert_array_equal(fft.rfftfreq(8).fetch(), np.fft.rfftfreq(8))
    assert {*FOURIER, "fftn", "irfft2", "fftshift", "fftfreq", "rfftfreq"} <= {*dir(fft)}
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
