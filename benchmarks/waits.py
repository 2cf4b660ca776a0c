"""What the layer under MPI (`mpi_workers/waits`) costs: MPI calls with it and without it, in turns.

The same ranks run a loop of one call in C, with the layer on and off alternately: two ranks that
have a core each, and four on two cores. Off, a call goes through the layer to MPI's own wait.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ali import scaffold
from benchmarks.harness import Report
from mpi_workers.local import local_gang

CALLS = ("there and back", "Barrier", "Allreduce", "Bcast, roots in turn")  # as in waits.c
SIZES = (8, 256 << 10)  # bytes
RANKS = {2: "a core each", 4: "2 cores"}
TURNS, SECONDS = 20, 0.01  # of each
AT_MOST = 1.5  # times plain MPI
LIMIT_S = 600.0


def turns(gang: Any, library: str) -> list[list[Any]]:
    """Of each call its bytes, and the medians of the seconds with the layer and without it."""
    from mpi4py import MPI  # only ranks may initialise MPI

    loop = ctypes.CDLL(library).seconds_of
    loop.restype = ctypes.c_double
    comm = gang.comm

    def measured(what: int, nbytes: int, count: int, *, layer: bool) -> float:
        def slowest() -> float:
            return float(comm.allreduce(loop(what, nbytes, count, comm.py2f()), MPI.MAX))

        if layer:
            return slowest()
        with local_gang.uninterruptible():
            return slowest()

    found = []
    for what, name in enumerate(CALLS):
        for nbytes in SIZES if name != "Barrier" else (0,):
            count = {}
            for layer in (True, False):
                first = max(measured(what, nbytes, 20, layer=layer), 1e-7)
                count[layer] = max(int(SECONDS / first), 20)
            times: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(TURNS):
                for layer, its in times.items():
                    its.append(measured(what, nbytes, count[layer], layer=layer))
            found.append([name, nbytes, *map(statistics.median, (times[True], times[False]))])
    return found


def run() -> Report:
    report = Report("waits")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        report.notes.append(f"**Taken on a loaded machine** (load {load:.1f} at the begin).")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libwaits.so")
        compiler = scaffold.mpi_compiler("mpicc")
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
        for ranks, where in RANKS.items():
            found = local_gang.run("benchmarks.waits:turns", ranks, str(library), timeout=LIMIT_S)
            for name, nbytes, ours, theirs in found:
                size = {0: "", 8: ", 8 B"}.get(nbytes, f", {nbytes >> 10} KiB")
                detail = f"{1e6 * ours:.3g} us; plain {1e6 * theirs:.3g}"
                what = f"{name}{size}: {ranks} ranks on {where}"
                report.add(what, ours / theirs, AT_MOST, "x plain MPI", at_most=True, detail=detail)
    return report


if __name__ == "__main__":
    from benchmarks.harness import run_and_save

    run_and_save(run)
