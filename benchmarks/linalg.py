"""Linear algebra: every library and its peers, end to end and compute only, in one run.

One core per rank, one BLAS thread per rank; NumPy and Dask have the same cores. Spark runs as a
program of its own (`spark_mllib.py`), and so do the plain mpiexec programs (`bare.py`).
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import LibraryError
from benchmarks.harness import WITH_SPARK, Peer, Report, Turns, alone, phases, printed, timed
from benchmarks.spark_mllib import DECAY
from mpi_workers.local import local_gang

Array = np.ndarray[Any, Any]
CORES = min(2, len(os.sched_getaffinity(0)))
LIBRARIES = ("linalg", "scalapack", "elemental")
NATURAL = {"linalg": "VC_STAR", "scalapack": "MC_MR", "elemental": "MC_MR"}
OURS = ("VC_STAR", "STAR_VC", "MC_MR")  # layouts in which linalg multiplies
COMPUTE, END_TO_END = 1.1, 1.25  # targets of a product, x NumPy's time
N = 4000  # matmul
TALL = (100_000, 200)  # qr
THIN = (20_000, 200)  # svd
SVD, RANK = (100_000, 500), 20
ROUNDS = 5
SPARK_LIMIT_S = 600


def run() -> Report:
    report = Report("linalg")
    random = np.random.default_rng(0)
    with AlchemistSession(CORES, progress=False) as als:
        loaded = _loaded(als, report)
        numpy_s = _matmul(als, loaded, report, random)
        _qr(als, loaded, report, random.standard_normal(TALL))
        _svd(als, loaded, report, random.standard_normal(THIN))
        _truncated(als, loaded, report, random)
        _overheads(als, loaded, report, random)
    if WITH_SPARK:
        _spark(report, numpy_s)
    return report


def _loaded(als: AlchemistSession, report: Report) -> dict[str, Any]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = als.load_library(name)
        except LibraryError as error:
            report.notes.append(f"{name} is not in this table: {str(error).split('.')[0]}.")
    return found


class Ours:
    """A routine of a library on the user's data, with send and fetch; how long each part took."""

    def __init__(
        self,
        als: AlchemistSession,
        routine: Callable[..., Any],
        data: Sequence[Array],
        layout: str,
    ) -> None:
        self._als = als
        self._routine = routine
        self._data = data
        self._layout = layout
        self.last: list[Array] = []
        self.compute_s = self.transfer_s = 0.0

    def run(self) -> None:
        self.last = []  # the memory of the last result is used again
        send_s, self.compute_s, fetch_s = phases(
            lambda: [self._als.send_matrix(a, layout=self._layout) for a in self._data],
            self._routine,
            lambda handle: self.last.append(handle.fetch()),
        )
        self.transfer_s = send_s + fetch_s


def _turns(
    operation: str,
    report: Report,
    yardstick: tuple[str, Callable[[], Any]],
    peers: dict[str, Callable[[], Any]],
    ours: dict[str, Ours],
    check: Callable[[list[Array]], bool],
) -> dict[str, Peer]:
    """Time everything in turns, check what ours gave, and put a line for each in the table."""
    name, reference = yardstick
    for competitor, mine in ours.items():
        mine.run()
        if not check(mine.last):
            raise SystemExit(f"{operation} by {competitor} is wrong")
    turns = Turns()
    for _ in range(ROUNDS):
        for peer, work in ({name: reference} | peers).items():
            turns.add((peer, "compute"), timed(work))
        for competitor, mine in ours.items():
            mine.run()
            turns.add((competitor, "compute"), mine.compute_s)
            turns.add((competitor, "all"), mine.compute_s + mine.transfer_s)
    best = turns.times()
    found = {
        who: report.compare(operation, who, best[who, what], best.get((who, "all")))
        for who, what in best
        if what == "compute"
    }
    for mine in ours.values():
        mine.last = []
    return found


def dask_matmul(A: Array, B: Array) -> Callable[[], object]:
    """Dask's product."""
    import dask.array as da

    a, b = (da.from_array(x, chunks=(N // 4, N // 4)) for x in (A, B))
    return lambda: (a @ b).compute(num_workers=CORES)


def dask_truncated_svd(A: Array) -> Callable[[], object]:
    """Dask's leading singular values and vectors."""
    import dask.array as da

    a = da.from_array(A, chunks=(SVD[0] // 8, SVD[1]))
    return lambda: da.compute(*da.linalg.svd_compressed(a, RANK, n_power_iter=2), num_workers=CORES)


def _matmul(als: Any, loaded: dict[str, Any], report: Report, random: Any) -> float:
    A, B = random.random((N, N)), random.random((N, N))
    exact = A @ B
    found = _turns(
        f"matmul {N} x {N}",
        report,
        ("numpy", lambda: A @ B),
        {"dask": dask_matmul(A, B)},
        {
            f"{n}, {layout}": Ours(als, lib.matmul, (A, B), layout)
            for n, lib in loaded.items()
            for layout in (OURS if n == "linalg" else (NATURAL[n],))
        },
        lambda results: np.allclose(results[0], exact, rtol=1e-10),
    )
    numpy_s = found["numpy"].compute_s
    detail = f"{CORES} ranks; numpy {2 * N**3 / numpy_s / 1e9:.0f} GF/s"
    for layout in OURS:
        peer = found[f"linalg, {layout}"]
        for what, seconds, target in (
            ("compute", peer.compute_s, COMPUTE),
            ("send + compute + fetch", peer.end_to_end_s, END_TO_END),
        ):
            report.add(
                f"matmul {N} x {N}, {layout}, {what}", seconds / numpy_s, target, "x numpy",
                at_most=True, detail=detail,
            )  # fmt: skip
    return min(peer.end_to_end_s for name, peer in found.items() if name.split(",")[0] in loaded)


def _qr(als: Any, loaded: dict[str, Any], report: Report, A: Array) -> None:
    import dask.array as da

    chunked = da.from_array(A, chunks=(A.shape[0] // 8, A.shape[1]))
    _turns(
        f"qr {A.shape[0]} x {A.shape[1]}",
        report,
        ("numpy", lambda: np.linalg.qr(A)),
        {"dask": lambda: da.compute(*da.linalg.tsqr(chunked), num_workers=CORES)},
        {n: Ours(als, lib.qr, (A,), "VC_STAR") for n, lib in loaded.items()},
        lambda results: np.allclose(results[0] @ results[1], A),
    )


def _svd(als: Any, loaded: dict[str, Any], report: Report, A: Array) -> None:
    import dask.array as da

    chunked = da.from_array(A, chunks=(A.shape[0] // 8, A.shape[1]))
    _turns(
        f"svd {A.shape[0]} x {A.shape[1]}",
        report,
        ("numpy", lambda: np.linalg.svd(A, full_matrices=False)),
        {"dask": lambda: da.compute(*da.linalg.svd(chunked), num_workers=CORES)},
        {n: Ours(als, lib.svd, (A,), "VC_STAR") for n, lib in loaded.items()},
        lambda results: np.allclose(results[1] * results[0].T @ results[2].conj().T, A),
    )


def decaying(random: Any) -> Array:
    """A matrix whose singular values fall by `DECAY` from one to the next."""
    mix, _ = np.linalg.qr(random.standard_normal((SVD[1], SVD[1])))
    return (random.standard_normal(SVD) * DECAY ** np.arange(SVD[1])) @ mix


def gram_route(A: Array) -> tuple[Array, Array, Array]:
    """NumPy's quick way: the eigenvectors of A^T A."""
    values, vectors = np.linalg.eigh(A.T @ A)
    V = vectors[:, ::-1][:, :RANK]
    S = np.sqrt(values[::-1][:RANK])
    return S, A @ V / S, V


def _truncated(als: Any, loaded: dict[str, Any], report: Report, random: Any) -> None:
    A = decaying(random)
    expected = gram_route(A)[0]
    svd = loaded["linalg"].truncated_svd
    ours = {
        "linalg, ARPACK": Ours(als, lambda a: svd(a, rank=RANK), (A,), "VC_STAR"),
        "linalg, randomized": Ours(
            als, lambda a: svd(a, rank=RANK, method="randomized"), (A,), "VC_STAR"
        ),
        "linalg, Gram": Ours(als, lambda a: svd(a, rank=RANK, method="gram"), (A,), "VC_STAR"),
    }
    found = _turns(
        f"truncated_svd {SVD[0]} x {SVD[1]}, rank {RANK}",
        report,
        ("numpy, Gram route", lambda: gram_route(A)),
        {"dask svd_compressed": dask_truncated_svd(A)},
        ours,
        lambda results: np.allclose(results[0], expected, rtol=1e-6),
    )
    unit = found["numpy, Gram route"].compute_s
    fastest = min(ours, key=lambda name: found[name].compute_s)
    report.add(
        f"truncated SVD of {SVD[0]} x {SVD[1]}, decaying spectrum",
        found[fastest].compute_s / unit,
        1.5,
        "x numpy's Gram route",
        at_most=True,
        detail=f"{fastest}; "
        + "; ".join(f"{n} {found[n].compute_s:.2f} s" for n in ours)
        + f"; numpy {unit:.2f} s",
    )
    for name, mine in ours.items():
        share = mine.transfer_s / found[name].end_to_end_s
        report.add(
            f"share of transfers in a truncated SVD, {name}",
            100 * share,
            10,
            "%",
            at_most=True,
            detail="from NumPy on the same node; the paper's 20 % is from Spark to other nodes",
        )


def _overheads(als: Any, loaded: dict[str, Any], report: Report, random: Any) -> None:
    """The session's matmul against the same routine in a bare mpiexec program."""
    for name, library in loaded.items():
        layout = NATURAL[name]
        A = als.send_matrix(random.random((N, N)), layout=layout)
        _product(library, A)  # the bare program's first of two warms its memory, too
        turns = Turns()
        for _ in range(ROUNDS):
            bare_s = local_gang.run(
                "benchmarks.bare:matmul", CORES, name, layout, N, 2, timeout=300
            )
            turns.add((name, "bare"), bare_s)
            turns.add((name, "session"), _product(library, A))
        bare, within = turns.times().values()
        A.free()
        report.add(
            f"{name}: matmul {N} x {N} in a session, compute",
            within / bare,
            1.1,
            "x bare mpiexec",
            at_most=True,
            detail=f"{2 * N**3 / bare / 1e9:.0f} GF/s bare",
        )


def _product(library: Any, A: Handle) -> float:
    start = time.perf_counter()
    product = library.matmul(A, A)
    seconds = time.perf_counter() - start
    product.free()
    return seconds


def _spark(report: Report, ours_s: float) -> None:
    multiply = mllib("multiply", N)
    if isinstance(multiply, str):
        report.notes.append(f"Spark is not in this table: {multiply}")
        return
    report.compare(f"matmul {N} x {N}", "Spark BlockMatrix", *multiply.values())
    report.add(
        f"matmul {N} x {N}, end to end, against Spark's BlockMatrix",
        multiply["end_to_end_s"] / ours_s,
        20,
        "x as quick as Spark",
        detail=f"Spark {multiply['end_to_end_s']:.1f} s, of which multiply "
        f"{multiply['compute_s']:.1f} s",
    )
    svd = mllib("svd", *SVD, RANK)
    if isinstance(svd, str):
        report.notes.append(f"Spark's computeSVD is not in this table: {svd}")
        return
    operation = f"truncated_svd {SVD[0]} x {SVD[1]}, rank {RANK}"
    report.compare(operation, "Spark computeSVD", *svd.values())


@functools.cache
def mllib(*command: Any) -> dict[str, float] | str:
    """The output of Spark's program, or the reason why it has failed."""
    found = printed("benchmarks.spark_mllib", *command, limit_s=SPARK_LIMIT_S)
    return found if isinstance(found, str) else found[-1]


if __name__ == "__main__":
    alone(run)
