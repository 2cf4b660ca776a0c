"""NumPy's functions of windows and borders: convolve, correlate, pad, trapezoid."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import creation, rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import implements
from alchemist_ray.errors import BadArgumentError, ShapeError

DIRECT = 64  # elements of a kernel: a longer one is applied by Fourier transforms
EXACT_SUM = 1 << 51  # integers that the transforms find exactly


@implements(np.convolve)
def _convolve(engine: Engine, a: Any, v: Any, mode: str = "full") -> Any:
    a, v = (engine.reshape(x, -1) if x.ndim == 0 else x for x in map(engine.matrix, (a, v)))
    if a.ndim != 1 or v.ndim != 1 or not a.size or not v.size:
        raise ShapeError(f"convolution of arrays of shapes {a.shape} and {v.shape}: give vectors")
    n, k = (a, v) if a.size >= v.size else (v, a)
    whole = _convolved(engine, n, k)
    match mode:
        case "full":
            return whole
        case "same":
            return whole[(k.size - 1) // 2 :][: n.size]
        case "valid":
            return whole[k.size - 1 : n.size]
    raise BadArgumentError(f"mode={mode!r}: it is 'full', 'same' or 'valid'")


def _convolved(engine: Engine, a: Any, v: Any) -> Any:
    """All sums of products of a vector and a shorter one."""
    kind, size = np.result_type(a.dtype, v.dtype), a.size + v.size - 1
    if v.size <= DIRECT:
        if kind.kind == "b":
            return np.convolve(a.astype(np.int8), v.astype(np.int8)) > 0
        near = np.pad(a, v.size - 1)
        parts = [near[j : j + size] * x for j, x in enumerate(v.fetch()[::-1])]
        return sum(parts[1:], parts[0])
    if kind.kind not in "fc":
        most = [float(np.max(np.abs(x.astype(np.float64)))) for x in (a, v)]
        if most[0] * most[1] * v.size > EXACT_SUM:
            raise BadArgumentError(
                f"np.convolve of integers with a kernel of {v.size} elements, whose sums float64 "
                "cannot hold: convert them with astype(float)"
            )
    real = kind.kind != "c"
    there, back = (np.fft.rfft, np.fft.irfft) if real else (np.fft.fft, np.fft.ifft)
    found = back(there(a, size) * there(v, size), size)
    if kind.kind == "b":
        return found > 0.5
    return (np.rint(found) if kind.kind in "iu" else found).astype(kind)


@implements(np.correlate)
def _correlate(engine: Engine, a: Any, v: Any, mode: str = "valid") -> Any:
    a, v = map(engine.matrix, (a, v))
    if np.size(v) > np.size(a):
        return np.conj(_correlate(engine, v, a, mode)[::-1])
    return _convolve(engine, a, np.conj(v)[::-1], mode)


STATISTICS: dict[str, Any] = {
    "maximum": np.max, "minimum": np.min, "mean": np.mean, "median": np.median,
}  # fmt: skip
OPTIONS = {  # of np.pad, by mode
    "constant": ("constant_values",), "linear_ramp": ("end_values",),
    "reflect": ("reflect_type",), "symmetric": ("reflect_type",),
    **dict.fromkeys(STATISTICS, ("stat_length",)),
}  # fmt: skip


@implements(np.pad)
def _pad(
    engine: Engine, array: Any, pad_width: Any, mode: Any = "constant", *, constant_values: Any = 0,
    end_values: Any = 0, stat_length: Any = None, reflect_type: str = "even",
) -> Any:  # fmt: skip
    if isinstance(pad_width, dict):
        pad_width = [pad_width.get(i, pad_width.get(i - array.ndim, 0)) for i in range(array.ndim)]
        pad_width = [ends if np.iterable(ends) else (ends, ends) for ends in pad_width]
    # NumPy's own checks of the options, and its words.
    given = {
        "constant_values": constant_values, "end_values": end_values, "stat_length": stat_length,
        "reflect_type": reflect_type,
    }  # fmt: skip
    options = {name: given[name] for name in OPTIONS.get(mode, ())}
    if callable(mode):
        raise rules.unsupported("np.pad with a function", "np.concatenate adds what you compute")
    pad: Any = np.pad
    pad(np.zeros((2,) * array.ndim), pad_width, mode, **options)  # raises for bad arguments
    widths = np.broadcast_to(pad_width, (array.ndim, 2)).tolist()
    if mode == "empty" or (mode == "constant" and np.unique(constant_values).size == 1):
        value = 0 if mode == "empty" else np.ravel(constant_values)[0]
        shape = tuple(n + sum(ends) for n, ends in zip(array.shape, widths, strict=True))
        found = creation.filled(engine, shape, value, array.dtype, array.layout)
        inner = (slice(w[0], w[0] + n) for w, n in zip(widths, array.shape, strict=True))
        found[tuple(inner)] = array
        return found
    beyond = constant_values if mode == "constant" else end_values
    values = np.broadcast_to(np.asarray(beyond), (array.ndim, 2))
    lengths = np.broadcast_to(np.asarray(stat_length), (array.ndim, 2))
    for axis, ends in enumerate(widths):
        if any(ends):
            array = _padded(
                engine, array, axis, ends, mode, values[axis], lengths[axis], reflect_type
            )
    return array


def _padded(
    engine: Engine, a: Any, axis: int, ends: Any, mode: str, values: Any, lengths: Any,
    reflect_type: str,
) -> Any:  # fmt: skip
    """An array with more elements at both ends of an axis."""
    n = a.shape[axis]
    if mode in ("edge", "reflect", "symmetric", "wrap"):
        pad: Any = np.pad
        index = pad(np.arange(n), ends, mode)
        if reflect_type == "even" or mode in ("edge", "wrap"):
            return np.take(a, index, axis)
        if max(ends) > n - (mode == "reflect"):
            raise rules.unsupported(
                f"np.pad with reflect_type='odd' of {max(ends)} elements beside {n}", "pad twice"
            )
        left, right = (
            np.take(a, [at] * len(places), axis) * 2 - np.take(a, places, axis)
            for at, places in ((0, index[: ends[0]]), (n - 1, index[ends[0] + n :]))
        )
        return np.concatenate([engine.cast(left, a.dtype), a, engine.cast(right, a.dtype)], axis)
    sides = []
    for side, width in enumerate(ends):
        shape = [width if i == axis else 1 for i in range(a.ndim)]
        edge = np.take(a, [0 if side == 0 else n - 1], axis)
        if mode == "constant":
            block = np.zeros_like(edge) + np.asarray(values[side]).astype(a.dtype)
            sides.append(np.repeat(block, width, axis))
        elif mode == "linear_ramp":
            steps = np.arange(width).reshape(shape) / max(1, width)
            ramp = values[side] + (edge - values[side]) * (steps if side == 0 else np.flip(steps))
            sides.append(engine.cast(np.floor(ramp) if a.dtype.kind in "iu" else ramp, a.dtype))
        else:
            length = n if lengths[side] is None else min(int(lengths[side]), n)
            part = slice(0, length) if side == 0 else slice(n - length, n)
            found = STATISTICS[mode](a[rules.at(axis, part)], axis=axis, keepdims=True)
            whole = a.dtype.kind in "iu" and mode in ("mean", "median")
            found = engine.cast(np.round(found) if whole else found, a.dtype)
            sides.append(np.repeat(found, width, axis))
    return np.concatenate([sides[0], a, sides[1]], axis)


@implements(np.trapezoid)
def _trapezoid(engine: Engine, y: Any, x: Any = None, dx: Any = 1.0, axis: int = -1) -> Any:
    y = engine.matrix(y)
    along = rules.axis_index(axis, y.ndim)
    if x is None:
        d = dx
    else:
        d = np.diff(x) if np.ndim(x) == 1 else np.diff(x, axis=axis)
        if np.ndim(x) == 1:
            d = d.reshape([-1 if i == along else 1 for i in range(y.ndim)])
    ends = [y[rules.at(along, part)] for part in (slice(1, None), slice(None, -1))]
    return (d * (ends[0] + ends[1]) / 2.0).sum(along)
