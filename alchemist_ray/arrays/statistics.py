"""NumPy's statistics: cumulative sums, quantiles, histograms, weighted averages, covariance.

Size, range, standard deviation, skewness and quartiles. NumPy's "stone" is not there: it needs a
histogram for every number of bins up to the square root of the size.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import Implementation, implements
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import BadArgumentError, DtypeError, ShapeError

# --- along the elements -----------------------------------------------------------------


def _scan(op: str, skip: bool = False) -> Implementation:
    def scan(engine: Engine, a: Any, axis: Any = None, dtype: Any = None) -> Any:
        whole = engine.cast(a, dtype)
        if skip and whole.dtype.kind in "fc":
            neutral = np.asarray(op == "prod", whole.dtype)
            whole = engine.where(engine.unary("isnan", whole), neutral, whole)
        along = rules.along_or_number(axis, a.ndim)
        found = engine.along(whole, along, lambda M, i: engine.call("cumulative", op, M, axis=i))
        return engine.cast(found, dtype)

    return scan


implements(np.cumsum)(_scan("sum"))
implements(np.cumprod)(_scan("prod"))
implements(np.nancumsum)(_scan("sum", skip=True))
implements(np.nancumprod)(_scan("prod", skip=True))


def _standard_scan(op: str) -> Implementation:
    def scan(
        engine: Engine, x: Any, /, *, axis: Any = None, dtype: Any = None,
        include_initial: bool = False,
    ) -> Any:  # fmt: skip
        if axis is None and x.ndim != 1:
            raise ShapeError(f"np.cumulative_{op} of an array of shape {x.shape}: give axis=")
        whole = engine.cast(x, dtype)
        along = 0 if axis is None else rules.axis_index(axis, x.ndim)
        initial = bool(include_initial)
        found = engine.along(
            whole, along, lambda M, i: engine.call("cumulative", op, M, axis=i, initial=initial)
        )
        return engine.cast(found, dtype)

    return scan


implements(np.cumulative_sum)(_standard_scan("sum"))
implements(np.cumulative_prod)(_standard_scan("prod"))


@implements(np.diff)
def _diff(
    engine: Engine, a: Any, n: int = 1, axis: Any = -1, prepend: Any = None, append: Any = None
) -> Any:
    whole = engine.matrix(a)
    if not whole.ndim:
        raise ShapeError("np.diff is not defined for an array of shape ()")
    if n < 0:
        raise BadArgumentError(f"np.diff: n={n}: it must be at least 0")
    along = rules.axis_index(axis, whole.ndim)
    ends = []
    for end in (prepend, append):
        if end is not None and np.ndim(end) == 0:
            shape = [1 if i == along else length for i, length in enumerate(whole.shape)]
            end = np.full(shape, end)
        ends.append([] if end is None else [end])
    if ends[0] or ends[1]:
        whole = engine.concatenate([*ends[0], whole, *ends[1]], along)
    op = "not_equal" if whole.dtype.kind == "b" else "subtract"
    before, after = rules.at(along, slice(None, -1)), rules.at(along, slice(1, None))
    for _ in range(n):
        whole = engine.binary(op, whole[after], whole[before])
    return whole


# --- slopes and polynomials -------------------------------------------------------------


@implements(np.gradient)
def _gradient(engine: Engine, f: Any, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    whole = engine.matrix(f)
    if whole.dtype.kind == "i":
        whole = engine.astype(whole, np.dtype(np.float64))
    given = range(whole.ndim) if axis is None else axis if np.iterable(axis) else (axis,)
    axes = [rules.axis_index(one, whole.ndim) for one in given]
    steps = varargs or (1.0,)
    if len(steps) == 1 and np.ndim(steps[0]) == 0:
        steps *= len(axes)
    if len(steps) != len(axes):
        raise TypeError(f"np.gradient: {len(steps)} spacings for {len(axes)} axes")
    if edge_order not in (1, 2):
        raise BadArgumentError(f"np.gradient: edge_order={edge_order!r}: it must be 1 or 2")
    found = tuple(
        _slopes(engine, whole, along, np.asarray(step), edge_order)
        for along, step in zip(axes, steps, strict=True)
    )
    return found[0] if len(found) == 1 else found


def _slopes(engine: Engine, f: Any, along: int, step: Any, edge_order: int) -> Any:
    """Derivatives along an axis: central differences, and one-sided ones at both ends."""
    n = f.shape[along]
    if n < edge_order + 1:
        raise ShapeError(
            f"np.gradient of shape {f.shape}: axis {along} must have at least {edge_order + 1} "
            "elements"
        )
    if step.ndim and step.shape != (n,):
        raise ShapeError(
            f"np.gradient: a spacing of shape {step.shape} for axis {along} of length {n}: give a "
            "number, or a coordinate for each index"
        )
    steps = np.diff(step).astype(np.float64) if step.ndim else np.full(n - 1, step, np.float64)

    def at(start: int, stop: int | None) -> Any:
        return f[rules.at(along, slice(start, stop))]

    def edge(first: int, toward: int) -> Any:
        i, j, k = ((one, one + 1) for one in (first, first + toward, first + 2 * toward))
        steps_in = steps if toward == 1 else steps[::-1]
        left = float(steps_in[0])
        if edge_order == 1:
            return (at(*j) - at(*i)) / (toward * left)
        right = float(steps_in[1])
        both = left + right
        return toward * (
            at(*j) * (both / (left * right))
            - at(*i) * ((left + both) / (left * both))
            - at(*k) * (left / (right * both))
        )

    parts = [edge(0, 1), edge(n - 1, -1)]
    if n > 2:
        left, right = (
            part.reshape([-1 if i == along else 1 for i in range(f.ndim)])
            for part in (steps[:-1], steps[1:])
        )
        if (steps == steps[0]).all():
            inner = (at(2, None) - at(0, -2)) / (2 * float(steps[0]))
        else:
            inner = (
                at(2, None) * (left / (right * (left + right)))
                + at(1, -1) * ((right - left) / (left * right))
                - at(0, -2) * (right / (left * (left + right)))
            )
        parts.insert(1, inner)
    return engine.cast(engine.concatenate(parts, along), f.dtype)


@implements(np.polyfit)
def _polyfit(
    engine: Engine, x: Any, y: Any, deg: int, rcond: Any = None, full: bool = False, w: Any = None
) -> Any:
    """As NumPy: least squares with the powers of x, whose columns are scaled to length 1."""
    X, Y = engine.both(x, y)
    if X.ndim != 1 or Y.ndim not in (1, 2) or X.shape[0] != Y.shape[0] or not X.size or deg < 0:
        raise ShapeError(
            f"np.polyfit of x of shape {X.shape}, y of {Y.shape} and degree {deg}: x must be a "
            "vector, y have a row for each of its elements, and the degree be at least 0"
        )
    kind = np.result_type(X.dtype, np.float16) if X.dtype.kind in "fc" else np.dtype(np.float64)
    powers = X[:, None].astype(np.result_type(kind, np.float64)) ** np.arange(deg, -1.0, -1.0)
    if w is not None:
        weight = engine.matrix(w, X)
        if weight.shape != X.shape:
            raise ShapeError(f"np.polyfit: weights of shape {weight.shape} for x of {X.shape}")
        powers = powers * weight[:, None]
        Y = Y * (weight[:, None] if Y.ndim == 2 else weight)
    rcond = X.shape[0] * np.finfo(kind).eps if rcond is None else rcond
    scale = np.sqrt(np.asarray((abs(powers) ** 2).sum(axis=0)))
    scale[scale == 0] = 1
    C, residuals, rank, S = np.linalg.lstsq(powers / scale, Y, rcond)
    C = engine.astype(
        C / (scale[:, None] if C.ndim == 2 else scale), np.result_type(kind, Y.dtype), copy=False
    )
    if full:
        return C, residuals, rank, S, rcond
    if rank != deg + 1:
        warnings.warn("Polyfit may be poorly conditioned", np.exceptions.RankWarning, stacklevel=4)
    return C


@implements(np.polyval)
def _polyval(engine: Engine, p: Any, x: Any) -> Any:
    X = engine.matrix(x, p if isinstance(p, MatrixRef) else None)
    found = np.zeros_like(X)
    for coefficient in np.asarray(p):
        found = found * X + coefficient
    return found


# --- quantiles --------------------------------------------------------------------------


def _quantiles(
    engine: Engine, name: str, a: Any, q: Any, axis: Any, method: str, keepdims: Any
) -> Any:
    """`name` is NumPy's function: of a small example it tells dtype and errors."""
    like = np.ones(2, a.dtype)
    if name.endswith("median"):
        asked = np.asarray(0.5)
        method = "median"
        kind = np.median(like).dtype
    else:
        kind = np.asarray(getattr(np, name)(like, q, method=method)).dtype
        asked = np.asarray(q, np.float64) / (100.0 if name.endswith("percentile") else 1.0)
    gone = rules.axes_of(axis, a.ndim)
    kept = [i for i in range(a.ndim) if i not in gone]
    if name in ("nanquantile", "nanpercentile") and a.size == 0:
        return engine.reduce("nanmean", a, axis, keepdims=bool(keepdims))  # as NumPy
    count = math.prod(a.shape[i] for i in gone)
    if not count and method != "median":
        raise ShapeError(f"np.{name}: the array has no elements (shape {a.shape})")
    rest = [1 if i in gone else n for i, n in enumerate(a.shape) if keepdims or i in kept]
    numbers = a.size // count if count else math.prod(a.shape[i] for i in kept)
    shape = (*asked.shape, *rest)
    flat = shape
    if a.ndim > 2 or len(shape) > 2:
        flat = (asked.size, numbers) if kept else (asked.size,)
    if a.ndim > 2:
        a = engine.reshape(engine.permute(a, [*kept, *gone]), (numbers, count))
        gone = [1] if kept else [0, 1]
    along = gone[0] if len(gone) < a.ndim else None
    found = engine.call(
        "quantile", a, asked.reshape(-1).tolist(), list(flat), axis=along, method=method,
        skip_nan=name.startswith("nan"), dtype=kind.name,
    )  # fmt: skip
    return found if found.shape == shape else engine.reshape(found, shape)


def _weights(engine: Engine, name: str, a: Any, axes: list[int], weights: Any) -> Any:
    """Weights of each element, or of each index of the axes: then in a shape that broadcasts."""
    weight = engine.matrix(weights)
    if weight.shape == a.shape:
        return weight
    if weight.shape != tuple(a.shape[i] for i in axes):
        raise ShapeError(
            f"np.{name}: weights of shape {weight.shape} for an array of {a.shape}: give a weight "
            "for each element, or for each index of axis="
        )
    return engine.reshape(weight, [n if i in axes else 1 for i, n in enumerate(a.shape)])


def _weighted(
    engine: Engine, name: str, a: Any, q: Any, axis: Any, method: str, keepdims: Any, weights: Any
) -> Any:
    """Elements at which the sum of the weights of all smaller ones reaches a share of the total."""
    if method != "inverted_cdf":
        raise BadArgumentError(f"np.{name} with weights=: method='inverted_cdf' has them")
    if a.dtype.kind == "c":
        raise DtypeError(f"np.{name} of {a.dtype}: complex numbers have no order")
    axes = rules.axes_of(axis, a.ndim)
    weight = _weights(engine, name, a, axes, weights)
    if weight.shape != a.shape:
        weight = engine.broadcast(weight, a.shape)
    if bool(engine.reduce("any", engine.binary("less", weight, 0), None)):
        raise ValueError(f"np.{name}: weights must be non-negative")
    kept = [i for i in range(a.ndim) if i not in axes]
    lines = [
        engine.reshape(np.transpose(x, [*kept, *axes]), (*[a.shape[i] for i in kept], -1))
        for x in (a, weight)
    ]
    values, weight = lines
    if name.startswith("nan"):
        weight = engine.where(engine.unary("isnan", values), np.float64(0), weight)
    order = np.argsort(values, axis=-1)
    shares = np.cumsum(np.take_along_axis(weight, order, -1).astype(np.float64), axis=-1)
    shares = shares / shares[..., -1:]
    values = np.take_along_axis(values, order, -1)
    last = values.shape[-1] - 1
    missing = None
    if values.dtype.kind == "f" and not name.startswith("nan"):
        missing = np.isnan(values).any(-1)
    asked = np.asarray(q, np.float64) / (100.0 if name.endswith("percentile") else 1.0)
    found = []
    for share in asked.reshape(-1):
        below = np.sum((shares < share) | (shares == 0), axis=-1, keepdims=True)
        one = np.take_along_axis(values, np.minimum(below, last), -1)[..., 0]
        found.append(
            one if missing is None else np.where(missing, np.asarray(np.nan, one.dtype), one)
        )
    rest = [1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i in kept]
    return engine.reshape(np.stack(found), (*asked.shape, *rest))


def _quantile_function(function: Any) -> None:
    def quantile(
        engine: Engine, a: Any, q: Any, axis: Any = None, overwrite_input: bool = False,
        method: str = "linear", keepdims: Any = False, *, weights: Any = None,
    ) -> Any:  # fmt: skip
        if weights is not None:
            return _weighted(engine, function.__name__, a, q, axis, method, keepdims, weights)
        return _quantiles(engine, function.__name__, a, q, axis, method, keepdims)

    implements(function)(quantile)


for _function in (np.quantile, np.percentile, np.nanquantile, np.nanpercentile):
    _quantile_function(_function)


@implements(np.median)
def _median(
    engine: Engine, a: Any, axis: Any = None, overwrite_input: bool = False, keepdims: Any = False
) -> Any:
    return _quantiles(engine, "median", a, 0.5, axis, "linear", keepdims)


@implements(np.nanmedian)
def _nanmedian(
    engine: Engine, a: Any, axis: Any = None, overwrite_input: bool = False, keepdims: Any = False
) -> Any:
    return _quantiles(engine, "nanmedian", a, 0.5, axis, "linear", keepdims)


# --- averages and covariance ------------------------------------------------------------


@implements(np.average)
def _average(
    engine: Engine, a: Any, axis: Any = None, weights: Any = None, returned: bool = False, *,
    keepdims: Any = False,
) -> Any:  # fmt: skip
    whole = engine.matrix(a)
    axes = rules.axes_of(axis, whole.ndim)
    keep = bool(keepdims)
    if weights is None:
        found = engine.reduce("mean", whole, axis, keepdims=keep)
        total: Any = math.prod(whole.shape[i] for i in axes)
        return (found, np.full_like(found, total)) if returned else found
    weight = _weights(engine, "average", whole, axes, weights)
    kind = np.result_type(whole.dtype, weight.dtype)
    kind = np.result_type(kind, np.float64) if kind.kind in "biu" else kind
    weight = engine.cast(weight, kind)
    total = engine.reduce("sum", weight, axis, keepdims=keep)
    if bool(engine.reduce("any", engine.binary("equal", total, 0), None)):
        raise ZeroDivisionError("np.average: the weights sum to zero")
    found = engine.reduce("sum", whole * weight, axis, keepdims=keep) / total
    if not returned:
        return found
    return found, total if total.shape == found.shape else np.broadcast_to(total, found.shape)


@implements(np.cov)
def _cov(
    engine: Engine, m: Any, y: Any = None, rowvar: bool = True, bias: bool = False,
    ddof: int | None = None, fweights: Any = None, aweights: Any = None, *, dtype: Any = None,
) -> Any:  # fmt: skip
    """Observations are rows here: with ``rowvar=False``, a tall matrix is multiplied in place."""
    parts = [_observations(engine, x, rowvar) for x in (m, y) if x is not None]
    X = parts[0] if len(parts) == 1 else engine.concatenate(parts, 1)
    kind = np.result_type(X.dtype, np.float64) if dtype is None else rules.checked_dtype(dtype)
    X = engine.cast(X, kind)
    weights: Any = None
    for given in (fweights, aweights):
        if given is not None:
            weights = np.asarray(given, float) * (1 if weights is None else weights)
    total = X.shape[0] if weights is None else weights.sum()
    less = (0 if bias else 1) if ddof is None else ddof
    if aweights is None or not less:
        factor = total - less
    else:
        factor = total - less * (weights * np.asarray(aweights)).sum() / total
    if factor <= 0:
        warnings.warn("np.cov: no degrees of freedom are left", RuntimeWarning, stacklevel=2)
        factor = 0.0
    X = X - _average(engine, X, 0, weights)
    right = X if weights is None else X * weights[:, None].astype(np.float64)
    found = engine.call(
        "matmul", X, engine.unary("conj", right) if kind.kind == "c" else right, transpose_a="T"
    )
    found = engine.cast(found * np.true_divide(1, factor), kind)
    return engine.reshape(found, ()) if found.shape == (1, 1) else found


def _observations(engine: Engine, x: Any, rowvar: bool) -> Any:
    whole = engine.matrix(x)
    if whole.ndim < 2 or (rowvar and whole.shape[0] == 1):
        return engine.reshape(whole, (-1, 1))
    return engine.transpose(whole) if rowvar else whole


@implements(np.corrcoef)
def _corrcoef(
    engine: Engine, x: Any, y: Any = None, rowvar: bool = True, *, dtype: Any = None
) -> Any:
    found = _cov(engine, x, y, rowvar, dtype=dtype)
    if not found.ndim:
        return found / found
    deviations = np.sqrt(engine.call("diagonal", found).real)
    found = found / engine.reshape(deviations, (-1, 1)) / deviations
    if found.dtype.kind != "c":
        return np.clip(found, -1, 1)
    return found


@implements(np.interp)
def _interp(
    engine: Engine, x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None,
    period: Any = None,
) -> Any:  # fmt: skip
    if period is not None:
        raise rules.unsupported("np.interp with period=", "np.interp(A % period, xp, fp)")
    places, values = engine.matrix(xp), engine.matrix(fp)
    if places.ndim > 1 or values.ndim > 1:
        raise ShapeError(
            f"np.interp: points of shapes {places.shape} and {values.shape}; they must be vectors"
        )
    return engine.each(
        engine.matrix(x), lambda M: engine.call("interp", M, places, values, left, right)
    )


@implements(np.nan_to_num)
def _nan_to_num(
    engine: Engine, x: Any, copy: bool = True, nan: Any = 0.0, posinf: Any = None,
    neginf: Any = None,
) -> Any:  # fmt: skip
    return engine.call("nan_to_num", x, nan, posinf, neginf)


_WIDTHS: dict[str, Any] = {
    "sqrt": lambda x: _spread(x) / np.sqrt(x.size),
    "sturges": lambda x: _spread(x) / (np.log2(x.size) + 1),
    "rice": lambda x: _spread(x) / (2 * x.size ** (1 / 3)),
    "scott": lambda x: (24 * np.pi**0.5 / x.size) ** (1 / 3) * np.std(x).item(),
    "fd": lambda x: 2 * _quartiles_apart(x) * x.size ** (-1 / 3),
    "doane": lambda x: _doane(x),
    "auto": lambda x: min(max(_WIDTHS["fd"](x), _WIDTHS["sqrt"](x) / 2), _WIDTHS["sturges"](x)),
}


def _spread(x: Any) -> Any:
    high, low = x.max().fetch()[()], x.min().fetch()[()]
    return int(high) - int(low) if x.dtype.kind in "iu" else high - low  # int8 would wrap


def _quartiles_apart(x: Any) -> Any:
    high, low = np.asarray(np.percentile(x, [75, 25]))
    return high - low


def _doane(x: Any) -> Any:
    deviation = np.std(x).item()
    if x.size <= 2 or not deviation > 0:
        return 0.0
    skewness = (((x - np.mean(x)) / deviation) ** 3).mean().item()
    error = np.sqrt(6 * (x.size - 2) / ((x.size + 1) * (x.size + 3)))
    return _spread(x) / (1 + np.log2(x.size) + np.log2(1 + abs(skewness) / error))


def number_of_bins(name: str, whole: Any, range: Any) -> int:
    """As `numpy.histogram_bin_edges` estimates it, by some reductions of all elements."""
    if name == "stone":
        raise rules.unsupported(
            "np.histogram with bins='stone'", "use bins='auto', which needs few reductions"
        )
    if name not in _WIDTHS:
        raise BadArgumentError(f"np.histogram: {name!r} is not one of {', '.join(_WIDTHS)}")
    if range is not None:
        whole = whole[(whole >= range[0]) & (whole <= range[1])]
    if not whole.size:
        return 1
    width = _WIDTHS[name](whole)
    if not width:
        return 1
    if whole.dtype.kind == "i":
        width = max(width, 1)
    edges = range if range is not None else (whole.min().item(), whole.max().item())
    apart = edges[1] - edges[0] or 1.0
    return int(np.ceil(apart / width))
