"""Jobs whose time is up, by Slurm's own clock: side by side."""

from __future__ import annotations

from typing import Any

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import Submitted, assert_clean

LIMIT_S = 120.0  # Slurm looks at its jobs' limits every 30 s


def end_soon(slurm: Slurm, job: Submitted, seconds: int) -> None:
    """Have the time limit of a job lie so far ahead; Slurm sees it when it looks next."""
    job.wait_told("address")
    slurm.login("scontrol", "update", f"JobId={job.number}", f"EndTime=now+{seconds}")


def test_time_that_is_up(slurm: Slurm, submit: Any) -> None:
    """One is told in time and saves; one does not want to hear; one is never told."""
    site = slurm.shared / "hasty.toml"
    site.write_text("[job]\nspare_s = 20\n")
    saving = submit("-c", 1, program=["save"])
    deaf = submit("-c", 1, "--site", site, program=["ignore"])
    unwarned = submit("-c", 1, "--option=--signal=B:CONT@1", program=["ignore"])
    for job, seconds in ((saving, 80), (deaf, 45), (unwarned, 1)):
        end_soon(slurm, job, seconds)

    assert saving.wait(LIMIT_S) == 5, saving.log  # its own exit code
    assert saving.told("saved") == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert "SIGTERM: the program has 45 s to end" in saving.log

    assert deaf.wait(LIMIT_S) == 128 + 9, deaf.log  # killed by us, with time left to clean up
    assert slurm.state(deaf.number)["JobState"] == "FAILED"

    unwarned.wait(LIMIT_S)
    assert slurm.state(unwarned.number)["JobState"] == "TIMEOUT", unwarned.log
    assert_clean(slurm.nodes)
