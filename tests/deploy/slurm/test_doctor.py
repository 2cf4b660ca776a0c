"""``alchemist doctor`` in an allocation where no Ray runs: by steps of the job alone."""

from __future__ import annotations

import json
import os
from typing import Any

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import ALCHEMIST, START_S, assert_clean


def doctor(
    slurm: Slurm, *words: Any, before: tuple[Any, ...] = (), **env: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """Exit code and findings by check, of the command in an allocation of 2 nodes."""
    command = [*before, *ALCHEMIST, "doctor", "--json", *words]
    done = slurm.salloc("-c2", *command, **env)
    assert "{" in done.stdout, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    found: dict[str, list[dict[str, str]]] = {}
    for finding in told["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.returncode, found


def test_the_nodes_of_a_job_are_looked_at_and_its_pmi(slurm: Slurm) -> None:
    code, found = doctor(slurm)
    wrong = [f for told in found.values() for f in told if f["status"] == "bad"]
    assert (code, wrong) == (0, []), json.dumps(wrong, indent=1)
    names = {node.name for node in slurm.nodes}
    assert len({f["node"] for f in found["MPI library"]} & names) == 2
    assert found["PMI of srun"][0]["message"] == "--mpi=pmi2: one world of 4"
    assert "2 connections" in found["between nodes"][0]["message"]
    assert found["clocks"][0]["status"] == "ok"
    assert found["versions"][0]["status"] == "ok"
    assert "alchemist slurm run -- alchemist doctor" in found["Ray address"][0]["message"]
    assert_clean(slurm.nodes)


def test_the_wrong_pmi_and_what_the_site_has_not(slurm: Slurm) -> None:
    code, found = doctor(slurm, "--site", "cray-ex", ALCHEMIST_SRUN_MPI="none")
    assert code == 1
    (pmi,) = found["PMI of srun"]
    assert "4 ranks in worlds of [1] instead of 4" in pmi["message"]
    assert "srun --mpi=list" in pmi["advice"]
    assert all("no interface hsn0" in f["message"] for f in found["network interface"])
    assert all("CRAY_MPICH_DIR is not set" in f["advice"] for f in found["MPI library"])
    assert_clean(slurm.nodes)


DIES = """
import glob, os, signal, sys, time
if sys.orig_argv[-1] == "world" and os.environ.get("SLURM_PROCID") == "3":
    end = time.monotonic() + 50
    while not glob.glob("/dev/shm/mpich_shm_*") and time.monotonic() < end:
        time.sleep(0.01)
    print("names seen:", glob.glob("/dev/shm/mpich_shm_*"), file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_rank_killed_in_mpi_init_is_told_and_leaves_no_shared_memory(slurm: Slurm) -> None:
    (slurm.shared / "sitecustomize.py").write_text(DIES)
    path = os.pathsep.join([str(slurm.shared), os.environ.get("PYTHONPATH", "")])
    code, found = doctor(slurm, PYTHONPATH=path)
    assert code == 1
    (pmi,) = found["PMI of srun"]
    assert "0 of 4 ranks answered" in pmi["message"]
    assert "names seen: ['/dev/shm/mpich_shm_" in pmi["message"]  # or there was nothing to remove
    assert_clean(slurm.nodes)


def test_with_the_jobs_ray_gangs_are_looked_at_too(slurm: Slurm) -> None:
    run = (*ALCHEMIST, "slurm", "run", "--start-timeout", START_S, "--")
    code, found = doctor(slurm, "--nodes", 2, "--ranks-per-node", 1, before=run)
    wrong = [f for told in found.values() for f in told if f["status"] == "bad"]
    assert (code, wrong) == (0, []), json.dumps(wrong, indent=1)
    assert "this job's folder" in found["Ray address"][0]["message"]
    assert "mode token" in found["Ray authentication"][0]["message"]
    assert found["gang"][0]["message"].startswith("2 ranks on 2 nodes")
    assert found["PMI"][0]["message"].startswith("one world of 2")
    assert_clean(slurm.nodes)
