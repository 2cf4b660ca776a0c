"""PyTorch's CPU device in place of a rank's GPU, by the same code: its copies are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpi_workers.matrix import device
from mpi_workers.matrix.device import Device


class CountingDevice(Device):
    """The CPU, with a record of the memory that is registered, and a limit of its own memory."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.pinned: list[int] = []
        self.unpinned: list[int] = []
        self.full = 0  # how many allocations fail next

    def registered(self, address: int, nbytes: int) -> Callable[[], object]:
        self.pinned.append(address)
        return lambda: self.unpinned.append(address)

    def with_room(self, make: Callable[[], Any], what: str, nbytes: int) -> Any:
        def limited() -> Any:
            if self.full:
                self.full -= 1
                raise self.torch.OutOfMemoryError("CUDA out of memory")
            return make()

        return super().with_room(limited, what, nbytes)


@contextmanager
def counted(*, products: bool = False) -> Iterator[CountingDevice]:
    """Let this rank use it; with `products` for all products, however small."""
    found = CountingDevice()
    found.least_flops, found.rates_of = (0.0, None) if products else (found.least_flops, {})
    device.use(found)
    try:
        yield found
    finally:
        device.use(None)
