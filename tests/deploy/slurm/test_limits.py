"""Jobs whose time is up, by Slurm's own clock: side by side, two minutes in all."""

from __future__ import annotations

import time
from typing import Any

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import Submitted, assert_clean

LIMIT_S = 200.0  # Slurm looks at its jobs' limits every 30 s


def end_soon(slurm: Slurm, job: Submitted) -> None:
    """Have the time limit of a job lie 60 to 120 s ahead; it is told 60 to 120 s before it."""
    hours, minutes, seconds = map(int, slurm.state(job.number)["RunTime"].split(":"))
    limit = hours * 60 + minutes + 1 + (seconds > 0)
    slurm.login("scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}")


def test_time_that_is_up(slurm: Slurm, submit: Any) -> None:
    """One is told in time and saves; one does not want to hear; one is never told."""
    unwarned = submit("-c", 1, "-t", 1, "--option=--signal=B:CONT@1", program=["ignore"])
    saving, deaf = submit("-c", 1, program=["save"]), submit("-c", 1, program=["ignore"])
    for job in (saving, deaf):
        job.wait_told("address")
        end_soon(slurm, job)

    assert saving.wait(LIMIT_S) == 5, saving.log  # its own exit code
    assert saving.told("saved") == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert "SIGTERM: ending the program" in saving.log

    assert deaf.wait(LIMIT_S) == 128 + 9, deaf.log  # killed by us, with time left to clean up
    assert slurm.state(deaf.number)["JobState"] == "FAILED"

    unwarned.wait(LIMIT_S)
    assert slurm.state(unwarned.number)["JobState"] == "TIMEOUT", unwarned.log
    assert_clean(slurm.nodes)


def test_a_job_that_qdel_ends_leaves_nothing(slurm: Slurm, submit: Any) -> None:
    job = submit("-N", 2, "-c", 2, program=["transfer"], system="pbs")
    assert len({host for _, host, _ in job.wait_told("workers")}) == 2
    job.wait_told("sent")
    assert job.number in slurm.login("qstat")
    begin = time.monotonic()
    slurm.login("qdel", job.number)
    slurm.wait(job.number, 30)
    assert time.monotonic() - begin < 30
    assert_clean(slurm.nodes)
