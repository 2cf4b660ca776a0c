"""Available memory is counted along the path of cgroups, without the page cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpi_workers.matrix.available_memory import MemoryCgroup, available_bytes
from tests.mpi_workers.cgroups import limited_memory, write_v1, write_v2
from tests.support import commands

MIB = 1 << 20
GIB = 1 << 30


def found(tmp_path: Path, membership: str) -> MemoryCgroup:
    (tmp_path / "membership").write_text(membership)
    cgroup = MemoryCgroup.find(tmp_path / "membership", tmp_path / "mount")
    assert cgroup is not None
    return cgroup


def test_page_cache_is_available(tmp_path: Path) -> None:
    write_v2(tmp_path / "mount", 4 * GIB, 4 * GIB - 1, cache=3 * GIB)
    assert found(tmp_path, "0::/\n").available() == 3 * GIB + 1


def test_the_nearest_limit_on_the_path_counts(tmp_path: Path) -> None:
    write_v2(tmp_path / "mount/job", 6 * GIB, 5 * GIB)
    write_v2(tmp_path / "mount/job/step", 4 * GIB, 1 * GIB)
    write_v2(tmp_path / "mount/job/step/task", "max", 1 * GIB)
    cgroup = found(tmp_path, "0::/job/step/task\n")
    assert cgroup.available() == GIB
    assert cgroup.limit() == 4 * GIB


def test_v1_counts_the_cgroups_below(tmp_path: Path) -> None:
    write_v1(tmp_path / "mount/memory/job", 4 * GIB, 3 * GIB, cache=2 * GIB)
    assert found(tmp_path, "4:cpu,memory:/job\n").available() == 3 * GIB


def test_without_a_limit_the_node_counts(tmp_path: Path) -> None:
    write_v2(tmp_path / "mount", "max", GIB)
    cgroup = found(tmp_path, "0::/\n")
    assert (cgroup.available(), cgroup.limit()) == (None, None)


def test_a_cgroup_over_its_limit_has_nothing_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_v2(tmp_path / "mount", GIB, 2 * GIB)
    cgroup = found(tmp_path, "0::/\n")
    monkeypatch.setattr(MemoryCgroup, "find", lambda: cgroup)
    assert available_bytes() == 0


# Enters a cgroup, reads a file, allocates a matrix, frees it while it is still mapped, and
# allocates another one.
READER = """
import gc, json, mmap, os, sys
import numpy as np
procs, path, cached, needed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
with open(procs, "w") as file:
    file.write(str(os.getpid()))
from mpi_workers.matrix.layout import Distribution
from mpi_workers.matrix.available_memory import available_bytes
from mpi_workers.matrix.memory import Pool
from mpi_workers.matrix.storage import Storage
before = available_bytes()
with open(path, "wb") as file:
    for _ in range(cached >> 20):
        file.write(bytes(1 << 20))
    os.fsync(file.fileno())
with open(path, "rb") as file:
    while file.read(1 << 20):
        pass
after = available_bytes()
storage = Storage(0, Pool(1 << 40, shared=True))
mapped = []
for columns in (1, 2):  # of another size, so that the warm segment does not fit
    shape = (needed // 8 // columns, columns)
    matrix = storage.new(Distribution("CIRC_CIRC", shape, (1, 1)), np.dtype("float64"))
    matrix.local[...] = 1
    segment = matrix.block.segment
    mapped.append(mmap.mmap(segment.fd, segment.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))
    del matrix, segment
    gc.collect()
    needed += needed // 16
print(json.dumps([before, after]))
"""


def test_page_cache_and_freed_matrices_leave_room_for_a_matrix(tmp_path: Path) -> None:
    limit, cached, needed = 400 * MIB, 250 * MIB, 200 * MIB
    with limited_memory(limit) as folder:
        arguments = [folder / "cgroup.procs", tmp_path / "file", cached, needed]
        done = commands.python(READER, *map(str, arguments))
    assert done.returncode == 0, done.stderr
    before, after = json.loads(done.stdout)
    assert before <= limit
    assert after > before - cached // 4
