"""Methods of arrays that order, accumulate and look up; each is NumPy's function of that name."""

from __future__ import annotations

from typing import Any

import numpy as np

from alchemist_ray.arrays.fetched_values import FetchedValues


class ArrayMethods(FetchedValues):
    """Methods that `ArrayOperators` inherits; costs are those of the ranks' routines."""

    __slots__ = ()

    def argmax(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Indices of the first largest elements, or of the first nan; axis None in C order.

        One pass; ranks combine an element and its index for each result.
        """
        return np.argmax(self, axis, keepdims=keepdims)

    def argmin(self, axis: Any = None, *, keepdims: bool = False) -> Any:
        """Indices of the first smallest elements, see `argmax`."""
        return np.argmin(self, axis, keepdims=keepdims)

    def argsort(self, axis: Any = -1, kind: Any = None, *, stable: bool = True) -> Any:
        """Indices that sort along an axis; equal elements keep their order in every `kind`.

        Each element crosses the network three times, of many lines once; ``m log(m)`` comparisons.
        """
        return np.argsort(self, axis)

    def sort(self, axis: Any = -1, kind: Any = None, *, stable: bool = True) -> None:
        """Sort in place, as in NumPy; ``np.sort(A)`` gives a new array. See `argsort`."""
        self[...] = np.sort(self, axis)  # type: ignore[index]

    def cumsum(self, axis: Any = None, dtype: Any = None) -> Any:
        """Cumulative sums; axis None: of all elements in C order.

        Each element crosses the network twice, of whole lines on one rank not at all.
        """
        return np.cumsum(self, axis, dtype)

    def cumprod(self, axis: Any = None, dtype: Any = None) -> Any:
        """Cumulative products, see `cumsum`."""
        return np.cumprod(self, axis, dtype)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, **options: Any) -> Any:
        """Products of columns (``axis=0``), rows (1) or all; int32 in int64; see `sum`."""
        return np.prod(self, axis, dtype, out, **options)

    def nonzero(self) -> Any:
        """Indices of the elements that are not 0, a vector for each axis."""
        return np.nonzero(self)

    def repeat(self, repeats: Any, axis: Any = None) -> Any:
        """Repeat each element, row (``axis=0``) or column (1)."""
        return np.repeat(self, repeats, axis)

    def take(self, indices: Any, axis: Any = None) -> Any:
        """Elements, rows (``axis=0``) or columns (1) at indices."""
        return np.take(self, indices, axis)

    def searchsorted(self, v: Any, side: Any = "left", sorter: Any = None) -> Any:
        """Where to insert elements into this sorted vector so that it stays sorted."""
        return np.searchsorted(self, v, side, sorter)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None,
        copy: bool | None = None,
    ) -> Any:  # fmt: skip
        """The fetched elements, for libraries that exchange arrays by DLPack."""
        return self.fetch().__dlpack__(max_version=max_version, dl_device=dl_device, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU: the elements are fetched."""
        return np.zeros(0).__dlpack_device__()

    def swapaxes(self, axis1: int, axis2: int) -> Any:
        """The transpose, or the array itself if the axes are one."""
        return np.swapaxes(self, axis1, axis2)
