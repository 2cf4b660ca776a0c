"""Streams between two hosts, which are namespaces of this machine: ours and plain ones.

One array from a process of the other host; and a Dask array in the object store of one host, which
is sent to a gang on the other, on which the user's process is too.

Needs root. ``python -m benchmarks.between_hosts``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import dask.array
import numpy as np
import ray
from ray.util.dask import ray_dask_get

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Time, in_turns, run_and_save
from benchmarks.streams import NODE, PLAIN, plain_sockets, plain_streams, served
from mpi_workers.data import node_connections
from tests.faults import inside
from tests.faults.hosts import Hosts, why_not

N = 2500  # 50 MB
STREAMS = (1, 2, 4)
ROUNDS = 9
LIMIT_S = 120.0
BLOCKS = (2, 200)  # of the Dask array
TALL = (160_000, 100)  # its shape, 128 MB
PARTS = 1.25  # target: the time of many blocks over that of few


def run() -> Report:
    report = Report("between_hosts")
    if (reason := why_not()) is not None:
        report.notes.append(f"Not measured: {reason}.")
        print(report.notes[0], flush=True)
        return report
    with Hosts(2) as hosts:
        near, far = hosts[0], hosts[1]
        with served(NODE, N, far) as node, served(PLAIN, N, far) as plain:
            found: dict[str, list[float]] = near.call(
                "benchmarks.streams:measured", node, plain, N, STREAMS, ROUNDS, limit_s=LIMIT_S
            )
        hosts.start_ray([2, 0], store_bytes=1 << 30)
        with served(PLAIN, math.isqrt(math.prod(TALL)), far) as plain:
            of_blocks = near.call(
                "benchmarks.between_hosts:measured_blocks", far.ip, plain, limit_s=LIMIT_S
            )
    times = {name: Time(turns) for name, turns in found.items()}
    for streams in STREAMS:
        for what in ("send", "fetch"):
            ours, bare = times[f"{what} {streams}"], times[f"plain {what} {streams}"]
            report.add(
                f"{what}, {streams} stream{'s' if streams > 1 else ''}", bare / ours, 0.9,
                "x as many plain streams", detail=f"{8e-9 * N * N / ours:.2f} GB/s; {ours}",
            )  # fmt: skip
    _add_blocks(report, of_blocks)
    return report


def _add_blocks(report: Report, found: dict[str, Any]) -> None:
    times = {name: Time(turns) for name, turns in found["times"].items()}
    few, many = (times[f"{count} blocks"] for count in BLOCKS)
    for count, took in zip(BLOCKS, (few, many), strict=True):
        report.add(
            f"Dask array of {count} blocks on the other host", times["plain"] / took, 0.9,
            "x as many plain streams",
            detail=f"{8e-9 * math.prod(TALL) / took:.2f} GB/s; {took}",
        )  # fmt: skip
    report.add(
        f"Dask array on the other host, {BLOCKS[1]} blocks / {BLOCKS[0]}", many / few, PARTS,
        "x the time", at_most=True, detail=f"{found['connections']} connections from its agent to "
        f"the gang's node in {found['sends']} sends",
    )  # fmt: skip


# --- blocks of a Dask array ---


def measured_blocks(far: str, plain: str) -> dict[str, Any]:
    """The turns of sends of a Dask array whose chunks are all on the host `far`, from this one."""
    inside.join(2)
    out = np.empty(TALL)
    sockets = plain_sockets(plain, node_connections.STREAMS_PER_NODE)
    there = inside.task_on(far)
    A = np.random.default_rng(0).random(TALL)
    with AlchemistSession(2, progress=False) as als:
        works: dict[str, Callable[[], object]] = {"plain": plain_streams(sockets, out, b"s")}
        for count in BLOCKS:
            x = dask.array.from_array(A, chunks=(len(A) // count, -1)) + 0.0
            kept = x.persist(scheduler=ray_dask_get, ray_remote_args=there)
            refs = list(dict(kept.__dask_graph__()).values())
            ray.wait(refs, num_returns=len(refs), fetch_local=False)
            handle = als.send_matrix(kept)
            if not np.array_equal(handle.fetch(), A):
                raise AssertionError("what came is not what was sent")
            handle.free()
            works[f"{count} blocks"] = lambda kept=kept: als.send_matrix(kept).free()
        times = in_turns(works, ROUNDS)
        connections = len(inside.connections_from(far, als))
    return {
        "times": {name: list(took.turns) for name, took in times.items()},
        "connections": connections,
        "sends": len(BLOCKS) * (ROUNDS + 1),
    }


if __name__ == "__main__":
    run_and_save(run)
