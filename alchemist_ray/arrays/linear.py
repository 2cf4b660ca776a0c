"""`numpy.linalg` on handles: thin factors, computed on the gang by the routines of linalg."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from string import ascii_letters
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.arrays.rules import Implementation, implements
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import ShapeError

_ONE = np.eye(1)
QR: Any = type(np.linalg.qr(_ONE))
SVD: Any = type(np.linalg.svd(_ONE))
EIGH: Any = type(np.linalg.eigh(_ONE))
SLOGDET: Any = type(np.linalg.slogdet(_ONE))
NORMS = {None: "fro", "fro": "fro", "f": "fro", 1: "1", np.inf: "inf", 2: "2", "nuc": "nuc"}


def _require_matrix(name: str, a: Any) -> None:
    if len(a.shape) < 2:
        raise ShapeError(f"np.linalg.{name} of an array of shape {a.shape}: it must have two axes")
    if len(a.shape) > 2:
        raise ShapeError(
            f"np.linalg.{name} takes one matrix on ranks, and an array of shape {a.shape} is a "
            f"stack of them: np.linalg.{name} of A[i] computes one, of A.fetch() all of them here"
        )


def _of_matrix(function: Any) -> Callable[[Implementation], Implementation]:
    """`implements` for a function of one matrix: vectors and stacks of matrices are refused."""

    def register(implementation: Implementation) -> Implementation:
        @functools.wraps(implementation)
        def checked(engine: Engine, a: Any, *args: Any, **kwargs: Any) -> Any:
            _require_matrix(function.__name__, a)
            return implementation(engine, a, *args, **kwargs)

        return implements(function)(checked)

    return register


@_of_matrix(np.linalg.qr)
def _qr(engine: Engine, a: Any, mode: str = "reduced") -> Any:
    if mode not in ("reduced", "r") and not (mode == "complete" and a.shape[0] <= a.shape[1]):
        raise rules.unsupported(f"np.linalg.qr with mode={mode!r}", "mode='reduced' gives Q (m, k)")
    Q, R = engine.call("qr", a)
    return R if mode == "r" else QR(Q, R)


@_of_matrix(np.linalg.svd)
def _svd(
    engine: Engine,
    a: Any,
    full_matrices: bool = True,
    compute_uv: bool = True,
    hermitian: bool = False,
) -> Any:
    if not compute_uv:
        return _svdvals(engine, a)
    if full_matrices and a.shape[0] != a.shape[1]:
        raise rules.unsupported(
            f"np.linalg.svd of {a.shape} with full_matrices=True",
            "give full_matrices=False; als.load_library('linalg').truncated_svd(A, rank) computes "
            "the largest ones",
        )
    S, U, V = engine.call("svd", a)
    return SVD(U, S, engine.transpose(V, conjugate=True))


@_of_matrix(np.linalg.svdvals)
def _svdvals(engine: Engine, x: Any, /) -> Any:
    return engine.call("svdvals", x)


@_of_matrix(np.linalg.eigh)
def _eigh(engine: Engine, a: Any, UPLO: str = "L") -> Any:
    if UPLO not in "LlUu":
        raise rules.unsupported(f"UPLO={UPLO!r}", "it is 'L' or 'U'")
    W, V = engine.call("eigh", a if UPLO in "Ll" else a.H)
    return EIGH(W, V)


@_of_matrix(np.linalg.eigvalsh)
def _eigvalsh(engine: Engine, a: Any, UPLO: str = "L") -> Any:
    return _eigh(engine, a, UPLO).eigenvalues


@_of_matrix(np.linalg.cholesky)
def _cholesky(engine: Engine, a: Any, /, *, upper: bool = False) -> Any:
    L = engine.call("cholesky", a.H if upper else a)
    return engine.transpose(L, conjugate=True) if upper else L


@implements(np.linalg.solve)
def _solve(engine: Engine, a: Any, b: Any) -> Any:
    A, B = engine.both(a, b)
    _require_matrix("solve", A if B.ndim < 3 else B)
    return engine.call("solve", A, B)


@implements(np.linalg.lstsq)
def _lstsq(engine: Engine, a: Any, b: Any, rcond: Any = None) -> Any:
    """Solution, sums of squared residuals, rank and singular values."""
    A, B = engine.both(a, b)
    _require_matrix("lstsq", A if B.ndim < 3 else B)
    X, residuals, rank, S = engine.call("least_squares", A, B, rcond=_rcond(rcond, None))
    full = rank == A.shape[1] and A.shape[0] > A.shape[1]
    return X, residuals if full else residuals[:0], rank, S


@_of_matrix(np.linalg.inv)
def _inv(engine: Engine, a: Any) -> Any:
    return engine.call("inv", a)


@_of_matrix(np.linalg.pinv)
def _pinv(engine: Engine, a: Any, rcond: Any = None, hermitian: bool = False, *,
          rtol: Any = None) -> Any:  # fmt: skip
    return engine.call("pinv", a, rcond=_rcond(rcond, rtol))


@implements(np.linalg.matrix_rank)
def _matrix_rank(engine: Engine, A: Any, tol: Any = None, hermitian: bool = False, *,
                 rtol: Any = None) -> Any:  # fmt: skip
    if tol is not None:
        raise rules.unsupported(
            "np.linalg.matrix_rank with tol=", "use the relative tolerance rtol="
        )
    if A.ndim < 2:
        return np.intp(bool(A.any()))
    _require_matrix("matrix_rank", A)
    return np.intp(engine.call("matrix_rank", A, rcond=_rcond(None, rtol)))


def _rcond(rcond: Any, rtol: Any) -> float:
    given = rcond if rtol is None else rtol
    return -1.0 if given is None else float(given)


@_of_matrix(np.linalg.det)
def _det(engine: Engine, a: Any) -> Any:
    return _number(engine.call("det", a), a)


@_of_matrix(np.linalg.slogdet)
def _slogdet(engine: Engine, a: Any) -> Any:
    sign, logabsdet = engine.call("slogdet", a)
    return SLOGDET(_number(sign, a), _number(logabsdet, a, real=True))


def _number(value: Any, a: Any, *, real: bool = False) -> Any:
    """In the precision of a matrix."""
    kind = a.dtype if a.dtype.kind not in "biu" else np.dtype(np.float64)
    if real or kind.kind != "c":
        return np.finfo(kind).dtype.type(value.real)
    return kind.type(value)


@_of_matrix(np.linalg.cond)
def _cond(engine: Engine, x: Any, p: Any = None) -> Any:
    if p not in (None, 2):
        raise rules.unsupported(
            f"np.linalg.cond with p={p!r}",
            "als.load_library('linalg').condest(A) estimates it in the 1-norm",
        )
    if not x.size:
        raise ShapeError(f"np.linalg.cond of an array of shape {x.shape}: it has no elements")
    values = np.asarray(_svdvals(engine, x))
    return values[0] / values[-1] if values[0] else values.dtype.type(np.inf)


# --- products ---------------------------------------------------------------------------


@implements(np.linalg.multi_dot)
def _multi_dot(engine: Engine, arrays: Any) -> Any:
    """The product of several; of the neighbours, the cheapest are multiplied first."""
    parts = [engine.matrix(x) for x in arrays]
    ndims = [x.ndim for x in parts]
    if len(parts) < 2 or not {*ndims[1:-1]} <= {2} or not {ndims[0], ndims[-1]} <= {1, 2}:
        raise ShapeError(
            f"np.linalg.multi_dot of shapes {', '.join(str(x.shape) for x in parts)}: give two "
            "matrices or more; only the first and the last may be vectors"
        )
    while len(parts) > 1:
        flops = [a.size * (b.shape[1] if b.ndim > 1 else 1) for a, b in pairwise(parts)]
        i = flops.index(min(flops))
        parts[i : i + 2] = [engine.matmul(*parts[i : i + 2])]
    return parts[0]


@implements(np.linalg.matmul)
def _matmul(engine: Engine, x1: Any, x2: Any, /) -> Any:
    return engine.matmul(x1, x2)


@implements(np.dot)
def _dot(engine: Engine, a: Any, b: Any, /) -> Any:
    """Sums over the last axis of a and the last but one of b, with all other axes of both."""
    if not np.ndim(a) or not np.ndim(b):
        return engine.binary("multiply", a, b)
    if np.ndim(a) > 1 and np.ndim(b) > 2:
        return _contracted(engine, "np.dot", a, b, (-1, -2))
    return engine.matmul(a, b)


@implements(np.inner)
def _inner(engine: Engine, a: Any, b: Any, /) -> Any:
    """Sums over the last axes of both, with all other axes."""
    if not np.ndim(a) or not np.ndim(b):
        return engine.binary("multiply", a, b)
    if np.ndim(b) > 2:
        return _contracted(engine, "np.inner", a, b, (-1, -1))
    return engine.matmul(a, b.T if np.ndim(b) == 2 else b)


@implements(np.vdot)
def _vdot(engine: Engine, a: Any, b: Any, /) -> Any:
    left, right = engine.both(a, b)
    return engine.matmul(engine.reshape(left.conj(), -1), engine.reshape(right, -1))


@implements(np.kron)
def _kron(engine: Engine, a: Any, b: Any) -> Any:
    """Both factors are repeated to the shape of the result, and multiplied."""
    left, right = engine.both(a, b)
    if 0 in (left.ndim, right.ndim):
        return engine.binary("multiply", left, right)
    ndim = max(left.ndim, right.ndim)
    left, right = (engine.reshape(x, (1,) * (ndim - x.ndim) + x.shape) for x in (left, right))
    times = list(left.shape)
    for axis, length in enumerate(right.shape):
        left = np.repeat(left, length, axis=axis)
    return engine.binary("multiply", left, np.tile(right, times))


@implements(np.tensordot, np.linalg.tensordot)
def _tensordot(engine: Engine, a: Any, b: Any, /, axes: Any = 2) -> Any:
    return _contracted(engine, "np.tensordot", a, b, axes)


def _contracted(engine: Engine, name: str, a: Any, b: Any, axes: Any) -> Any:
    """Sums over axes of a and b, by one product of matrices; first the other axes of a."""
    A, B = engine.both(a, b)
    if np.ndim(axes) == 0 and isinstance(axes, int):
        axes = list(range(A.ndim - axes, A.ndim)), list(range(axes))
    left, right = (
        [rules.axis_index(axis, x.ndim) for axis in (one if np.iterable(one) else (one,))]
        for one, x in zip(axes, (A, B), strict=True)
    )
    lengths = [A.shape[i] for i in left], [B.shape[i] for i in right]
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"{name} of shapes {A.shape} and {B.shape} over the axes {left} and {right}: "
            "lengths must match"
        )
    free = [[i for i in range(x.ndim) if i not in own] for x, own in ((A, left), (B, right))]
    outer = [[x.shape[i] for i in own] for x, own in zip((A, B), free, strict=True)]
    m, inner, n = map(math.prod, (outer[0], lengths[0], outer[1]))
    rows = engine.reshape(engine.permute(A, [*free[0], *left]), (m, inner), copy=False)
    cols = engine.reshape(engine.permute(B, [*right, *free[1]]), (inner, n), copy=False)
    found = engine.matmul(rows, cols)
    return engine.reshape(found, [*outer[0], *outer[1]], copy=False)


Operand = tuple[str, Any]  # of `einsum`: its letters, and a handle
WIDENED = 1 << 17  # elements of a small operand of it: 1 MiB of float64


@implements(np.einsum)
def _einsum(engine: Engine, subscripts: Any, *operands: Any, optimize: Any = "greedy") -> Any:
    """Operands in pairs, each a product of matrices, in the order of `numpy.einsum_path`."""
    if not isinstance(subscripts, str):
        raise rules.unsupported(
            "np.einsum without subscripts", "write np.einsum('ij,jk->ik', A, B)"
        )
    beside = next(x for x in operands if isinstance(x, MatrixRef))
    arrays = [engine.matrix(x, beside) for x in operands]
    common = np.result_type(*(x.dtype for x in arrays))
    subscripts = _with_letters(subscripts.replace(" ", ""), [x.ndim for x in arrays])
    inputs, _, output = subscripts.partition("->")
    terms = _of_equal_lengths(engine, list(zip(inputs.split(","), arrays, strict=True)))
    subscripts = f"{','.join(term for term, _ in terms)}->{output}"
    shapes = [np.broadcast_to(np.float64(0), x.shape) for _, x in terms]
    for step in np.einsum_path(subscripts, *shapes, optimize=optimize or "greedy")[0][1:]:
        taken = [terms.pop(i) for i in sorted(step, reverse=True)]
        while len(taken) > 1:
            needed = "".join([output, *(term for term, _ in (*terms, *taken[2:]))])
            taken[:2] = [_pair(engine, taken[0], taken[1], needed, common)]
        terms.append(taken[0])
    term, found = _summed(engine, terms[0], output, common)
    found = engine.cast(found, common)
    return engine.permute(found, [term.index(x) for x in output])


def _with_letters(subscripts: str, ndims: Sequence[int]) -> str:
    """Subscripts with an output, and with letters in place of each ellipsis."""
    inputs, arrow, output = subscripts.partition("->")
    terms = inputs.split(",")
    more = [ndim + 3 - len(term) for ndim, term in zip(ndims, terms, strict=False) if "." in term]
    free = [x for x in ascii_letters if x not in subscripts][: max(more, default=0)]
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        output = "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
        output = "..." * bool(more) + output
    hidden = iter(more)
    terms = [
        term.replace("...", "".join(free[len(free) - next(hidden) :])) if "." in term else term
        for term in terms
    ]
    return f"{','.join(terms)}->{output.replace('...', ''.join(free))}"


def _of_equal_lengths(engine: Engine, terms: list[Operand]) -> list[Operand]:
    """Operands without axes of length 1 that are longer in another one, as NumPy has it."""
    longest: dict[str, int] = {}
    for term, A in terms:
        for letter, length in zip(term, A.shape, strict=True):
            other = longest.get(letter, length)
            if other != length and 1 not in (other, length):
                raise ShapeError(
                    f"np.einsum: axis {letter!r} has the lengths {other} and {length} in arrays "
                    f"of shapes {', '.join(str(x.shape) for _, x in terms)}"
                )
            longest[letter] = other if length == 1 else length
    found = []
    for term, A in terms:
        kept = [n == longest[letter] for letter, n in zip(term, A.shape, strict=True)]
        if not all(kept):
            term = "".join(x for x, stays in zip(term, kept, strict=True) if stays)
            A = engine.reshape(A, [n for n, stays in zip(A.shape, kept, strict=True) if stays])
        found.append((term, A))
    return found


def _summed(engine: Engine, operand: Operand, needed: str, common: np.dtype[Any]) -> Operand:
    """An operand of `einsum`: the diagonals of repeated letters, summed over those not needed."""
    term, A = operand
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            i, j = term.index(letter), term.rindex(letter)
            index = np.arange(A.shape[i])
            A = np.moveaxis(A, (i, j), (0, 1))[index, index]
            term = letter + term[:i] + term[i + 1 : j] + term[j + 1 :]
    gone = tuple(axis for axis, letter in enumerate(term) if letter not in needed)
    if gone:
        A = engine.cast(A, common)
        A = engine.cast(engine.reduce("sum", A, gone), common)
    return "".join(letter for letter in term if letter in needed), A


def _widened(
    engine: Engine, one: Operand, two: Operand, needed: str, common: np.dtype[Any]
) -> Operand:
    """A small operand with the letters that are only summed over in the other one.

    Their sum is then a part of the product, which reads the large operand once.
    """
    (a, A), (b, B) = one, two
    alone = [x for x in dict.fromkeys(a) if x not in needed + b and a.count(x) == 1]
    lengths = [A.shape[a.index(x)] for x in alone]
    size = B.size * math.prod(lengths)
    if not alone or size > min(WIDENED, A.size) or common.kind not in "fc":
        return two
    wide = engine.reshape(B, (*B.shape, *[1] * len(alone)))
    return b + "".join(alone), engine.broadcast(wide, (*B.shape, *lengths))


def _pair(
    engine: Engine, one: Operand, two: Operand, needed: str, common: np.dtype[Any]
) -> Operand:
    """Two operands of `einsum` as one: a product of matrices for each index of both that stays."""
    two = _widened(engine, one, two, needed, common)
    one = _widened(engine, two, one, needed, common)
    a, A = _summed(engine, one, needed + two[0], common)
    b, B = _summed(engine, two, needed + one[0], common)
    if np.result_type(A.dtype, B.dtype) != common:
        A = engine.astype(A, common)
    last = "".join(x for x in b if x in a and x not in needed)
    if B.size > A.size and b.endswith(last):  # a large left operand in this order stays as it is
        (a, A), (b, B) = (b, B), (a, A)
    batch, inner = ([x for x in a if x in b and (x in needed) == stays] for stays in (True, False))
    rows, cols = [x for x in a if x not in b], [x for x in b if x not in a]
    lengths = dict(zip(a + b, A.shape + B.shape, strict=True))

    def matrices(term: str, X: Any, *sides: list[str]) -> Any:
        moved = engine.permute(X, [term.index(x) for side in sides for x in side])
        shape = [math.prod(lengths[x] for x in side) for side in sides]
        return engine.reshape(moved, shape if batch else shape[1:], copy=False)

    left, right = matrices(a, A, batch, rows, inner), matrices(b, B, batch, inner, cols)
    letters = [*batch, *rows, *cols]
    product = engine.matmul(left, right)
    found = engine.reshape(product, [lengths[x] for x in letters], copy=False)
    return "".join(letters), found


@implements(np.linalg.vecdot)
def vecdot(engine: Engine, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Sums along an axis of the conjugate of `x1` times `x2`."""
    if not np.ndim(x1) or not np.ndim(x2):
        raise ShapeError("vecdot: a number is not a vector: use * to multiply by it")
    shapes = np.shape(x1), np.shape(x2)
    along = [rules.axis_index(axis, len(shape)) for shape in shapes]
    if shapes[0][along[0]] != shapes[1][along[1]]:
        raise ShapeError(
            f"vecdot of shapes {shapes[0]} and {shapes[1]}: lengths along axis {axis} must match"
        )
    left, right = np.moveaxis(x1, axis, -1), np.moveaxis(x2, axis, -1)
    left = np.conj(left) if np.iscomplexobj(left) else left
    product = engine.binary("multiply", left, right)
    return engine.cast(engine.reduce("sum", product, -1), product.dtype)


def matvec(engine: Engine, x1: Any, x2: Any) -> Any:
    """Matrices times vectors, of stacks of both."""
    if np.ndim(x1) < 2 or not np.ndim(x2):
        raise ShapeError(f"matvec of shapes {np.shape(x1)} and {np.shape(x2)}: give matrix, vector")
    return engine.matmul(x1, x2[..., None])[..., 0]


def vecmat(engine: Engine, x1: Any, x2: Any) -> Any:
    """Conjugates of vectors times matrices, of stacks of both."""
    if not np.ndim(x1) or np.ndim(x2) < 2:
        raise ShapeError(f"vecmat of shapes {np.shape(x1)} and {np.shape(x2)}: give vector, matrix")
    left = np.conj(x1) if np.iscomplexobj(x1) else x1
    return engine.matmul(left[..., None, :], x2)[..., 0, :]


@implements(np.cross, np.linalg.cross)
def _cross(engine: Engine, x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    left, right = engine.both(x1, x2)
    along = [rules.axis_index(axis, x.ndim) for x in (left, right)]
    if (left.shape[along[0]], right.shape[along[1]]) != (3, 3):
        raise ShapeError(f"a cross product of shapes {left.shape} and {right.shape}: axis {axis} "
                         "must have length 3")  # fmt: skip

    def turned(x: Any, order: list[int]) -> Any:
        return np.take(x, order, axis=axis)

    one, two = [1, 2, 0], [2, 0, 1]
    ahead = engine.binary("multiply", turned(left, one), turned(right, two))
    back = engine.binary("multiply", turned(left, two), turned(right, one))
    return engine.binary("subtract", ahead, back)


@_of_matrix(np.linalg.matrix_power)
def _matrix_power(engine: Engine, a: Any, n: int) -> Any:
    if a.shape[0] != a.shape[1]:
        raise ShapeError(f"a power of a matrix of shape {a.shape}: it must be square")
    if n == 0:
        return engine.call("eye", a.shape[0], None, a.dtype.name, a.layout)
    base = a if n > 0 else engine.call("inv", a)
    found, left = None, abs(n)
    while True:  # by squaring
        if left % 2:
            found = base if found is None else engine.matmul(found, base)
        left //= 2
        if not left:
            return found
        base = engine.matmul(base, base)


# --- norms ------------------------------------------------------------------------------


@implements(np.linalg.norm)
def _norm(engine: Engine, x: Any, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    if axis is None and ord is None:
        return _vector_norm(engine, x, keepdims=keepdims)
    axes = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    if len(axes) == 1:
        return _vector_norm(engine, x, axis=axes, ord=2 if ord is None else ord, keepdims=keepdims)
    if len(axes) != 2:
        raise ShapeError(
            f"np.linalg.norm of shape {x.shape} with ord={ord!r} and axis={axis!r}: give the axis "
            "of vectors, or two of matrices"
        )
    return _norms(engine, x, ord, axes, keepdims)


@implements(np.linalg.matrix_norm)
def _matrix_norm(engine: Engine, x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    if x.ndim < 2:
        raise ShapeError(f"np.linalg.matrix_norm of an array of shape {x.shape}: it has no matrix")
    return _norms(engine, x, ord, (-2, -1), keepdims)


def _norms(engine: Engine, x: Any, ord: Any, axes: tuple[int, ...], keepdims: bool) -> Any:
    """Norms of the matrices with these axes of rows and columns."""
    row, col = (rules.axis_index(axis, x.ndim) for axis in axes)
    if ord in NORMS and x.ndim == 2 and row < col:
        return _whole_norm(engine, x, NORMS[ord], keepdims)
    if ord == -2 and x.ndim == 2 and row < col:
        least = np.linalg.svdvals(x if x.dtype.kind in "fc" else x.astype(np.float64)).min()
        return engine.reshape(least, (1, 1)) if keepdims else least
    if row == col or ord not in (None, "fro", "f", 1, -1, np.inf, -np.inf):
        one = "also 2 and 'nuc'" if x.ndim == 2 else "2 and 'nuc' of one matrix, A[i]"
        raise rules.unsupported(
            f"a matrix norm of shape {x.shape} with ord={ord!r} and axis={axes}",
            f"it can be one of 'fro', 1, -1, inf, -inf of two axes, and {one}",
        )
    size = abs(x if x.dtype.kind in "fc" else x.astype(np.float64))
    if ord in (None, "fro", "f"):
        return np.sqrt(engine.reduce("sum", np.square(size), (row, col), keepdims=keepdims))
    added, compared = (row, col) if abs(ord) == 1 else (col, row)
    sums = engine.reduce("sum", size, added, keepdims=True)
    found = engine.reduce("max" if ord > 0 else "min", sums, compared, keepdims=True)
    return found if keepdims else np.squeeze(found, (row, col))


def _whole_norm(engine: Engine, x: Any, ord: str, keepdims: bool) -> Any:
    """Of one matrix or vector: a number."""
    found = _number(engine.call("norm", x, ord), x, real=True)
    return engine.matrix(np.full((1,) * x.ndim if keepdims else (), found))


@implements(np.linalg.vector_norm)
def _vector_norm(
    engine: Engine, x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2
) -> Any:
    if x.ndim < 3 and len(rules.axes_of(axis, x.ndim)) == x.ndim and ord == 2:
        return _whole_norm(engine, x, "fro", keepdims)
    size = abs(x if x.dtype.kind in "fc" else x.astype(np.float64))
    match ord:
        case 1:
            return engine.reduce("sum", size, axis, keepdims=keepdims)
        case np.inf:
            return engine.reduce("max", size, axis, keepdims=keepdims)
        case 0:
            return np.count_nonzero(x, axis, keepdims=keepdims).astype(size.dtype)
        case 2:
            return np.sqrt(engine.reduce("sum", np.square(size), axis, keepdims=keepdims))
        case _ if ord == -np.inf:
            return engine.reduce("min", size, axis, keepdims=keepdims)
        case int() | float():
            return engine.reduce("sum", size**ord, axis, keepdims=keepdims) ** (1 / ord)
    raise ShapeError(f"vector_norm: ord={ord!r}; it must be a number")
