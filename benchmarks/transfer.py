"""Send and fetch, compared with np.copyto on one thread and with a plain socket stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession, Handle
from benchmarks import streams
from benchmarks.harness import Report, Time, alone, in_turns
from mpi_workers.matrix import copy_kernels

N = 4000
SIDE = 2500  # of the matrix that is streamed, 50 MB
LAYOUTS = ("VC_STAR", "MC_MR", "STAR_VC")
COMPILED, TILED = 0.65, 0.45  # of np.copyto: with the compiled copy kernel, and without
FRESH = {"contiguous columns": 0.5, "another order": 0.35}  # of A.copy()


def run() -> Report:
    report = Report("transfer")
    A = np.random.default_rng(0).random((N, N))
    other = np.zeros_like(A)
    with AlchemistSession(4, progress=False) as als:
        quarter = N // 4
        blocks = [(ray.put(A[i : i + quarter]), i, 0) for i in range(0, N, quarter)]
        rates: dict[str, dict[str, float]] = {"send": {}, "fetch": {}}
        target = TILED if copy_kernels.level() is None else COMPILED
        for layout in LAYOUTS:
            times = _turns(als, A, other, blocks, layout)
            copy = times["copy"]
            _compare(report, layout, times)
            for what in ("send", "blocks", "fetch"):
                name = {"blocks": "object store →"}.get(what, "NumPy →")
                label = f"fetch, {layout}" if what == "fetch" else f"{name} gang, {layout}"
                report.add(
                    label,
                    copy / times[what],
                    target,
                    "x np.copyto",
                    detail=f"{A.nbytes / times[what] / 1e9:.1f} GB/s; copyto "
                    f"{A.nbytes / copy / 1e9:.1f}",
                )
                if what in rates:
                    rates[what][layout] = times[what]
        for what, by_layout in rates.items():
            report.add(
                f"slowest / fastest layout, {what}",
                max(by_layout.values()) / min(by_layout.values()),
                2,
                "x",
                at_most=True,
            )
        _fresh_memory(report, als)
        _few_rows(report, als)
    report.notes.append(f"Copies between array orders: {copy_kernels.description()}.")
    with streams.served(streams.NODE, SIDE) as node, streams.served(streams.PLAIN, SIDE) as plain:
        between = streams.measured(node, plain, SIDE, (1,), 9)
    for what in ("send", "fetch"):
        ours, bare = (min(between[f"{kind}{what} 1"]) for kind in ("", "plain "))
        report.add(
            f"between nodes, {what}, per stream", bare / ours, 0.9, "x plain stream",
            detail=f"plain {8e-9 * SIDE**2 / bare:.2f} GB/s",
        )  # fmt: skip
    return report


def _compare(report: Report, layout: str, times: dict[str, Time]) -> None:
    """Times beside Ray's own, through its object store."""
    for way, what, who in (
        ("in", "put", "ray.put"),
        ("in", "send", "send_matrix"),
        ("in", "blocks", "send_matrix of the object store"),
        ("out", "get", "ray.get and a copy"),
        ("out", "fetch", "fetch"),
    ):
        report.compare(f"128 MB {way}, {layout}", who, times[what])


def _turns(
    als: AlchemistSession, A: Any, other: Any, blocks: list[Any], layout: str
) -> dict[str, Time]:
    held: list[Handle] = [als.send_matrix(A, layout=layout)]
    result: list[Any] = [None]

    def send(source: Any) -> None:
        held.append(als.send_matrix(source, layout=layout))

    def fetch() -> None:
        result[0] = None  # the last result's memory is used again
        result[0] = held[0].fetch()

    def put() -> None:
        result[0] = None
        result[0] = ray.put(A)

    stored = ray.put(A)
    works: dict[str, Callable[[], object]] = {
        "copy": lambda: np.copyto(other, A),
        "send": lambda: send(A),
        "blocks": lambda: send(blocks),
        "fetch": fetch,
        "put": put,
        "get": lambda: np.copyto(other, ray.get(stored)),
    }

    def free() -> None:
        for handle in held[1:]:
            handle.free()
        del held[1:]

    times = in_turns(works, 8, after=free)
    if not np.array_equal(held[0].fetch(), A):
        raise SystemExit("what came back is not what was sent")
    held[0].free()
    return times


def _fresh_memory(report: Report, als: AlchemistSession) -> None:
    """Sends into memory that the ranks did not have before; NumPy copies into such memory too."""
    C = np.random.default_rng(2).random((N, N))
    held: list[Handle] = []

    for what, array, layout in (
        ("contiguous columns", C.T, "STAR_VC"),
        ("another order", C, "VC_STAR"),
    ):
        works = {
            "copy": array.copy,
            "send": lambda a=array, to=layout: held.append(als.send_matrix(a, layout=to)),
        }
        times = in_turns(works, rounds=5)
        ratio = times["copy"] / times["send"]
        detail = f"{times['send'] * 1e3:.0f} ms; A.copy() {times['copy'] * 1e3:.0f}"
        report.add(
            f"send into fresh memory, {what}", ratio, FRESH[what], "x A.copy()", detail=detail
        )
        for handle in held:
            handle.free()
        held.clear()


def _few_rows(report: Report, als: AlchemistSession) -> None:
    """First fetches of 3 rows: from 800 MB, and from 4 MB."""
    large, small = (als.send_matrix(np.ones((m, 100))) for m in (1_000_000, 5_000))
    if als.connection is None:
        raise SystemExit("the session has no gang")
    nodes = als.connection.nodes

    def first(handle: Handle) -> None:
        nodes.trim()
        handle.fetch(rows=slice(0, 3))

    times = in_turns({"large": lambda: first(large), "small": lambda: first(small)}, rounds=20)
    detail = f"{times['large'] * 1e3:.2f} ms"
    ratio = times["large"] / times["small"]
    report.add("first fetch of 3 rows, 800 MB / 4 MB", ratio, 1.5, "x", at_most=True, detail=detail)
    large.free()
    small.free()


if __name__ == "__main__":
    alone(run)
