"""Local products: of arrays that one rank has, on its GPU if it has one and the product is large.

Everything of `ali.linalg` that spends its time in products of matrices calls `multiply`. A product
goes to the GPU if its time there, with that of the bytes that have to cross, is less than on the
host. The rates are measured once for each dtype, at the first product that is large enough for the
measurement to pay.

Products on the GPU have the dtype of the matrix, also inside: no TF32.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg

from ali.blocks import CHUNK, Array, panels
from mpi_workers.failures import Failure
from mpi_workers.matrix import device
from mpi_workers.matrix.device import Device

DEVICE_STRIP = 4096  # columns
GAIN = 0.8  # of the host's time: a product that takes the GPU longer stays on the host
LATENCY_S = 1e-4  # of a product on the GPU
TRIAL = 512  # order of the products that are measured on the host; on the GPU 4 times that
TRIAL_BYTES = 32 << 20  # 32 MiB


class Operand:
    """An array that takes part in several products: it crosses to the GPU once.

    Parameters
    ----------
    array : ndarray
    products : int
        How many, by which the time of its transfer is divided.
    """

    def __init__(self, array: Array, products: int = 1) -> None:
        self.array = array
        self.products = max(1, products)
        self._copy: Any = None

    def crossing_nbytes(self) -> float:
        """Bytes that a product has to wait for."""
        held = self._copy is not None or device.is_kept(self.array)
        return 0.0 if held else self.array.nbytes / self.products

    def on(self, found: Device) -> Any:
        """The array on a device."""
        if self._copy is None:
            copy = found.operand(self.array)
            if self.products == 1:
                return copy
            self._copy = copy
        return self._copy

    def drop(self) -> None:
        """Free the device's memory."""
        self._copy = None


class Rates(NamedTuple):
    """Measured on this rank: operations and bytes per second."""

    host: float
    device: float
    bus: float

    def pays(self, flops: float, nbytes: float) -> bool:
        """Whether the GPU takes less time for a product for which these bytes cross."""
        return LATENCY_S + flops / self.device + nbytes / self.bus < GAIN * flops / self.host


def multiply(
    a: Array | Operand, b: Array | Operand, out: Array | None = None, *, add: int = 0
) -> Array:
    """``a @ b``, in `out` if it is given: ``out = a @ b``, or ``out += add * (a @ b)``.

    Parameters
    ----------
    a, b : ndarray or Operand, shapes (m, k) and (k, n)
        Of the dtype of `out`.
    add : {0, 1, -1}

    Notes
    -----
    If b is the transposed view of a, the product is symmetric to the last bit, and its operand
    crosses once.
    """
    left = a if isinstance(a, Operand) else Operand(a)
    right = b if isinstance(b, Operand) else Operand(b)
    found = device.current()
    if found is not None and found.products and _pays(found, left, right, out if add else None):
        try:
            return _on_device(found, left, right, out, add)
        except Failure as failure:
            left.drop()
            right.drop()
            _say_once(found, failure)
    if add and out is not None:
        _add_on_host(left.array, right.array, out, add)
        return out
    if out is not None:
        return np.matmul(left.array, right.array, out=out)
    return np.asarray(left.array @ right.array)


def subtract_product(x: Array, left: Array, right: Array) -> None:
    """``x -= left @ right``."""
    multiply(left, right, x, add=-1)


def strip_width(rows: int, itemsize: int) -> int:
    """Columns of a product to add at a time: on the host it stays in the cache."""
    cached = max(32, 4 * CHUNK // max(1, rows * itemsize))
    found = device.current()
    return max(cached, DEVICE_STRIP) if found is not None and found.products else cached


def _add_on_host(a: Array, b: Array, out: Array, add: int) -> None:
    if not (out.size and a.size):
        return
    if add == 1 and out.dtype.kind in "fc" and out.flags.f_contiguous:
        (gemm,) = scipy.linalg.get_blas_funcs(("gemm",), (a, b, out))
        gemm(1.0, a, b, 1.0, out, overwrite_c=True)
        return
    for some in panels(out.shape[1], max(32, 4 * CHUNK // (len(out) * out.itemsize))):
        if add == 1:
            out[:, some] += a @ b[:, some]
        else:
            out[:, some] -= a @ b[:, some]


# --- on the GPU ---


def _pays(found: Device, left: Operand, right: Operand, added: Array | None) -> bool:
    a, b = left.array, right.array
    flops = _flops(a, b)
    if flops < found.least_flops or a.dtype != b.dtype or a.dtype.char not in "fdFD":
        return False
    if found.rates_of is None:
        return bool(flops)
    try:
        if a.dtype.char not in found.rates_of:
            found.rates_of[a.dtype.char] = measured(found, a.dtype)
    except Failure as failure:  # no PyTorch, or it cannot use the GPU
        _say_once(found, failure)
        found.products = False
        return False
    nbytes = left.crossing_nbytes() + len(a) * b.shape[1] * a.itemsize
    if not _same_memory(a, b):
        nbytes += right.crossing_nbytes()
    if added is not None:  # a pass over the host's memory
        nbytes += added.nbytes
    rates: Rates = found.rates_of[a.dtype.char]
    return rates.pays(flops, nbytes)


def _flops(a: Array, b: Array) -> float:
    m, k, n = *a.shape, b.shape[1]
    return float((8 if a.dtype.kind == "c" else 2) * m * k * n)


def _same_memory(a: Array, b: Array) -> bool:
    """Whether b is the transposed view of a."""
    return (
        a.ctypes.data == b.ctypes.data and a.shape == b.shape[::-1] and a.strides == b.strides[::-1]
    )


def _on_device(found: Device, left: Operand, right: Operand, out: Array | None, add: int) -> Array:
    a, b = left.array, right.array
    there = out
    if there is None or add:
        there = np.empty((len(a), b.shape[1]), b.dtype, order="F")
    found.store(_product(found, left, right, by_columns=there.flags.f_contiguous), there)
    if out is None or not add:
        return there
    return np.add(out, there, out=out) if add == 1 else np.subtract(out, there, out=out)


def _product(found: Device, left: Operand, right: Operand, *, by_columns: bool) -> Any:
    """The product on the device, in the order in which the host has it: a transfer is one copy."""
    torch = found.torch
    symmetric = _same_memory(left.array, right.array)
    x = left.on(found)
    y = x.mT if symmetric else right.on(found)

    def product() -> Any:
        c = y.mT @ x.mT if by_columns else x @ y
        if symmetric:
            c = torch.tril(c) + torch.tril(c, -1).mT
        return c.mT if by_columns else c

    nbytes = len(left.array) * right.array.shape[1] * left.array.itemsize
    # A user's function may have allowed TF32, by PyTorch's present setting or its older ones, which
    # raise where the present one was used.
    matmul = torch.backends.cuda.matmul
    name, exact = ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else (
        "allow_tf32", False)  # fmt: skip
    before = getattr(matmul, name)
    setattr(matmul, name, exact)
    try:
        return found.with_room(product, "a product", nbytes)
    finally:
        setattr(matmul, name, before)


def _say_once(found: Device, failure: Failure) -> None:
    if not found.said:
        found.said = True
        sys.stderr.write(f"a product was computed on the host: {failure.message}\n")
        sys.stderr.flush()


def measured(found: Device, dtype: np.dtype[Any]) -> Rates:
    """The rates of this rank in a dtype. Raises `Failure` if the device cannot be used."""
    small = np.ones((TRIAL, TRIAL), dtype, order="F")
    large = found.load(np.ones((4 * TRIAL, 4 * TRIAL), dtype, order="F"))
    moved = np.ones(TRIAL_BYTES // dtype.itemsize, dtype)

    def host() -> None:
        small @ small

    def on_device() -> None:
        found.store((large @ large)[:1, :1], small[:1, :1])

    def bus() -> None:
        found.load(moved)

    return Rates(
        _flops(small, small) / _shortest(host),
        64 * _flops(small, small) / _shortest(on_device),
        moved.nbytes / _shortest(bus),
    )


def _shortest(action: Callable[[], None]) -> float:
    """Seconds, without those of the first time."""
    action()
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return max(1e-9, min(times))
