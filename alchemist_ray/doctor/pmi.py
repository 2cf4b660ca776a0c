"""Whether ranks that the job's own launcher starts find each other: the site's PMI, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from alchemist_ray.doctor.finding import BAD, OK, Expected, Finding
from alchemist_ray.launch.srun import DEFAULT_PMI, PMI, srun_command

LIMIT_S = 60.0


def world(names: Sequence[str], expected: Expected, ranks_per_node: int) -> list[Finding]:
    """Start a step of plain MPI programs over the job's nodes; each says its world's size."""
    pmi = os.environ.get(PMI) or expected.pmi or DEFAULT_PMI
    size = ranks_per_node * len(names)
    command = [
        *srun_command(os.environ), "--overlap", f"--mpi={pmi}", "--quiet", "--kill-on-bad-exit=1",
        "--overcommit", "--cpu-bind=none", "--input=none", f"--nodes={len(names)}",
        f"--ntasks={size}", f"--ntasks-per-node={ranks_per_node}", f"--nodelist={','.join(names)}",
        "--job-name=alchemist-doctor", sys.executable, "-m", "ali", "mpi", "--world",
    ]  # fmt: skip
    advice = (
        "`srun --mpi=list` shows what there is: pmi2 for MPICH, MVAPICH and Intel MPI, cray_shasta "
        f"for Cray MPICH, pmix for Open MPI; {PMI} or mpi.pmi of the site file sets it"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [
            Finding("PMI of srun", BAD, f"--mpi={pmi}: no MPI_Init within {LIMIT_S:g} s", advice)
        ]
    return [judged(pmi, size, done.returncode, done.stdout, done.stderr, advice)]


def judged(pmi: str, size: int, code: int, out: str, err: str, advice: str) -> Finding:
    """What the step's output means."""
    sizes = [json.loads(line)["size"] for line in out.splitlines() if line.startswith("{")]
    if code == 0 and sizes == [size] * size:
        return Finding("PMI of srun", OK, f"--mpi={pmi}: one world of {size}")
    words = " ".join(err.split())[-400:]
    if sizes and set(sizes) != {size}:
        said = (
            f"--mpi={pmi}: {len(sizes)} ranks in worlds of {sorted(set(sizes))} instead of {size}"
        )
    else:
        said = f"--mpi={pmi}: exit code {code}, {len(sizes)} of {size} ranks answered: {words}"
    return Finding("PMI of srun", BAD, said, advice)
