"""Copies of parts on a device: which are made, which are kept. PyTorch's CPU device stands in."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from mpi_workers.local import local_gang
from mpi_workers.matrix.device import fault_of
from tests.support import launches
from tests.support.suite import scaled

# Imported in the ranks alone: here it would cost each worker of pytest 500 MB.
pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
RANKS = "tests.mpi_workers.matrix.ranks_device:"


@pytest.mark.parametrize("ranks", scaled([3], [1, 2, 3, 4]))
def test_parts_cross_in_every_layout_with_the_copies_that_are_asked_for(ranks: int) -> None:
    for shape in ((17, 11), (3, 2), (1, 5)):
        launches.run(RANKS + "crossing", ranks, shape)


@pytest.mark.parametrize("ranks", scaled([3], [1, 3]))
def test_parts_of_every_dtype_vectors_and_arrays_of_more_axes_cross(ranks: int) -> None:
    launches.run(RANKS + "dtypes", ranks)


def test_what_cannot_cross_is_an_error_that_says_why() -> None:
    launches.run(RANKS + "refused", 3)


def test_a_segment_is_registered_once_and_until_its_pages_are_returned() -> None:
    launches.run(RANKS + "pinned", 3)


@pytest.mark.parametrize("ranks", scaled([3], [1, 4]))
def test_a_copy_is_kept_until_a_call_may_change_the_part(ranks: int) -> None:
    local_gang.run(RANKS + "kept", ranks)  # not shared: it begins calls by their numbers


@pytest.mark.parametrize("alive", [True, False])
def test_an_error_of_cuda_is_a_lost_gpu_if_further_calls_fail(
    alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def synchronize() -> None:
        if not alive:
            raise RuntimeError("CUDA error: unspecified launch failure")

    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    error = RuntimeError("CUDA error: an illegal memory access was encountered\nhint")
    lost = "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert fault_of(error) == ("" if alive else lost)
    assert not fault_of(ValueError("of the user's own"))
