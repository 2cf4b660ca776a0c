"""How far results are from exact ones, for the errors that docstrings state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Errors = Callable[..., float]
Cases = dict[str, list[tuple[dict[str, Any], Errors]]]
norm = np.linalg.norm


def far(found: Any, exact: Any) -> float:
    """The largest difference, relative to the largest number."""
    exact = np.asarray(exact)
    found = np.asarray(found).reshape(exact.shape)
    return float(np.abs(found - exact).max() / max(1e-300, np.abs(exact).max()))


def off(*products: Array) -> float:
    """``|A - B|`` over ``|A|``, in the Frobenius norm."""
    return float(norm(products[0] - products[1]) / norm(products[0]))


def lost(x: Array, a: Array, b: Array) -> float:
    """The backward error of a solution of ``A X = B``."""
    return float(norm(a @ x - b) / (norm(a) * norm(x) + norm(b)))


def slope(x: Array, a: Array, b: Array, lam: float = 0.0) -> float:
    """The gradient of a least squares problem, relative to ``|A| (|A| |X| + |B|)``."""
    gradient = a.T @ (a @ x - b) + lam * x
    return float(norm(gradient) / (norm(a, 2) * (norm(a, 2) * norm(x) + norm(b))))


def factored(a: Array, s: Array, u: Array, v: Array) -> float:
    """Backward error of an SVD, or the deviation of its vectors from orthonormal ones."""
    ones = [float(norm(x.T @ x - np.eye(x.shape[1]), 2)) for x in (u, v)]
    return max(off(a, (u * s) @ v.T), *ones)


def unit(q: Array) -> float:
    """How far columns are from orthonormal."""
    return float(norm(q.T @ q - np.eye(q.shape[1]), 2))
