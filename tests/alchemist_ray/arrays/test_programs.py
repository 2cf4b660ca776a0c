"""Random programs on handles give NumPy's values, shapes and dtypes, or a documented refusal.

Each program has up to ten operations on up to four arrays. After each operation, NumPy's side takes
the elements of the gang's, so that rounding does not add up.
"""

from __future__ import annotations

import contextlib
import math
import operator
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import AlchemistError
from mpi_workers.matrix.dtypes import DTYPES
from tests.alchemist_ray.arrays.checks import values
from tests.support.layouts import SOME_LAYOUTS
from tests.support.suite import scaled

ROWS = [0, 1, 2, 3, 7, 7, 7, 50, 1000, 200_000]
COLS = [0, 1, 2, 3, 3]
BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod,
    operator.lt, operator.le, operator.eq, operator.ne, operator.and_, operator.or_, np.maximum,
    np.arctan2, np.logical_xor, operator.matmul,
]  # fmt: skip
UNARY = [
    operator.neg, abs, operator.invert, np.sign, np.isnan, np.tanh, np.square, np.ravel,
    np.transpose, np.conj, np.real, np.nonzero, np.diagonal, np.copy, np.trace, np.squeeze,
]  # fmt: skip
ORDERING: list[Any] = [
    np.sort, np.argmax, np.argmin, np.diff, np.unique, np.median, np.flip,
    lambda x: np.argsort(x, kind="stable"), lambda x: np.sort(x, axis=0), lambda x: np.roll(x, 3),
    lambda x: np.unique(x, axis=0), lambda x: np.repeat(x, 2),
    lambda x: np.quantile(x, 0.3, method="inverted_cdf"), lambda x: np.nanmean(x, keepdims=True),
    lambda x: np.argsort(x, axis=0, kind="stable"), np.triu,
    lambda x: np.searchsorted([-2, 0, 3], x), lambda x: np.isin(x, [1, 2]), np.nan_to_num,
    lambda x: np.moveaxis(x, 0, -1), lambda x: np.swapaxes(x, 0, 1), lambda x: np.stack([x, x], -1),
    lambda x: np.cumsum(x, -1, dtype=complex), lambda x: np.take(x, [0, 0][: x.size], axis=-1),
    lambda x: np.einsum("ijk->kj", x), lambda x: np.tensordot(x, x, 1),
    lambda x: np.histogram(x, 4, (-3, 3))[0], lambda x: np.broadcast_to(x, (2, *x.shape)[-2:]),
]  # fmt: skip
SCANS: list[Any] = [  # NumPy adds one element after the other, the ranks by blocks
    np.cumsum, lambda x: np.cumsum(x, axis=-1), lambda x: np.cumprod(np.sign(x), axis=0),
]  # fmt: skip
REDUCTIONS = ["sum", "mean", "min", "max", "any", "all", "var"]
REFUSED = TypeError, ValueError, IndexError, OverflowError, np.exceptions.AxisError
# NumPy only warns when a cast drops imaginary parts, and wraps integers round.
REFUSALS = ["is not supported", "would drop", "cannot hold"]
LONGER = {"float32": "float64", "complex64": "complex128", "complex128": "clongdouble"} | (
    dict.fromkeys(["float64", "int32", "int64", "bool"], "longdouble")
)
NUMBERS = [0, 1, -2, 0.5, True, 1j, np.float32(2), np.int64(3)]
Pair = tuple[Any, Any]  # what the gang has, and what NumPy has


@st.composite
def arrays(draw: Any, session: AlchemistSession) -> Pair:
    """An array on the ranks, or one in this process for both sides."""
    m, n = draw(st.sampled_from(ROWS)), draw(st.sampled_from(COLS))
    few = min(m, 7)
    shape = draw(
        st.sampled_from(
            [(m,), (m, n), (m, n), (min(n, 3), min(n, 3)), (n,), (), (few, n, 3), (2, few, n),
             (n, 1, few, 2), (few, 3, n), (2, n, 1, 2, few)]
        )
    )  # fmt: skip
    a = np.asarray(values(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9))))
    if draw(st.integers(0, 3)) == 0 and shape:
        return a, a
    if not shape:
        return session.xp.asarray(a), a
    return session.send_matrix(a, layout=draw(st.sampled_from(SOME_LAYOUTS))), a


@st.composite
def indices(draw: Any, have: Any) -> tuple[Any, Any]:
    """An index for the gang's array, and the same for NumPy's."""
    kind = draw(st.sampled_from(["slice", "int", "list", "mask", "all", "pair", "new"]))
    m = have.shape[0] if have.shape else 0
    cut = st.builds(slice, *[st.none() | st.integers(-8, 8)] * 2,
                    st.none() | st.sampled_from([1, 2, -1]))  # fmt: skip
    key: Any
    if kind == "slice":
        key = draw(cut)
    elif kind == "int":
        key = draw(st.integers(-8, 7))
    elif kind == "list":
        key = draw(st.lists(st.integers(-min(m, 7), min(m, 7) - 1), max_size=4)) if m else []
    elif kind == "mask":
        key = values((m,), "int32", 3) > 2
    elif kind == "all":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            key = abs(have) > 2
        if isinstance(key, Handle):
            return key, key.fetch()
    elif kind == "pair":
        key = draw(st.tuples(cut | st.integers(-3, 2), cut | st.integers(-3, 2)))
    else:
        key = draw(st.sampled_from(
            [(slice(None), None), (None,), (Ellipsis, None), (Ellipsis, 0), (Ellipsis, [0, 0]),
             ([[0, 1], [1, 0]],), (slice(None), [0], None)]
        ))  # fmt: skip
    return key, key


def step(draw: Any, mine: list[Pair]) -> Pair | None:
    """One operation: what the gang gives, and what NumPy gives. None: both refuse."""
    (A, a), (B, b) = draw(st.sampled_from(mine)), draw(st.sampled_from(mine))
    kind = draw(st.sampled_from(
        ["binary", "number", "unary", "ordering", "reduce", "index", "assign", "where", "astype",
         "join", "reshape", "out", "scan"]
    ))  # fmt: skip
    work: Any
    match kind:
        case "binary":
            op = draw(st.sampled_from(BINARY))
            if enormous(op, a, b):
                return None
            ours, theirs, work = (A, B), (a, b), op
        case "number":
            op, number = draw(st.sampled_from(BINARY[:-1])), draw(st.sampled_from(NUMBERS))
            turned = draw(st.booleans())
            ours, theirs, work = (A,), (a,), lambda x: op(number, x) if turned else op(x, number)
        case "unary":
            ours, theirs, work = (A,), (a,), draw(st.sampled_from(UNARY))
            if work is np.nonzero:
                work = _first_of_nonzero
        case "ordering":
            ours, theirs, work = (A,), (a,), draw(st.sampled_from(ORDERING))
            if work is np.triu and a.ndim == 1 and a.size > 1000:  # it would become square
                return None
        case "scan":
            if a.dtype == np.float16 and a.size > 1000:  # NumPy's sum stays where 1 is too little
                return None
            ours, theirs, work = (A,), (a,), draw(st.sampled_from(SCANS))
        case "reduce":
            name, axis = (
                draw(st.sampled_from(REDUCTIONS)),
                draw(st.sampled_from([None, 0, 1, -1, 2, (0, 1)])),
            )
            axis = axis if A.shape else None  # NumPy takes 0 in some functions only
            options: dict[str, Any] = {"axis": axis, "keepdims": draw(st.booleans())}
            if name in ("sum", "min", "max") and draw(st.booleans()):
                options["initial"] = draw(st.sampled_from([0, 2, -1.5]))
            some = draw(st.booleans())
            ours, theirs, work = (
                (A,),
                (a,),
                lambda x: getattr(np, name)(
                    x, **options, **({"where": abs(x) > 1} if some else {})
                ),
            )
        case "index" | "assign":
            key, plain = draw(indices(A))
            if kind == "index":
                ours, theirs, work = (A, key), (a, plain), operator.getitem
            elif isinstance(A, Handle):
                ours, theirs, work = (A, key, B), (a, plain, b), assigned
            else:
                return None
        case "where":
            if enormous(np.where, a, b):
                return None
            ours, theirs, work = (A, B), (a, b), lambda x, y: np.where(abs(x) > 1, x, y)
        case "astype":
            to = draw(st.sampled_from(["float32", "float64", "complex128", "bool"]))
            ours, theirs, work = (A,), (a,), lambda x: x.astype(to)
        case "out":
            op = draw(st.sampled_from([np.add, np.multiply, np.less, np.hypot]))
            some = draw(st.booleans())
            if enormous(op, a, b):
                return None
            ours, theirs, work = (
                (A, B),
                (a, b),
                lambda x, y: op(x, 2, out=y.copy(), **({"where": abs(y) > 1} if some else {})),
            )
        case "join":
            axis = draw(st.sampled_from([0, 1, None]))
            ours, theirs, work = (A, B), (a, b), lambda x, y: np.concatenate([x, y], axis=axis)
        case _:
            shape = draw(
                st.sampled_from([-1, (-1, 1), (1, -1), (2, -1), (-1, 3), (-1, 2, 3), (2, -1, 7)])
            )
            ours, theirs, work = (A,), (a,), lambda x: x.reshape(shape)
    return compared(work, ours, theirs, sequential=kind in ("scan", "reduce"))


def _first_of_nonzero(x: Any) -> Any:
    return np.nonzero(x)[0]


def enormous(op: Any, a: Any, b: Any) -> bool:
    """Whether a result is so large that NumPy may run out of memory, or not."""
    shape = (*a.shape[:-1], *b.shape[1:]) if op is operator.matmul else ()
    with contextlib.suppress(ValueError):
        shape = shape or np.broadcast_shapes(a.shape, b.shape)
    return bool(math.prod(shape) > 1 << 23)


def assigned(x: Any, key: Any, value: Any) -> Any:
    """A copy of `x` after an assignment."""
    if x[key].size == 0 or (x[key].ndim == 0 < value.ndim):
        return x  # NumPy's checks of the value's shape differ from case to case
    x = x.copy()
    x[key] = value
    return x


def compared(
    work: Any, ours: tuple[Any, ...], theirs: tuple[Any, ...], *, sequential: bool = False
) -> Pair | None:
    """`sequential`: NumPy's own error grows with the length, so it is allowed for."""
    if not any(isinstance(x, Handle) for x in ours):
        return None
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = work(*theirs)
        except REFUSED:
            expected = None
        if expected is None or expected.ndim > 8 or expected.nbytes > 1 << 27:
            if expected is None:
                with pytest.raises((AlchemistError, *REFUSED)):
                    work(*ours)
            return None
        try:
            found = work(*ours)
        except AlchemistError as refusal:
            if any(words in str(refusal) for words in REFUSALS):
                return None
            raise
    assert isinstance(found, Handle)
    got = np.asarray(found)
    assert (found.shape, found.dtype) == (got.shape, got.dtype) == (expected.shape, expected.dtype)
    eps = 512 * float(np.finfo(expected.dtype).eps) if expected.dtype.kind in "fc" else 0.0
    scale = np.max(np.abs(expected.astype("complex128")), where=np.isfinite(expected), initial=0)
    own = 0.0
    if sequential and eps and theirs[0].dtype.name in LONGER:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exact = work(theirs[0].astype(LONGER[theirs[0].dtype.name]))
            own = np.max(np.abs(expected - exact), where=np.isfinite(expected), initial=0)
    np.testing.assert_allclose(got, expected, rtol=eps, atol=eps * float(scale) + 2 * own)
    return found, got


@settings(
    max_examples=scaled(40, 10_000),
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
@pytest.mark.timeout(scaled(400, 6000))
def test_programs(session: AlchemistSession, data: Any) -> None:
    mine = [data.draw(arrays(session)) for _ in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 10))):
        result = step(data.draw, mine)
        if result is not None:
            mine = [*mine[-3:], result]
