"""Listings in other languages than Python: run here, by another test, or shown with a reason."""

from __future__ import annotations

import os
import re
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.deploy.slurm import sites
from alchemist_ray.measures.metrics import METRICS
from tests.docs.pages import ROOT, documents, read_page
from tests.support import commands
from tests.support.build import uv_build
from tests.support.kernels import plain_shell

__all__ = ["plain_shell"]

LISTING = re.compile(r"^```(\S*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LANGUAGES = ("sh", "bash", "text", "toml", "yaml", "promql", "scala", "java")
HERE = "tests/docs/test_listings.py"
SCAFFOLD = "tests/ali/test_scaffold.py"
# By page: words of a listing, and the test that runs it, or why no test can.
RUN_BY = {
    "README.md": {"alchemist demo": "tests/test_distribution.py"},
    "benchmarks/README.md": {"benchmarks.recovery": "shown only: it measures for minutes"},
    "benchmarks/papers/README.md": {"benchmarks.papers": "tests/benchmarks/test_papers.py"},
    "cray/README.md": {
        "git clone": "tests/deploy/slurm/test_readme.py",
        "singular values": "tests/deploy/slurm/test_readme.py",
        "salloc": "tests/deploy/slurm/test_readme.py",
    },
    "docs/bench.md": {"bench hpc": "tests/alchemist_ray/observe/test_bench.py"},
    "docs/computing-centre.md": {
        "alchemist slurm submit": "tests/deploy/jupyterhub/test_centre.py",
        "jupyterhub -f": "shown only: the test has the environment, and starts the hub by itself",
    },
    "docs/debugging.md": {"GroupFailedError": "tests/faults/test_ranks.py"},
    "docs/doctor.md": {"alchemist doctor": "tests/alchemist_ray/observe/test_doctor.py"},
    "docs/gateway.md": {
        "alchemist gateway --port": HERE,
        "docker run": "tests/deploy/container/test_image.py",
        "make client-wheel": "tests/alchemist_ray/gateway/test_wheel.py",
    },
    "docs/getting-started.md": {
        "alchemist doctor": "tests/test_distribution.py",
        "git clone": "tests/deploy/slurm/test_readme.py",
        "pip download": "tests/test_distribution.py",
    },
    "docs/kubernetes.md": {"alchemist token": HERE},
    "docs/metrics.md": {"ray_alchemist": HERE},
    "docs/operations.md": {
        "alchemist doctor": "tests/alchemist_ray/observe/test_bench.py",
        "alchemist status": HERE,
        "alchemist logs": HERE,
    },
    "docs/own-library.md": {
        "alchemist new-library": SCAFFOLD,
        "# a module with @routine": "tests/ali/test_registry.py",
        "hatchling": HERE,
        "alchemist run-routine": HERE,
    },
    "docs/scala.md": {
        "import alchemist": "tests/alchemist_ray/clients/spark/test_scala.py",
        "package alchemist.libA": "tests/alchemist_ray/clients/spark/test_scala.py",
        "spark-submit": "tests/alchemist_ray/clients/spark/test_scala.py",
        "GEMM.apply": "shown only: the classes are those of the Scala program",
    },
    "docs/simulators.md": {"alchemist new-library": SCAFFOLD},
    "docs/slurm.md": {
        "make image": "tests/deploy/container/test_image.py",
        'about = "our cluster"': HERE,
        "--container": HERE,
        "ALCHEMIST_JOB_FOLDER": "tests/deploy/slurm/test_spark_apart.py",
    },
    "docs/two-notebooks.md": {"ray start": "shown only: the test of the page has a cluster"},
    "docs/virtual-cluster.md": {
        "podman create": "tests/deploy/virtual/test_guests.py",
        "--join vc": "tests/deploy/virtual/test_guests.py",
        "sriov_numvfs": "shown only: it needs a network card with virtual functions",
    },
    "docs/your-code.md": {"%load_ext": HERE},
    "kuberay/README.md": {
        "kubectl create": "tests/kube/test_1_readme.py",
        "helm template": "tests/deploy/kuberay/test_chart.py",
        "helm install": "tests/deploy/kuberay/test_chart.py",
        "kustomize.config": HERE,
        "ray job submit": "shown only: it needs a cluster and its forwarded port",
    },
}


def listings() -> list[tuple[str, str]]:
    """Page and text of every listing that `test_examples.py` does not run."""
    found = []
    for path in documents():
        page = read_page(path)
        built = {command.strip() for command in page.commands.values()}
        for language, text in LISTING.findall(path.read_text()):
            if language in LANGUAGES and text.strip() not in built:
                found.append((page.name, text))
    return found


def listing(page: str, words: str) -> str:
    """The listing of a page with these words."""
    (found,) = [text for name, text in listings() if name == page and words in text]
    return found


def shell(text: str, folder: Path, **variables: str) -> str:
    """Run lines in a shell, as printed; what they print. Fails if one of them does."""
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": tools, "PYTHONPATH": str(ROOT), **variables}
    return commands.output("bash", "-e", "-c", text, cwd=folder, env=env, limit_s=200, merged=True)


@pytest.mark.parametrize(("page", "text"), listings(), ids=lambda value: value.splitlines()[0][:60])
def test_every_listing_is_run_by_a_test_or_has_a_reason(page: str, text: str) -> None:
    tests = [test for words, test in RUN_BY.get(page, {}).items() if words in text]
    assert tests, f"{page}: no test runs this listing:\n{text}"
    assert all((ROOT / test).exists() or test.startswith("shown only: ") for test in tests), tests


def test_commands_about_gangs_in_operation(cluster: str, tmp_path: Path) -> None:
    lines = [
        line.partition("  #")[0]
        for words in ("alchemist status", "alchemist logs")
        for line in listing("docs/operations.md", words).splitlines()
    ]
    status, watch, cancel, stop, logs, follow = lines
    forever = "timeout -s INT 8 {} || [ $? = 124 ]"  # as Ctrl-C ends them
    with AlchemistSession(4, name="climate", lifetime="detached") as session:
        session.run(lambda comm: print("rank", comm.rank, "computes"))
        session.detach()
    shown = [status, forever.format(watch), logs, forever.format(follow)]
    said = shell("\n".join(shown), tmp_path, RAY_ADDRESS=cluster)
    assert len(re.findall(r"^climate +ready +4", said, re.M)) >= 2, said
    assert said.count("rank 3 computes") == 2, said
    shell(f"{cancel}\n{stop}", tmp_path, RAY_ADDRESS=cluster)
    assert "climate" not in {gang.name for gang in AlchemistSession.list()}


def test_a_gateway_and_the_program_of_its_client(cluster: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "gateway.md").read_text()
    serve, create = listing("docs/gateway.md", "--port").splitlines()
    # The user's own file of tokens is left alone.
    create = create.replace("alchemist token ", "alchemist token --tokens tokens.json ")
    token = shell(create, tmp_path).split()[-1]
    serve = f"{serve.replace('24960', '0')} --tokens tokens.json"
    said = shell(serve, tmp_path, RAY_ADDRESS=cluster)
    (program,) = re.findall(r"```python\n(# Not run .*?)```", text, re.DOTALL)
    (tmp_path / "app.py").write_text(program)
    (address,) = re.findall(r"alchemist://\S+", said)
    try:
        numbers = shell("python app.py", tmp_path, ALCHEMIST_ADDRESS=address, ALCHEMIST_TOKEN=token)
    finally:
        shell("alchemist gateway --stop", tmp_path, RAY_ADDRESS=cluster)
    assert len(re.findall(r"\d+\.\d+", numbers)) == 10, numbers


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_routine_of_the_template_without_ray(tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", A := np.arange(12.0).reshape(6, 2))
    shell("alchemist new-library mylib && make -C mylib && cp mylib/libmylib.so .", tmp_path)
    shell(listing("docs/own-library.md", "run-routine"), tmp_path)
    (result,) = (tmp_path / "results").glob("*.npy")
    np.testing.assert_array_equal(np.load(result), 3 * A)


def test_a_wheel_with_a_shared_object_has_the_tag_of_its_platform(tmp_path: Path) -> None:
    page = "docs/own-library.md"
    (tmp_path / "pyproject.toml").write_text(listing(page, "hatchling"))
    hook = read_page(ROOT / page).files["hatch_build.py"]
    (tmp_path / "hatch_build.py").write_text(hook)
    (tmp_path / "mylib").mkdir()
    for name in ("__init__.py", "libmylib.so"):
        (tmp_path / "mylib" / name).touch()
    (wheel,) = uv_build(tmp_path, tmp_path / "dist", "--wheel").glob("*.whl")
    assert re.fullmatch(r"mylib-1\.0-py3-none-linux_\w+\.whl", wheel.name)
    assert "mylib/libmylib.so" in zipfile.ZipFile(wheel).namelist()


def test_cells_on_the_ranks(cluster: str, plain_shell: Any) -> None:
    names = plain_shell.user_ns
    load, first, *cells = listing("docs/your-code.md", "%load_ext").split("\n\n")
    for cell in (load, first):
        plain_shell.run_cell(cell).raise_error()
    session: AlchemistSession = names["als"]
    names["A"] = session.send_matrix(np.ones((8, 2)))
    for cell in cells:
        plain_shell.run_cell(cell).raise_error()
    np.testing.assert_allclose(names["A"].fetch(), 1 - names["mean"])
    session.stop()


def test_the_site_file_and_the_jobs_in_an_image(tmp_path: Path) -> None:
    import tomllib  # noqa: PLC0415 - one use

    text = listing("docs/slurm.md", 'about = "our cluster"')
    assert sites.parse(tomllib.loads(text), "ours.toml", "ours").mpi.launcher == "srun"
    for line in listing("docs/slurm.md", "--container").splitlines():
        said = shell(line.replace(" -- ", " --dry-run -- "), tmp_path)
        assert "exec alchemist slurm run" in said


def test_the_queries_name_metrics_that_exist() -> None:
    queries = [text for page, text in listings() if page == "docs/metrics.md"]
    named = {name for text in queries for name in re.findall(r"ray_(alchemist_\w+)", text)}
    assert len(named) >= 4
    assert named <= set(METRICS)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_a_sites_own_kustomization(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kuberay", tmp_path / "kuberay")
    (tmp_path / "kustomization.yaml").write_text(listing("kuberay/README.md", "kustomize.config"))
    said = shell("kubectl kustomize .", tmp_path)
    assert "image: registry.example/alchemist-on-ray:0.1.0" in said
    assert "image: alchemist-on-ray" not in said
    assert "namespace: alchemist" not in said


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_the_secret_with_the_tokens_of_a_gateway(tmp_path: Path) -> None:
    create, secret, *_ = listing("docs/kubernetes.md", "alchemist token").splitlines()
    said = shell(f"{create}\n{secret} --dry-run=client -o yaml", tmp_path)  # without a cluster
    assert "name: alchemist-gateway" in said
    assert "  tokens.json: " in said
