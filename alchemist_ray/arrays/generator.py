"""Random numbers on the ranks: ``als.xp.random.default_rng(seed)``, after `numpy.random`."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from alchemist_ray.arrays import rules
from alchemist_ray.arrays.engine import Engine
from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.errors import BadArgumentError, ShapeError


class Generator:
    """Draws arrays of random numbers on the ranks; see `numpy.random.Generator`.

    The same seed and calls give the same arrays on any number of ranks. The numbers differ from
    those of NumPy's generators.

    Parameters
    ----------
    seed : int, optional
        Without it, every generator draws other numbers.
    """

    def __init__(self, engine: Engine, seed: int | None = None) -> None:
        self._engine = engine
        self._entropy = np.random.SeedSequence(seed).entropy
        self._draws = 0

    def _draw(
        self, kind: str, size: Any, real: Any = (), whole: Any = (), dtype: Any = None
    ) -> Any:
        sequence = np.random.SeedSequence(self._entropy, spawn_key=(self._draws,))
        self._draws += 1
        seed = int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))
        shape = [] if size is None else list(rules.shape_of(size))
        parameters = [float(x) for x in real], [operator.index(x) for x in whole]
        found = self._engine.call("draw", kind, shape, seed, *parameters)
        return self._engine.cast(found, dtype)

    def random(self, size: Any = None, dtype: Any = None) -> Any:
        """Uniform in the half-open interval [0, 1)."""
        return self._draw("uniform", size, (0.0, 1.0), dtype=dtype)

    def uniform(self, low: float = 0.0, high: float = 1.0, size: Any = None) -> Any:
        """Uniform in the half-open interval [low, high)."""
        return self._draw("uniform", size, (low, high))

    def standard_normal(self, size: Any = None, dtype: Any = None) -> Any:
        """Normal with mean 0 and standard deviation 1."""
        return self._draw("normal", size, (0.0, 1.0), dtype=dtype)

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Any = None) -> Any:
        """Normal with mean `loc` and standard deviation `scale`."""
        if scale < 0:
            raise BadArgumentError(f"normal: scale={scale}: it must be at least 0")
        return self._draw("normal", size, (loc, scale))

    def exponential(self, scale: float = 1.0, size: Any = None) -> Any:
        """Exponential with mean `scale`."""
        if scale < 0:
            raise BadArgumentError(f"exponential: scale={scale}: it must be at least 0")
        return self._draw("exponential", size, (scale, 0.0))

    def integers(
        self,
        low: int,
        high: int | None = None,
        size: Any = None,
        dtype: Any = np.int64,
        endpoint: bool = False,
    ) -> Any:
        """Integers in ``[low, high)``, or in ``[0, low)``; `endpoint`: the last one included."""
        first, last = (0, low) if high is None else (low, high)
        last += int(endpoint)
        if first >= last:
            raise BadArgumentError(f"integers: the range [{first}, {last}) is empty")
        return self._draw("integers", size, whole=(first, last), dtype=dtype)

    def permutation(self, x: Any, axis: int = 0) -> Any:
        """A random permutation of ``range(x)`` or of the rows of an array; a copy.

        Notes
        -----
        A sort of as many random numbers. Of an array, each element crosses the network once, and
        every rank has all indices.
        """
        if not isinstance(x, MatrixRef) and not rules.is_array(x):
            return np.argsort(self._draw("uniform", (operator.index(x),), (0.0, 1.0)))
        whole = self._engine.matrix(x)
        along = rules.axis_index(axis, whole.ndim)
        order = np.argsort(self._draw("uniform", (whole.shape[along],), (0.0, 1.0)))
        return np.take(whole, order, axis=along)

    def shuffle(self, x: Any, axis: int = 0) -> None:
        """Put the rows of an array in random order, in place. Costs as `permutation`."""
        x[...] = self.permutation(x, axis)

    def choice(
        self, a: Any, size: Any = None, replace: bool = True, p: Any = None, axis: int = 0
    ) -> Any:
        """A random sample from ``range(a)`` or from the rows of an array.

        Parameters
        ----------
        a : int or array
        size : int or tuple of int, optional
        replace : bool
            Whether a row may be drawn more than once.
        p : sequence of float, optional
            Probabilities of the rows, with `replace`.
        axis : int
            From which to draw.

        Raises
        ------
        ShapeError, BadArgumentError
            If `size` exceeds the number of rows without `replace`, or `p` is invalid.

        Notes
        -----
        Without `replace`: a sort of as many random numbers as there are rows. The array is not
        copied; the rows chosen cross the network once, and every rank has their indices.
        """
        given = isinstance(a, MatrixRef) or rules.is_array(a)
        whole = self._engine.matrix(a) if given else None
        along = 0 if whole is None else rules.axis_index(axis, whole.ndim)
        count = operator.index(a) if whole is None else whole.shape[along]
        shape = () if size is None else rules.shape_of(size)
        wanted = int(np.prod(shape, dtype=np.int64))
        if not count and wanted:
            raise BadArgumentError("choice: cannot draw from an array without elements")
        if p is not None:
            index = self._by_probability(p, count, shape, replace=replace)
        elif replace:
            index = self.integers(0, max(1, count), shape)
        elif wanted > count:
            raise ShapeError(f"choice: replace=False cannot draw {wanted} of {count} elements")
        else:
            index = self._engine.reshape(self.permutation(count)[:wanted], shape)
        if whole is None:
            return index
        if len(shape) == 1:
            return np.take(whole, index, axis=along)
        found = np.take(whole, index.reshape(-1), axis=along)
        return found.reshape((*whole.shape[:along], *shape, *whole.shape[along + 1 :]))

    def _by_probability(self, p: Any, count: int, shape: Any, *, replace: bool) -> Any:
        probabilities = np.asarray(p, np.float64)
        if not replace:
            raise rules.unsupported("choice with p= and replace=False", "leave out p=")
        if probabilities.shape != (count,) or not np.isclose(probabilities.sum(), 1.0):
            raise BadArgumentError(
                f"choice: p has shape {probabilities.shape} and sum {probabilities.sum():g}; it "
                f"must have {count} probabilities with sum 1"
            )
        edges = np.cumsum(probabilities)
        return np.searchsorted(edges / edges[-1], self.random(shape), "right")

    def __repr__(self) -> str:
        return "<generator of random arrays on ranks>"
