"""Memory cgroups: their files in a folder, and a real one with a limit (root only)."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpi_workers.matrix.available_memory import MemoryCgroup


@contextlib.contextmanager
def limited_memory(nbytes: int) -> Iterator[Path]:
    """The folder of a new memory cgroup below this process's. Skips the test if it cannot be made.

    A process enters it by writing its pid to ``cgroup.procs``.
    """
    found = MemoryCgroup.find()
    if found is None or os.geteuid() != 0:
        pytest.skip("only root can make a memory cgroup, and only with a memory controller")
    folder = found.folder / f"alchemist-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    try:
        try:
            (folder / found.names.limit).write_text(f"{nbytes}\n")
        except OSError as error:
            pytest.skip(f"no memory limit can be set here: {error}")
        yield folder
    finally:
        folder.rmdir()


@contextlib.contextmanager
def limited_processes(pid: int, more: int) -> Iterator[None]:
    """A process may have `more` children and threads than now. Skips the test without the right."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    groups = {controllers: path.lstrip("/") for _, controllers, path in lines}
    mount = Path("/sys/fs/cgroup")
    above = mount / "pids" / groups["pids"] if "pids" in groups else mount / groups.get("", "")
    folder = above / f"alchemist-test-{uuid.uuid4().hex[:8]}"
    try:
        folder.mkdir()
        (folder / "cgroup.procs").write_text(f"{pid}\n")
        limit = int((folder / "pids.current").read_text()) + more
        (folder / "pids.max").write_text(f"{limit}\n")
    except OSError as error:
        pytest.skip(f"no cgroup that limits processes can be made here: {error}")
    try:
        yield
    finally:
        for each in (folder / "cgroup.procs").read_text().split():
            (above / "cgroup.procs").write_text(each)
        folder.rmdir()


def write_v2(
    folder: Path, limit: object = "max", used: int = 0, cache: int = 0, kills: int = 0
) -> None:
    """The files of a memory cgroup, version 2."""
    _write(folder, {
        "memory.events": f"low 0\nmax 7\noom 1\noom_kill {kills}",
        "memory.max": limit,
        "memory.current": used,
        "memory.stat": f"anon 5\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}",
    })  # fmt: skip


def write_v1(
    folder: Path, limit: int = 9223372036854771712, used: int = 0, cache: int = 0, kills: int = 0
) -> None:
    """The same of version 1."""
    _write(folder, {
        "memory.oom_control": f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}",
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}",
    })  # fmt: skip


def _write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")
