"""What a machine's few numbers predict of our times, compared with what was measured.

A machine is described by the latency of a message (alpha), the time of its bytes (beta), the
products of a core and its copies. These four are measured on a gang of two ranks; times of four
works are predicted from them for gangs of 1, 2 and 4 ranks and, with alpha and beta of the link,
for 2 hosts that are namespaces of this machine. The same model then says what clusters would take
on which none of this was measured.

Sources: Hockney, "The communication challenge for MPP", Parallel Computing 20(3), 1994 (alpha and
beta); Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication", Concurrency 19(13),
2007 (costs of collectives).
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, alone, markdown, timed
from tests.faults import inside
from tests.faults.hosts import Hosts, why_not

N = 2000  # of the square matrices, 32 MB
TALL = (60_000, 300)  # 144 MB
SUMMED = 8 << 20  # bytes of a sum over all ranks
GANGS = (1, 2, 4)
TURNS = 5
WITHIN = 2.0  # predicted and measured times differ by at most this factor
LIMIT_S = 240.0
SMALL, LARGE = 8, 8 << 20  # messages for alpha and beta


@dataclass(frozen=True, slots=True)
class Machine:
    """What the model knows. Seconds, bytes, operations."""

    alpha_s: float  # of a message
    beta_s: float  # of a byte of a message
    flops: float  # of a core, in products, while all cores work
    copied: float  # bytes that a core copies in a second, while all cores do
    cores: int

    def share(self, ranks: int) -> float:
        """The part of a core that each of this many ranks has."""
        return min(1.0, self.cores / ranks)


def matmul(machine: Machine, ranks: int, n: int = N) -> float:
    """A B by rows: each rank gets all of B in panels and multiplies its rows of A."""
    others = (ranks - 1) / ranks
    words = 8 * n * n
    moved = others * words * machine.beta_s + _steps(ranks) * machine.alpha_s
    copies = (words / ranks + words) / machine.copied if ranks > 1 else 0.0
    return (2 * n**3 / ranks / machine.flops + copies) / machine.share(ranks) + moved


def gram(machine: Machine, ranks: int, shape: tuple[int, int] = TALL) -> float:
    """A^T A of a tall A: a product of the rows of each rank, and a sum over the ranks."""
    m, n = shape
    product = 2 * m * n * n / ranks / machine.flops / machine.share(ranks)
    return product + allreduce(machine, ranks, 8 * n * n)


def allreduce(machine: Machine, ranks: int, nbytes: int = SUMMED) -> float:
    """A sum of an array over all ranks: reduce-scatter and allgather."""
    if ranks == 1:
        return 0.0
    others = (ranks - 1) / ranks
    added = others * nbytes / machine.copied / machine.share(ranks)
    return 2 * _steps(ranks) * machine.alpha_s + 2 * others * nbytes * machine.beta_s + added


def redistribute(machine: Machine, ranks: int, n: int = N) -> float:
    """Rows of a square matrix to columns: every rank sends a part of its block to every other."""
    words = 8 * n * n / ranks
    copies = 2 * words / machine.copied / machine.share(ranks)
    return copies + (ranks - 1) * machine.alpha_s + words * (ranks - 1) / ranks * machine.beta_s


def _steps(ranks: int) -> int:
    return math.ceil(math.log2(ranks)) if ranks > 1 else 0


MODELS: dict[str, Callable[[Machine, int], float]] = {
    f"matmul {N} x {N}": matmul,
    f"A^T A, {TALL[0]} x {TALL[1]}": gram,
    f"a sum of {SUMMED >> 20} MiB over all ranks": allreduce,
    f"VC_STAR to STAR_VC, {N} x {N}": redistribute,
}
# A fat node of a present cluster, a rank per core: stated, not measured.
ASSUMED = Machine(alpha_s=1.5e-6, beta_s=1 / 0.2e9, flops=40e9, copied=2e9, cores=128)


# --- measuring ---


def facts(comm: Any) -> list[float]:
    """alpha, beta, products and copies of the slowest rank: on all ranks."""
    A = np.random.default_rng(comm.rank).random((600, 600))
    source, target = np.ones(4 << 20), np.ones(4 << 20)
    comm.Barrier()
    product_s = _median(lambda: A @ A)
    comm.Barrier()
    copy_s = _median(lambda: np.copyto(target, source))
    times = [0.0, 0.0]
    if comm.size > 1:
        times = [_one_way(comm, nbytes) for nbytes in (SMALL, LARGE)]
    slowest = [max(rates) for rates in zip(*comm.allgather([product_s, copy_s]), strict=True)]
    alpha_s, beta_s = times[0], (times[1] - times[0]) / (LARGE - SMALL)
    return [alpha_s, beta_s, 2 * 600**3 / slowest[0], source.nbytes / slowest[1]]


def _one_way(comm: Any, nbytes: int) -> float:
    """Half of a round trip between the first and the last rank; the last one's time is ours."""
    sent, got, ends = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8), (0, comm.size - 1)

    def there_and_back() -> None:
        if comm.rank == ends[0]:
            comm.Send(sent, ends[1])
            comm.Recv(got, ends[1])
        elif comm.rank == ends[1]:
            comm.Recv(got, ends[0])
            comm.Send(sent, ends[0])

    seconds = _median(there_and_back, 50) / 2
    return float(comm.bcast(seconds))


def _sum(comm: Any, nbytes: int) -> float:
    given, total = np.ones(nbytes // 8), np.empty(nbytes // 8)

    def add() -> None:
        comm.Barrier()
        comm.Allreduce(given, total)

    return max(comm.allgather(_median(add, 10)))


def _median(work: Callable[[], object], turns: int = 7) -> float:
    work()
    return statistics.median(timed(work) for _ in range(turns))


def measure(ranks: int) -> dict[str, Any]:
    """The facts of a gang, and the seconds of each work: medians."""
    random = np.random.default_rng(0)
    with AlchemistSession(ranks, progress=False) as als:
        lib = als.load_library("linalg")
        A = als.send_matrix(random.random((N, N)), layout="VC_STAR")
        tall = als.send_matrix(random.random(TALL), layout="VC_STAR")
        works: tuple[Callable[[], Any], ...] = (
            lambda: lib.matmul(A, A).free(),
            lambda: lib.matmul(tall, tall, transpose_a="T").free(),
        )
        found = [_median(work, TURNS) for work in works]
        found.append(als.run(_sum, SUMMED))
        found.append(_median(lambda: A.to_layout("STAR_VC").free(), TURNS))
        return {"facts": als.run(facts), "times": dict(zip(MODELS, found, strict=True))}


def measure_hosts(ranks: int) -> dict[str, Any]:
    """The same on the cluster of the hosts; called on one of them."""
    inside.join(2)
    return measure(ranks)


# --- the report ---


def run() -> Report:
    report = Report("cost_model")
    cores = min(2, len(os.sched_getaffinity(0)))
    found = {f"{n} rank{'s' if n > 1 else ''}": (n, measure(n)) for n in GANGS}
    machine = Machine(*found["2 ranks"][1]["facts"], cores)
    machines = dict.fromkeys(found, machine)
    if (reason := why_not()) is None:
        with Hosts(2) as hosts:
            hosts.start_ray([1, 1])
            place = "2 hosts, a rank each"
            told = hosts[0].call("benchmarks.cost_model:measure_hosts", 2, limit_s=LIMIT_S)
        found[place] = 2, told
        alpha_s, beta_s, *_ = told["facts"]
        machines[place] = replace(machine, alpha_s=alpha_s, beta_s=beta_s)
        report.notes.append(_facts("Between the hosts", machines[place]))
    else:
        report.notes.append(f"Two hosts were not measured: {reason}.")
    report.notes.insert(0, _facts("On this machine, in a gang of 2", machine))
    for work, model in MODELS.items():
        for place, (ranks, told) in found.items():
            if ranks == 1 and model is allreduce:
                continue  # nothing is summed
            predicted, measured = model(machines[place], ranks), told["times"][work]
            report.add(
                f"{work}, {place}", max(predicted / measured, measured / predicted), WITHIN,
                "x apart", at_most=True,
                detail=f"measured {measured * 1e3:.3g} ms, predicted {predicted * 1e3:.3g} ms",
            )  # fmt: skip
    report.notes.append(_clusters())
    return report


def _facts(where: str, machine: Machine) -> str:
    return (
        f"{where}: alpha {machine.alpha_s * 1e6:.3g} us, 1/beta {1e-9 / machine.beta_s:.3g} GB/s, "
        f"{machine.flops * 1e-9:.3g} GFLOP/s and {machine.copied * 1e-9:.3g} GB/s of a core."
    )


def _clusters() -> str:
    """A table of predictions for clusters, by the same model."""
    works = ("matmul 100000 x 100000", "A^T A of 1e9 x 100", "VC_STAR to STAR_VC, 100000 x 100000")
    lines = []
    for ranks in (128, 512, 2048, 8192):
        # A rank has a share of its node's link and memory, and a core of its own.
        machine = replace(ASSUMED, cores=ranks)
        times = (
            matmul(machine, ranks, 100_000),
            gram(machine, ranks, (10**9, 100)),
            redistribute(machine, ranks, 100_000),
        )
        lines.append([ranks, *(f"{t:.3g} s" for t in times)])
    told = (
        "Predicted, not measured, for nodes of 128 cores with 40 GFLOP/s and 2 GB/s of copies "
        "each, and a link of 25 GB/s a node (0.2 GB/s a rank) with 1.5 us:"
    )
    return f"{told}\n\n{markdown(('ranks (128 a node)', *works), lines)}".rstrip()


if __name__ == "__main__":
    alone(run)
