"""A node of the job is lost, with all that ran on it: the last test, which leaves it so."""

from __future__ import annotations

from typing import Any

from tests.deploy.slurm.cluster import RUNS, Slurm
from tests.deploy.slurm.conftest import assert_clean


def test_a_node_that_is_lost_ends_the_gang_and_not_the_job(slurm: Slurm, submit: Any) -> None:
    job = submit("-N", 3, "-c", 2, program=["vanish"])
    assert len({host for _, host, _ in job.wait_told("workers")}) == 3
    lost = slurm.nodes[2]
    lost.kill()
    told = job.wait_told("lost", 40)
    assert told["kind"] == "GroupFailedError"
    assert lost.name in told["message"]
    again = job.wait_told("again", 120)
    assert lost.name not in {host for _, host, _ in again["workers"]}
    assert again["error"] < 1e-12
    # Slurm goes on asking the lost node whether it is clean.
    assert job.wait(60, lives=RUNS) == 0, job.log
    assert_clean(slurm.nodes[:2])
