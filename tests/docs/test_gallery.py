"""The gallery: codes of others run as printed, and give what they give by mpiexec.

They run in the environment that `make gallery` makes, else in this one. That environment is not
activated: ranks find the programs of their MPI by themselves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.pages import GALLERY, Page, read_page
from tests.docs.test_examples import run
from tests.support import commands
from tests.support.suite import LONG

ROOT = commands.ROOT
NEEDS = {  # packages of a page's program; of other pages the page's own name
    "pylops-mpi": "pylops_mpi",
    "mpi4py-fft": "mpi4py_fft",
    "cylinder": "ngsolve",
}
PAGES = {path.stem: read_page(path) for path in sorted((ROOT / GALLERY).glob("*.md"))}
RUN = [name for name, page in PAGES.items() if page.blocks]
COMPARED = [name for name in RUN if any(file.endswith("_mpiexec.py") for file in PAGES[name].files)]
LIMIT_S = 280
pytestmark = pytest.mark.timeout(2 * LIMIT_S + 60)

_first_lines: dict[str, list[float]] = {}


def python() -> Path:
    made = ROOT / ".gallery/bin/python"
    return made if made.exists() else Path(sys.executable)


@cache
def installed(package: str) -> bool:
    look = "import importlib.util as util, sys; sys.exit(util.find_spec(sys.argv[1]) is None)"
    return commands.run(python(), "-c", look, package).returncode == 0


def numbers(line: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", line)]


START = """
import sys, ray
ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=300 << 20,
         _temp_dir=sys.argv[1])
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def gallery_cluster() -> Iterator[str]:
    """A Ray of that environment's Python, without its programs in PATH."""
    env = {**os.environ, "PATH": "/usr/local/bin:/usr/bin:/bin", "VIRTUAL_ENV": ""}
    words = [str(python()), "-c", START, os.environ["RAY_TMPDIR"] + "/g"]
    with subprocess.Popen(
        words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=commands.die_with_parent,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdin is not None
        address = process.stdout.readline().strip()
        assert address, "Ray has not started in the environment of the gallery"
        yield address
        process.stdin.close()
        process.wait(60)


def test_the_gallery_has_a_picture_of_each_code() -> None:
    assert len(RUN) >= 6
    for name in RUN:
        text = (ROOT / GALLERY / f"{name}.md").read_text()
        assert f"]({name}.png)" in text
        assert (ROOT / GALLERY / f"{name}.png").stat().st_size < 150_000
        assert f'savefig("{name}.png"' in text
        assert f"({name}.md)" in (ROOT / GALLERY / "index.md").read_text()


@pytest.mark.parametrize("name", RUN)
def test_a_code_of_the_gallery_runs_as_printed(
    gallery_cluster: str, tmp_path: Path, name: str
) -> None:
    if not installed(package := NEEDS.get(name, name)):
        pytest.skip(f"needs {package} (make gallery)")
    page = PAGES[name]
    plain = {"PATH": "/usr/local/bin:/usr/bin:/bin", "MPLBACKEND": "Agg"}
    plain["PYTHONPATH"] = str(tmp_path)
    results = run(page, tmp_path, gallery_cluster, python=python(), limit_s=LIMIT_S, more=plain)
    for block in page.blocks:
        assert not results[block.name]["error"], results[block.name]["error"]
    assert not results["exit"]["error"], results["exit"]["error"]
    assert (tmp_path / f"{name}.png").stat().st_size > 5000
    output = "".join(results[block.name]["output"] for block in page.blocks)
    told = [line for line in output.splitlines() if not line.startswith("[rank")]
    assert numbers(told[0])
    if name in COMPARED:
        by_gang, by_mpiexec = numbers(told[0]), numbers(mpiexec(page, tmp_path))
        assert len(by_gang) == len(by_mpiexec) >= 2
        assert by_gang == pytest.approx(by_mpiexec, rel=1e-10)


STOPPED = """
import os, signal
import numpy as np
from envs import HPCSimulatorEnv

action = np.zeros(1, "float32")
with HPCSimulatorEnv(
    lib_name="cylinder", lib_path="cylinder.py", num_workers=2, on_failure="truncate",
    step_timeout_s=120,
) as env:
    env.reset(seed=1)
    env.step(action)
    worker = env._simulation._session.list_workers()[1]
    env._simulation.config = dataclasses.replace(env._simulation.config, step_timeout_s=5.0)
    os.kill(worker.pid, signal.SIGSTOP)
    *_, truncated, info = env.step(action)
    print(truncated, info["gang_lost"])
    env.reset(seed=2)
    print(env.step(action)[-1]["drag"] > 0)
"""


@pytest.mark.skipif(not LONG, reason="a training: make test-long")
def test_the_controlled_flow_is_trained_and_a_stopped_rank_costs_an_episode(
    gallery_cluster: str, tmp_path: Path
) -> None:
    if not installed("ngsolve"):
        pytest.skip("needs ngsolve (make gallery)")
    page = PAGES["cylinder"]
    (tmp_path / "cylinder.py").write_text(page.files["cylinder.py"])
    text = (ROOT / GALLERY / "cylinder.md").read_text()
    training = text.partition("# Not run by the tests: make test-long")[2].partition("\n")[2]
    training = training.partition("```")[0].replace(
        '"training_iteration": 25', '"training_iteration": 1'
    )
    env = {**os.environ, "RAY_ADDRESS": gallery_cluster, "PYTHONPATH": str(ROOT)}
    done = commands.output(python(), "-c", training, cwd=tmp_path, env=env, limit_s=1500)
    assert -50 < numbers(done.splitlines()[-1])[-1] < 50
    done = commands.output(python(), "-c", "import dataclasses" + STOPPED, cwd=tmp_path, env=env,
                           limit_s=600)  # fmt: skip
    assert done.splitlines() == ["True True", "True"]


def mpiexec(page: Page, folder: Path) -> str:
    """The first line of the same by mpiexec."""
    (program,) = [file for file in page.files if file.endswith("_mpiexec.py")]
    tools, prefix = python().parent, python().parent.parent
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "MPI_LIB_NRN_PATH": f"{prefix}/lib/libmpi.so.12",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = commands.output(
        tools / "mpiexec", "-n", 2, python(), program, cwd=folder, env=env, limit_s=LIMIT_S
    )
    return next(line for line in done.splitlines() if re.match(r"-?\d", line))
