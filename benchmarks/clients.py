"""Dask and Ray Data: send and fetch, compared with NumPy: same bytes, same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import dask.array
import numpy as np
import polars
import ray
import ray.data
import torch
from ray.data import Datasource, ReadTask
from ray.data.block import BlockAccessor, BlockMetadata
from ray.util.dask import ray_dask_get

from alchemist_ray import AlchemistSession, Handle
from benchmarks.harness import Report, Time, alone, in_turns

SHAPES = {"tall": (160_000, 100), "wide": (2_000, 8_000)}  # 128 MB each
LAYOUTS = ("VC_STAR", "STAR_VC", "MC_MR")
FEW, MANY = 2, 200
ROUNDS = 6
RATE, PARTS, SLOWEST = 0.8, 1.25, 2.0  # the targets
CLIENTS = {"dask": "Dask", "data": "Ray Data"}


def run() -> Report:
    """All clients but Spark (`clients_spark.py`), which needs a Java."""
    report = Report("clients")
    with AlchemistSession(2, progress=False) as als:
        for client, name in CLIENTS.items():
            _add_client(report, als, client, name)
        _add_protocols(report, als)
    return report


def _add_protocols(report: Report, als: AlchemistSession) -> None:
    """Packages whose memory is read by a protocol, compared with an array of the same 200 MB."""
    A = np.random.default_rng(0).random((2_500_000, 10))
    names = {f"c{j}": A[:, j] for j in range(A.shape[1])}
    sources = {"numpy": A, "torch": torch.from_numpy(A), "polars": polars.DataFrame(names)}
    times = _sends(als, sources, A, "VC_STAR")
    for package in ("torch", "polars"):
        ratio = times[package] / times["numpy"]
        report.add(f"{package} → gang / array → gang", ratio, 1.1, "x", at_most=True)


def _add_client(report: Report, als: AlchemistSession, client: str, name: str) -> None:
    make = {"dask": _dask_array, "data": _dataset}[client]
    for shape_name, shape in SHAPES.items():
        A = np.random.default_rng(0).random(shape)
        few, many = make(A, FEW), make(A, MANY)
        sent: dict[str, dict[str, Time]] = {}
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
        opening = in_turns(
            {
                "open few": partial(ray.get, _references(few)),
                "open many": partial(ray.get, _references(many)),
            },
            ROUNDS,
        )
        more = opening["open many"] - opening["open few"]
        report.add(
            f"{name}, {MANY} parts / {FEW} parts and what Ray alone needs, {shape_name}",
            best_of["many"] / (best_of["few"] + more),
            PARTS,
            "x the time",
            at_most=True,
            detail=f"{best_of['many'] * 1e3:.1f} ms, {best_of['few'] * 1e3:.1f}; Ray "
            f"{more * 1e3:.1f}, for ray.get of {MANY} blocks and their release",
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
    x = dask.array.from_array(A, chunks=(len(A) // parts, -1)) + 0.0
    return _persisted(x)


def _dataset(A: Any, parts: int) -> Any:
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data.from_numpy(np.array_split(A, parts)).materialize()


def _references(source: Any) -> list[Any]:
    """The objects of a persisted array or a materialized Dataset."""
    if isinstance(source, dask.array.Array):
        return list(dict(source.__dask_graph__()).values())
    return [ref for bundle in source.iter_internal_ref_bundles() for ref in bundle.block_refs]


def _sends(als: AlchemistSession, sources: dict[str, Any], A: Any, layout: str) -> dict[str, Time]:
    """The time of each, taken in turns."""
    held: list[Handle] = []

    def send(source: Any) -> None:
        held.append(als.send_matrix(source, layout=layout))

    def check() -> None:
        handle = held.pop()
        if not np.array_equal(handle.fetch(rows=slice(0, None, 97)), A[::97]):
            raise SystemExit("what came is not what was sent")
        handle.free()

    works = {name: partial(send, source) for name, source in sources.items()}
    return in_turns(works, ROUNDS, after=check)


def _add_fetch(report: Report, als: AlchemistSession, name: str, shape_name: str, A: Any) -> None:
    """Into the object store, and back into one array: beside `Handle.fetch`.

    Beside the copies alone, of which there are two where a fetch has one; and beside the same
    collection of the same size whose tasks make zeros: the time that Dask or Ray Data need without
    any data to fetch.
    """
    handle = als.send_matrix(A)
    kept: list[Any] = [None]
    chunks = (len(A) // FEW, -1)
    zeros = dask.array.zeros(A.shape, chunks=chunks)

    def holding(work: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            kept[0] = None  # its memory is used again
            kept[0] = work()

        return run

    works: dict[str, Callable[[], Any]] = {"numpy": handle.fetch}
    half = len(A) // FEW
    put = "a fetch and a ray.put"
    works[put] = lambda: ray.put(handle.fetch())
    if name == "Dask":
        works["to_dask().persist() by Dask-on-Ray"] = lambda: _persisted(handle.to_dask(chunks))
        works["zeros: persist() by Dask-on-Ray"] = lambda: _persisted(zeros)
        works["to_dask().compute() by threads"] = lambda: handle.to_dask(chunks).compute()
        works["zeros: compute() by threads"] = zeros.compute
        joined = "two fetches and a concatenation"
        works[joined] = lambda: np.concatenate(
            [handle.fetch(rows=slice(half)), handle.fetch(rows=slice(half, None))]
        )
    else:
        works["to_dataset(lazy=False)"] = lambda: handle.to_dataset(
            override_num_blocks=FEW, lazy=False
        )
        works["to_dataset().materialize()"] = lambda: handle.to_dataset(
            override_num_blocks=FEW
        ).materialize()
        source = _Zeros(A.shape)
        works["zeros: materialize()"] = lambda: ray.data.read_datasource(
            source, override_num_blocks=FEW
        ).materialize()
    times = in_turns({what: holding(work) for what, work in works.items()}, ROUNDS)
    fetch = times.pop("numpy")
    for what, took in times.items():
        if not what.startswith("to_"):
            continue
        empty = times.get(f"zeros: {what.partition('.')[2]}")
        least = joined if "compute" in what else put
        report.add(
            f"{what}, {shape_name}",
            fetch / took,
            RATE,
            "x NumPy's rate",
            detail=f"{took * 1e3:.0f} ms; fetch {fetch * 1e3:.0f}; {least} {times[least] * 1e3:.0f}"
            + (f"; the same of zeros, without a gang, {empty * 1e3:.0f}" if empty else ""),
        )
    handle.free()


def _persisted(array: Any) -> Any:
    kept = array.persist(scheduler=ray_dask_get)
    refs = list(dict(kept.__dask_graph__()).values())
    ray.wait(refs, num_returns=len(refs))
    return kept


class _Zeros(Datasource):
    """Blocks of zeros, for the time that Ray Data itself takes."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self._shape = shape

    def estimate_inmemory_data_size(self) -> int:
        return 8 * self._shape[0] * self._shape[1]

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[ReadTask]:
        rows, n = self._shape[0] // parallelism, self._shape[1]
        about = BlockMetadata(
            num_rows=rows, size_bytes=8 * rows * n, exec_stats=None, input_files=None
        )

        def block() -> Iterator[Any]:
            yield BlockAccessor.batch_to_block({"data": np.zeros((rows, n))})

        return [ReadTask(block, about)] * parallelism


if __name__ == "__main__":
    alone(run, store_bytes=2 << 30)
