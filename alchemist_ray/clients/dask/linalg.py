"""Drop-ins for factorizations and solvers of `dask.array.linalg`, on a gang: change one import.

::

    from alchemist_ray.clients.dask import linalg  # was: from dask.array import linalg

Names, parameters, defaults and results are dask's, with three differences. A function computes
when it is called, not at ``compute()``: it sends the arrays, runs the routine on the ranks, and
returns dask arrays whose chunks are fetched when they are used. Arrays may have any chunks. Every
function takes ``session=``.

The session is the one that is given, else that of `engine`, else the only session of this process
that has workers.

Arrays that a function sends are freed when it returns. Results are freed with the dask arrays that
refer to them, as long as threads of this process compute these. Once a graph with them has been
pickled (Dask-on-Ray, dask's processes), they stay until the end of the gang, or until `Handle.free`
of a handle of `AlchemistSession.list_matrices`.
"""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import svd_flip

from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.handle import Handle
from alchemist_ray.clients.dask.results import to_dask
from alchemist_ray.clients.default_session import current_session
from alchemist_ray.errors import ShapeError
from alchemist_ray.session.alchemist_session import AlchemistSession
from alchemist_ray.transfer.sending import send

__all__ = [
    "cholesky", "engine", "lstsq", "matmul", "qr", "solve", "svd", "svd_compressed", "tsqr",
]  # fmt: skip

MIN_SUBSPACE = 20  # as dask.array.linalg.compression_level

_chosen: ContextVar[Any] = ContextVar("session")


@contextlib.contextmanager
def engine(session: AlchemistSession) -> Iterator[None]:
    """Within the context, the functions of this module use this session."""
    before = _chosen.set(session)
    try:
        yield
    finally:
        _chosen.reset(before)


def _engine(session: Any) -> Engine:
    return (session or _chosen.get(None) or current_session()).connection.part(Engine)


def _call(session: Any, routine: str, *arrays: Any, promote: bool = True, **options: Any) -> Any:
    """Call a routine with arrays that are sent for it, promoted as by numpy.linalg."""
    chosen = _engine(session)
    handles: list[Handle] = []
    try:
        for array in arrays:
            kind = array.dtype.kind
            small = promote and (kind in "biu" or array.dtype.itemsize < 4)
            dtype = ("float64" if kind in "biu" else "float32") if small else None
            handles.append(send(chosen.connection, array, dtype=dtype))
        return chosen.call(routine, *handles, **options)
    finally:
        for handle in handles:
            chosen.connection.free(handle)


def _array(a: Any, name: str = "a", dims: tuple[int, ...] = (2,)) -> Any:
    array = da.asarray(a)
    if array.ndim not in dims:
        wanted = " or ".join(map(str, dims))
        raise ShapeError(f"{name} has shape {array.shape}: it must have {wanted} dimensions")
    return array


def _square(a: Any, what: str) -> None:
    m, n = a.shape
    if m != n and not np.isnan(m + n):
        raise ShapeError(f"{what}: a must be square, and its shape is {a.shape}")


def _sizes(array: Any, axis: int, length: int) -> Any:
    """The chunks of an array along an axis, where a result has as many elements along it."""
    sizes = array.chunks[axis] if axis < array.ndim else ()
    known = not np.isnan(sum(sizes)) and sum(sizes) == length
    return tuple(map(int, sizes)) if known else "auto"


def svd(
    a: Any, coerce_signs: bool = True, full_matrices: bool = False, *, session: Any = None
) -> tuple[Any, Any, Any]:
    """Singular value decomposition; see `dask.array.linalg.svd`.

    Parameters
    ----------
    a : dask array, shape (m, n)
    coerce_signs : bool
        Choose the signs of singular vectors as dask does.
    full_matrices : bool
        True is not implemented, as in dask.
    session : AlchemistSession, optional

    Returns
    -------
    u : dask array, shape (m, k), k = min(m, n)
    s : dask array, shape (k,), descending
    v : dask array, shape (k, n)
    """
    if full_matrices:
        raise NotImplementedError("full_matrices=True: only the thin factors are computed")
    return _svd(_array(a), session, coerce_signs)


def _svd(
    a: Any, session: Any, coerce_signs: bool, routine: str = "svd", **options: Any
) -> tuple[Any, Any, Any]:
    S, U, V = _call(session, routine, a, **options)
    u = to_dask(U, (_sizes(a, 0, U.shape[0]), -1))
    adjoint = _engine(session).transpose(V, conjugate=True)
    v = to_dask(adjoint, (-1, _sizes(a, 1, V.shape[0])))
    if coerce_signs:
        u, v = svd_flip(u, v)
    return u, to_dask(S, -1), v


def svd_compressed(
    a: Any,
    k: int,
    iterator: str = "power",
    n_power_iter: int = 0,
    n_oversamples: int = 10,
    seed: Any = None,
    compute: bool = False,
    coerce_signs: bool = True,
    *,
    session: Any = None,
) -> tuple[Any, Any, Any]:
    """The k leading singular values and vectors by a randomized method; see dask's function.

    Parameters
    ----------
    a : dask array, shape (m, n)
    k : int
    iterator : {"power", "QR"}
        Both orthogonalise every step here.
    n_power_iter, n_oversamples : int
        As in dask.
    seed : int, RandomState or Generator, optional
        The same integer gives the same result, but not dask's random numbers.
    compute : bool
        Has no effect: the array is sent once for any number of passes.
    coerce_signs : bool
    session : AlchemistSession, optional

    Returns
    -------
    u, s, v : dask arrays, shapes (m, k), (k,), (k, n)
    """
    if iterator not in ("power", "QR"):
        raise ValueError(f"iterator={iterator!r}: it must be 'power' or 'QR'")
    a = _array(a)
    smaller = min(a.shape)
    rank = operator.index(k) if np.isnan(smaller) else min(operator.index(k), int(smaller))
    subspace = max(MIN_SUBSPACE, rank + n_oversamples)
    return _svd(
        a,
        session,
        coerce_signs,
        "truncated_svd",
        rank=rank,
        method="randomized",
        oversampling=subspace - rank,
        power_iterations=n_power_iter,
        seed=_seed(seed),
    )


def _seed(seed: Any) -> int:
    whole = isinstance(seed, int | np.integer)
    return int(seed if whole else np.random.default_rng(seed).integers(1 << 31))


def qr(a: Any, *, session: Any = None) -> tuple[Any, Any]:
    """Thin QR factorization, the diagonal of r real and >= 0; see `dask.array.linalg.qr`.

    Returns
    -------
    q, r : dask arrays, shapes (m, k) and (k, n), k = min(m, n)
    """
    a = _array(a)
    Q, R = _call(session, "qr", a)
    return to_dask(Q, (_sizes(a, 0, Q.shape[0]), -1)), to_dask(R, (-1, _sizes(a, 1, R.shape[1])))


def tsqr(
    data: Any,
    compute_svd: bool = False,
    _max_vchunk_size: int | None = None,
    *,
    session: Any = None,
) -> tuple[Any, ...]:
    """`qr`, or with `compute_svd` the SVD without coerced signs; see `dask.array.linalg.tsqr`.

    `_max_vchunk_size` has no effect.
    """
    if compute_svd:
        return _svd(_array(data, "data"), session, coerce_signs=False)
    return qr(data, session=session)


def matmul(a: Any, b: Any, *, session: Any = None) -> Any:
    """Product of two arrays of one or two dimensions; see `dask.array.matmul`.

    Returns
    -------
    dask array
        Of NumPy's shape and dtype: products of integers are exact, and wrap as NumPy's do. Its
        chunks follow the rows of `a` and the columns of `b`.
    """
    a, b = _array(a, "a", (1, 2)), _array(b, "b", (1, 2))
    dtype = np.result_type(a.dtype, b.dtype)
    # int64 wraps at 2**64: the lower bits of its sums are those of every other integer's.
    exact = [x.astype("int64") for x in (a, b)] if dtype.kind in "biu" else [a, b]
    C = _call(session, "matmul", *exact, promote=dtype.kind not in "biu")
    sides = [(x, axis) for x, axis in ((a, 0), (b, 1)) if x.ndim == 2]
    sizes = tuple(_sizes(*side, n) for side, n in zip(sides, C.shape, strict=True))
    return to_dask(C, sizes).astype(dtype, copy=False)


def lstsq(a: Any, b: Any, *, session: Any = None) -> tuple[Any, Any, Any, Any]:
    """Least squares; see `dask.array.linalg.lstsq`.

    Parameters
    ----------
    a : dask array, shape (m, n)
        Of any rank and shape; x is the solution of smallest norm, as in NumPy.
    b : dask array, shape (m,) or (m, k)
    session : AlchemistSession, optional

    Returns
    -------
    x : dask array, shape (n,) or (n, k)
    residuals : dask array, shape (1,) or (k,)
        Sums of squares, also if `a` is rank-deficient.
    rank : dask array, shape ()
    s : dask array, shape (min(m, n),)
    """
    a, b = _array(a), _array(b, "b", (1, 2))
    X, squares, rank, s = _call(session, "least_squares", a, b)
    x = to_dask(X, -1 if b.ndim == 1 else (-1, _sizes(b, 1, X.shape[1])))
    return x, to_dask(squares, -1), da.from_array(np.asarray(int(rank))), to_dask(s, -1)


def cholesky(a: Any, lower: bool = False, *, session: Any = None) -> Any:
    """Cholesky factor of a Hermitian positive definite array; see `dask.array.linalg.cholesky`.

    Returns
    -------
    dask array, shape (n, n)
        Upper triangular u with a = u^H u, or with `lower` l with a = l l^H.
    """
    a = _array(a)
    _square(a, "cholesky")
    L = _call(session, "cholesky", a)
    factor = L if lower else _engine(session).transpose(L, conjugate=True)
    return to_dask(factor, tuple(_sizes(a, axis, L.shape[0]) for axis in (0, 1)))


def solve(
    a: Any, b: Any, sym_pos: bool | None = None, assume_a: str = "gen", *, session: Any = None
) -> Any:
    """Solution x of a x = b; see `dask.array.linalg.solve`.

    Returns
    -------
    dask array, shape (n,) or (n, k)
    """
    if sym_pos is not None:
        warnings.warn("sym_pos is deprecated, as in dask: use assume_a='pos'", FutureWarning, 2)
        assume_a = "pos" if sym_pos else assume_a
    if assume_a not in ("gen", "pos"):
        raise ValueError(f"assume_a={assume_a!r}: it must be 'gen' or 'pos'")
    a, b = _array(a), _array(b, "b", (1, 2))
    _square(a, "solve")
    X = _call(session, "solve", a, b, assume="positive" if assume_a == "pos" else "general")
    return to_dask(X, tuple(_sizes(b, axis, length) for axis, length in enumerate(X.shape)))
