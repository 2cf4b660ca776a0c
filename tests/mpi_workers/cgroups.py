"""A memory cgroup with a limit, for one test (root only)."""

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
