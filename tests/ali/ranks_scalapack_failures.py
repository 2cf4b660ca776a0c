"""Rank side of test_scalapack.py: refused calls, failures and the communicator that follows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

from ali import scalapack
from ali.interface import Context
from ali.loader import symbol_file
from ali.native.host import ignored_errors_raised
from ali.scalapack.native import grid_of
from mpi_workers.failures import Failure
from mpi_workers.rank.gang import Gang
from tests.ali.ranks_linalg_checks import failures_on_rank_0
from tests.ali.ranks_scalapack_checks import Checks, blocks, values

COMMUNICATOR = 10  # what Cblacs_get is asked for


def refusals(gang: Gang) -> dict[str, str]:
    """Calls that are refused before any message: rank 0 makes them alone."""
    state: dict[str, Any] = {}
    scalapack.load(state, None)
    ctx = Context(gang, state)
    tall, other = ctx.zeros((4, 3), "float64"), ctx.zeros((5, 5), "float32")
    empty = ctx.zeros((0, 3), "float64")
    calls: dict[str, Callable[[], Any]] = {
        "matmul": lambda: scalapack.matmul(ctx, tall, tall),
        "matmul transposed": lambda: scalapack.matmul(ctx, tall, other, "T"),
        "matmul op": lambda: scalapack.matmul(ctx, tall, tall, "H"),
        "solve": lambda: scalapack.solve(ctx, tall, tall),
        "solve rows": lambda: scalapack.solve(ctx, other, tall),
        "cholesky": lambda: scalapack.cholesky(ctx, tall),
        "eigh": lambda: scalapack.eigh(ctx, tall),
        "condest": lambda: scalapack.condest(ctx, tall),
        "condest kind": lambda: scalapack.condest(ctx, other, "fro"),
        "lstsq": lambda: scalapack.lstsq(ctx, tall, other),
        "norm": lambda: scalapack.norm(ctx, tall, "2"),
        "svd of nothing": lambda: scalapack.svd(ctx, empty),
    }
    return failures_on_rank_0(gang, calls)


def troubles(gang: Gang) -> dict[str, list[str]]:
    """Failures that ScaLAPACK finds, or that only all ranks together see."""
    check = Checks(gang)
    ctx = check.ctx
    ones = check.distribution(np.ones((12, 12)))
    bad = np.eye(12)
    bad[11, 10] = np.inf
    infinite, good = check.distribution(bad), check.distribution(np.eye(12) * 2)
    low = check.distribution(values((30, 12), "float64", "low rank"))
    calls: dict[str, Callable[[], Any]] = {
        "singular": lambda: scalapack.solve(
            ctx, check.distribution(np.diag([1.0] * 8 + [0.0])), nine
        ),
        "not definite": lambda: scalapack.cholesky(
            ctx, check.distribution(np.diag([1.0, 1.0, -1.0]))
        ),
        "not of full rank": lambda: scalapack.lstsq(ctx, low, low),
    }
    nine = check.distribution(np.ones((9, 1)))
    for name in ("lu", "qr", "lq", "svd", "svdvals", "cholesky", "eigh", "condest"):
        calls[name] = partial(getattr(scalapack, name), ctx, infinite)
    calls["solve"] = lambda: scalapack.solve(ctx, good, infinite)
    calls["lstsq"] = lambda: scalapack.lstsq(ctx, infinite, good)
    found = {}
    for way, (name, call) in itertools.product(("lies", "blocks"), calls.items()):
        said = "nothing"
        with blocks(way):
            try:
                call()
            except Failure as failure:
                said = f"{failure.kind}: {failure.message}"
        found[f"{name}, {way}"] = list(ctx.comm.allgather(said))
    found["condest of a singular matrix"] = [str(scalapack.condest(ctx, ones))]
    return found


def renewal(gang: Gang) -> list[Any]:
    """After a failed call the gang has another communicator: the grid follows."""
    check = Checks(gang)
    grids = []
    a = values((20, 20), "float64")
    A = check.distribution(a)
    for _ in range(3):
        check.product(a @ a, check.whole(scalapack.matmul(check.ctx, A, A)), what="matmul")
        grids.append(grid_of(check.ctx))
        check.true(grids[-1] is grid_of(check.ctx), "one grid per communicator")
        gang.renew()
    check.true(len({id(g) for g in grids}) == 3, "a grid for each communicator")
    return check.result()


def ignored(gang: Gang) -> str:
    """The error of a native call that ignores an error on a communicator of BLACS' own."""
    ctx = Checks(gang).ctx
    native = ctx.state["native"]
    handle = ctypes.c_int()
    native.blacs("Cblacs_get", grid_of(ctx).context, COMMUNICATOR, ctypes.byref(handle))
    comm = native.blacs("Cblacs2sys_handle", handle.value)
    mpi = ctypes.CDLL(symbol_file(ctypes.CDLL(MPI.__file__), "MPI_Send"))
    try:
        with ignored_errors_raised(gang, "scalapack: p?gemm"):
            mpi.MPI_Send(None, 0, MPI._handleof(MPI.BYTE), gang.size, 0, comm)
    except Failure as failure:
        return f"{failure.kind}: {failure.message}"
    return "nothing"
