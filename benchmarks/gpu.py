"""A rank's GPU: copies against the bus, products against PyTorch and the host's cores.

``python -m benchmarks.gpu`` needs a GPU, PyTorch and MPI, and neither Ray nor a network; less than
five minutes. It first checks every path on small matrices. ``--save`` writes the table into
``results/gpu.md``; ``--device cpu --sizes 256`` runs the same code without a GPU: no figures.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ali.interface import Context
from ali.linalg import gram, matmul, truncated_svd
from benchmarks.harness import RESULTS, Report, Row, timed, write_part
from mpi_workers.local import local_gang
from mpi_workers.matrix import device
from mpi_workers.matrix.device import Device
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.rank.gang_view import GangView

SIZES = (4096, 8192, 16384)
COPIES, PRODUCTS, TORCH = 0.8, 10.0, 0.6  # aims: of torch's copies; x the host; of torch's rate
ROUNDS = 3
RANK = 20  # of the truncated SVD
LIMIT_S = 280.0
CORES = min(16, len(os.sched_getaffinity(0)))
Shown = list[Any]  # the fields of a `Row`


# --- on a rank ---


def best_s(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The shortest time of an action that waits for the GPU; the first time is not counted."""
    if rounds > 1:
        action()
    return min(timed(action) for _ in range(rounds))


def paths(gang: GangView, name: str) -> dict[str, str]:
    """Use every path on small matrices, and compare with NumPy; the names of card and driver."""
    found, ctx = Device(name), Context(gang, {})
    found.least_flops, found.rates_of = 0.0, None
    device.use(found)
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float64", "complex64", "complex128"):
        a, b = (rng.standard_normal((300, 300)).astype(dtype) for _ in range(2))
        A, B = ctx.new_replicated(a), ctx.new_replicated(b)
        near = {"rtol": 1e3 * np.finfo(dtype).eps, "atol": 1e4 * np.finfo(dtype).eps}
        copies = found.copies
        np.testing.assert_array_equal(A.on_device().cpu().numpy(), a)
        assert A.on_device().stride() == (1, 300)
        np.testing.assert_array_equal(ctx.from_device(A.on_device()).local, a)
        with B.changed_on_device() as x:
            x += 1
        np.testing.assert_allclose(B.local, b + 1, **near)
        assert found.copies == copies + 6
        np.testing.assert_allclose(matmul(ctx, A, B).local, a @ (b + 1), **near)
        np.testing.assert_allclose(gram(ctx, A).local, a.conj().T @ a, **near)
        values = truncated_svd(ctx, A, 5, method="randomized", power_iterations=8)[0]
        exact = np.linalg.svd(a, compute_uv=False)[:5]
        np.testing.assert_allclose(values.local[:, 0], exact, rtol=0.02)
        A.block.steady = True  # as in a call that does not change it
        A.on_device()
        copies = found.copies
        A.on_device()
        assert found.copies == copies
    try:
        x = found.with_room(lambda: found.torch.empty(1 << 60, device=name), "too much", 1 << 60)
        raise AssertionError(f"{x.shape} elements fit")
    except Exception as error:
        words = str(error)
        assert name == "cpu" or "no memory for too much" in words, words
    if name == "cpu":
        return {"card": "none: PyTorch's CPU stands in", "torch": found.torch.__version__}
    about = found.torch.cuda.get_device_properties(0)
    return {
        "card": f"{about.name}, {about.total_memory >> 30} GiB",
        "torch": f"{found.torch.__version__} with CUDA {found.torch.version.cuda}",
        "registered": str(A.block.segment.unpin is not None),
    }


def measured(gang: GangView, name: str, sizes: list[int], cores: int) -> list[Shown]:
    """All rows of the table."""
    ctx, found = Context(gang, {}), Device(name)
    rows = []
    with threadpool_limits(cores):
        rows += _copies(ctx, found, sizes[-1])
        for dtype in ("float64", "float32"):
            for n in sizes:
                A, B = (_random(ctx, n, n, dtype, seed) for seed in (1, 2))
                rows += _against(ctx, found, f"matmul, n = {n}, {dtype}", matmul, A, B)
                rows += _against(ctx, found, f"gram, n = {n}, {dtype}", gram, A)
                del A, B
        A = _random(ctx, 8 * sizes[-1], max(64, sizes[-1] // 8), "float64", 3)

        def svd(ctx: Context, A: DistMatrix) -> object:
            return truncated_svd(ctx, A, RANK, method="randomized")

        m, n = A.shape
        what = f"randomized SVD, rank {RANK}, {m} x {n}, float64"
        rows += _against(ctx, found, what, svd, A)
    return rows


def _random(ctx: Context, m: int, n: int, dtype: str, seed: int) -> DistMatrix:
    A = ctx.empty((m, n), dtype)
    rng = np.random.default_rng(seed)
    for j in range(n):  # column by column: without a second matrix
        A.local[:, j] = rng.random(m, "float32") - 0.5
    return A


def _copies(ctx: Context, found: Device, n: int) -> list[Shown]:
    """Both ways, against PyTorch's copies of pinned memory of its own."""
    device.use(found)
    torch, A = found.torch, _random(ctx, n, max(1, n // 4), "float64", 0)
    gpu = found.name != "cpu"
    host = torch.empty(A.local.size, dtype=torch.float64, pin_memory=gpu)
    there = torch.empty(A.local.size, dtype=torch.float64, device=found.name)

    def waited(action: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            action()
            if gpu:
                torch.cuda.synchronize()

        return run

    rows = []
    x = A.on_device()
    for way, ours, theirs in (
        ("to", A.on_device, lambda: there.copy_(host)),
        ("from", lambda: found.store(x, A.local), lambda: host.copy_(there)),
    ):
        mine, torchs = best_s(waited(ours)), best_s(waited(theirs))
        detail = f"{A.nbytes / mine / 1e9:.1f} GB/s, torch {A.nbytes / torchs / 1e9:.1f}"
        what = f"copy {way} the GPU, {A.nbytes >> 20} MiB"
        rows.append([what, torchs / mine, COPIES, False, "of torch's pinned copy", detail])
    return rows


def _against(
    ctx: Context, found: Device, what: str, routine: Callable[..., Any], *given: DistMatrix
) -> list[Shown]:
    """A routine with the GPU against the same on the host's cores, and PyTorch with transfers."""
    device.use(None)
    host = best_s(lambda: routine(ctx, *given), 1)
    device.use(found)
    before = found.copied_nbytes
    routine(ctx, *given)
    crossed = found.copied_nbytes - before
    mine = best_s(lambda: routine(ctx, *given))
    detail = f"{mine:.3f} s, host {host:.3f}; {crossed / 1e9:.2f} GB crossed"
    large = "n = 16384, float64" in what and "matmul" in what
    rows = [[what, host / mine, PRODUCTS if large else 1.0, False, "x the host's cores", detail]]
    if "SVD" not in what:
        torch = found.torch

        def by_torch() -> None:
            x, *y = (torch.from_numpy(A.local).to(found.name) for A in given)
            (x @ y[0] if y else x.mT @ x).cpu()

        theirs = best_s(by_torch)
        detail = f"{mine:.3f} s, torch {theirs:.3f} on the same memory"
        rows.append([what, theirs / mine, TORCH, False, "of torch's rate", detail])
    return rows


# --- the program ---


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: the same code without a GPU")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--save", action="store_true", help="write results/gpu.md")
    options = parser.parse_args()
    begun = time.monotonic()
    about = local_gang.run("benchmarks.gpu:paths", 1, options.device, timeout=LIMIT_S)
    print("every path is right:", ", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    left_s = LIMIT_S - (time.monotonic() - begun)
    told = [options.device, list(options.sizes), CORES]
    rows = local_gang.run("benchmarks.gpu:measured", 1, *told, timeout=left_s)
    day, processor = time.strftime("%Y-%m-%d"), platform.processor() or platform.machine()
    where = f"{about['card']}; PyTorch {about['torch']}; {CORES} cores of the host ({processor})"
    text = Report("gpu", [Row(*row) for row in rows], notes=[f"{where}; {day}."]).table()
    print(text)
    if options.save:
        write_part(RESULTS / "gpu.md", "gpu", text)


if __name__ == "__main__":
    main()
