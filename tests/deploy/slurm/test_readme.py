"""The walk of cray/README.md, by its own commands, from the clone to the truncated SVD."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import Submitted, assert_clean
from tests.faults.hosts import ROOT

README = ROOT / "cray" / "README.md"
INSTALL = ".venv/bin/pip install ."
WALK_S = 400.0
PROMPT_SECTION = "**At a prompt**"
APP = (
    "import ray\nfrom alchemist_ray import AlchemistSession\nwith AlchemistSession(2) as als:\n"
    "    print('ranks', als.run(lambda comm: comm.allreduce(1)), 'nodes', len(ray.nodes()))\n"
)


def block(after: str) -> list[str]:
    """The lines of the first block of shell after these words, without comments."""
    text = README.read_text().partition(after)[2]
    found = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert found, after
    return [line.partition("   #")[0].strip() for line in found[1].splitlines()]


def shell(lines: list[str], folder: Path) -> None:
    """Lines that need the internet, which the cluster's hosts do not have."""
    done = subprocess.run(
        ["bash", "-e"], input="\n".join(lines), cwd=folder, text=True, timeout=WALK_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def clone(slurm: Slurm) -> Path:
    """The environment of the first two lines, in the cluster's home, from the present files."""
    get, install, *_ = block("## From `git clone`")
    assert get == "git clone <this repository> alchemist && cd alchemist"
    assert install == f"python3 -m venv .venv && {INSTALL}"
    today = "git ls-files -z --cached --others --exclude-standard --deduplicate"
    copy = f"(cd {ROOT} && {today} | tar -cf - --ignore-failed-read --null -T -) | tar -xf -"
    # uv takes from its cache what pip would fetch again; pip compiles what it installs.
    uv = f"{Path(sys.executable).parent}/uv pip install --quiet --compile-bytecode"
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
    salloc, *lines = block(PROMPT_SECTION)
    assert salloc.startswith("salloc ")
    (clone / "app.py").write_text(APP)
    session = "\n".join(["set -e", f"cd {clone}", "source .venv/bin/activate", *lines])
    (clone / "session.sh").write_text(session)
    said = slurm.login(*salloc.split(), "bash", clone / "session.sh", limit_s=WALK_S)
    assert said.count("ranks 2 nodes 3") == 2, said
    assert_clean(slurm.nodes)
