"""A job in this project's own image, which Charliecloud runs on the nodes."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.deploy.container import images
from tests.deploy.slurm.cluster import Slurm
from tests.deploy.slurm.conftest import ALCHEMIST, START_S, SUBMIT, Submitted, assert_clean

REASON = images.why_not() or (None if shutil.which("ch-run") else "no ch-run: apt, charliecloud")
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(images.BUILD_LIMIT_S + 420),  # the image is built here, if it is not yet
]
RUNTIME = ("--container-runtime", "charliecloud")
PROGRAM = """\
import json, os, sys
import numpy as np
from alchemist_ray import AlchemistSession

def tell(name, value):
    print(f"TOLD {name} {json.dumps(value)}", flush=True)

def product(als):
    rng = np.random.default_rng(0)
    a, b = rng.random((300, 120)), rng.random((120, 200))
    handle = als.load_library("linalg").matmul(als.send_matrix(a), als.send_matrix(b))
    return float(np.abs(handle.fetch() - a @ b).max())

def where(comm):
    import os, sys
    return comm.gather([os.uname().nodename, sys.executable, os.environ.get("SLURM_STEP_ID")])

for launcher in ("pmi", "srun"):
    with AlchemistSession(4, launcher=launcher) as als:
        names = [name for name in os.listdir("/dev/shm") if name.startswith("mpich")]
        tell(launcher, {"where": als.run(where), "error": product(als), "segments": names})
tell("program", [sys.executable, os.getcwd(), sys.argv[1:], os.path.exists("/usr/bin/srun")])
sys.exit(9)
"""


def test_a_gang_over_two_nodes_all_in_the_image(slurm: Slurm) -> None:
    """Ray, the program and the ranks; srun's ranks through the supervisor outside."""
    root = images.image_root()
    (slurm.shared / "app.py").write_text(PROGRAM)
    options = ["-N", 2, "-c", 2, "--container", root, *RUNTIME]
    words = [*SUBMIT, *options, "--", "python", "app.py", "x"]
    job = Submitted(slurm, slurm.login(*ALCHEMIST, "slurm", *words))
    code = job.wait(START_S + 150)
    print(job.log)
    assert code == 9, job.log
    python, folder, arguments, srun = job.told("program")
    assert (python, folder, arguments) == ("/usr/local/bin/python", str(slurm.shared), ["x"])
    assert not srun
    for launcher in ("pmi", "srun"):
        told = job.told(launcher)
        assert len({host for host, _, _ in told["where"]}) == 2
        assert {python for _, python, _ in told["where"]} == {"/usr/local/bin/python3"}
        assert told["error"] < 1e-12
        assert told["segments"] == []  # mapped by all that need them, and named no more
    steps = {step for _, _, step in job.told("srun")["where"]}
    assert len(steps) == 1
    assert steps != {step for _, _, step in job.told("pmi")["where"]}
    assert_clean(slurm.nodes)


@pytest.mark.parametrize(
    ("image", "runtime", "said"),
    [
        ("/nowhere/at/all", "charliecloud", "/nowhere/at/all"),
        ("it.sif", "apptainer", "apptainer: not found"),
    ],
)
def test_an_image_or_a_runtime_that_is_not_there(
    slurm: Slurm, image: str, runtime: str, said: str
) -> None:
    options: list[Any] = [*SUBMIT, "--container", image, "--container-runtime", runtime]
    job = Submitted(slurm, slurm.login(*ALCHEMIST, "slurm", *options, "--", "true"))
    assert job.wait(100) == 1
    assert "JobError: Ray did not start: `ray start` on " in job.log
    assert said in job.log
    assert_clean(slurm.nodes)
