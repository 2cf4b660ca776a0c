"""Whether ranks that the job's own launcher starts find each other: the site's PMI, without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence

from alchemist_ray.launchers.srun import DEFAULT_PMI, PMI
from alchemist_ray.observe.doctor import step
from alchemist_ray.observe.doctor.fanout import InStep
from alchemist_ray.observe.doctor.finding import BAD, OK, Expected, Finding

LIMIT_S = 60.0
SWEEP_S = 20.0
END = 400  # characters of what ranks have said, at each end
CLOCK_S = 1.0  # a file's time may be a tick behind


def world(names: Sequence[str], expected: Expected, ranks_per_node: int) -> list[Finding]:
    """Start a step of plain MPI programs over the job's nodes; each says its world's size."""
    pmi = os.environ.get(PMI) or expected.pmi or DEFAULT_PMI
    size = ranks_per_node * len(names)
    advice = (
        "`srun --mpi=list` shows what there is: pmi2 for MPICH, MVAPICH and Intel MPI, cray_shasta "
        f"for Cray MPICH, pmix for Open MPI; {PMI} or mpi.pmi of the site file sets it"
    )
    began = time.monotonic()
    ranks = step.start(
        names, "mpi_workers", "world", pmi=pmi, tasks_per_node=ranks_per_node,
        options=["--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none", "--input=none"],
    )  # fmt: skip
    try:
        out, err = ranks.communicate(timeout=LIMIT_S)
        found = judged(pmi, size, ranks.returncode, out, err, advice)
    except subprocess.TimeoutExpired as late:
        words = _short((late.stderr or b"").decode(errors="replace"))
        said = f"--mpi={pmi}: no MPI_Init within {LIMIT_S:g} s {words}".rstrip()
        found = Finding("PMI of srun", BAD, said, advice)
        ranks.terminate()
    finally:
        step.end(ranks)
    if found.status == BAD:
        clean(names, time.monotonic() - began)
    return [found]


def clean(names: Sequence[str], age_s: float) -> None:
    """Remove what ranks killed in MPI_Init have left in their nodes' shared memory."""
    probes = InStep(names)
    try:
        probes.ask("sweep", age_s + CLOCK_S, limit_s=SWEEP_S)
    finally:
        probes.close()


def judged(pmi: str, size: int, code: int, out: str, err: str, advice: str) -> Finding:
    """What the step's output means."""
    sizes = [json.loads(line)["size"] for line in out.splitlines() if line.startswith("{")]
    if code == 0 and sizes == [size] * size:
        return Finding("PMI of srun", OK, f"--mpi={pmi}: one world of {size}")
    words = _short(err)
    if sizes and set(sizes) != {size}:
        said = (
            f"--mpi={pmi}: {len(sizes)} ranks in worlds of {sorted(set(sizes))} instead of {size}"
        )
    else:
        said = f"--mpi={pmi}: exit code {code}, {len(sizes)} of {size} ranks answered: {words}"
    return Finding("PMI of srun", BAD, said, advice)


def _short(err: str) -> str:
    """What was said first is the cause, and what was said last is what came of it."""
    words = " ".join(err.split())
    return words if len(words) <= 2 * END else f"{words[:END]} ... {words[-END:]}"
