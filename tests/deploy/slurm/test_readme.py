"""The walk of cray/README.md, by its own commands, from the clone to the truncated SVD."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import Submitted, assert_clean
from tests.faults.hosts import ROOT
from tests.support import commands

README = ROOT / "cray" / "README.md"
INSTALL = ".venv/bin/pip install ."
WALK_S = 400.0
PROMPT_SECTION = "**At a prompt**"
APP = """
import os
from alchemist_ray import AlchemistSession  # before ray, which needs the job's token
import ray
with AlchemistSession(2) as als:
    ranks = als.run(lambda comm: comm.allreduce(1))
    print("ranks", ranks, "nodes", len(ray.nodes()), "from", os.uname().nodename)
raise SystemExit(3)
"""


def block(after: str) -> list[str]:
    """The lines of the first block of shell after these words, without comments."""
    text = README.read_text().partition(after)[2]
    found = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert found, after
    return [line.partition("   #")[0].strip() for line in found[1].splitlines()]


def shell(lines: list[str], folder: Path) -> None:
    """Lines that need the internet, which the cluster's hosts do not have."""
    commands.output("bash", "-e", given="\n".join(lines), cwd=folder, limit_s=WALK_S)


@pytest.fixture(scope="module")
def clone(slurm: Slurm) -> Path:
    """The environment of the first two lines, in the cluster's home, from the present files."""
    get, install, *_ = block("## From `git clone`")
    assert get == "git clone <this repository> alchemist && cd alchemist"
    assert install == f"python3 -m venv .venv && {INSTALL}"
    today = "git ls-files -z --cached --others --exclude-standard --deduplicate"
    copy = f"(cd {ROOT} && {today} | tar -cf - --ignore-failed-read --null -T -) | tar -xf -"
    # uv takes from its cache what pip would fetch again.
    uv = f"{Path(sys.executable).parent}/uv pip install --quiet"
    shell(
        [
            get.replace("<this repository>", str(ROOT)),
            copy,
            install.replace("python3", sys.executable, 1).replace(
                INSTALL, f"{uv} --python .venv/bin/python --constraint constraints.txt ."
            ),
        ],
        slurm.shared,
    )
    return slurm.shared / "alchemist"


def test_from_the_clone_to_a_truncated_svd_on_three_nodes(slurm: Slurm, clone: Path) -> None:
    lines = block("## From `git clone`")[2:]
    script = "\n".join(["set -e", f"cd {clone}", *lines])
    said = slurm.login("bash", "-c", script, limit_s=120)
    assert "generic-slurm" in said
    assert "#SBATCH --nodes=3" in said
    job = Submitted(slurm, "\n".join(said.splitlines()[-3:]))
    assert job.wait(WALK_S) == 0, job.log
    print(job.log)
    assert f"{12} ranks on 3 nodes" in job.log
    shown = re.search(r"singular values: \[(.*?) \.\.\.\]", README.read_text())
    found = re.search(r"singular values: \[(.*?)\]", job.log, re.DOTALL)
    assert shown
    assert found
    wanted = [float(word) for word in shown[1].split()]
    np.testing.assert_allclose([float(w) for w in found[1].split()][:4], wanted, rtol=1e-6)
    assert_clean(slurm.nodes)


def test_at_a_prompt(slurm: Slurm, clone: Path) -> None:
    """salloc's shell is on the login host: programs go to the node with Ray's head."""
    salloc, run, start, again, stop = block(PROMPT_SECTION)
    assert salloc.startswith("salloc ")
    assert run == again
    (clone / "app.py").write_text(APP)
    node, coded = slurm.nodes[0].name, '; echo "code $?"'
    by_itself = f"srun --overlap -N1 -n1 -w {node} python app.py"
    session = [
        f"cd {clone}", "source .venv/bin/activate", run + coded, f"{start} || exit",
        f"{start} && exit", run + coded, by_itself + coded, f"{stop} || exit", f"{stop} && exit",
        "echo to the end",
    ]  # fmt: skip
    (clone / "session.sh").write_text("\n".join(session))
    said = slurm.login(*salloc.split(), "bash", clone / "session.sh", limit_s=WALK_S, check=False)
    assert "\nto the end\n" in said, said
    assert said.count(f"ranks 2 nodes 3 from {node}\n") == said.count("\ncode 3\n") == 3, said
    assert "Ray is up on 3 nodes with 12 CPUs" in said
    assert "als.connect_to_alchemist(" in said
    assert "Ray already runs in this job" in said
    assert "no Ray of `alchemist slurm start` runs in this job" in said
    assert_clean(slurm.nodes)
