"""Spark in a job of its own, on other nodes than the gangs, as Tables II and III of 2018 count.

The node of Spark's driver joins the other job's Ray without CPUs: ranks cannot come there.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.slurm.cluster import ROOT, Slurm
from tests.deploy.slurm.conftest import PROGRAM, START_S, Submitted, assert_clean

pytestmark = pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java")
DOCS = ROOT / "docs" / "slurm.md"


def test_rows_go_from_sparks_job_to_the_nodes_of_the_gangs_job(slurm: Slurm, submit: Any) -> None:
    ends = slurm.shared / "spark-ends"
    gangs = submit("-N", 2, "-c", 2, program=["stay", str(ends)])
    gangs.wait_told("address")
    folder = Path(gangs.script).parent
    (listing,) = re.findall(r"```sh\n(#!/bin/bash\n.*?)```", DOCS.read_text(), re.DOTALL)
    script = slurm.shared / "spark.sh"
    script.write_text(
        listing.replace("$HOME/.alchemist/jobs/$job", str(folder))
        .replace("job=JOB", f"job={gangs.number}")
        .replace("python program.py", " ".join(PROGRAM) + " spark")
    )  # fmt: skip
    log = slurm.shared / "spark.log"
    number = slurm.login("sbatch", "--parsable", "-o", log, script).strip()
    spark = Submitted(slurm, f"job {number}\nscript {script}\nlog {log}")
    assert spark.wait(START_S) == 0, spark.log
    ends.touch()
    assert gangs.wait() == 7, gangs.log
    (sparks,) = spark.told("executors")
    ranks = [node.name for node in slurm.nodes if node.name != sparks]
    assert sparks in [node.name for node in slurm.nodes]
    for case, nodes in (("STRICT_PACK-1", 1), ("STRICT_PACK-2", 1), ("STRICT_SPREAD-2", 2)):
        hosts, same, _ = spark.told(case)
        assert same, case
        assert len(hosts) == nodes
        assert set(hosts) <= set(ranks)
    assert_clean(slurm.nodes)
