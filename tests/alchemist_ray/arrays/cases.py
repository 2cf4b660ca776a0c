"""Calls of NumPy's functions that tests compare with NumPy, and of those that handles refuse.

The table of coverage in docs/arrays-coverage.md is made of these (`coverage.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ali.arrays.ordering import CONTINUOUS, DISCONTINUOUS, NEAREST
from mpi_workers.protocol.libraries import BINARY, UNARY

Work = Callable[[Any], Any]
BITWISE = {"bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"}  # of integers
BINARY_UFUNCS = sorted(BINARY - BITWISE)
UFUNCS = [
    getattr(np, name)
    for name in {
        **dict.fromkeys(UNARY - {"abs", "conj"}),
        "absolute": 0,
        "positive": 0,
        "deg2rad": 0,
        "rad2deg": 0,
    }
]
ALONG = [
    "sort", "argmax", "argmin", "cumsum", "cumprod", "prod", "median", "nansum", "nanmean",
    "nanmin", "nanmax", "nanstd", "nanvar", "nanmedian", "nanprod", "nancumsum", "nanargmax", "ptp",
    "average", "count_nonzero", "diff", "flip",
]  # fmt: skip
METHODS = ["sum", "mean", "var", "std", "min", "max", "any", "all"]  # also functions
KEEPING = ["argmax", "argmin", "median", "prod", "nansum", "nanmean", "nanmedian", "average"]
FOURIER = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
OTHERS: dict[str, Work] = {
    "argsort": lambda x: np.argsort(x, kind="stable"),
    "argsort of columns": lambda x: np.argsort(x, 0, kind="stable"),
    "argsort of all": lambda x: np.argsort(x, None, kind="stable"),
    "two differences": lambda x: np.diff(x, 2, 0, prepend=0, append=1),
    "quantile": lambda x: np.quantile(x, 0.3),
    "quantiles of columns": lambda x: np.quantile(x, [0.1, 0.5], 0),
    "weighted quantiles": lambda x: np.quantile(
        np.nan_to_num(x), [0, 0.3, 1], 0, method="inverted_cdf", weights=np.arange(x.shape[0]) + 0.5
    ),
    "weighted percentile": lambda x: np.percentile(
        np.nan_to_num(x), 40, method="inverted_cdf", weights=np.ones(x.shape)
    ),
    "convolve": lambda x: [
        np.convolve(np.nan_to_num(np.ravel(x)), [1, 2, -1], mode)
        for mode in ("full", "same", "valid")
    ],
    "correlate": lambda x: [
        np.correlate(np.nan_to_num(np.ravel(x)), [1, 2, 0, -1], mode)
        for mode in ("full", "same", "valid")
    ],
    "a longer kernel": lambda x: np.correlate(np.nan_to_num(np.ravel(x)), np.arange(40.0), "same"),
    **{
        f"pad, {mode}": lambda x, mode=mode: np.pad(np.nan_to_num(x), (2, 1), mode)
        for mode in (
            "edge", "reflect", "symmetric", "wrap", "linear_ramp", "maximum", "minimum", "mean",
            "median",
        )
    },
    "pad with options": lambda x: [
        np.pad(x, [(1, 0)] * x.ndim, "constant", constant_values=(3, 4)),
        np.pad(np.nan_to_num(x), 1, "mean", stat_length=2),
        np.pad(np.nan_to_num(x), 3, "linear_ramp", end_values=(-2, 5)),
    ],
    "trapezoid": lambda x: [np.trapezoid(x), np.trapezoid(x, dx=0.5, axis=0)],
    "trapezoid at places": lambda x: np.trapezoid(x, np.arange(x.shape[0]) ** 2, axis=0),
    "intersection with places": lambda x: np.intersect1d(
        np.nan_to_num(x), [1, 2, 2, 0, 5], return_indices=True
    ),
    "take wrapped": lambda x: np.take(x, [-9, 3, 50], mode="wrap"),
    "take clipped": lambda x: np.take(x, [-9, 0, 50], axis=0, mode="clip"),
    "percentiles without nan": lambda x: np.nanpercentile(x, [5, 60], 0, method="nearest"),
    "hazen": lambda x: np.percentile(x, [5, 50], method="hazen"),
    **{
        f"quantiles, {method}": lambda x, method=method: np.quantile(
            x, [0, 0.1, 0.25, 0.5, 1], axis=0, method=method
        )
        for method in (*CONTINUOUS, *NEAREST, *DISCONTINUOUS, "averaged_inverted_cdf", "midpoint")
    },
    "weighted average": lambda x: np.average(
        x, 0, weights=np.arange(1, 1 + x.shape[0]), returned=True
    ),
    "cov": lambda x: np.cov(x, rowvar=False),
    "cov of rows": lambda x: np.cov(x),
    "weighted cov": lambda x: np.cov(
        x, rowvar=False, aweights=np.arange(1.0, 1 + x.shape[0]), fweights=[2] * x.shape[0]
    ),
    "corrcoef": lambda x: np.corrcoef(x, rowvar=False),
    "unique": np.unique,
    "unique with places": lambda x: np.unique(x, True, True, True),
    "rows": lambda x: np.unique(np.nan_to_num(x) > 0, axis=0, return_inverse=True),
    "columns": lambda x: np.unique(np.nan_to_num(x), True, True, True, axis=-1),
    "unique_counts": np.unique_counts,
    "unique_inverse": lambda x: np.unique_inverse(np.nan_to_num(x)),  # nan in any order
    "isin": lambda x: np.isin(x, [1, 2, 5]),
    "isin inverted": lambda x: np.isin(x, [1, 2, 5], invert=True),
    "searchsorted": lambda x: np.searchsorted([-1, 0, 3], x),
    "searchsorted right": lambda x: np.searchsorted([-1.5, 0, 3], x, side="right"),
    "digitize": lambda x: np.digitize(x, [-1, 0, 3]),
    "digitize in falling bins": lambda x: np.digitize(x, [3, 0, -1], right=True),
    "histogram": np.histogram,
    "histogram of a range": lambda x: np.histogram(x, 5, (-2, 3)),
    **{
        f"{bins} bins": lambda x, bins=bins: np.histogram(np.nan_to_num(x), bins, (-2, 4))
        for bins in ("auto", "fd", "doane", "scott", "rice", "sturges", "sqrt")
    },
    "bins of all elements": lambda x: np.histogram(x, "auto"),
    "density": lambda x: np.histogram(x, [-3, 0, 1, 4], density=True),
    "weighted histogram": lambda x: np.histogram(x, 4, weights=np.ones(x.shape)),
    "bincount": lambda x: np.bincount(abs(x)),
    "weighted bincount": lambda x: np.bincount(abs(x), weights=np.ones(x.shape), minlength=9),
    "outer": lambda x: np.outer(x, x),
    "outer with a list": lambda x: np.outer([1, 2], x),
    "tile": lambda x: np.tile(x, 2),
    "tile both ways": lambda x: np.tile(x, (3, 2)),
    "repeat": lambda x: np.repeat(x, 2),
    "repeat rows": lambda x: np.repeat(x, np.arange(x.shape[0]), 0),
    "roll": lambda x: np.roll(x, 2),
    "roll rows": lambda x: np.roll(x, -1, 0),
    "broadcast_to": lambda x: np.broadcast_to(x[:1], (4, *x.shape[1:])),
    "broadcast_arrays": lambda x: np.broadcast_arrays(x, 1),
    "argwhere": np.argwhere,
    "nan_to_num": lambda x: np.nan_to_num(x, nan=2, posinf=3),
    "interp": lambda x: np.interp(x, [0, 1, 3], [1, 2, 0]),
    "with an initial zero": lambda x: np.cumulative_sum(x, axis=0, include_initial=True),
    "in another dtype": lambda x: np.cumsum(x, dtype="complex128"),
    "take_along_axis": lambda x: np.take_along_axis(x, np.argsort(x, 0, kind="stable"), 0),
    "unstack": lambda x: np.unstack(x, axis=-1),
    "array_split": lambda x: np.array_split(x, 3),
    "append": lambda x: np.append(x, [1, 2]),
    "meshgrid": lambda x: np.meshgrid(x, [1, 2]),
    "unravel_index": lambda x: np.unravel_index(abs(x), (3, 400)),
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x, 2, axis=-1),
    "windows of all axes": lambda x: np.lib.stride_tricks.sliding_window_view(x, (2,) * x.ndim),
    "intersect1d": lambda x: np.intersect1d(x, [1, 2, -3]),
    "setdiff1d": lambda x: np.setdiff1d(x, [1, 2]),
    "union1d": lambda x: np.union1d(x, [1, 77]),
    "atleast_2d": np.atleast_2d,
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "nancumprod": np.nancumprod, "cumulative_prod": lambda x: np.cumulative_prod(x, axis=-1),
    "nanargmin": lambda x: np.nanargmin(x), "nanquantile": lambda x: np.nanquantile(x, 0.4),
    "unique_all": lambda x: np.unique_all(np.nan_to_num(x)),
    "unique_values": lambda x: np.sort(np.unique_values(np.nan_to_num(x))),  # in any order
    "split": lambda x: np.split(x, [2, 3]), "hsplit": lambda x: np.hsplit(x, [1]),
    "vsplit": lambda x: np.vsplit(x, [1]), "fliplr": np.fliplr, "flipud": np.flipud,
    "swapaxes": lambda x: np.swapaxes(x, 0, -1), "atleast_1d": np.atleast_1d, "copy": np.copy,
    "sum of some": lambda x: np.sum(x, axis=0, where=abs(x) > 1, initial=2),
    "sum of few": lambda x: np.nansum(x, axis=-1, where=abs(x) > 4, initial=0.5),
    "product of some": lambda x: np.prod(x, where=abs(x) > 2, initial=3),
    "product without nan": lambda x: np.nanprod(x, 0, where=abs(x) > 2, initial=1),
    "min of some": lambda x: np.min(x, 0, where=abs(x) > 1, initial=2),
    "max of some": lambda x: np.nanmax(x, -1, where=abs(x) > 1, initial=-1),
    "max and a number": lambda x: np.max(x, axis=0, initial=1),
    "min and a number": lambda x: np.nanmin(x, initial=0),
    "amax of nothing": lambda x: np.amax(x[:0], axis=0, initial=3),
    "amin of some": lambda x: np.amin(x, where=False, initial=1),
    "any of some": lambda x: np.any(x, axis=0, where=abs(x) > 9),
    "all of some": lambda x: np.all(x, axis=-1, where=[True], keepdims=True),
    "mean of some": lambda x: np.mean(x, axis=0, where=abs(x) > 1),
    "mean without nan": lambda x: np.nanmean(x, axis=-1, where=abs(x) < 3, keepdims=True),
    "var of some": lambda x: np.var(x, axis=0, where=abs(x) > 1, ddof=1),
    "var of few": lambda x: np.var(x, axis=-1, where=abs(x) > 3, ddof=2, keepdims=True),
    "var without nan": lambda x: np.nanvar(x, axis=0, where=abs(x) > 3, ddof=2),
    "std of some": lambda x: np.std(x, where=abs(x) > 1),
    "std without nan": lambda x: np.nanstd(x, axis=-1, where=abs(x) > 1, ddof=0.5),
    "add.reduce": lambda x: np.add.reduce(x, initial=1), "max.reduce": np.maximum.reduce,
    "and.reduce": lambda x: np.logical_and.reduce(x, axis=None, where=abs(x) > 1),
    "where of no array": lambda x: np.sum(x, where=np.ones((2, 9, 9), bool)),
    "max without a start value": lambda x: np.max(x, where=abs(x) > 1),
    **{
        f"{kind} of {n} points": lambda x, kind=kind, n=n: getattr(np.fft, kind)(
            x, n, 0, norm="ortho"
        )
        for kind in FOURIER
        for n in (None, 3, 9)
    },
    **{
        f"{kind}{axes}": lambda x, kind=kind, axes=axes: getattr(np.fft, kind + axes)(
            x, s=None if x.ndim < 2 else (3, 6), axes=None if x.ndim < 2 else (0, 1), norm="forward"
        )
        for kind in FOURIER[:4]
        for axes in "n2"
    },
    "fftshift": lambda x: np.fft.fftshift(x * 1, 0), "ifftshift": np.fft.ifftshift,
}  # fmt: skip


def filled_diagonal(x: Any, value: Any) -> Any:
    found = x.copy()
    np.fill_diagonal(found, value)
    return found


PAIRS: list[Callable[[Any, Any], Any]] = [  # of a matrix and another one with as many columns
    lambda x, y: np.matvec(y, x[0]), lambda x, y: np.vecmat(x, y.T), lambda x, y: np.vecdot(x, x),
    lambda x, y: np.concatenate([x, y, x]), lambda x, y: np.concatenate([x.T, y.T], axis=1),
    lambda x, y: np.vstack([x, y]), lambda x, y: np.hstack([x, y.T]),
    lambda x, y: np.where(x > 1, x, 0), lambda x, y: np.where(x > 1, 2.5, x[:1]),
    lambda x, y: np.clip(x, -1, 3), lambda x, y: np.transpose(x), lambda x, y: x.dot(y.T),
    lambda x, y: np.dot(y, x), lambda x, y: np.zeros_like(x), lambda x, y: np.ones_like(y),
    lambda x, y: np.full_like(x, 7), lambda x, y: np.diagonal(x), lambda x, y: np.trace(x),
    lambda x, y: np.diag(x), lambda x, y: np.take(x, [0, 2], axis=1), lambda x, y: np.real(x),
    lambda x, y: np.imag(x), lambda x, y: np.linalg.matrix_transpose(x),
    lambda x, y: np.astype(x, np.complex128), lambda x, y: np.round(y, 1),
    lambda x, y: np.flip(x), lambda x, y: np.flip(x, 1),
    lambda x, y: np.triu(x, 1), lambda x, y: np.tril(x), lambda x, y: np.tensordot(x, x),
    lambda x, y: np.einsum("ij,ij->i", x, x), lambda x, y: np.tensordot(y, x, axes=1),
    lambda x, y: np.tensordot(x, y, axes=([0], [1])),
    lambda x, y: np.linalg.matrix_power(x, 5), lambda x, y: np.linalg.matrix_power(x, 0),
    lambda x, y: np.isclose(x, x + 1e-12), lambda x, y: np.diag(x[:, 0]),
    lambda x, y: np.reshape(x, (4, 9)), lambda x, y: np.ravel(y),
    lambda x, y: np.squeeze(x[:1]),
    lambda x, y: np.expand_dims(x[0], 1), lambda x, y: np.stack([x[0], y[0]]),
    lambda x, y: np.stack([x[0], y[0]], axis=1), lambda x, y: np.column_stack([x[0], y.T]),
    lambda x, y: np.hstack([x[0], y[1]]), lambda x, y: np.vstack([x[0], y]),
    lambda x, y: np.concatenate([x, y], axis=None), lambda x, y: np.where(x > 1)[1],
    lambda x, y: np.nonzero(y > 0)[0], lambda x, y: np.flatnonzero(y > 0),
    lambda x, y: np.take(x, [0, 2]), lambda x, y: x[0] @ y.T, lambda x, y: np.amax(x.real, axis=0),
    lambda x, y: np.amin(x.real, axis=0), lambda x, y: np.matrix_transpose(x),
    lambda x, y: np.conj(x),
    lambda x, y: np.zeros_like(np.empty_like(x)),
    lambda x, y: np.isclose(x, x[0], rtol=0.5, atol=0.1, equal_nan=True),
    lambda x, y: np.isclose(x / 0, np.inf), lambda x, y: np.isclose(x, [1, np.inf, np.nan] * 2),
    lambda x, y: np.isclose(np.full(6, np.inf), x / 0), lambda x, y: np.isclose(y, 1),
    lambda x, y: np.triu(x[0]), lambda x, y: np.tril(y[0], -1), lambda x, y: np.clip(y, min=-1),
    lambda x, y: np.repeat(y, 2, axis=1),
    lambda x, y: np.bitwise_and(y > 1, y > 2), lambda x, y: np.bitwise_or(y > 1, x[:3, :6] == 2),
    lambda x, y: np.bitwise_xor(y > 1, y > 2), lambda x, y: np.left_shift(y.astype("int32"), 2),
    lambda x, y: np.right_shift(y.astype("int64"), 1),
    lambda x, y: np.mean(x, axis=0, dtype="complex128"), lambda x, y: np.var(y, dtype="float32"),
    lambda x, y: np.std(x, axis=0, ddof=1), lambda x, y: np.angle(x),
    lambda x, y: np.angle(y, True),
    lambda x, y: np.iscomplex(x), lambda x, y: np.isreal(x), lambda x, y: np.inner(x, y),
    lambda x, y: np.inner(x[0], y[0]), lambda x, y: np.vdot(x, x), lambda x, y: np.kron(x[:2], y),
    lambda x, y: np.kron(x[0], y), lambda x, y: np.diag(x, 1), lambda x, y: np.diag(x, -7),
    lambda x, y: np.diag(y[0], 2), lambda x, y: np.diag(y[0], -1), lambda x, y: np.trace(x, 1),
    lambda x, y: np.diagonal(x, -2), lambda x, y: np.ravel(y, order="F"),
    lambda x, y: np.reshape(y, (9, -1), order="F"), lambda x, y: x.mean(0, "complex64"),
    lambda x, y: y.reshape(9, -1, order="F"), lambda x, y: y.reshape((-1,)),
    lambda x, y: y.real.clip(-1, 1, out=y.real.copy()),
    lambda x, y: x.ravel("F"), lambda x, y: x.diagonal(2), lambda x, y: divmod(y, 2)[1],
    lambda x, y: divmod(7, y)[0], lambda x, y: np.around(y, 1), lambda x, y: x.transpose(1, 0),
    lambda x, y: x.transpose((0, 1)), lambda x, y: x.transpose(None),
    lambda x, y: np.select([x > 2, x > 1], [x, x.dtype.type(7)], x.dtype.type(3)),
    lambda x, y: np.select([x[0] > 1], [x[0]]),
    lambda x, y: np.pad(x, 1), lambda x, y: np.pad(y, ((1, 0), (2, 3)), constant_values=4),
    lambda x, y: np.pad(x[0], (0, 2)), lambda x, y: np.pad(y[:, 0], 3, mode="constant"),
    lambda x, y: filled_diagonal(x[:4], 3), lambda x, y: filled_diagonal(y, y[0]),
    lambda x, y: np.partition(y.real, 5)[:, 5], lambda x, y: np.partition(y[0].real, 2, axis=0)[2],
    lambda x, y: y[0].real[np.argpartition(y[0].real, 2)][2],
    lambda x, y: y[0][np.argpartition(y[0].real, 2, axis=-1)].real.min(),
    lambda x, y: np.lexsort((x[0].real, y[0].real)), lambda x, y: np.lexsort((y[0].real,)),
    lambda x, y: np.linalg.multi_dot([x, y.T, y]), lambda x, y: np.linalg.multi_dot([y, x[0]]),
    lambda x, y: np.gradient(y)[0], lambda x, y: np.gradient(y)[1], lambda x, y: np.gradient(y[0]),
    lambda x, y: np.gradient(y, 0.5, axis=1, edge_order=2),
    lambda x, y: np.gradient(y[0], np.arange(y.shape[1]) ** 2.0),
    lambda x, y: np.gradient(y[:, 0], 2.0 ** np.arange(y.shape[0]), edge_order=2),
    lambda x, y: np.gradient(y, 2, np.arange(y.shape[1]) ** 2.0)[1],
    lambda x, y: np.gradient(y[:2], axis=-2), lambda x, y: np.gradient(y[:3], 3, axis=0),
    lambda x, y: np.polyval([2.0, 1.0, 3.0], y), lambda x, y: np.polyval([2, 1], y[0]),
    lambda x, y: np.polyfit(np.cumsum(abs(y[0]) + 1), y[0], 1),
    lambda x, y: np.polyfit(
        np.cumsum(abs(y[:, 0]) + 1) + -6.0, y, 2, w=np.arange(1.0, 1 + len(y))
    ),
    lambda x, y: np.polyfit(np.cumsum(abs(y[0]) + 1), y[0], 2, full=True)[3],
]  # fmt: skip
LINEAR: list[Work] = [  # of a Hermitian positive definite matrix
    np.linalg.det, lambda x: np.linalg.slogdet(x)[1], np.linalg.cond, np.linalg.inv,
    np.linalg.pinv, lambda x: np.linalg.pinv(x, rtol=0.5), np.linalg.cholesky,
    lambda x: np.linalg.cholesky(x, upper=True), np.linalg.eigvalsh, lambda x: np.linalg.eigh(x)[0],
    lambda x: np.linalg.eigvalsh(x, UPLO="U"), np.linalg.svdvals,
    lambda x: np.linalg.svd(x, compute_uv=False),
    lambda x: np.linalg.svd(x, full_matrices=False)[1],
    lambda x: abs(np.linalg.qr(x)[1]), lambda x: abs(np.linalg.qr(x, mode="r")),
    np.linalg.matrix_rank, lambda x: np.linalg.matrix_rank(x, rtol=0.5),
    lambda x: np.linalg.solve(x, np.arange(5.0)), lambda x: np.linalg.lstsq(x, np.ones((5, 2)))[0],
    lambda x: np.linalg.norm(x), lambda x: np.linalg.norm(x, 1),
    lambda x: np.linalg.norm(x, np.inf),
    lambda x: np.linalg.norm(x, 2), lambda x: np.linalg.norm(x, "nuc"),
    lambda x: np.linalg.norm(x, -2),
    lambda x: np.linalg.norm(x, axis=0), lambda x: np.linalg.norm(x, 1, axis=1, keepdims=True),
    lambda x: np.linalg.matrix_norm(x, ord="fro", keepdims=True),
    lambda x: np.linalg.vector_norm(x, axis=1, ord=3), lambda x: np.linalg.vector_norm(x),
    lambda x: np.linalg.matrix_power(x, -2), lambda x: np.linalg.matmul(x, x),
    lambda x: np.linalg.matrix_transpose(x), lambda x: np.linalg.diagonal(x), np.linalg.trace,
    lambda x: np.linalg.outer(x[0], x[1]), lambda x: np.linalg.cross(x[:, :3], x[:, 2:]),
    lambda x: np.cross(x[0, :3], x[1, :3]), lambda x: np.linalg.tensordot(x, x, axes=1),
    lambda x: np.linalg.vecdot(x, x),
]  # fmt: skip
ASKING: list[Work] = [  # these give values of Python, not handles
    np.shape, np.ndim, np.size, lambda x: np.size(x, 0), np.iscomplexobj, np.isrealobj,
    lambda x: np.can_cast(x.dtype, "float64"), lambda x: np.result_type(x, "float32"),
    lambda x: np.allclose(x, x + 1e-12), lambda x: np.allclose(x, x + 0.1, rtol=0, atol=0.2),
    lambda x: np.array_equal(x, x), lambda x: np.array_equal(x, x[:1], equal_nan=True),
    lambda x: np.array_equiv(x, x[:1]), lambda x: np.may_share_memory(x, x),
    lambda x: np.shares_memory(x, x + 1),
]  # fmt: skip
FETCHING = [  # calls that are missing; the error has the same with fetched operands
    "np.apply_along_axis(sum, 0, A)", "np.var(A, mean=0)",
]  # fmt: skip
REFUSED = {  # and words of the message, which names what to do
    "np.histogram(A, 'stone')": "bins='auto'",
    "np.histogram(A, 'no')": "auto",
    "np.interp(A, [0], [1], period=3)": "%",
    "np.digitize(A, [0, 2, 1])": "must be monotonic",
    "np.nanargmax(A * np.nan)": "only NaN",
    "np.frexp(A)": r"np\.frexp\(A\.fetch\(\)\).*als\.run",
    "np.hypot.reduce(A)": r"\.fetch\(\)",
    "np.multiply.outer(A, A)": r"np\.outer",
    "np.add.accumulate(A)": "cumsum",
    "np.add.reduceat(A, [0, 2])": "segment_sum",
    "np.add(A, 1, out=B)": r"x\[\.\.\.\] = \(A \+ C\)\.fetch\(\)",
    "np.add(A, 1, out=A[0])": "do not broadcast to out=",
    "np.add(A, 0.5, out=(A > 1))": r"B\[\.\.\.\] = result\.astype\('bool'\)",
    "np.add(A, 1, where=A > 0)": r"np\.where",
    "np.add(A, 1, dtype='float32')": r"\.astype",
    "np.mean(A, axis=0, out=A)": r"out= has \(6, 4\)",
    "np.mean(A, axis=0, out=np.ones(4))": "for a new matrix",
    "np.sum(A, where=[True, False])": "where= of shape",
    "np.max(A, where=A > 0)": "initial=",
    "np.reshape(A, (4, 6), order='A')": "'C' or 'F'",
    "np.gradient(A, [1, 2], axis=0)": "a coordinate for each index",
    "np.gradient(A[:2], edge_order=2)": "at least 3 elements",
    "np.polyfit(A, A, 1)": "x must be a vector",
    "np.linalg.eig(A)": "eigh",
    "np.linalg.matrix_rank(A, tol=1.0)": "rtol=",
    "np.linalg.svd(A)": "full_matrices=False",
    "np.linalg.qr(A, mode='complete')": "reduced",
}
