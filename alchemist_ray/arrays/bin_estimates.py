"""How many bins a histogram gets: NumPy's estimators, from few numbers that the ranks compute.

Size, range, standard deviation, skewness and quartiles. NumPy's "stone" is not there: it needs a
histogram for every number of bins up to the square root of the size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.errors import BadArgumentError

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
    return x.max().fetch()[()] - x.min().fetch()[()]


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
