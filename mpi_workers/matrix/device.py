"""Copies of a rank's parts on its GPU, made by PyTorch. The host's memory is the truth.

A copy that nothing may have changed is kept with its part's memory (`MemoryBlock.copy`): the part
must be complete, and the call under way must have declared that it does not write to it
(`MemoryBlock.steady`). Anything else is copied whenever it is asked for: nothing tells whether an
array has been written to. MPI is given host memory only.

A segment is registered with CUDA once, so that copies run at the bus's rate.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpi_workers.failures import Failure, text_of
from mpi_workers.matrix.sizes import readable

if TYPE_CHECKING:
    from mpi_workers.matrix.memory import MemoryBlock

T = TypeVar("T")
Tensor = Any  # of torch, which need not be installed
LIBRARIES = ("torch", "cupy")
LEAST_FLOPS = 2e9  # a product that takes the host less than 0.1 s stays there


class Device:
    """The GPU that this rank computes on: the first of those that were reserved for it.

    Parameters
    ----------
    name : str
        As PyTorch names it: ``"cuda"``. ``"cpu"`` stands in for it in tests.
    products : bool
        Whether libraries compute products on it.

    Attributes
    ----------
    copies, copied_nbytes : int
        Copies to and from the device since the rank's start.
    least_flops : float
        Of the products that may be computed on it.
    rates_of : dict, optional
        What products cost, by dtype, once it was measured. None: all of that size go there.
    said : bool
        Whether this rank has said that it computes on the host for lack of memory.
    """

    def __init__(self, name: str = "cuda", *, products: bool = True) -> None:
        self.name = name
        self.products = products
        self.copies = 0
        self.copied_nbytes = 0
        self.least_flops = LEAST_FLOPS
        self.rates_of: dict[str, Any] | None = {}
        self.said = False
        self._kept: weakref.WeakSet[MemoryBlock] = weakref.WeakSet()
        self._torch: Any = None

    @property
    def torch(self) -> Any:
        """PyTorch, once it has opened the device. Raises `Failure` (ResourceError)."""
        if self._torch is None:
            self._torch = self._opened()
        return self._torch

    def _opened(self) -> Any:
        try:
            import torch  # noqa: PLC0415 - optional, and slow
        except ImportError as error:
            raise Failure(
                "ResourceError",
                f"a matrix on a GPU needs PyTorch on the ranks' nodes ({error}): pip install torch",
            ) from None
        try:
            torch.empty(1, device=self.name)
        except Exception as error:  # no driver, one that is too old, no such card
            raise Failure(
                "ResourceError",
                f"PyTorch {torch.__version__} cannot use this rank's GPU: {_first_line(error)}",
            ) from None
        return torch

    # --- copies ---

    def part(self, array: NDArray[Any], block: MemoryBlock) -> Tensor:
        """A copy of the part in a block, of the same shape and strides: a kept one if it is valid.

        Raises
        ------
        Failure
            ResourceError, if the device has too little memory or cannot be used.
        """
        flat, version = block.copy or (None, 0)
        if flat is None or flat._version != version or flat.dtype != self.dtype(array.dtype):
            block.copy = None  # its memory first
            flat = self.load(block.array().view(array.dtype))
            if block.steady:
                block.copy = flat, flat._version
                self._kept.add(block)
        return flat.as_strided(array.shape, [step // array.itemsize for step in array.strides])

    def operand(self, array: NDArray[Any]) -> Tensor:
        """A copy of an array: one that is kept, if the array is a whole part. Raises as `part`."""
        block = block_of(array)
        if block is not None and block.steady and _is_whole(array, block):
            return self.part(array, block)
        return self.load(array)

    def load(self, array: NDArray[Any]) -> Tensor:
        """A copy of an array on the device, column-major if the array is. Raises as `part`."""
        self.pin(array)
        host = self.torch.from_numpy(array if array.flags.writeable else _unlocked(array))
        made = self.with_room(
            lambda: self.torch.empty_like(host, device=self.name), "a copy", array.nbytes
        )
        return self._copied(host, made)

    def store(self, x: Tensor, out: NDArray[Any]) -> None:
        """Copy a tensor's elements into an array."""
        self.pin(out)
        self._copied(x, self.torch.from_numpy(out))

    def _copied(self, source: Tensor, target: Tensor) -> Tensor:
        target.copy_(source.detach())
        self.copies += 1
        self.copied_nbytes += target.numel() * target.element_size()
        return target

    def tensor(self, x: Any) -> Tensor:
        """An array of another library on the device, without a copy."""
        return (x if isinstance(x, self.torch.Tensor) else self.torch.from_dlpack(x)).detach()

    def given(self, x: Tensor, library: str) -> Any:
        """A tensor as an array of a library, without a copy. Raises `Failure`."""
        if library not in LIBRARIES:
            known = ", ".join(LIBRARIES)
            words = f"library={library!r}: arrays on a device are of one of {known}"
            raise Failure("BadArgumentError", words)
        if library == "torch":
            return x
        try:
            import cupy  # noqa: PLC0415 - optional
        except ImportError as error:
            words = f"library='cupy' needs CuPy on the ranks' nodes ({error}): install cupy"
            raise Failure("ResourceError", words) from None
        return cupy.from_dlpack(x)

    def dtype(self, kind: np.dtype[Any]) -> Any:
        """PyTorch's dtype for one of NumPy's."""
        return self.torch.from_numpy(np.empty(0, kind)).dtype

    def numpy_dtype(self, x: Tensor) -> np.dtype[Any]:
        """NumPy's dtype of a tensor's elements. Raises `TypeError` if it has none (bfloat16)."""
        found: np.dtype[Any] = self.torch.empty(0, dtype=x.dtype).numpy().dtype
        return found

    # --- memory ---

    def with_room(self, make: Callable[[], T], what: str, nbytes: int) -> T:
        """The result of `make`; if memory is short, kept copies make room first.

        Raises
        ------
        Failure
            ResourceError, if there is too little memory without them, too.
        """
        try:
            return make()
        except RuntimeError as error:
            if not _is_shortage(error):
                raise
            self.forget()
        try:
            return make()
        except RuntimeError as error:
            if not _is_shortage(error):
                raise
            free, there = self._memory()
            raise Failure(
                "ResourceError",
                f"this rank's GPU has no memory for {what} of {readable(nbytes)}: "
                f"{readable(free)} of {readable(there)} are free. Delete tensors, use more ranks "
                "with a GPU each, or fewer ranks per GPU",
            ) from None

    def _memory(self) -> tuple[int, int]:
        """Free bytes, and all."""
        if self.name == "cpu":
            return 0, 0
        free, there = self.torch.cuda.mem_get_info()
        return free, there

    def forget(self) -> None:
        """Drop the copies that are kept, and return their memory for other ranks too."""
        for block in list(self._kept):
            block.copy = None
        self._kept.clear()
        if self.name != "cpu":
            self.torch.cuda.empty_cache()

    def pin(self, array: NDArray[Any]) -> None:
        """Register the segment that an array is in, if there is one: once, until its release."""
        block = block_of(array)
        segment = None if block is None else block.segment
        if segment is not None and segment.unpin is None:
            segment.unpin = self.registered(segment.memory.address, segment.nbytes)

    def registered(self, address: int, nbytes: int) -> Callable[[], object]:
        """Register memory with CUDA; a function that ends that. Copies work without, but slower."""
        if self.name != "cpu":
            cudart = self.torch.cuda.cudart()
            if int(cudart.cudaHostRegister(address, nbytes, 0)) == 0:
                return lambda: cudart.cudaHostUnregister(address)
            with contextlib.suppress(RuntimeError):  # CUDA reports that error once more
                self.torch.zeros(1, device=self.name)
        return lambda: None


def block_of(array: NDArray[Any]) -> MemoryBlock | None:
    """The block that an array is a view of; None for NumPy's own memory."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if hasattr(base, "segment") else None


def _unlocked(array: NDArray[Any]) -> NDArray[Any]:
    """An array that may be written to, of the same memory: PyTorch warns of others."""
    about = {**array.__array_interface__, "data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=about))


def _is_whole(array: NDArray[Any], block: MemoryBlock) -> bool:
    return array.nbytes == block.nbytes and array.flags.forc


def is_kept(array: NDArray[Any]) -> bool:
    """Whether an array is a whole part, or its transpose, of which a copy is kept."""
    block = block_of(array)
    return block is not None and block.copy is not None and _is_whole(array, block)


def _is_shortage(error: RuntimeError) -> bool:
    """Whether CUDA or cuBLAS got no memory; `torch.OutOfMemoryError` is only one of the ways."""
    return "out of memory" in str(error) or "ALLOC_FAILED" in str(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {text_of(error)}".split("\n")[0]


# --- the device of this rank ---

_device: Device | None = None


def use(device: Device | None) -> None:
    """Let this rank compute on a device, or on none."""
    global _device
    _device = device


def current() -> Device | None:
    """The device of this rank; None if no GPU was reserved for it."""
    return _device


def required() -> Device:
    """The device of this rank. Raises `Failure` (ResourceError) if no GPU was reserved for it."""
    if _device is None:
        raise Failure(
            "ResourceError",
            "no GPU is reserved for this rank: start the gang with gpus_per_worker=1, or a "
            "fraction of it",
        )
    return _device


def copied_nbytes() -> int:
    """Bytes that have crossed to and from the device."""
    return 0 if _device is None else _device.copied_nbytes


def fault_of(error: BaseException) -> str:
    """The cause, if an error has left this process without its GPU for good; else empty.

    After an Xid error, or an invalid access in a kernel, each further call of CUDA fails.
    """
    torch = sys.modules.get("torch")
    if torch is None or "CUDA" not in text_of(error) or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception:
        return _first_line(error)
    return ""
