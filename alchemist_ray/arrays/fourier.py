"""NumPy's ``np.fft`` on handles: transforms along axes, which the ranks compute with SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import Implementation, implements
from alchemist_ray.errors import DtypeError, ShapeError

NORMS = ("backward", "ortho", "forward")
REAL_ONLY = ("rfft", "ihfft")
HALVES = ("irfft", "hfft")  # of lines of which the second half is left out
TWO = (-2, -1)


def _transform(
    kind: str, engine: Engine, a: Any, n: int | None = None, axis: int = -1,
    norm: str | None = None,
) -> Any:  # fmt: skip
    along = rules.axis_index(axis, a.ndim)
    if a.dtype.kind == "c" and kind in REAL_ONLY:
        raise DtypeError(f"np.fft.{kind} of {a.dtype}: it takes real numbers; use np.fft.fft")
    if norm not in (None, *NORMS):
        raise ValueError(f"np.fft.{kind}: norm={norm!r}; it is {', '.join(NORMS)} or None")
    length = a.shape[along] if n is None else int(n)
    if n is None and kind in HALVES:
        length = 2 * (length - 1)
    if length < 1 or not a.shape[along]:
        raise ShapeError(
            f"np.fft.{kind} along axis {along} of shape {a.shape}: {length} points; "
            "it needs at least one"
        )
    return engine.along(
        a, along, lambda M, i: engine.call("fourier", M, kind, length, i, norm or "backward")
    )


def _each_axis(
    kind: str, a: Any, s: Sequence[int] | None, axes: Sequence[int] | None
) -> list[tuple[int | None, int]]:
    """Length (None: as it is) and axis of each transform of several."""
    if axes is None:
        axes = range(a.ndim) if s is None else range(-len(s), 0)
    lengths = [None] * len(axes) if s is None else [None if n == -1 else n for n in s]
    if len(lengths) != len(axes):
        raise ShapeError(f"np.fft.{kind}: s={s} and axes={axes} have different lengths")
    if not lengths:
        raise ShapeError(f"np.fft.{kind} of an array of shape {a.shape}: it needs an axis")
    return list(zip(lengths, axes, strict=True))


def _of_axes(last: str, others: str, *, first: bool) -> Implementation:
    """Several transforms: `last` along the last axis, before or after `others` along the others."""

    def transform(
        engine: Engine, a: Any, s: Any = None, axes: Any = None, norm: str | None = None
    ) -> Any:
        *rest, ending = _each_axis(f"{last}n", a, s, axes)
        works = [(last, *ending)] if first else []
        works += [(others, *one) for one in reversed(rest)]
        works += [] if first else [(last, *ending)]
        for kind, n, axis in works:
            a = _transform(kind, engine, a, n, axis, norm)
        return a

    return transform


def _of_two(whole: Implementation) -> Implementation:
    def transform(
        engine: Engine, a: Any, s: Any = None, axes: Any = TWO, norm: str | None = None
    ) -> Any:
        return whole(engine, a, s, axes, norm)

    return transform


for _kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    implements(getattr(np.fft, _kind))(partial(_transform, _kind))
for _last, _others, _first in (
    ("fft", "fft", True), ("ifft", "ifft", True), ("rfft", "fft", True), ("irfft", "ifft", False),
):  # fmt: skip
    _whole = _of_axes(_last, _others, first=_first)
    implements(getattr(np.fft, f"{_last}n"))(_whole)
    implements(getattr(np.fft, f"{_last}2"))(_of_two(_whole))


def _shift(engine: Engine, x: Any, axes: Any = None, *, sign: int = 1) -> Any:
    along = rules.axes_of(tuple(axes) if np.ndim(axes) else axes, x.ndim)
    return np.roll(x, [sign * (x.shape[i] // 2) for i in along], along)


implements(np.fft.fftshift)(_shift)
implements(np.fft.ifftshift)(partial(_shift, sign=-1))
