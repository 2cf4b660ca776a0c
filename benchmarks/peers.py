"""Peers on the same work in one run: starting ranks, a call, moving an array, a product, an SVD.

Those that are not installed are named in a note; ``make peers`` installs Heat and executorlib in a
folder of their own (`peers.txt`). ``python -m benchmarks.peers``; with ``spark``, MLlib as well.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession, Executor
from benchmarks import by_hand
from benchmarks.harness import WITH_SPARK, Report, Turns, alone, timed, use_peers
from benchmarks.linalg import (
    CORES,
    RANK,
    SVD,
    N,
    Ours,
    dask_matmul,
    dask_truncated_svd,
    decaying,
    gram_route,
    mllib,
)
from mpi_workers.local import local_gang

Array = np.ndarray[Any, Any]
RANKS = 4  # that are started
CALLS = 100
TURNS = 3  # a turn of all systems takes a minute
LIMIT_S = 120
READY, CALL = f"{RANKS} ranks ready", f"an empty call on {RANKS} ranks, p50"
MOVE = "128 MB there and back"
FUTURES = 200
SUBMIT = f"{FUTURES} calls of 2 ranks as futures"
MATMUL, TRUNCATED = f"matmul {N} x {N}", f"truncated SVD {SVD[0]} x {SVD[1]}, rank {RANK}"
Work = Callable[[], float]  # gives its seconds
Turn = Callable[[], dict[str, float]]  # the seconds of each operation
Opened = tuple[
    Callable[[], object], Callable[[Array], Array] | None
]  # a call, a way there and back


def run() -> Report:
    use_peers()
    report = Report("peers")
    A = np.random.default_rng(0).random((4000, 4000))
    _turns(report, {who: functools.partial(_use, system, A) for who, system in SYSTEMS.items()})
    _turns(report, _only(SUBMIT, {
        "alchemist": _futures(lambda: Executor(num_workers=2, max_gangs=1), _first),
        "executorlib": _futures(lambda: _executor_of(2), _rank),
        "mpi4py.futures, one rank a call": functools.partial(
            local_gang.run, "benchmarks.by_hand:futures", 3, FUTURES
        ),
    }))  # fmt: skip
    _compute(report)
    for operation in dict.fromkeys(peer.operation for peer in report.peers):
        ours, *others = [peer for peer in report.peers if peer.operation == operation]
        best = min(others, key=lambda peer: peer.end_to_end_s)
        report.add(
            operation, ours.end_to_end_s / best.end_to_end_s, 1.0, "x the quickest peer",
            at_most=True, detail=f"{best.who} {best.end_to_end_s:.3g} s",
        )  # fmt: skip
    return report


# --- ranks, calls, an array ---


@contextlib.contextmanager
def _alchemist() -> Iterator[Opened]:
    with AlchemistSession(RANKS, progress=False) as als:
        echo = als.load_library("echo")

        def there_and_back(A: Array) -> Array:
            handle = als.send_matrix(A)
            back = handle.fetch()
            handle.free()
            return back

        yield echo.nothing, there_and_back


@contextlib.contextmanager
def _ray_actors() -> Iterator[Opened]:
    actors = [by_hand.Holder.remote() for _ in range(RANKS)]

    def there_and_back(A: Array) -> Array:
        stored, cuts = ray.put(A), np.linspace(0, len(A), RANKS + 1).astype(int)
        parts = [
            actor.rows.remote(stored, begin, end)
            for actor, begin, end in zip(actors, cuts[:-1], cuts[1:], strict=True)
        ]
        return np.concatenate(ray.get(parts))

    try:
        yield lambda: ray.get([actor.nothing.remote() for actor in actors]), there_and_back
    finally:
        for actor in actors:
            ray.kill(actor)


@contextlib.contextmanager
def _dask() -> Iterator[Opened]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=RANKS, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        client.wait_for_workers(RANKS, LIMIT_S)
        workers = list(client.scheduler_info(n_workers=-1)["workers"])

        def call() -> object:
            return client.gather(
                [client.submit(_rank, 0, pure=False, workers=[worker]) for worker in workers]
            )

        def there_and_back(A: Array) -> Array:
            parts = [
                client.scatter(part, workers=[w], hash=False)
                for part, w in zip(np.array_split(A, RANKS), workers, strict=True)
            ]
            return np.concatenate(client.gather(parts))

        yield call, there_and_back


def _rank(rank: int) -> int:
    return rank


def _same(A: Array) -> Array:
    return A


@contextlib.contextmanager
def _executorlib() -> Iterator[Opened]:
    with _executor_of(RANKS) as ranks:
        yield (
            lambda: ranks.submit(_rank, 0).result(LIMIT_S),
            lambda A: ranks.submit(_same, A).result(LIMIT_S)[0],  # of one rank; all return it
        )


@contextlib.contextmanager
def _raydp() -> Iterator[Opened]:
    from raydp.mpi import create_mpi_job

    def mpiexec(context: Any) -> list[str]:
        return ["mpiexec", "-n", str(RANKS)]

    job = create_mpi_job("peer", RANKS, 1, RANKS, mpiexec, LIMIT_S, "mpich")
    with job:
        yield lambda: job.run(lambda context: 0), None  # messages of at most 50 MiB


@contextlib.contextmanager
def _mpiexec() -> Iterator[Opened]:
    local_gang.run("benchmarks.by_hand:nothing", RANKS)
    yield None, None  # a program that ends


def _futures(executor: Callable[[], Any], function: Callable[..., Any]) -> Work:
    """Calls of two ranks that wait at the same time, after a first one."""

    def measure() -> float:
        with executor() as opened:
            opened.submit(function, 0).result(LIMIT_S)
            begin = time.perf_counter()
            futures = [opened.submit(function, 0) for _ in range(FUTURES)]
            for future in futures:
                future.result(LIMIT_S)
            return time.perf_counter() - begin

    return measure


def _executor_of(ranks: int) -> Any:
    """executorlib's, whose calls are on as many ranks."""
    from executorlib import SingleNodeExecutor

    return SingleNodeExecutor(
        max_cores=ranks, max_workers=1, block_allocation=True, resource_dict={"cores": ranks}
    )


def _first(comm: Any, rank: int) -> int:
    return rank


SYSTEMS: dict[str, Callable[[], contextlib.AbstractContextManager[Opened]]] = {
    "alchemist": _alchemist,
    "Ray, actors by hand": _ray_actors,
    "mpiexec, mpi4py by hand": _mpiexec,
    "dask.distributed": _dask,
    "executorlib": _executorlib,
    "RayDP's MPI": _raydp,
}


def _use(system: Callable[[], Any], A: Array) -> dict[str, float]:
    """One turn of a system: start it, use it, end it."""
    told = {}
    with contextlib.ExitStack() as stack:
        begin = time.perf_counter()
        call, there_and_back = stack.enter_context(system())
        if call is not None:
            call()
        told[READY] = time.perf_counter() - begin
        if call is not None:
            told[CALL] = sorted(timed(call) for _ in range(CALLS))[CALLS // 2]
        if there_and_back is not None:
            back = there_and_back(A)
            assert np.array_equal(A, back)
            del back
            told[MOVE] = timed(lambda: there_and_back(A))
    return told


# --- a product, an SVD ---


def _compute(report: Report) -> None:
    """Times of the computation alone, on data that each system has where it wants it."""
    random = np.random.default_rng(0)
    A, B = random.random((N, N)), random.random((N, N))
    tall = decaying(random)
    with AlchemistSession(CORES, progress=False) as als:
        lib = als.load_library("linalg")
        by_gram = functools.partial(lib.truncated_svd, rank=RANK, method="gram")
        _turns(report, _only(MATMUL, {
            "alchemist": _computing(Ours(als, lib.matmul, (A, B), "VC_STAR")),
            "numpy": _timed(lambda: A @ B),
            "dask": _timed(dask_matmul(A, B)),
            "Ray, tasks by hand": _timed(_ray_matmul(A, B)),
            "mpiexec, mpi4py by hand": _by_hand("matmul", N),
            "Heat": _heat("matmul", [N, N]),
        }))  # fmt: skip
        _turns(report, _only(TRUNCATED, {
            "alchemist": _computing(Ours(als, by_gram, (tall,), "VC_STAR")),
            "numpy": _timed(lambda: gram_route(tall)),
            "dask": _timed(dask_truncated_svd(tall)),
            "Ray, tasks by hand": _timed(_ray_svd(tall)),
            "mpiexec, mpi4py by hand": _by_hand("truncated_svd", *SVD, RANK),
            "Heat": _heat("truncated svd", [*SVD, RANK]),
        }))  # fmt: skip
    if WITH_SPARK:
        for operation, command in ((MATMUL, ("multiply", N)), (TRUNCATED, ("svd", *SVD, RANK))):
            if isinstance(found := mllib(*command), str):
                report.notes.append(f"Spark MLlib is not in this table: {found}")
                continue
            report.compare(operation, "Spark MLlib", found["compute_s"])


def _turns(report: Report, systems: dict[str, Turn]) -> None:
    """Turns of all systems; those that are not installed are named in a note."""
    turns = Turns()
    for _ in range(TURNS):
        for who in list(systems):
            try:
                for operation, seconds in systems[who]().items():
                    turns.add((operation, who), seconds)
            except ImportError as error:
                report.notes.append(f"{who} is not in this table: {error}.")
                del systems[who]
    for (operation, who), seconds in turns.times().items():
        report.compare(operation, who, seconds)


def _only(operation: str, works: dict[str, Work]) -> dict[str, Turn]:
    """Turns of one operation."""
    return {who: lambda work=work: {operation: work()} for who, work in works.items()}


def _timed(work: Callable[[], object]) -> Work:
    return functools.partial(timed, work)


def _computing(ours: Ours) -> Work:
    def measure() -> float:
        ours.run()
        return ours.compute_s

    return measure


def _by_hand(function: str, *arguments: int) -> Work:
    return functools.partial(
        local_gang.run, f"benchmarks.by_hand:{function}", CORES, *arguments, timeout=LIMIT_S
    )


def _heat(name: str, size: list[int]) -> Work:
    def measure() -> float:
        # Not imported here: it initialises MPI, which leaves a file in /dev/shm.
        if missing := [name for name in ("heat", "torchvision") if find_spec(name) is None]:
            raise ImportError(f"no {' and '.join(missing)} here (make peers)")
        measured: dict[str, list[float]] = local_gang.run(
            "benchmarks.heat_peer:measure", CORES, {name: size}, 2, timeout=LIMIT_S
        )
        return min(measured[name])

    return measure


def _ray_matmul(A: Array, B: Array) -> Callable[[], object]:
    blocks, stored = [ray.put(rows) for rows in np.array_split(A, CORES)], ray.put(B)
    return lambda: by_hand.ray_matmul(blocks, stored)


def _ray_svd(A: Array) -> Callable[[], object]:
    blocks = [ray.put(rows) for rows in np.array_split(A, CORES)]
    return lambda: by_hand.ray_truncated_svd(blocks, RANK)


if __name__ == "__main__":
    alone(run)
