"""Every function of the coverage page on arrays of one to four axes: NumPy's numbers, or an error.

NumPy is the oracle: the same values, shape and dtype, and where NumPy raises, so do handles.
`REFUSED` names the calls that only NumPy takes.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.arrays.rules import FUNCTIONS
from tests.alchemist_ray.arrays import cases
from tests.alchemist_ray.arrays.checks import values, whole
from tests.support.suite import part

SHAPES = [(5,), (4, 3), (3, 4, 2), (2, 3, 2, 3)]
PAIRS = [(3,), (4,), (2, 3), (3, 3), (2, 3, 3), (2, 2, 3, 3), (1,)]
TWICE = list(itertools.product(PAIRS, PAIRS))
# Values that are arbitrary in NumPy: elements of `empty_like`, signs of Q and R, an order.
ARBITRARY = {"empty_like", "qr", "unique_values"}
# One matrix is factored on the ranks, not a stack; thin factors only.
REFUSED = (
    r"np\.linalg\.\w+ takes one matrix", r"np\.linalg\.svd of .* full_matrices=False",
    r"a matrix norm of shape .* ord=(2|-2|nuc) ", r"axis -1 must have length 3",
)  # fmt: skip


def _square(function: Any) -> Callable[[Any], Any]:
    """Of positive definite matrices, which every function of matrices takes."""
    return lambda x: function(x if x.ndim < 2 else x[..., :2, :2] * 0.0 + (np.eye(2) * 3 + 0.5))


ONE: dict[str, Callable[[Any], Any]] = {
    **{function.__name__: function for function in FUNCTIONS},
    **{
        f"{function.__name__} of square ones": _square(function)
        for function in FUNCTIONS
        if function.__module__ == "numpy.linalg"
    },
    **{ufunc.__name__: ufunc for ufunc in cases.UFUNCS},
    **cases.OTHERS,
    **{
        f"{name}, axis {axis}": lambda x, name=name, axis=axis: getattr(np, name)(x, axis=axis)
        for name in (*cases.ALONG, *cases.METHODS)
        for axis in (None, 0, 1, -1)
    },
    **{
        f"norm {ord}, {axis}": lambda x, ord=ord, axis=axis: np.linalg.norm(x, ord, axis)
        for ord in (None, 1, -1, 2, np.inf, -np.inf, "fro", 0, 3)
        for axis in (None, 0, (0, 1), (1, 0), (-2, -1), (0,), (0, 1, 2))
    },
    **{
        f"matrix norm {ord}": lambda x, ord=ord: np.linalg.matrix_norm(x, ord=ord, keepdims=True)
        for ord in (1, -1, np.inf, "fro")
    },
    "trace of others": lambda x: np.trace(x, 0, -2, -1),
    "trace turned": lambda x: np.trace(x, 1, 1, 0),
    "traces": lambda x: np.linalg.trace(x, offset=1),
    "x.trace": lambda x: x.trace(1, 0, -1),
    "diagonals": lambda x: np.linalg.diagonal(x, offset=-1),
    "x.diagonal": lambda x: x.diagonal(1, 1, 0),
    "diagonal of others": lambda x: np.diagonal(x, 0, -2, -1),
    "diag": lambda x: np.diag(x, 1),
    "vector_norm": lambda x: np.linalg.vector_norm(x, axis=(0, -1) if x.ndim > 1 else 0, ord=3),
    "lexsort of two": lambda x: np.lexsort([x, -x], axis=0),
    "lexsort of three": lambda x: np.lexsort([x, x, -x]),
    "a number times": lambda x: np.dot(2.0, x),
    "times a number": lambda x: np.inner(x, 3.0),
    "fill_diagonal": lambda x: cases.filled_diagonal(x, 3.0),
    "multi_dot": lambda x: np.linalg.multi_dot([x, x.T, x]),
    "take one": lambda x: np.take(x, 0),
    "take of an array": lambda x: np.take(x, np.array(1), axis=0),
    "take a table": lambda x: np.take(x, [[0, 1], [1, 0]], axis=-1),
    "weighted average of rows": lambda x: np.average(x, -1, np.arange(1.0, x.shape[-1] + 1)),
    "average of axes": lambda x: np.average(x, (0, -1) if x.ndim > 1 else 0),
    "median of axes": lambda x: np.median(x, (0, -1) if x.ndim > 1 else 0, keepdims=True),
    "var of axes": lambda x: np.var(x, (0, -1) if x.ndim > 1 else 0, ddof=1),
    "max.reduce of axes": lambda x: np.maximum.reduce(x, axis=(0, -1) if x.ndim > 1 else 0),
    "roll both": lambda x: np.roll(x, (1, 2), (0, -1)),
    "pad": lambda x: np.pad(x, [(1, 2)] * x.ndim),
    "tile": lambda x: np.tile(x, (2, 1, 2)),
    "stack": lambda x: np.stack([x, x], -1),
    "hstack": lambda x: np.hstack([x, x]),
    "vstack": lambda x: np.vstack([x, x]),
    "column_stack": lambda x: np.column_stack([x, x]),
    "split": lambda x: np.split(x, [1], -1),
    "hsplit": lambda x: np.hsplit(x, [1]),
    "vsplit": lambda x: np.vsplit(x, [1]),
    "select": lambda x: np.select([x > 0, x > 1], [x, -x], 7.0),
    "clip": lambda x: np.clip(x, x[:1], 2),
    "gradient": lambda x: np.gradient(x),
    "polyval": lambda x: np.polyval([1.0, 2.0, 3.0], x),
    "lstsq": lambda x: np.linalg.lstsq(x, np.ones(x.shape[0]))[0],
    "polyfit": lambda x: np.polyfit(np.arange(float(x.shape[0])), x, 1),
    "expand_dims": lambda x: np.expand_dims(x, (0, -1)),
    "histogram": lambda x: np.histogram(x, 4, weights=abs(x)),
    "einsum": lambda x: np.einsum("...i->...", x),
    "matvec": lambda x: np.matvec(x, x[..., 0, :]),
    "vecmat": lambda x: np.vecmat(x[..., 0], x),
    "vecdot along rows": lambda x: np.linalg.vecdot(x, x[..., 0], axis=0),
}
OF_NUMPY = [
    "dot", "inner", "outer", "vdot", "kron", "matmul", "vecdot", "matvec", "vecmat", "cross",
    "add", "append", "isin", "union1d", "intersect1d", "setdiff1d", "isclose", "array_equal",
    "array_equiv", "cov", "broadcast_arrays", "meshgrid", "polyval",
]  # fmt: skip
OF_LINALG = [
    "outer", "matmul", "vecdot", "cross", "solve",
]  # fmt: skip
TWO: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(np, name) for name in OF_NUMPY},
    **{f"linalg.{name}": getattr(np.linalg, name) for name in OF_LINALG},
    **{f"tensordot {n}": lambda a, b, n=n: np.tensordot(a, b, n) for n in range(3)},
    "A.dot": lambda a, b: a.dot(b),
    "lstsq": lambda a, b: np.linalg.lstsq(a, b)[0],
    "multi_dot": lambda a, b: np.linalg.multi_dot([a, b, a]),
    "lexsort": lambda a, b: np.lexsort((a, b)),
    "concatenate": lambda a, b: np.concatenate([a, b]),
    "stack": lambda a, b: np.stack([a, b]),
    "hstack": lambda a, b: np.hstack([a, b]),
    "vstack": lambda a, b: np.vstack([a, b]),
    "where": lambda a, b: np.where(a > 0, a, b),
    "average": lambda a, b: np.average(a, 0, b),
    "searchsorted": lambda a, b: np.searchsorted(np.sort(a), b),
    "take_along_axis": lambda a, b: np.take_along_axis(a, abs(b).astype(int) % 2, -1),
    "take": lambda a, b: np.take(a, abs(b).astype(int) % 2, axis=0),
    "repeat": lambda a, b: np.repeat(a, abs(b).astype(int) % 3, axis=0),
    "histogram": lambda a, b: np.histogram(a, 3, weights=b),
    "bincount": lambda a, b: np.bincount(abs(a).astype(int), b),
    "select": lambda a, b: np.select([a > 0], [b], a),
    "einsum": lambda a, b: np.einsum("...i,...i", a, b),
    "clip": lambda a, b: np.clip(a, b, b + 2),
}


def _differs(work: Callable[..., Any], given: list[Any], handles: list[Handle]) -> str:
    """How a call on handles differs from NumPy's; empty if it does not."""
    try:
        expected = work(*(x.copy() for x in given))
    except Exception:
        try:
            found = work(*handles)
        except Exception:
            return ""
        return f"NumPy refuses that, got {found}"
    try:
        found = work(*handles)
    except Exception as error:
        refused = any(re.search(known, str(error)) for known in REFUSED)
        return "" if refused else f"refused: {type(error).__name__}: {error}"
    several = isinstance(expected, tuple | list)
    pairs = zip(found, expected, strict=True) if several else [(found, expected)]
    for mine, numpys in pairs:
        got, wanted = np.asarray(whole(mine)), np.asarray(numpys)
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            return f"{wanted.dtype} of {wanted.shape} becomes {got.dtype} of {got.shape}"
        numbers = wanted.dtype != object  # else it is a dtype
        if (
            mine != numpys
            if not numbers
            else not np.allclose(got, wanted, rtol=1e-10, atol=1e-10, equal_nan=True)
        ):
            return f"{wanted.ravel()[:5]} becomes {got.ravel()[:5]}"
    return ""


@pytest.fixture
def quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_functions_of_one_array(session: AlchemistSession, quiet: None) -> None:
    found = {}
    for turn, (name, work) in enumerate(ONE.items()):
        if name.split()[0] not in ARBITRARY:
            for shape in part(SHAPES, turn, 4):
                a = values(shape, "float64")
                found[name, shape] = _differs(work, [a], [session.send_matrix(a)])
    assert not {name: text for name, text in found.items() if text}


def test_functions_of_two_arrays(session: AlchemistSession, quiet: None) -> None:
    found = {}
    for turn, (name, work) in enumerate(TWO.items()):
        for m, n in part(TWICE, turn, 14):
            a, b = values(m, "float64"), values(n, "float64", 1)
            A, B = session.send_matrix(a), session.send_matrix(b)
            found[name, m, n] = _differs(work, [a, b], [A, B])
    assert not {name: text for name, text in found.items() if text}


def test_of_mixed_operands(session: AlchemistSession) -> None:
    """A handle and an array of NumPy's, in both orders."""
    for m, n in TWICE:
        name = ("dot", "inner")[len(m) % 2]
        a, b = values(m, "int64"), values(n, "complex64", 1)
        work = getattr(np, name)
        assert not _differs(lambda x: work(x, b), [a], [session.send_matrix(a)])  # noqa: B023
        assert not _differs(lambda x: work(a, x), [b], [session.send_matrix(b)])  # noqa: B023
