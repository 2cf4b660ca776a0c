"""The import law of the design, and a graph of imports without cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.thin_clients import NOT_ON_CLIENTS

ROOT = Path(__file__).parents[2]
PACKAGES = ("mpi_workers", "ali", "alchemist_ray", "envs")
FORBIDDEN = {
    "mpi_workers": {"ray", "alchemist_ray", "ali", "envs"},
    "ali": {"ray", "alchemist_ray", "envs"},
    "alchemist_ray": {"mpi4py", "ali", "envs"},
    "envs": {"mpi4py", "mpi_workers", "ali", "torch"},
}
# The simulators' rank side: libraries, and what builds them.
RANK_SIDE = {"envs/rayleigh_benard/build.py", "envs/lammps/library.py"}
NOT_ON_RANKS = {"ray", "alchemist_ray", "gymnasium", "torch"}
# A rank is assembled here and nowhere else.
ALLOWED = {("mpi_workers/entry_points.py", "ali")}
# Libraries see matrices, values and failures; a rank's gang and communicator only as types.
ALI_MAY_USE = ("mpi_workers.matrix", "mpi_workers.columns", "mpi_workers.protocol.signature",
               "mpi_workers.protocol.files", "mpi_workers.protocol.libraries",
               "mpi_workers.protocol.packing",
               "mpi_workers.failures")  # fmt: skip
ALI_MAY_ALSO_USE = {
    # The rank's end of the channel to the process that steps a simulation.
    "ali/simulator": ("mpi_workers.wire",),
    # A rank serves PMI to the program that it has started.
    "ali/executables": ("mpi_workers.wire.pmi",),
    # The conformance suite starts ranks of its own to try a library on.
    "ali/testing.py": ("mpi_workers.local",),
    "ali/testing_simulators.py": ("mpi_workers.local",),
    "ali/conformance.py": ("mpi_workers.local",),
    "ali/standalone.py": ("mpi_workers.local",),
}
# What an attached process needs of a gang works where Ray is not installed.
WITHOUT_RAY = ("alchemist_ray.attached", "alchemist_ray.arrays")


def files(package: str) -> Iterator[Path]:
    yield from (ROOT / package).rglob("*.py")


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def imported(path: Path, *, types: bool = True) -> frozenset[str]:
    """Dotted names that a file imports anywhere, also in functions and for type checkers."""
    tree = ast.parse(path.read_text())
    names = set()
    for node in () if types else list(ast.walk(tree)):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@pytest.mark.parametrize("package", FORBIDDEN)
def test_files_import_only_what_their_package_may(package: str) -> None:
    for path in files(package):
        tops = {name.partition(".")[0] for name in imported(path, types=False)}
        forbidden = NOT_ON_RANKS if where(path) in RANK_SIDE else FORBIDDEN[package]
        wrong = {top for top in tops & forbidden if (where(path), top) not in ALLOWED}
        assert not wrong, f"{where(path)} imports {wrong}"


def test_libraries_import_only_matrices_and_values_of_mpi_workers() -> None:
    for path in files("ali"):
        also = [more for prefix, more in ALI_MAY_ALSO_USE.items() if where(path).startswith(prefix)]
        allowed = (*ALI_MAY_USE, *(name for more in also for name in more))
        wrong = {
            name
            for name in imported(path, types=False)
            if name.startswith("mpi_workers.")
            and not name.startswith(allowed)
            and not any(one.startswith(f"{name}.") for one in allowed)  # the package of one
        }
        assert not wrong, f"{where(path)} imports {wrong}"


def graph() -> dict[str, set[str]]:
    """Which of our files each one imports, by module name."""
    modules = {}
    for package in PACKAGES:
        for path in files(package):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = path

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {module_of(name) for name in imported(path)} - {"", module}
        for module, path in modules.items()
    }


def test_no_files_import_each_other_in_a_cycle() -> None:
    TopologicalSorter(graph()).prepare()  # raises `CycleError` with the modules of a cycle


def folders(files: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which of its siblings each folder or file imports, at every level of the packages."""
    found: dict[str, set[str]] = {}
    for module, imports in files.items():
        for other in imports:
            here, there = module.split("."), other.split(".")
            shared = sum(
                1
                for _ in takewhile(lambda both: both[0] == both[1], zip(here, there, strict=False))
            )
            if 0 < shared < min(len(here), len(there)):
                importing = ".".join(here[: shared + 1])
                found.setdefault(importing, set()).add(".".join(there[: shared + 1]))
    return found


def test_no_folders_import_each_other_in_a_cycle() -> None:
    TopologicalSorter(folders(graph())).prepare()


@pytest.mark.parametrize("package", ["mpi_workers", "alchemist_ray"])
def test_a_readme_lists_rooms_in_the_order_of_their_imports(package: str) -> None:
    """A row of its table imports only rows above it."""
    rows = {}
    for place, line in enumerate((ROOT / package / "README.md").read_text().splitlines()):
        if line.startswith("| `"):
            for name in re.findall(r"`([\w./]+)`", line.split("|")[1]):
                rows[f"{package}.{name.removesuffix('/').removesuffix('.py')}"] = place
    at_top = {room: to for room, to in folders(graph()).items() if room.count(".") == 1}
    listed = {room for room in at_top if room.startswith(f"{package}.")}
    programs = {f"mpi_workers.{name}" for name in ("__main__", "build_native", "entry_points")}
    missing = listed - rows.keys() - programs
    assert not missing, f"{package}/README.md does not list {missing}"
    back = [(room, one) for room in listed & rows.keys() for one in at_top[room] & rows.keys()
            if rows[one] > rows[room]]  # fmt: skip
    assert not back, f"these import rooms that {package}/README.md lists below them: {back}"


@pytest.mark.parametrize("module", WITHOUT_RAY)
def test_imports_where_ray_is_not_installed(module: str) -> None:
    program = (
        "import importlib, pkgutil, sys\n"
        "sys.modules['ray'] = None\n"
        f"package = importlib.import_module({module!r})\n"
        "for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
    )
    commands.python(program, code=0)


POSIX_NAMES = {
    "os": "register_at_fork sched_getaffinity getuid geteuid sysconf fork",
    "socket": "AF_UNIX TCP_USER_TIMEOUT TCP_KEEPIDLE send_fds",
    "select": "poll epoll",
    "signal": "pthread_sigmask SIGCHLD",
    "mmap": "MAP_SHARED MAP_PRIVATE MAP_ANONYMOUS PROT_READ PROT_WRITE",
}
ON_CLIENTS = ("alchemist_ray", "alchemist_ray.session.alchemist_session",
              "alchemist_ray.arrays.handle", "alchemist_ray.arrays.namespace",
              "alchemist_ray.attached.libraries", "alchemist_ray.functions.user_code",
              "alchemist_ray.transfer.sending")  # fmt: skip


def test_a_session_imports_with_numpy_and_msgpack_alone() -> None:
    program = (
        "import asyncio, importlib, sys\n"  # asyncio needs some of these names on this system
        f"sys.modules.update(dict.fromkeys({[*NOT_ON_CLIENTS, 'cloudpickle']}))\n"
        f"for module, names in {POSIX_NAMES}.items():\n"
        "    for name in names.split():\n"
        "        delattr(importlib.import_module(module), name)\n"
        f"for name in {ON_CLIENTS}:\n"
        "    importlib.import_module(name)\n"
        "from alchemist_ray import AlchemistSession, Handle\n"
    )
    commands.python(program, code=0)


@pytest.mark.parametrize(
    ("imports", "absent"),
    [
        ("alchemist_ray", "mpi4py"),
        ("mpi_workers.data.transfers", "mpi4py"),
        ("mpi_workers.data.transfers", "ray"),
        ("mpi_workers.rank.process", "ray"),
        ("ali", "ray"),
        # A forked rank must not inherit a CUDA context.
        ("mpi_workers.entry_points, mpi_workers.node.fork_server", "torch"),
        ("mpi_workers.entry_points, mpi_workers.node.fork_server", "cupy"),
        ("mpi_workers.rank.process, envs.lammps.library", "gymnasium"),
        ("mpi_workers.rank.process, envs.rayleigh_benard.build", "ray"),
    ],
)
def test_importing_does_not_also_import(imports: str, absent: str) -> None:
    commands.python(f"import {imports}, sys\nassert {absent!r} not in sys.modules", code=0)


def test_a_process_that_has_imported_modules_of_ranks_gets_the_environments() -> None:
    pytest.importorskip("gymnasium", reason="needs gymnasium")
    program = (
        "import mpi_workers.rank.gang_view, envs, gymnasium\n"
        "assert 'alchemist/Simulator-v0' in gymnasium.registry"
    )
    commands.python(program, code=0)


def test_a_users_process_that_imports_ali_does_not_initialise_mpi() -> None:
    """Files of routines and their tests import it; MPI would leave a file in /dev/shm."""
    program = "import sys, ali, ali.testing\nassert 'mpi4py.MPI' not in sys.modules"
    commands.python(program, code=0)
