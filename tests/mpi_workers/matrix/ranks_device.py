"""Functions that test_device.py runs on the ranks, and the routines that they call as commands."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from ali import registry
from ali.interface import Context, routine
from ali.run import Programs
from mpi_workers.failures import Failure
from mpi_workers.matrix import device
from mpi_workers.matrix.device import Device
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import LAYOUTS, selector, taken
from mpi_workers.rank.commands import RankCommands
from mpi_workers.rank.gang_view import GangView
from tests.support.devices import counted


def _elements(shape: tuple[int, int], dtype: str) -> np.ndarray[Any, Any]:
    return (np.arange(shape[0] * shape[1]).reshape(shape) % 100).astype(dtype)


def crossing(gang: GangView, shape: tuple[int, int]) -> None:
    """A part crosses to the device and back in every layout, by no other copies than asked for."""
    ctx = Context(gang, {})
    with counted() as found:
        for layout in (*LAYOUTS, "BLOCK", "BLOCK_CYCLIC:3"):
            whole = _elements((shape[0], shape[1]), "float64")
            A = ctx.new_replicated(whole, layout)
            before = found.copies, found.copied_nbytes
            x = A.on_device()
            assert found.copies == before[0] + 1
            assert found.copied_nbytes == before[1] + A.local.nbytes
            np.testing.assert_array_equal(x.numpy(), A.local)
            assert x.numel() == 0 or x.stride() == tuple(s // 8 for s in A.local.strides)
            assert not np.shares_memory(x.numpy(), A.local)
            with A.changed_on_device() as y:
                y *= 2
            np.testing.assert_array_equal(A.local, 2 * x.numpy())
            assert found.copies == before[0] + 3
            B = ctx.from_device(y, layout)
            assert (B.shape, B.layout, B.dtype) == (A.shape, layout, A.dtype)
            mine = taken(2 * whole, selector(B.rows), selector(B.cols))
            np.testing.assert_array_equal(B.local, mine)
            assert found.copies == before[0] + 3 + bool(B.stored.size)


def dtypes(gang: GangView) -> None:
    ctx = Context(gang, {})
    with counted():
        for dtype in DTYPES:
            A = ctx.new_replicated(_elements((5, 3), dtype), "VC_STAR")
            B = ctx.from_device(A.on_device())
            assert B.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(B.local, A.local)
        v = ctx.from_device(torch.ones(len(range(gang.rank, 7, gang.size)), requires_grad=True))
        assert v.array_shape == (7,)
        cube = ctx.empty((6, 2, 5), "int16")
        cube.local[...] = np.arange(cube.local.size).reshape(cube.local.shape)
        np.testing.assert_array_equal(cube.on_device().numpy(), cube.local)


def refused(gang: GangView) -> None:
    """Parts that make no matrix are refused on all ranks."""
    ctx = Context(gang, {})
    A = ctx.zeros((4, 4), "float32")
    with pytest.raises(Failure, match="no GPU is reserved for this rank: start the gang with"):
        A.on_device()
    device.use(Device("cuda"))
    with pytest.raises(Failure, match=r"PyTorch .* cannot use this rank's GPU: RuntimeError: .*"):
        A.on_device()
    device.use(Device("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # as Python sees a module that is not there
        with pytest.raises(Failure, match=r"needs PyTorch on the ranks' nodes .*: pip "):
            A.on_device()
    with counted() as found:
        with pytest.raises(Failure, match="library='jax': arrays on a device are of one of torch"):
            A.on_device("jax")
        with pytest.raises(Failure, match="library='cupy' needs CuPy on the ranks' nodes"):
            A.on_device("cupy")
        for x, words in (
            (torch.zeros(2 + gang.rank * 3, 2), "parts of these shapes make no matrix in VC_STAR"),
            (torch.zeros(2, 2, 2), "must have one dtype, and 1 axis or 2; they have float32 and 3"),
            (torch.zeros(2, 2, dtype=[torch.float32, torch.int64][gang.rank % 2]), "one dtype"),
            (torch.zeros(2, 2, dtype=torch.bfloat16), "BFloat16"),
        ):
            with pytest.raises(Failure, match=words):
                ctx.from_device(x)
        with pytest.raises(Failure, match="layout"):
            ctx.from_device(torch.zeros(2, 2), "NO_SUCH")
        B = ctx.zeros((1 << 12, 64), "float64")
        B.block.steady = True
        B.on_device()
        found.full = 1  # memory is short: the copy that is kept makes room
        A.on_device()
        assert B.block.copy is None
        found.full = 2
        with pytest.raises(Failure, match=r"no memory for a copy of .* Delete tensors, use more"):
            B.on_device()
        np.testing.assert_array_equal(B.on_device().numpy(), 0)


def pinned(gang: GangView) -> None:
    """Memory is registered once, also when another matrix has it, until it is released."""
    ctx = Context(gang, {})
    with counted() as found:
        A = ctx.zeros((1 << 16, gang.size), "float64", "STAR_STAR")
        address = A.local.ctypes.data
        for _ in range(3):
            A.on_device()
        del A
        A = ctx.zeros((1 << 16, gang.size), "float64", "STAR_STAR")
        assert A.local.ctypes.data == address
        ctx.from_device(A.on_device(), "STAR_STAR")
        assert found.pinned.count(address) == 1
        assert not found.unpinned
        del A
        assert gang.storage.pool.trim() > 0
        assert sorted(found.unpinned) == sorted(found.pinned)


# --- commands ---


@routine("copies", writes=())
def read(ctx: Context, A: DistMatrix) -> int:
    """Copies that two uses of A take."""
    found = device.required()
    before = found.copies
    assert (A.on_device().numpy() == A.local).all()
    assert (A.on_device().numpy() == A.local).all()
    return found.copies - before


@routine("copies")
def undeclared(ctx: Context, A: DistMatrix) -> int:
    before = device.required().copies
    A.local[...] += 1
    assert (A.on_device().numpy() == A.local).all()
    A.local[...] += 1
    assert (A.on_device().numpy() == A.local).all()
    return device.required().copies - before


@routine(writes=("A",))
def changed(ctx: Context, A: DistMatrix) -> None:
    with A.changed_on_device() as x:
        x += 1


@routine(writes=())
def spoiled(ctx: Context, A: DistMatrix) -> None:
    A.on_device().T[0] = 77


@routine(writes=())
def wrongly_declared(ctx: Context, A: DistMatrix) -> None:
    with A.changed_on_device():
        pass


@routine("B", writes=())
def made(ctx: Context) -> DistMatrix:
    return ctx.new_replicated(np.arange(12.0).reshape(6, 2), "VC_STAR")


def kept(gang: GangView) -> None:
    """A copy is kept from call to call until one may change the matrix, or it is freed."""
    commands = RankCommands(gang, gang.storage, registry.load, Programs())
    number = iter(range(2, 1000))  # the first one is the test's own

    def call(name: str, matrix: int | None = 1, **more: Any) -> Any:
        given = {} if matrix is None else {"A": {"matrix": matrix}}
        body = {"op": "call", "seq": next(number), "library": "l", "routine": name}
        reply = commands.execute({**body, "arguments": given, "first": 1, **more})
        return reply.get("value", [None])[0] if name in ("read", "undeclared") else None

    def read_copies(**more: Any) -> int:
        return gang.comm.bcast(call("read", changes=[], **more))  # type: ignore[no-any-return]

    with counted() as found:
        commands.execute({"op": "load", "seq": next(number), "library": "l", "path": __file__})
        call("made", None)
        assert read_copies() == 1
        assert read_copies() == 0
        assert gang.comm.bcast(call("undeclared")) == 2  # all may change what is not declared
        assert read_copies() == 1
        call("changed", changes=[1])
        assert read_copies() == 1
        call("spoiled", changes=[])  # which is not allowed, but noticed
        assert read_copies() == 1
        with pytest.raises(Failure, match="has not declared that it writes to it"):
            call("wrongly_declared", changes=[])
        assert read_copies() == 0
        assert len(found._kept) == 1
        commands.execute({"op": "free", "seq": next(number), "unreferenced": [1]})
        assert not len(found._kept)
