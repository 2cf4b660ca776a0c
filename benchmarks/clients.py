"""Dask and Ray Data: send and fetch, compared with NumPy: same bytes, same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ray
import ray.data

from alchemist_ray import AlchemistSession, Handle
from benchmarks.harness import Report, timed

SHAPES = {"tall": (160_000, 100), "wide": (2_000, 8_000)}  # 128 MB each
LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR")
FEW, MANY = 2, 200
ROUNDS = 6
RATE, PARTS, SLOWEST = 0.8, 1.5, 2.0  # the targets
CLIENTS = {"dask": "Dask", "data": "Ray Data"}


def run() -> Report:
    """All clients but Spark (`clients_spark.py`), which needs a Java."""
    report = Report("clients")
    with AlchemistSession(2, progress=False) as als:
        for client, name in CLIENTS.items():
            _add_client(report, als, client, name)
    return report


def _add_client(report: Report, als: AlchemistSession, client: str, name: str) -> None:
    make = {"dask": _dask_array, "data": _dataset}[client]
    for shape_name, shape in SHAPES.items():
        A = np.random.default_rng(0).random(shape)
        few, many = make(A, FEW), make(A, MANY)
        sent: dict[str, dict[str, float]] = {}
        for layout in LAYOUTS:
            works = {"numpy": A, "few": few, "many": many}
            times = sent[layout] = _sends(als, works, A, layout)
            for parts, count in (("few", FEW), ("many", MANY)):
                report.add(
                    f"{name} → gang, {layout}, {shape_name}, {count} parts",
                    times["numpy"] / times[parts],
                    RATE,
                    "x NumPy's rate",
                    detail=f"{A.nbytes / times[parts] / 1e9:.1f} GB/s; NumPy "
                    f"{A.nbytes / times['numpy'] / 1e9:.1f}",
                )
        best_of = {p: min(sent[k][p] for k in LAYOUTS) for p in ("few", "many")}
        report.add(
            f"{name}, {MANY} parts / {FEW} parts, {shape_name}",
            best_of["many"] / best_of["few"],
            PARTS,
            "x the time",
            at_most=True,
        )
        by_layout = [sent[layout]["few"] for layout in LAYOUTS]
        report.add(
            f"{name}, slowest / fastest layout, {shape_name}",
            max(by_layout) / min(by_layout),
            SLOWEST,
            "x",
            at_most=True,
        )
        _add_fetch(report, als, name, shape_name, A)


def _dask_array(A: Any, parts: int) -> Any:
    """The array in the object store, as after `persist`."""
    import dask.array as da
    from ray.util.dask import ray_dask_get

    x = da.from_array(A, chunks=(len(A) // parts, -1)) + 0.0
    kept = x.persist(scheduler=ray_dask_get)
    refs = list(dict(kept.__dask_graph__()).values())
    ray.wait(refs, num_returns=len(refs))
    return kept


def _dataset(A: Any, parts: int) -> Any:
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_numpy(np.array_split(A, parts)).materialize()


def _sends(als: AlchemistSession, sources: dict[str, Any], A: Any, layout: str) -> dict[str, float]:
    """The shortest time of each, taken in turns."""
    shortest = dict.fromkeys(sources, float("inf"))
    held: list[Handle] = []
    for _ in range(ROUNDS):
        for name, source in sources.items():
            work = _sending(als, source, layout, held)
            shortest[name] = min(shortest[name], timed(work))
            handle = held.pop()
            if not np.array_equal(handle.fetch(rows=slice(0, None, 97)), A[::97]):
                raise SystemExit(f"{name}: what came is not what was sent")
            handle.free()
    return shortest


def _sending(
    als: AlchemistSession, source: Any, layout: str, held: list[Handle]
) -> Callable[[], None]:
    return lambda: held.append(als.send_matrix(source, layout=layout))


def _add_fetch(report: Report, als: AlchemistSession, name: str, shape_name: str, A: Any) -> None:
    """Into the object store, and back into one array: beside `Handle.fetch`."""
    from ray.util.dask import ray_dask_get

    handle = als.send_matrix(A)
    result: list[Any] = [None]

    def numpy() -> None:
        result[0] = None
        result[0] = handle.fetch()

    def to_store() -> None:
        result[0] = None
        if name == "Dask":
            chunked = handle.to_dask((len(A) // FEW, -1))
            result[0] = chunked.persist(scheduler=ray_dask_get)
            refs = list(dict(result[0].__dask_graph__()).values())
            ray.wait(refs, num_returns=len(refs))
        else:
            result[0] = handle.to_dataset(override_num_blocks=FEW).materialize()

    works: dict[str, Callable[[], None]] = {"numpy": numpy, "store": to_store}
    if name == "Dask":
        works["threads"] = lambda: result.__setitem__(
            0, handle.to_dask((len(A) // FEW, -1)).compute()
        )
    shortest = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for what, work in works.items():
            shortest[what] = min(shortest[what], timed(work))
    told = {
        "store": "to_dask().persist() by Dask-on-Ray"
        if name == "Dask"
        else "to_dataset().materialize()",
        "threads": "to_dask().compute() by threads",
    }
    for what in shortest.keys() - {"numpy"}:
        report.add(
            f"{told[what]}, {shape_name}",
            shortest["numpy"] / shortest[what],
            RATE,
            "x NumPy's rate",
            detail=f"{A.nbytes / shortest[what] / 1e9:.1f} GB/s; fetch "
            f"{A.nbytes / shortest['numpy'] / 1e9:.1f}",
        )
    handle.free()


if __name__ == "__main__":
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)
    run().save()
