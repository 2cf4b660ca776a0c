"""All measures of this library in one call, for ``alchemist bench hpc``."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from ali.hpc.conjugate_gradient import hpcg
from ali.hpc.fourier import fft
from ali.hpc.identity import about
from ali.hpc.kernels import dgemm, stream
from ali.hpc.messages import allreduce, ping_pong, ring
from ali.hpc.random_access import random_access
from ali.hpc.solver import hpl
from ali.hpc.transpose import ptrans
from ali.interface import Context, routine
from mpi_workers.matrix.sizes import readable

SIZES = (8, 1 << 10, 1 << 16, 1 << 20, 1 << 22)
RING_SIZES = (8, 2_000_000)  # HPCC's
N_PRODUCT, N_SYSTEM, N_TRANSPOSE, N_FFT, N_GRID = 1000, 1500, 2000, 1 << 20, 32

Measure = tuple[str, float, str, bool]  # name, value, unit, whether larger values are better


@routine("measures", "ranks")
def suite(ctx: Context, seconds: float = 1.0) -> tuple[list[str], list[str]]:
    """HPCC's measures and HPCG's kernel, in about seven times `seconds`.

    Parameters
    ----------
    seconds : float
        Time of `dgemm`, `stream` and `hpcg`; the others get a half or less.

    Returns
    -------
    measures : list of str
        JSON objects: `what`, `value`, `unit`, `more` (whether larger values are better). Of a
        list of rates the median and the slowest rank.
    ranks : list of str
        The result of `about`.

    Raises
    ------
    Failure
        RoutineError if a validation fails.
    """
    ranks = about(ctx)
    hosts = [json.loads(rank)["host"] for rank in ranks]
    steps: tuple[Callable[[], Iterator[Measure]], ...] = (
        lambda: _each_alone(ctx, seconds),
        lambda: _together(ctx, seconds),
        lambda: _messages(ctx, hosts, seconds),
    )
    found: list[Measure] = []
    for number, step in enumerate(steps):
        ctx.progress(number / len(steps))
        found += step()
    names = ("what", "value", "unit", "more")
    return [json.dumps(dict(zip(names, measure, strict=True))) for measure in found], ranks


def _each_alone(ctx: Context, seconds: float) -> Iterator[Measure]:
    rates, _ = dgemm(ctx, N_PRODUCT, seconds)
    yield from _by_rank(f"dgemm {N_PRODUCT} x {N_PRODUCT}", rates, "GFLOP/s")
    *kernels, _ = stream(ctx, seconds=seconds)
    for name, rates in zip(("copy", "scale", "add", "triad"), kernels, strict=True):
        yield from _by_rank(f"stream {name}", rates, "GB/s")


def _by_rank(what: str, rates: Sequence[float], unit: str) -> Iterator[Measure]:
    yield f"{what}, per rank", median(rates), unit, True
    yield f"{what}, slowest rank", min(rates), unit, True


def _together(ctx: Context, seconds: float) -> Iterator[Measure]:
    half_s = seconds / 2
    yield f"hpl, n = {N_SYSTEM}", hpl(ctx, N_SYSTEM, half_s)[0], "GFLOP/s", True
    yield f"ptrans, n = {N_TRANSPOSE}", ptrans(ctx, N_TRANSPOSE, half_s)[0], "GB/s", True
    yield "random access", 1e3 * random_access(ctx, seconds=half_s)[0], "MUPS", True
    yield f"fft, n = 2^{math.log2(N_FFT):.0f}", fft(ctx, N_FFT, half_s)[0], "GFLOP/s", True
    gflops, _, _ = hpcg(ctx, N_GRID, seconds=seconds)
    yield f"hpcg, {N_GRID}^3 points a rank", gflops, "GFLOP/s", True


def _messages(ctx: Context, hosts: Sequence[str], seconds: float) -> Iterator[Measure]:
    if ctx.size == 1:
        return
    for where, pair in pairs(hosts).items():
        times = ping_pong(ctx, list(SIZES), *pair, seconds / 8)
        yield from _by_size(f"ping-pong {where}", SIZES, times)
    rings = ring(ctx, list(RING_SIZES), seconds / 4)
    for name, times in zip(("natural", "random"), rings, strict=True):
        yield from _by_size(f"{name} ring", RING_SIZES, times)
    for size, time_s in zip(SIZES, allreduce(ctx, list(SIZES), seconds / 8), strict=True):
        yield f"allreduce {readable(size)}", 1e6 * time_s, "us", False


def _by_size(what: str, sizes: Sequence[int], times: Sequence[float]) -> Iterator[Measure]:
    """The time of the smallest message, the rates of the others."""
    yield f"{what}, {readable(sizes[0])}", 1e6 * times[0], "us", False
    for size, time_s in zip(sizes[1:], times[1:], strict=True):
        yield f"{what}, {readable(size)}", 1e-9 * size / time_s, "GB/s", True


def pairs(hosts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Two ranks of one host and two of two hosts, if they exist, by the host of each rank."""
    by_host: dict[str, list[int]] = defaultdict(list)
    for rank, host in enumerate(hosts):
        by_host[host].append(rank)
    found = {}
    for ranks in by_host.values():
        if len(ranks) > 1:
            found["within a node"] = (ranks[0], ranks[1])
            break
    if len(by_host) > 1:
        first, second = list(by_host.values())[:2]
        found["between nodes"] = (first[0], second[0])
    return found
