"""The array API standard's namespace for the matrices of a gang.

The arguments of a function decide: NumPy's own functions come here through their protocols for
handles, and stay NumPy for small 1-D arrays. So the namespace is NumPy's, where the
standard has the name, but for creation: that takes place on the gang.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from alchemist_ray.arrays import creation
from alchemist_ray.arrays.engine import LAYOUT, Engine
from alchemist_ray.arrays.generator import Generator
from alchemist_ray.arrays.rules import FUNCTIONS, INSTEAD
from alchemist_ray.attached.connection import GangConnection
from alchemist_ray.dtypes import DTYPES
from alchemist_ray.errors import BadArgumentError
from mpi_workers.matrix.layout import MAX_AXES

VERSIONS = ("2021.12", "2022.12", "2023.12", "2024.12")
CONSTANTS = ("e", "inf", "nan", "newaxis", "pi")
_STANDARD = """
    abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_invert bitwise_left_shift
    bitwise_or bitwise_right_shift bitwise_xor ceil conj copysign cos cosh divide equal exp
    expm1 floor floor_divide greater greater_equal hypot imag isfinite isinf isnan less less_equal
    log log1p log2 log10 logaddexp logical_and logical_not logical_or logical_xor maximum minimum
    multiply negative nextafter not_equal positive pow real reciprocal remainder round sign signbit
    sin sinh square sqrt subtract tan tanh trunc
    astype can_cast isdtype result_type
    broadcast_to concat flip matrix_transpose moveaxis permute_dims repeat
    reshape roll squeeze stack tile unstack
    matmul tensordot vecdot
    all any argmax argmin count_nonzero cumulative_prod cumulative_sum diff max mean min prod std
    sum var
    isin nonzero searchsorted take take_along_axis unique_all unique_counts unique_inverse
    unique_values where
    tril triu zeros_like ones_like full_like empty_like
"""
_LINALG = """
    cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank
    matrix_transpose outer pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm
"""
STANDARD, LINALG = frozenset(_STANDARD.split()), frozenset(_LINALG.split())


class _Names:
    """Attributes that are NumPy's, where the standard has them or handles do."""

    _numpy: Any = np
    _names: frozenset[str] = frozenset()

    def __getattr__(self, name: str) -> Any:
        if name in self._names or (name[0] != "_" and self._implemented(name)):
            return getattr(self._numpy, name)
        there = f"{self!r} has no {name!r}"
        if not name.startswith("_") and hasattr(self._numpy, name):
            there += ": " + INSTEAD.get(name, f"{self._numpy.__name__}.{name} takes A.fetch()")
        raise AttributeError(there)

    def __dir__(self) -> list[str]:
        ours = filter(self._implemented, dir(self._numpy))
        return sorted({*super().__dir__(), *self._names, *ours})

    def _implemented(self, name: str) -> bool:
        function = getattr(self._numpy, name, None)
        return isinstance(function, Hashable) and function in FUNCTIONS


class Linalg(_Names):
    """The standard's extension ``linalg``; also `norm`, `cond`, and SciPy's `expm` and `polar`."""

    _numpy = np.linalg
    _names = LINALG | {"norm", "cond"}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def expm(self, A: Any, /) -> Any:
        """Matrix exponential of a square matrix."""
        return self._engine.call("expm", A)

    def polar(self, a: Any, side: str = "right") -> Any:
        """Factors U, P of ``a = U P`` (side "right") or ``a = P U`` ("left"), as SciPy's polar."""
        if side not in ("right", "left"):
            raise BadArgumentError(f"polar: side={side!r}; it is 'right' or 'left'")
        if side == "right":
            U, P = self._engine.call("polar", a)
            return U, P
        U, P = self._engine.call("polar", self._engine.transpose(a, conjugate=True))
        return self._engine.transpose(U, conjugate=True), P

    def __repr__(self) -> str:
        return "<linalg of matrices on ranks>"


class Fourier(_Names):
    """The standard's extension ``fft``, and NumPy's transforms of two axes."""

    _numpy = np.fft

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def fftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
        """The frequencies of a transform of n points at distances d, in the order of `fft`."""
        return creation.asarray(self._engine, np.fft.fftfreq(n, d), dtype, None)

    def rfftfreq(self, n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Any:
        """The frequencies of `rfft`."""
        return creation.asarray(self._engine, np.fft.rfftfreq(n, d), dtype, None)

    def __repr__(self) -> str:
        return "<fft of matrices on ranks>"


class Random:
    """Random matrices: the same numbers for the same seed, on any number of ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def normal(self, shape: Any, *, seed: int, dtype: Any = None) -> Any:
        """Independent standard normal numbers, float64 by default."""
        return creation.random(self._engine, "normal", shape, seed, dtype)

    def uniform(self, shape: Any, *, seed: int, dtype: Any = None) -> Any:
        """Independent numbers from the half-open interval [0, 1), float64 by default."""
        return creation.random(self._engine, "uniform", shape, seed, dtype)

    def default_rng(self, seed: int | None = None) -> Generator:
        """A generator with the methods of NumPy's: normal, integers, permutation, choice, ..."""
        return Generator(self._engine, seed)

    def __repr__(self) -> str:
        return "<random matrices on ranks>"


class Namespace(_Names):
    """``xp`` for matrices of one gang: `AlchemistSession.xp`, `Handle.__array_namespace__`.

    Attributes
    ----------
    linalg : Linalg
    fft : Fourier
    random : Random
        Beyond the standard: ``default_rng``, and ``normal`` and ``uniform`` with a seed.
    """

    __array_api_version__ = VERSIONS[-1]
    __name__ = "alchemist_ray.xp"  # scikit-learn compares namespaces by name
    lib = np.lib  # where xarray's `rolling` looks for sliding_window_view
    _names = STANDARD

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.linalg = Linalg(engine)
        self.fft = Fourier(engine)
        self.random = Random(engine)
        for name in CONSTANTS:
            setattr(self, name, getattr(np, name))
        for name in DTYPES:
            setattr(self, name, np.dtype(name))

    def of_version(self, version: str | None) -> Namespace:
        """Itself, if it has that version of the standard."""
        if version is not None and version not in VERSIONS:
            raise ValueError(f"api_version={version!r}: it must be one of {', '.join(VERSIONS)}")
        return self

    # --- creation ---

    def asarray(
        self, obj: Any, /, *, dtype: Any = None, device: Any = None, copy: bool | None = None
    ) -> Any:
        """A handle of an array, or of what NumPy makes one of."""
        return creation.asarray(self._engine, obj, dtype, copy)

    def from_dlpack(self, x: Any, /, *, device: Any = None, copy: bool | None = None) -> Any:
        """A handle of an array of another library, which is sent."""
        return creation.asarray(self._engine, np.from_dlpack(x), None, copy)

    def zeros(self, shape: Any, *, dtype: Any = None, device: Any = None,
              layout: str = LAYOUT) -> Any:  # fmt: skip
        """Zeros."""
        return creation.full(self._engine, shape, 0.0, dtype or np.float64, layout)

    empty = zeros

    def ones(self, shape: Any, *, dtype: Any = None, device: Any = None,
             layout: str = LAYOUT) -> Any:  # fmt: skip
        """Ones."""
        return creation.full(self._engine, shape, 1.0, dtype or np.float64, layout)

    def full(self, shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None,
             layout: str = LAYOUT) -> Any:  # fmt: skip
        """The same value everywhere."""
        return creation.full(self._engine, shape, fill_value, dtype, layout)

    def arange(self, start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None,
               device: Any = None) -> Any:  # fmt: skip
        """Evenly spaced numbers from `start` to before `stop`."""
        return creation.arange(self._engine, start, stop, step, dtype)

    def linspace(self, start: Any, stop: Any, /, num: int, *, dtype: Any = None,
                 device: Any = None, endpoint: bool = True) -> Any:  # fmt: skip
        """`num` evenly spaced numbers, with `stop` or without."""
        return creation.linspace(self._engine, start, stop, num, dtype, endpoint=endpoint)

    def eye(self, n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None,
            device: Any = None, layout: str = LAYOUT) -> Any:  # fmt: skip
        """Ones on a diagonal, zeros elsewhere."""
        return creation.eye(self._engine, n_rows, n_cols, k, dtype or np.float64, layout)

    def from_function(self, function: Any, shape: Any, *, dtype: Any = None,
                      layout: str = LAYOUT) -> Any:  # fmt: skip
        """A matrix of ``function(i, j)``, evaluated on the ranks.

        Parameters
        ----------
        function : callable
            Is called on every rank with the global indices of its rows, (r, 1), and of its
            columns, (1, c), both int64, and gives what broadcasts to (r, c). It travels as
            in `AlchemistSession.run`.
        shape : (int, int)
        dtype : dtype, optional
            float64 by default.
        layout : str
            One of Elemental's 14, or in blocks.
        """
        return creation.from_function(self._engine, function, shape, dtype or np.float64, layout)

    def segment_sum(self, data: Any, segment_ids: Any, num_segments: int | None = None) -> Any:
        """Sums over the first axis of the elements that are in one segment, as JAX's.

        Parameters
        ----------
        data : Handle
            Numbers, at least one axis.
        segment_ids : vector of int
            For each element of the first axis the number of its segment.
        num_segments : int, optional
            By default, the largest segment + 1.

        Returns
        -------
        Handle, shape (num_segments, ...)
            A row for each segment, 0 for empty ones; the dtype of `numpy.sum`.

        Raises
        ------
        BadIndexError
            If a segment is out of range (JAX leaves these elements out).
        ShapeError, DtypeError
            If `segment_ids` are not one integer for each element of the first axis.

        Notes
        -----
        One pass over `data`, in the time of a few sums. Means are
        ``xp.segment_sum(A, ids, n) / np.bincount(ids, minlength=n)[:, None]``.
        """
        segments = self._engine.matrix(segment_ids, data)
        if num_segments is None:
            num_segments = int(segments.max()) + 1 if segments.size else 0
        return self._engine.call("segment_sum", data, segments, num_segments)

    # --- where NumPy's own does not take handles, or by other names ---

    def clip(self, x: Any, /, min: Any = None, max: Any = None) -> Any:
        """Elements below `min` or above `max` become these."""
        return np.clip(x, min, max)

    def expand_dims(self, x: Any, /, axis: Any = 0) -> Any:
        """A new axis of length 1."""
        return np.expand_dims(x, axis)

    def sort(self, x: Any, /, *, axis: int = -1, descending: bool = False,
             stable: bool = True) -> Any:  # fmt: skip
        """Sorted along an axis; equal elements keep their order."""
        found = np.sort(x, axis)
        return np.flip(found, axis) if descending else found

    def argsort(self, x: Any, /, *, axis: int = -1, descending: bool = False,
                stable: bool = True) -> Any:  # fmt: skip
        """Indices that sort along an axis; equal elements keep their order."""
        if not descending:
            return np.argsort(x, axis)
        found = np.flip(np.argsort(np.flip(x, axis), axis), axis)
        return x.shape[axis] - 1 - found

    def broadcast_arrays(self, *arrays: Any) -> list[Any]:
        """Copies in the shape to which all arrays broadcast."""
        return list(np.broadcast_arrays(*arrays))

    def meshgrid(self, *arrays: Any, indexing: Literal["xy", "ij"] = "xy") -> list[Any]:
        """Coordinates of the points of a grid, from those along its axes."""
        return list(np.meshgrid(*arrays, indexing=indexing))

    def finfo(self, type: Any, /) -> FloatInfo:
        """Limits of a floating dtype, or of that of a matrix, as Python's numbers."""
        found = np.finfo(getattr(type, "dtype", type))
        limits = (found.eps, found.max, found.min, found.smallest_normal)
        eps, top, bottom, smallest = map(float, limits)
        return FloatInfo(int(found.bits), eps, top, bottom, smallest, found.dtype)

    def iinfo(self, type: Any, /) -> Any:
        """Limits of an integer dtype, or of that of a matrix."""
        return np.iinfo(getattr(type, "dtype", type))

    # --- inspection ---

    def __array_namespace_info__(self) -> Info:
        return Info()

    def __repr__(self) -> str:
        return f"<array namespace of gang {self._engine.connection.address.gang}>"


def namespace_of(connection: GangConnection) -> Namespace:
    """The namespace for matrices of a gang."""
    return connection.part(_namespace)


def _namespace(connection: GangConnection) -> Namespace:
    return Namespace(connection.part(Engine))


@dataclass(frozen=True, slots=True)
class FloatInfo:
    """Limits of a floating dtype; of a complex one, those of its parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype[Any]


class Info:
    """The inspection functions of the standard."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": MAX_AXES}

    def default_device(self) -> str:
        return "gang"

    def devices(self) -> list[str]:
        return ["gang"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype[Any]]:
        names = {
            "real floating": "float64", "complex floating": "complex128", "integral": "int64",
            "indexing": "int64",
        }  # fmt: skip
        return {kind: np.dtype(name) for kind, name in names.items()}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, np.dtype[Any]]:
        found = {name: np.dtype(name) for name in DTYPES if name != "float16"}  # the standard's
        if kind is None:
            return found
        return {name: dtype for name, dtype in found.items() if np.isdtype(dtype, kind)}
