"""Products on a rank's GPU, by PyTorch's CPU device in its place: results, errors and copies."""

from __future__ import annotations

import itertools
import operator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from ali.linalg.local_products import Operand, Rates, measured, multiply, subtract_product
from mpi_workers.matrix.device import Device
from tests.ali.test_stated import EPS, stated
from tests.support import launches
from tests.support.devices import counted
from tests.support.suite import scaled

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
FLOATS = ("float32", "float64", "complex64", "complex128")
RANKS = "tests.ali.ranks_local_products:"
# The routines that are built on products.
BUILT = ("cholesky", "eigh", "gram", "inv", "lstsq", "matmul", "polar", "qr", "solve",
         "solve_triangular", "svd", "truncated_svd")  # fmt: skip


def numbers(shape: tuple[int, int], dtype: str, order: Any = "F") -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    found = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
    return np.asarray(found if dtype.startswith("c") else found.real, dtype, order)


@pytest.mark.parametrize("dtype", FLOATS)
def test_products_are_those_of_the_host(dtype: str) -> None:
    for a_order, b_order, c_order, add in itertools.product("CF", "CF", "CF", (0, 1, -1)):
        a, b = numbers((31, 20), dtype, a_order), numbers((20, 17), dtype, b_order)
        whole = numbers((40, 30), dtype, c_order)
        for out in (whole[:31, :17], whole[5:36, 3:20], np.array(whole[:31, :17], order=c_order)):
            exact = (out if add else 0 * out) + (add or 1) * (a @ b)
            with counted(products=True) as found:
                assert multiply(a, b, out, add=add) is out
                assert found.copies == 3
                assert found.copied_nbytes == a.nbytes + b.nbytes + out.nbytes
            np.testing.assert_allclose(out, exact, rtol=1e3 * np.finfo(dtype).eps, atol=1e-4)


def test_squares_are_symmetric_and_cross_once() -> None:
    a = numbers((50, 30), "float32")
    a.flags.writeable = False  # as those of a call that declares not to change them
    with counted(products=True) as found:
        square = multiply(a.T, a)
        assert found.copied_nbytes == a.nbytes + square.nbytes
    assert np.array_equal(square, square.T)
    np.testing.assert_allclose(square, a.T @ a, rtol=1e-4, atol=1e-4)


def test_an_operand_of_many_products_crosses_once() -> None:
    a, b = numbers((30, 30), "float64"), numbers((30, 30), "float64")
    with counted(products=True) as found:
        left = Operand(a, 3)
        for some in (slice(0, 10), slice(10, 20), slice(20, 30)):
            np.testing.assert_allclose(multiply(left, b[:, some]), a @ b[:, some])
        assert found.copied_nbytes == 3 * a.nbytes
        multiply(b[:, :5].T, left)  # also on the right
        assert found.copied_nbytes == 3 * a.nbytes + 2 * b[:, :5].nbytes


def test_what_is_small_or_no_floating_point_number_stays_on_the_host() -> None:
    with counted() as found:
        multiply(numbers((30, 30), "float64"), numbers((30, 30), "float64"))
    with counted(products=True) as also:
        multiply(np.ones((30, 30), int), np.ones((30, 30), int))
        multiply(np.ones((0, 30)), np.ones((30, 30)))
        subtract_product(np.ones((3, 0)), np.ones((3, 2)), np.ones((2, 0)))
    assert (found.copies, also.copies) == (0, 0)


def test_without_memory_the_host_computes_and_it_is_said_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    a = numbers((30, 30), "float64")
    left, c = Operand(a, 9), numbers((30, 30), "float64")
    with counted(products=True) as found:
        multiply(left, a)
        for _ in range(2):
            found.full = 2  # also after kept copies were dropped
            exact = c - a @ a
            subtract_product(c, left.array, a)
            np.testing.assert_array_equal(c, exact)
        found.full = 1
        multiply(left, a)
    said = capsys.readouterr().err
    assert said.count("a product was computed on the host: this rank's GPU has no memory") == 1
    assert said.count("\n") == 1


def test_a_users_choice_of_less_precision_does_not_count() -> None:
    import torch  # noqa: PLC0415 - 2 s in each process that collects this file

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with counted(products=True):
            multiply(numbers((9, 9), "float32"), numbers((9, 9), "float32"))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("where", ["backends", "backends.cuda.matmul"])
def test_a_users_choice_by_the_present_setting_does_not_count_either(where: str) -> None:
    """After it, PyTorch refuses to tell the older setting."""
    import torch  # noqa: PLC0415

    place = operator.attrgetter(where)(torch)
    if not hasattr(place, "fp32_precision"):
        pytest.skip(f"this PyTorch has no torch.{where}.fp32_precision")
    before, matmul = place.fp32_precision, torch.backends.cuda.matmul
    place.fp32_precision = "tf32"
    try:
        chosen = matmul.fp32_precision
        with counted(products=True):
            multiply(numbers((9, 9), "float32"), numbers((9, 9), "float32"))
        assert matmul.fp32_precision == chosen
    finally:
        place.fp32_precision = before


def test_the_gpu_gets_what_it_does_faster_transfers_included() -> None:
    rates = Rates(host=5e10, device=3e13, bus=2e10)
    n = 4096.0
    assert rates.pays(2 * n**3, 3 * 8 * n**2)
    assert not rates.pays(2 * n**2, 8 * n**2)  # of a matrix by a vector
    assert rates.pays(2 * n**2 * 64, 0)  # the matrix is there
    assert not Rates(host=1e12, device=5e11, bus=2e10).pays(2 * n**3, 0)  # a card for games
    assert all(rate > 0 for rate in measured(Device("cpu"), np.dtype("float64")))


@pytest.mark.parametrize("ranks", scaled([3], [1, 3]))
def test_errors_are_the_stated_ones(ranks: int) -> None:
    found = launches.run(RANKS + "stated", ranks, timeout=250)
    assert found.pop("copies") > 100
    for name in BUILT:
        limit, unit, _ = stated("linalg", name)
        assert found[name] * (EPS if unit == "times" else 1.0) <= limit, name


@pytest.mark.parametrize("ranks", scaled([2], [1, 2]))
def test_a_part_that_is_kept_crosses_once(ranks: int) -> None:
    launches.run(RANKS + "repeated", ranks)


def test_a_gpu_that_cannot_be_used_is_said_once() -> None:
    launches.run(RANKS + "unusable", 1)
