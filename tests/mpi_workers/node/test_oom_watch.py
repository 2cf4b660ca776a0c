"""Reading the kernel's memory controller; its effects are tested in tests/faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_workers.matrix.available_memory import V1 as V1_NAMES
from mpi_workers.matrix.available_memory import MemoryCgroup
from mpi_workers.node.processes import OomWatch
from tests.mpi_workers.cgroups import limited_memory, write_v1, write_v2
from tests.support import commands

KILLED = 9  # as waitpid says it
WORDS = "was killed by signal 9 (SIGKILL)"
V1 = "12:pids:/a\n4:cpu,memory:/job/step\n0::/\n"


@pytest.fixture
def membership(tmp_path: Path) -> Path:
    return tmp_path / "membership"


def test_in_a_container_the_files_are_at_the_mount(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/kubepods/pod7/abc\n")  # of a mount that shows less
    write_v2(tmp_path, "2147483648")
    watch = OomWatch(membership, tmp_path)
    assert watch.explained(KILLED, WORDS) == WORDS
    write_v2(tmp_path, "2147483648", kills=1)
    said = watch.explained(KILLED, WORDS)
    assert "the kernel's OOM killer" in said
    assert "2.1 GB (2147483648 bytes)" in said


def test_the_least_limit_on_the_way_up_counts(tmp_path: Path, membership: Path) -> None:
    membership.write_text("0::/job/step\n")
    write_v2(tmp_path / "job", "1000000")
    write_v2(tmp_path / "job/step")
    assert OomWatch(membership, tmp_path).limit() == 1_000_000


def test_version_one_is_read_where_it_is_mounted(tmp_path: Path, membership: Path) -> None:
    membership.write_text(V1)
    write_v1(tmp_path / "memory/job", 500_000)
    write_v1(tmp_path / "memory/job/step", kills=3)
    found = MemoryCgroup.find(membership, tmp_path)
    assert found == MemoryCgroup(tmp_path / "memory/job/step", tmp_path, V1_NAMES)
    watch = OomWatch(membership, tmp_path)
    assert watch.explained(KILLED, WORDS) == WORDS  # it has killed, but before
    write_v1(tmp_path / "memory/job/step", kills=4)
    assert "(500000 bytes)" in watch.explained(KILLED, WORDS)
    assert watch.explained(KILLED, WORDS) == WORDS  # each kill is told once


def test_without_a_limit_the_node_is_full_and_other_ends_are_not_the_kernels(
    tmp_path: Path, membership: Path
) -> None:
    membership.write_text("0::/\n")
    write_v2(tmp_path)
    watch = OomWatch(membership, tmp_path)
    write_v2(tmp_path, kills=1)
    for status in (11, 15, 9 << 8):  # SIGSEGV, SIGTERM, exit(9)
        assert watch.explained(status, "so it was") == "so it was"
    assert watch.explained(KILLED, WORDS).endswith("the node has run out of memory")


def test_nothing_to_read_is_no_error(tmp_path: Path, membership: Path) -> None:
    watch = OomWatch(membership, tmp_path)
    assert watch.limit() is None
    assert watch.explained(KILLED, WORDS) == WORDS
    membership.write_text("garbage\n\n0::/\n")
    (tmp_path / "memory.events").write_text("not what\nit was ever like\n")
    assert OomWatch(membership, tmp_path).explained(KILLED, WORDS) == WORDS


def test_the_controller_of_this_machine_is_found() -> None:
    here = MemoryCgroup.find()
    if here is None:
        pytest.skip("this process is under no memory controller")
    assert os.access(here.folder / here.names.events, os.R_OK)


LIMIT = 64 << 20  # 64 MiB
GREEDY = """
import os, sys
with open(sys.argv[1], "w") as procs:
    procs.write(str(os.getpid()))
from mpi_workers.node.processes import OomWatch
from tests.mpi_workers.cgroups import limited_memory
watch = OomWatch()
for greed in (0, 1 << 30):
    pid = os.fork()
    if pid == 0:
        bytearray(b"x") * greed
        os.kill(os.getpid(), 9)
    print(watch.explained(os.waitpid(pid, 0)[1], "by somebody"))
"""


@pytest.fixture
def small() -> Iterator[Path]:
    """A memory cgroup with a limit."""
    with limited_memory(LIMIT) as folder:
        yield folder


def test_the_kernel_kills_and_is_named(small: Path) -> None:
    done = commands.python(GREEDY, str(small / "cgroup.procs"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "by somebody"
    assert "the kernel's OOM killer" in second
    assert f"({LIMIT} bytes)" in second
