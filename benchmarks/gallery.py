"""Codes of the gallery: a warm call on a gang, and the same function in a program of mpiexec.

``make gallery && .gallery/bin/python -m benchmarks.gallery`` (names of codes: only these); not in
``make bench``. The program of mpiexec stays, and sleeps while it is not its turn.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, alone

RANKS, TURNS = 2, int(os.environ.get("ROUNDS", "5"))
PAGES = Path(__file__).parents[1] / "docs/gallery"
FILE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORK = {  # the body of f(comm), which takes two seconds and more on two cores
    "lammps": "import melt; x, side = melt.crystal(7); melt.melt(comm, x, side, 1.0, 3000)",
    "ngsolve": "import numpy, poisson; poisson.poisson(comm, numpy.ones((65, 65)), 0.015, 4)",
    "devito": "import shot; shot.shot(comm, shot.layers(501), (20.0, 500.0), 10000)",
    "neuron": "import ring; own = range(comm.rank, 256, comm.size); "
    "ring.ring(comm, own, [0.05] * len(own), 256, 5000.0)",
    "pylops-mpi": "import invert; A, _, data = invert.problem(1500); "
    "own = slice(1500 * comm.rank, 1500 * (comm.rank + 1)); "
    "invert.invert(comm, A[own], data[own], 1000)",
}
CALL = """
def f(comm):
    import sys
    sys.path.insert(0, {folder!r})
    {work}
"""
STAYS = """
import os, sys, time
from mpi4py import MPI
exec(sys.argv[1])
turn = 0
while True:
    while not os.path.exists(f"go{turn}"):
        time.sleep(0.005)
    MPI.COMM_WORLD.Barrier()
    begin = time.perf_counter()
    f(MPI.COMM_WORLD)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        print("took", time.perf_counter() - begin, flush=True)
    turn += 1
"""


@contextmanager
def by_mpiexec(call: str, folder: str) -> Iterator[subprocess.Popen[str]]:
    """The program, whose ranks yield as a gang's do where they have no cores of their own."""
    tools = Path(sys.executable).parent
    env = {
        **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1", "MPI_LIB_NRN_PATH": f"{tools.parent}/lib/libmpi.so.12",
    }  # fmt: skip
    if len(os.sched_getaffinity(0)) < RANKS:
        env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"
    words = [tools / "mpiexec", "-n", str(RANKS), sys.executable, "-c", STAYS, call]
    with subprocess.Popen(
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as program:
        try:
            yield program
        finally:
            program.terminate()


def seconds_of(program: subprocess.Popen[str], folder: str, turn: int) -> float:
    """Have it compute once."""
    Path(folder, f"go{turn}").touch()
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith("took "):
            return float(line.split()[1])
    raise RuntimeError("the program of mpiexec has ended")


def measure(report: Report, als: AlchemistSession, name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    with tempfile.TemporaryDirectory() as folder:
        for file, text in FILE.findall(page):
            Path(folder, file).write_text(text)
        call, space = CALL.format(folder=folder, work=WORK[name]), {}
        exec(call, space)
        with by_mpiexec(call, folder) as program, als.output(False):
            gang, plain = [], []
            for turn in range(TURNS + 1):
                begin = time.perf_counter()
                als.run(space["f"])
                gang.append(time.perf_counter() - begin)
                plain.append(seconds_of(program, folder, turn))
    detail = f"{median(gang[1:]):.2f} s, by mpiexec {median(plain[1:]):.2f} s; first calls "
    report.add(
        f"{name}, warm call", median(gang[1:]) / median(plain[1:]), 1.1, "x mpiexec", at_most=True,
        detail=f"{detail}{gang[0]:.1f} and {plain[0]:.1f} s",
    )  # fmt: skip


def run() -> Report:
    report = Report("gallery")
    for name in WORK:
        if name in sys.argv[1:] or not sys.argv[1:]:
            with AlchemistSession(RANKS, progress=False) as als:
                measure(report, als, name)
    return report


if __name__ == "__main__":
    alone(run, cpus=4)
