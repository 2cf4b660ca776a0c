"""The distribution alchemist-on-ray: `make dist` builds it; it works without this repository."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from alchemist_ray.version import __version__
from tests.support import commands
from tests.support.build import uv_build

ROOT = Path(__file__).parents[1]
BUILD_TIMEOUT_S = 100.0
# Matrices, a shipped library, a library built with its C compiler, and a file, from the wheel.
PROGRAM = """
import sys
import numpy as np
import ray
import alchemist_ray
from alchemist_ray import AlchemistSession

assert alchemist_ray.__file__.startswith(sys.argv[1]), alchemist_ray.__file__
ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
A = np.random.default_rng(0).random((300, 20))
with AlchemistSession(2) as als:
    S, U, V = als.load_library("linalg").truncated_svd(als.send_matrix(A), rank=3)
    assert np.allclose(S.fetch(), np.linalg.svd(A, compute_uv=False)[:3])
    where = als.run(lambda comm: __import__("mpi_workers").__file__)
    assert where.startswith(sys.argv[1]), where
ray.shutdown()
print("done")
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "alchemist_ray.clients.spark.build_jar"]
    jar = subprocess.run(
        command, timeout=BUILD_TIMEOUT_S, check=False, capture_output=True, cwd=ROOT
    )
    (out / "jar").write_bytes(jar.stdout)  # empty without Spark or a Java
    return uv_build(ROOT, out)


@pytest.mark.timeout(150)
def test_twine_finds_nothing_to_complain_about(built: Path) -> None:
    files = [*built.glob("*.whl"), *built.glob("*.tar.gz")]
    assert len(files) == 2
    done = commands.run(sys.executable, "-m", "twine", "check", "--strict", *files)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(150)
def test_the_wheel_works_without_the_repository(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    packages = tmp_path / "packages"
    uv = Path(sys.executable).with_name("uv")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--target", packages, wheel]
    subprocess.run(install, check=True, timeout=60)
    env = {**os.environ, "PYTHONPATH": str(packages)}
    done = commands.python(PROGRAM, packages, cwd=tmp_path, env=env)
    assert done.stdout.endswith("done\n"), done.stdout + done.stderr


@pytest.mark.timeout(150)
def test_the_wheel_has_the_jar_for_spark(built: Path) -> None:
    """As `make dist` builds it; an installed package finds it by the same name."""
    jar = (built / "jar").read_text().strip()
    if not jar:
        pytest.skip("the jar needs pyspark and a Java")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".jar")]
        assert name == f"alchemist_ray/clients/spark/java/{Path(jar).name}"
        names = zipfile.ZipFile(io.BytesIO(archive.read(name))).namelist()
        data = zipfile.ZipFile(io.BytesIO(archive.read(name))).read("alchemist/AlMatrix.class")
    assert {"alchemist/AlchemistContext.class", "alchemist/spark/Sender.class"} <= set(names)
    assert int.from_bytes(data[6:8]) == 52  # bytecode of Java 8


def test_the_maven_project_has_this_version() -> None:
    pom = (ROOT / "alchemist_ray/clients/spark/java/pom.xml").read_text()
    assert f"<version>{__version__}</version>" in pom


def test_the_sdist_has_what_a_build_needs(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml", "LICENSE", "README.md", "alchemist_ray/version.py",
        "mpi_workers/build_native.py", "mpi_workers/matrix/copy_kernel.c",
        "mpi_workers/rank/crash_frames.c",
        "ali/include/alchemist.h", "envs/rayleigh_benard/library.c", "cray/alchemist.sbatch",
    } <= names  # fmt: skip
    assert not any(".venv" in name or name.endswith(".pyc") for name in names)
