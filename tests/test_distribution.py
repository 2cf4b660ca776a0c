"""The distributions, as `make dist` builds them, installed from a folder of wheels alone."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from alchemist_ray.version import __version__
from tests.deploy.container import images
from tests.support import commands
from tests.support.build import needs_compiler

ROOT = Path(__file__).parents[1]
LIMIT_NBYTES = 3 << 20  # 3 MiB, without Spark's jar
DOWNLOAD_S = 900.0  # 220 MB, of which pip's cache keeps most
INSTALL_S = 600.0
# Files of the wheel that are not Python: what an installed package reads.
OTHER_FILES = (
    "alchemist_ray/clients/spark/java/*",  # the jar, and its sources for other versions of Spark
    "alchemist_ray/deploy/virtual_cluster/guest/*.sh",
    "ali/include/alchemist*",
    "ali/templates/*.in",
    "cray/alchemist.sbatch",
    "cray/sites/*.toml",
    "envs/rayleigh_benard/*.[ch]",  # built for the processor of each node
    "mpi_workers/*/*.c",  # to build on a machine for which there is no wheel
    "mpi_workers/*/*.so",
    "alchemist_on_ray-*.dist-info/*",
)
COMPILED = {
    "mpi_workers/matrix/copy_kernel.so",
    "mpi_workers/rank/crash_frames.so",
    "mpi_workers/waits/mpi_waits.so",
}
PROGRAM = """
import numpy as np
import alchemist_ray
from alchemist_ray import AlchemistSession

with AlchemistSession(2) as als:
    A = np.random.default_rng(0).random((300, 20))
    S, U, V = als.load_library("linalg").truncated_svd(als.send_matrix(A), rank=3)
    assert np.allclose(S.fetch(), np.linalg.svd(A, compute_uv=False)[:3])
    where = als.run(lambda comm: __import__("mpi_workers").__file__)
print(alchemist_ray.__file__, where, sep="\\n")
"""
# What a newcomer types: the demo, the program of the README on two ranks, and the doctor.
FIRST_COMMANDS = f"""
for name in cc gcc git make; do
  if command -v $name; then exit 1; fi  # sh -e would go on after a failed "! command"
done
alchemist demo
python -c 'import os; assert os.path.getsize("out/demo.png") > 100_000'
python -c '{PROGRAM}'
alchemist doctor || true
"""
FIRST_COMMANDS_S = 300.0
WHY_NOT_DEBIAN = (
    images.why_not() if sys.version_info[:2] == (3, 11) else "Debian 12 has Python 3.11"
)
CLIENT = """
import importlib.metadata
from alchemist_ray import AlchemistError, AlchemistSession

try:
    AlchemistSession(address="alchemist://127.0.0.1:{port}", token="alch_ab12cd34_" + "s" * 43)
except AlchemistError as error:
    print(error)
print(*sorted(found.name for found in importlib.metadata.distributions()))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `dist`. twine, auditwheel and check-wheel-contents have accepted its files."""
    if not (make := shutil.which("make")):
        pytest.skip("needs make")
    folder = tmp_path_factory.mktemp("dist")
    environment = Path(sys.prefix)
    ready = environment / ".ready-{}.{}".format(*sys.version_info)
    # This environment is as it is: make must not set it up again below the tests that use it.
    variables = [f"DIST={folder}", f"VENV={environment}", f"PYTHON={sys.executable}"]
    commands.output(make, "dist", *variables, "-o", ready, cwd=ROOT, limit_s=300.0, merged=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("alchemist_on_ray-*.whl")
    return found


@pytest.fixture(scope="module")
def index(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of this project and of all that the demo and the client need."""
    folder = tmp_path_factory.mktemp("index")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
    found = ["--find-links", built, "--constraint", ROOT / "constraints.txt", "--dest", folder]
    done = commands.run(
        *pip, *found, "alchemist-on-ray[demo]", "alchemist-client", limit_s=DOWNLOAD_S, merged=True
    )
    if done.returncode and "Failed to establish" in done.stdout:
        pytest.skip("needs the package index")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A new virtual environment, and variables with which it finds neither compiler nor clone."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=True)
    with tempfile.TemporaryDirectory() as home:  # short: Ray's sockets lie below it
        yield folder, {"PATH": str(folder / "bin"), "HOME": home, "TMPDIR": home}
    shutil.rmtree(folder)


def install(folder: Path, env: dict[str, str], index: Path, what: str) -> None:
    words = ["install", "--quiet", "--no-index", "--find-links", index, what]
    env = {**env, "PIP_NO_COMPILE": "1"}  # of all modules, 40 s of CPU
    commands.output(folder / "bin/pip", *words, env=env, cwd=env["HOME"], limit_s=INSTALL_S)


@pytest.mark.timeout(320)
def test_the_wheel_has_the_files_that_are_used_and_no_others(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.compress_size for entry in archive.infolist()}
    tracked = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    packages = ("alchemist_ray/", "ali/", "cray/", "envs/", "mpi_workers/")
    modules = {name for name in tracked if name.startswith(packages)}
    modules = {name for name in modules if not name.startswith("alchemist_ray/gateway/wheel/")}
    others = {name for name in sizes if not name.endswith((".py", "/"))}
    if tracked:  # a clone
        assert {name for name in sizes if name.endswith(".py")} == modules
    for pattern in OTHER_FILES:
        matching = {name for name in others if fnmatchcase(name, pattern)}
        assert matching, pattern
        others -= matching
    assert not others
    jar = sum(size for name, size in sizes.items() if name.endswith(".jar"))
    assert sum(sizes.values()) - jar < LIMIT_NBYTES


@needs_compiler
@pytest.mark.timeout(320)
def test_the_wheel_has_the_compiled_parts_and_says_for_which_systems(wheel: Path) -> None:
    """manylinux_2_34_x86_64, for example; an index refuses linux_x86_64."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= COMPILED
    assert re.fullmatch(
        rf"alchemist_on_ray-{__version__}-py3-none-manylinux_2_\d+_{os.uname().machine}", wheel.stem
    )


@pytest.mark.timeout(320)
def test_the_page_of_the_index_leads_to_pages_that_exist(wheel: Path) -> None:
    """Its links are those of the README, in the documentation of this version."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    page = str(metadata.get_payload())
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    urls = dict(text.split(", ") for text in metadata.get_all("Project-URL", []))
    base = f"{urls['Homepage']}/{__version__}/"
    ours = [link.removeprefix(base) for link in links if link.startswith(base)]
    assert len(ours) > 20
    for link in ours:
        path = link.partition("#")[0]
        if path.startswith("_images/"):
            assert list(ROOT.glob(f"docs/images/{Path(path).name}")), link
        else:
            stem = ROOT / path.removesuffix(".html")
            assert stem.with_suffix(".md").exists() or stem.with_suffix(".ipynb").exists(), link
    others = {link for link in links if not link.startswith((base, "https://"))}
    assert not others, others


def check_first_commands(said: str, folder: Path) -> None:
    """Of a package that is installed below `folder`: also the ranks have imported that one."""
    assert "The picture: out/demo.png" in said, said
    for package in ("alchemist_ray", "mpi_workers"):
        assert re.search(rf"^{folder}/\S+/{package}/__init__\.py$", said, re.MULTILINE), said
    assert "waits in MPI end with their call" in said, said


@needs_compiler
@pytest.mark.skipif(WHY_NOT_DEBIAN is None, reason="is tested in a bare Debian")
@pytest.mark.timeout(DOWNLOAD_S + INSTALL_S + FIRST_COMMANDS_S)
def test_one_line_installs_it_without_index_compiler_git_and_make(
    index: Path, empty: tuple[Path, dict[str, str]]
) -> None:
    folder, env = empty
    install(folder, env, index, "alchemist-on-ray[demo]")
    env = {**env, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    env["RAY_TMPDIR"] = env["HOME"]  # a cluster that runs on this machine is not joined
    said = commands.output(
        "/bin/sh", "-ec", FIRST_COMMANDS, env=env, cwd=env["HOME"], limit_s=FIRST_COMMANDS_S,
        merged=True,
    )  # fmt: skip
    check_first_commands(said, folder)


@pytest.mark.timeout(DOWNLOAD_S + INSTALL_S)
def test_the_client_needs_neither_ray_nor_mpi(
    index: Path, empty: tuple[Path, dict[str, str]]
) -> None:
    """What it does is tested in tests/alchemist_ray/gateway/test_wheel.py."""
    folder, env = empty
    install(folder, env, index, "alchemist-client")
    said = commands.output(
        folder / "bin/python", "-c", CLIENT.format(port=1), env=env, cwd=env["HOME"], merged=True
    ).splitlines()
    assert "127.0.0.1:1" in said[0]
    assert set(said[-1].split()) - {"pip", "setuptools"} == {"alchemist-client", "msgpack", "numpy"}


@needs_compiler
@pytest.mark.root
@pytest.mark.skipif(WHY_NOT_DEBIAN is not None, reason=str(WHY_NOT_DEBIAN))
@pytest.mark.timeout(DOWNLOAD_S + INSTALL_S + images.BUILD_LIMIT_S)
def test_one_line_installs_it_in_a_bare_debian_without_network(index: Path) -> None:
    """Debian 12 with python3-venv, and nothing else."""
    folder = Path("/opt/venv")
    lines = (
        f"python3 -m venv {folder} && . {folder}/bin/activate && cd /tmp",
        "pip install --quiet --no-index --find-links /index 'alchemist-on-ray[demo]'",
        FIRST_COMMANDS,
    )
    words = ["run", "--rm", "--network=none", "--shm-size=1g", f"--volume={index}:/index:ro"]
    limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=16384:16384"]
    said = commands.output(
        *images.in_store("podman", *words, *limits, images.bare(), "sh", "-ec", "\n".join(lines)),
        limit_s=INSTALL_S + FIRST_COMMANDS_S, merged=True, cwd="/",
    )  # fmt: skip
    check_first_commands(said, folder)


@pytest.mark.timeout(320)
def test_the_wheel_has_the_jar_for_spark(wheel: Path) -> None:
    """As `make dist` builds it; an installed package finds it by the same name."""
    command = [sys.executable, "-m", "alchemist_ray.clients.spark.build_jar"]
    jar = commands.run(*command, cwd=ROOT).stdout.strip()
    if not jar:
        pytest.skip("the jar needs pyspark and a Java")
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


@pytest.mark.timeout(320)
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
