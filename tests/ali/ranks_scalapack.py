"""Rank side of test_scalapack.py: norms and mixed dtypes, refused calls, failures, communicators.

That results are right is in ranks_routines.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from ali import scalapack
from ali.loader import symbol_file
from ali.native.host import ignored_errors_raised
from ali.scalapack import spectra
from ali.scalapack.cyclic import Call
from ali.scalapack.native import grid_of
from mpi_workers.failures import Failure
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_linalg_checks import FLOATS, Array, Checks, values
from tests.ali.ranks_routines import blocks
from tests.support.ranks_shared import failure_of

COMMUNICATOR = 10  # what Cblacs_get is asked for


def refused(check: Checks) -> list[Any]:
    """Calls that are refused before any message, and failures that only all ranks together see."""
    ctx = check.ctx
    tall, other = ctx.zeros((4, 3), "float64"), ctx.zeros((5, 5), "float32")
    says = check.refusals(scalapack, alone=True)
    says("matmul", "ShapeError: A is 4 x 3", tall, tall)
    says("matmul", "ShapeError: A is 4 x 3 (T) and B is 5 x 5 (N)", tall, other, "T")
    says("matmul", "BadArgumentError: transpose_a", tall, tall, "H")
    says("solve", "ShapeError: A is 4 x 3", tall, tall)
    says("solve", "ShapeError: A is 5 x 5 and B is 4 x 3", other, tall)
    says("cholesky", "ShapeError: A is 4 x 3", tall)
    says("eigh", "ShapeError: A is 4 x 3", tall)
    says("condest", "ShapeError: A is 4 x 3", tall)
    says("condest", "BadArgumentError: ord must be one of 1, inf; got 'fro'", other, "fro")
    says("lstsq", "ShapeError: A is 4 x 3", tall, other)
    says("norm", "BadArgumentError: ord must be one of fro, 1, inf, max; got '2'", tall, "2")
    says("svd", "ShapeError: a matrix is 0 x 3", ctx.zeros((0, 3), "float64"))
    late = check.refusals(scalapack)
    bad = np.eye(12)
    bad[11, 10] = np.inf
    infinite, good = check.distribute(bad), check.distribute(np.eye(12) * 2)
    low = check.distribute(np.tile(values((30, 6), "float64"), 2))
    nine = check.distribute(np.ones((9, 1)))
    singular = check.distribute(np.diag([1.0] * 8 + [0.0]))
    for way in (False, True):
        with blocks(way):
            late("solve", "LinAlgError: A is singular: pivot 9 of 9 is zero", singular, nine)
            indefinite = check.distribute(np.diag([1.0, 1.0, -1.0]))
            late("cholesky", "LinAlgError: A is not positive definite: its leading 3 x 3 part",
                 indefinite)  # fmt: skip
            late("lstsq", "LinAlgError: A (30 x 12) does not have full rank", low, low)
            for name in ("lu", "qr", "lq", "svd", "svdvals", "cholesky", "eigh", "condest"):
                late(name, "LinAlgError: A contains NaN or infinity", infinite)
            late("solve", "LinAlgError: B contains NaN or infinity", good, infinite)
            late("lstsq", "LinAlgError: A contains NaN or infinity", infinite, good)
    return says.found + late.found


def renewal(check: Checks) -> None:
    a = values((20, 20), "float64")
    A = check.distribute(a)

    def multiply() -> None:
        check.close(scalapack.matmul(check.ctx, A, A), a @ a, "float64", "matmul", 100)

    check.grid_outlives_failed_calls(multiply)


def exhausted(check: Checks) -> str:
    """Without enough communicators of MPI a call fails, which BLACS would end the ranks for."""
    check.gang.renew()
    taken = []
    with contextlib.suppress(MPI.Exception):
        while True:
            taken.append(check.gang.world.Dup())
    for comm in taken[:8]:
        comm.Free()
    said = failure_of(grid_of, check.ctx)
    for comm in taken[8:]:
        comm.Free()
    grid_of(check.ctx)
    return said


def ignored(check: Checks) -> str:
    """The error of a native call that ignores an error on a communicator of BLACS' own."""
    ctx, gang = check.ctx, check.gang
    native = ctx.state["native"]
    handle = ctypes.c_int()
    native.blacs("Cblacs_get", grid_of(ctx).context, COMMUNICATOR, ctypes.byref(handle))
    comm = native.blacs("Cblacs2sys_handle", handle.value)
    mpi = ctypes.CDLL(symbol_file(ctypes.CDLL(MPI.__file__), "MPI_Send"))

    def send() -> None:
        with ignored_errors_raised(gang, "scalapack: p?gemm"):
            mpi.MPI_Send(None, 0, MPI._handleof(MPI.BYTE), gang.size, 0, comm)

    return failure_of(send)


def loaded(gang: GangView) -> Checks:
    check = Checks(gang)
    scalapack.load(check.ctx.state, None)
    return check


ORDERS = {"fro": "fro", "1": 1, "inf": np.inf}


def numbers(check: Checks) -> None:
    """Products of mixed dtypes, norms of all kinds, condition, and descriptors of blocks."""
    ctx = check.ctx
    for one, two in itertools.product(
        (*FLOATS, "int32", "bool"), ("float64", "complex64", "int64", "bool")
    ):
        a, b = values((7, 5), one), values((5, 9), two, 1)
        C = scalapack.matmul(ctx, check.distribute(a), check.distribute(b))
        kind = np.result_type(*(np.float64 if x.dtype.kind in "bi" else x.dtype for x in (a, b)))
        check.close(C, a.astype(kind) @ b, kind, ["matmul", one, two], 400)
    for shape, dtype in itertools.product([(13, 7), (1, 1), (2, 50)], (*FLOATS, "int32", "bool")):
        a = values(shape, dtype)
        A, used = check.distribute(a), dtype if dtype in FLOATS else "float64"
        exact = {k: np.linalg.norm(a.astype("complex128"), o) for k, o in ORDERS.items()}
        for kind, norm in (exact | {"max": np.abs(a).max()}).items():
            away, size = abs(scalapack.norm(ctx, A, kind) - float(norm)), float(norm)
            check.true(away <= 60 * np.finfo(used).eps * size, ["norm", kind, shape, dtype])
    ones = check.distribute(np.ones((12, 12)))
    check.true(scalapack.condest(ctx, ones) == np.inf, "condest of a singular matrix")
    a = values((30, 20), "float64")
    large = scalapack.norm(ctx, check.distribute(a * 1e300)) / 1e300
    check.true(abs(large / np.linalg.norm(a) - 1) < 1e-13, "no overflow")
    a[29, 19] = np.nan
    check.true(np.isnan(scalapack.norm(ctx, check.distribute(a), "max")), "norm of NaN")
    for n, dtype, copied in itertools.product((1, 2, 16, 45), FLOATS, (False, True)):
        a = values((n, n), dtype)
        with blocks(copied):
            found = scalapack.condest(ctx, check.distribute(a), "inf")
        found /= float(np.linalg.cond(a.astype("complex128"), np.inf))
        check.true(0.2 < found < 1.01, ["condest", n, dtype, found])
    for size in (2, 8, 50):
        A = check.distribute(values((37, 11), "float64"), f"BLOCK_CYCLIC:{size}")
        own = Call(ctx, "lu", "getrf", A).operand(A)
        same = np.array_equal(own.desc, A.descriptor(grid_of(ctx).context))
        check.true(own.matrix is A and same, ["the descriptor", size])


def everything(gang: GangView) -> dict[str, Any]:
    try:
        scalapack.load({}, None)
    except Failure as failure:
        return {"missing": failure.message}
    return Checks.results_of(gang, numbers, refused, renewal, exhausted, ignored, make=loaded)


SLACK = 2.0  # LAPACK neglects numbers of up to 64 roundings


def bidiagonal(n: int) -> Iterator[tuple[str, Array, Array]]:
    """Any values; clustered, multiple, zero and graded ones; matrices that fall into parts."""
    rng = np.random.default_rng(n)
    any_d, any_e = rng.standard_normal(n), rng.standard_normal(max(0, n - 1))
    glued = np.ones(len(any_e))
    glued[20::21] = 1e-14
    yield "any", any_d, any_e
    yield "large", 1e300 * any_d, 1e300 * any_e
    yield "small", 1e-300 * any_d, 1e-300 * any_e
    yield "ones", np.ones(n), np.ones(len(any_e))
    yield "diagonal", any_d, np.zeros(len(any_e))
    yield "no diagonal", np.zeros(n), any_e
    yield "identity", np.ones(n), np.full(len(any_e), 1e-20)
    yield "graded", 10.0 ** -np.arange(n), 10.0 ** -np.arange(len(any_e))
    yield "glued", np.abs(np.arange(n) % 21 - 10.0), glued
    yield "zero", np.zeros(n), np.zeros(len(any_e))


def bidiagonals(gang: GangView) -> list[Any]:
    """Singular vectors by divide and conquer, without ScaLAPACK."""
    check = Checks(gang)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectra, "WIDTH", 11)
        for n, leaf in ((1, 3), (3, 3), (4, 3), (12, 5), (51, 5), (90, 48), (75, 7)):
            patch.setattr(spectra, "LEAF", leaf)
            for name, d, e in bidiagonal(n):
                what = [n, leaf, name]
                values, U, V = spectra.bidiagonal_svd(check.ctx, d, e)
                u, v = check.whole(U), check.whole(V)
                b = np.diag(d) + np.diag(e, 1)
                exact = np.linalg.svd(b, compute_uv=False)
                size = SLACK * float(exact[0])
                check.close(np.sort(values)[::-1], exact, "float64", [*what, "S"], size)
                check.close((u * values) @ v.T, b, "float64", [*what, "U S V^T"], size)
                check.orthonormal(u, [*what, "U"])
                check.orthonormal(v, [*what, "V"])
    return check.result()
