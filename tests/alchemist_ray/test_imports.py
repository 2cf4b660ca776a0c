"""The import law of the design: who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FORBIDDEN = {
    "mpi_workers": {"ray", "alchemist_ray", "ali", "envs"},
    "ali": {"ray", "alchemist_ray", "envs"},
    "alchemist_ray": {"mpi4py", "ali", "envs"},
    "envs": {"mpi4py", "mpi_workers", "ali", "torch"},
}
# What runs on ranks, though it lies in envs: libraries, and what builds them.
RANK_SIDE = {"envs/rayleigh_benard/build.py", "envs/lammps/library.py", "envs/lammps/crystal.py"}
NOT_ON_RANKS = {"ray", "alchemist_ray", "gymnasium", "torch"}
WITH_TORCH = {"envs/rllib.py", "envs/rayleigh_benard/train.py"}
# Where a rank is put together, and nowhere else.
ALLOWED = {("mpi_workers/__main__.py", "ali")}
ALI_MAY_USE = {"layout", "matrix", "redistribute", "tiles", "failures", "signature", "values"}
# The rank's end of a line to the process that steps a simulation.
SPEAKS = {"ali/simulator/line.py": {"sockets", "connection", "wire"}}
# The conformance suite starts ranks of its own to try a library on.
TRIES_ON_RANKS = {"ali/testing.py", "ali/conformance.py"}


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports anywhere, but for the eyes of a type checker."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_no_file_imports_what_its_folder_may_not(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        where = path.relative_to(ROOT).as_posix()
        tops = {name.partition(".")[0] for name in imported(path)}
        forbidden = NOT_ON_RANKS if where in RANK_SIDE else FORBIDDEN[folder]
        wrong = {top for top in tops & forbidden if (where, top) not in ALLOWED}
        wrong -= {"torch"} if where in WITH_TORCH else set()
        assert not wrong, f"{where} imports {wrong}"


def test_libraries_see_only_the_matrix_side_of_mpi_workers() -> None:
    for path in (ROOT / "ali").rglob("*.py"):
        parts = {n.split(".")[1] for n in imported(path) if n.startswith("mpi_workers.")}
        if path.relative_to(ROOT).as_posix() in TRIES_ON_RANKS:
            parts -= {"trial"}
        parts -= SPEAKS.get(path.relative_to(ROOT).as_posix(), set())
        assert parts <= ALI_MAY_USE, f"{path.name} imports {parts - ALI_MAY_USE}"


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("alchemist_ray", "mpi4py"),
        ("mpi_workers.data.transfers", "mpi4py"),
        ("mpi_workers.data.transfers", "ray"),
        ("mpi_workers.rank.loop", "ray"),
        ("ali", "ray"),
        ("mpi_workers.rank.loop, envs.lammps.library", "gymnasium"),
        ("mpi_workers.rank.loop, envs.rayleigh_benard.build", "ray"),
    ],
)
def test_importing_does_not_drag_in(imports: str, absent: str) -> None:
    program = f"import {imports}, sys; sys.exit({absent!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert done.returncode == 0, f"importing {imports} imports {absent}"
