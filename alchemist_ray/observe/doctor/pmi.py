"""A check of the site's PMI without Ray: ranks of srun must form one MPI world."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence

from alchemist_ray.launchers.srun import DEFAULT_PMI, PMI
from alchemist_ray.observe.doctor import probe
from alchemist_ray.observe.doctor.finding import BAD, OK, Expected, Finding
from alchemist_ray.observe.doctor.probe import StepProbes

LIMIT_S = 60.0
SWEEP_TIMEOUT_S = 20.0
SHOWN_CHARS = 400  # of the ranks' output, at each end
CLOCK_S = 1.0  # a file's time may be a tick late


def world(names: Sequence[str], expected: Expected, ranks_per_node: int) -> list[Finding]:
    """Start MPI programs on the job's nodes in a step; each reports the size of its world."""
    pmi = os.environ.get(PMI) or expected.pmi or DEFAULT_PMI
    size = ranks_per_node * len(names)
    advice = (
        "choose from `srun --mpi=list`: pmi2 for MPICH, MVAPICH and Intel MPI, cray_shasta "
        f"for Cray MPICH, pmix for Open MPI; {PMI} or mpi.pmi of the site file sets it"
    )
    began = time.monotonic()
    ranks = probe.start(
        names, "mpi_workers", "world", pmi=pmi, tasks_per_node=ranks_per_node,
        options=["--kill-on-bad-exit=1", "--overcommit", "--cpu-bind=none", "--input=none"],
    )  # fmt: skip
    try:
        out, err = ranks.communicate(timeout=LIMIT_S)
        found = judged(pmi, size, ranks.returncode, out, err, advice)
    except subprocess.TimeoutExpired as late:
        words = _short((late.stderr or b"").decode(errors="replace"))
        message = f"--mpi={pmi}: no MPI_Init within {LIMIT_S:g} s {words}".rstrip()
        found = Finding("PMI of srun", BAD, message, advice)
        ranks.terminate()
    finally:
        probe.end(ranks)
    if found.status == BAD:
        clean(names, time.monotonic() - began)
    return [found]


def clean(names: Sequence[str], age_s: float) -> None:
    """Remove shared memory of ranks that were killed in MPI_Init."""
    probes = StepProbes(names)
    try:
        probes.ask("sweep", age_s + CLOCK_S, limit_s=SWEEP_TIMEOUT_S)
    finally:
        probes.close()


def judged(pmi: str, size: int, code: int, out: str, err: str, advice: str) -> Finding:
    """Interpret the step's output."""
    sizes = [json.loads(line)["size"] for line in out.splitlines() if line.startswith("{")]
    if code == 0 and sizes == [size] * size:
        return Finding("PMI of srun", OK, f"--mpi={pmi}: one world of {size}")
    words = _short(err)
    if sizes and set(sizes) != {size}:
        message = (
            f"--mpi={pmi}: {len(sizes)} ranks in worlds of {sorted(set(sizes))} instead of {size}"
        )
    else:
        message = f"--mpi={pmi}: exit code {code}, {len(sizes)} of {size} ranks answered: {words}"
    return Finding("PMI of srun", BAD, message, advice)


def _short(err: str) -> str:
    """Shorten: the beginning shows the cause, the end the consequence."""
    words = " ".join(err.split())
    return (
        words
        if len(words) <= 2 * SHOWN_CHARS
        else f"{words[:SHOWN_CHARS]} ... {words[-SHOWN_CHARS:]}"
    )
