"""Functions that test_local_products.py runs on ranks."""

from __future__ import annotations

from contextlib import redirect_stderr
from io import StringIO

import numpy as np

from ali.interface import Context
from ali.linalg import products
from mpi_workers.matrix import device
from mpi_workers.matrix.device import Device
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_stated import errors
from tests.support.devices import counted


def stated(gang: GangView) -> dict[str, float]:
    """The largest error of each routine whose products are computed on the device."""
    with counted(products=True) as found:
        return {**errors(gang, "linalg"), "copies": float(found.copies)}


def repeated(gang: GangView) -> None:
    """A whole part that nothing changes crosses once, for all products of it."""
    ctx = Context(gang, {})
    whole = np.random.default_rng(1).standard_normal((60, 40))
    A = ctx.new_replicated(whole, "VC_STAR")
    B = ctx.new_replicated(whole.T[:, :7].copy(), "STAR_STAR")
    A.block.steady = True
    with counted(products=True) as found:
        for _ in range(3):
            C = products.product(ctx, A, B, "rows" if gang.size > 1 else "")
            np.testing.assert_allclose(C.local, A.local @ B.local, atol=1e-12)
        assert found.copied_nbytes == A.local.nbytes + 3 * (B.local.nbytes + C.local.nbytes)


def unusable(gang: GangView) -> None:
    """A GPU that PyTorch cannot use is said once, and nothing else changes."""
    ctx = Context(gang, {})
    A = ctx.new_replicated(np.ones((30, 30)), "VC_STAR")
    found = Device()
    found.least_flops = 0
    device.use(found)
    try:
        said = StringIO()
        with redirect_stderr(said):
            for _ in range(2):
                np.testing.assert_array_equal(products.product(ctx, A, A).local, 30)
    finally:
        device.use(None)
    words = "a product was computed on the host: PyTorch"
    assert said.getvalue().count(words) == said.getvalue().count("\n") == 1, said.getvalue()
