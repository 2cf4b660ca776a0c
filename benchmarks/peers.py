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
from benchmarks.harness import WITH_SPARK, Peer, Report, Turns, timed, use_peers
from benchmarks.linalg import CORES, RANK, SVD, N, Ours, decaying, gram_route, mllib
from mpi_workers.testing import local_gang

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
Opened = tuple[
    Callable[[], object], Callable[[Array], Array] | None
]  # a call, a way there and back


def run() -> Report:
    use_peers()
    report = Report("peers")
    _launch(report)
    _turns(report, SUBMIT, {
        "alchemist": _futures(lambda: Executor(num_workers=2, max_gangs=1), _first),
        "executorlib": _futures(_executorlibs, _rank),
        "mpi4py.futures, one rank a call": functools.partial(
            local_gang.run, "benchmarks.by_hand:futures", 3, FUTURES
        ),
    })  # fmt: skip
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
    from executorlib import SingleNodeExecutor

    with SingleNodeExecutor(
        max_cores=RANKS, max_workers=1, block_allocation=True, resource_dict={"cores": RANKS}
    ) as ranks:
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


def _executorlibs() -> Any:
    from executorlib import SingleNodeExecutor

    return SingleNodeExecutor(
        max_cores=CORES, max_workers=1, block_allocation=True, resource_dict={"cores": 2}
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


def _launch(report: Report) -> None:
    A = np.random.default_rng(0).random((4000, 4000))
    turns = Turns()
    systems = dict(SYSTEMS)
    for _ in range(TURNS):
        for who in list(systems):
            try:
                _use(systems[who], A, lambda what, s, who=who: turns.add((who, what), s))
            except ImportError as error:
                report.notes.append(f"{who} is not in this table: {error}.")
                del systems[who]
    found = turns.times()
    for operation in (READY, CALL, MOVE):
        unit = found["alchemist", operation]
        for who in systems:
            if (seconds := found.get((who, operation))) is not None:
                report.compare(Peer(operation, who, seconds, seconds, seconds / unit))


def _use(system: Callable[[], Any], A: Array, told: Callable[[str, float], None]) -> None:
    """One turn of a system: start it, use it, end it."""
    with contextlib.ExitStack() as stack:
        begin = time.perf_counter()
        call, there_and_back = stack.enter_context(system())
        if call is not None:
            call()
        told(READY, time.perf_counter() - begin)
        if call is not None:
            told(CALL, sorted(timed(call) for _ in range(CALLS))[CALLS // 2])
        if there_and_back is not None:
            back = there_and_back(A)
            assert np.array_equal(A, back)
            del back
            told(MOVE, timed(lambda: there_and_back(A)))


# --- a product, an SVD ---


def _compute(report: Report) -> None:
    """Times of the computation alone, on data that each system has where it wants it."""
    random = np.random.default_rng(0)
    A, B = random.random((N, N)), random.random((N, N))
    tall = decaying(random)
    with AlchemistSession(CORES, progress=False) as als:
        lib = als.load_library("linalg")
        by_gram = functools.partial(lib.truncated_svd, rank=RANK, method="gram")
        _turns(report, MATMUL, {
            "alchemist": _computing(Ours(als, lib.matmul, (A, B), "VC_STAR")),
            "numpy": _timed(lambda: A @ B),
            "dask": _timed(_dask_matmul(A, B)),
            "Ray, tasks by hand": _timed(_ray_matmul(A, B)),
            "mpiexec, mpi4py by hand": _by_hand("matmul", N),
            "Heat": _heat("matmul", [N, N]),
        })  # fmt: skip
        _turns(report, TRUNCATED, {
            "alchemist": _computing(Ours(als, by_gram, (tall,), "VC_STAR")),
            "numpy": _timed(lambda: gram_route(tall)),
            "dask": _timed(_dask_svd(tall)),
            "Ray, tasks by hand": _timed(_ray_svd(tall)),
            "mpiexec, mpi4py by hand": _by_hand("truncated_svd", *SVD, RANK),
            "Heat": _heat("truncated svd", [*SVD, RANK]),
        })  # fmt: skip
    if WITH_SPARK:
        for operation, command in ((MATMUL, ("multiply", N)), (TRUNCATED, ("svd", *SVD, RANK))):
            if isinstance(found := mllib(*command), str):
                report.notes.append(f"Spark MLlib is not in this table: {found}")
                continue
            seconds = found["compute_s"]
            unit = report.unit(operation)
            report.compare(Peer(operation, "Spark MLlib", seconds, seconds, seconds / unit))


def _turns(report: Report, operation: str, works: dict[str, Work]) -> None:
    turns = Turns()
    for _ in range(TURNS):
        for who in list(works):
            try:
                turns.add(who, works[who]())
            except ImportError as error:
                report.notes.append(f"{who} is not in this table: {error}.")
                del works[who]
    found = turns.times()
    for who, seconds in found.items():
        report.compare(Peer(operation, who, seconds, seconds, seconds / found["alchemist"]))


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


def _dask_matmul(A: Array, B: Array) -> Callable[[], object]:
    import dask.array as da

    a, b = (da.from_array(x, chunks=(N // 4, N // 4)) for x in (A, B))
    return lambda: (a @ b).compute(num_workers=CORES)


def _dask_svd(A: Array) -> Callable[[], object]:
    import dask.array as da

    a = da.from_array(A, chunks=(SVD[0] // 8, SVD[1]))
    return lambda: da.compute(*da.linalg.svd_compressed(a, RANK, n_power_iter=2), num_workers=CORES)


def _ray_matmul(A: Array, B: Array) -> Callable[[], object]:
    blocks, stored = [ray.put(rows) for rows in np.array_split(A, CORES)], ray.put(B)
    return lambda: by_hand.ray_matmul(blocks, stored)


def _ray_svd(A: Array) -> Callable[[], object]:
    blocks = [ray.put(rows) for rows in np.array_split(A, CORES)]
    return lambda: by_hand.ray_truncated_svd(blocks, RANK)


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    run().save()
