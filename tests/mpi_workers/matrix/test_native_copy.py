"""The compiled copy kernel moves the same elements as NumPy, with every set of instructions."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpi_workers import build_native
from mpi_workers.matrix import copy_kernels
from mpi_workers.matrix.copy_kernels import ArrayBlock, RankPart
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.matrix.layout import LAYOUTS, Distribution, copies, default_grid
from tests.support import commands

Array = np.ndarray[Any, Any]
SOURCE = Path(copy_kernels.__file__).with_name("copy_kernel.c")


@pytest.fixture(scope="module", autouse=True)
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The kernel as it is now, built for these tests; the best level of this processor."""
    library = tmp_path_factory.mktemp("kernel") / "copy_kernel.so"
    why = build_native.build(SOURCE, library)
    if why is not None:
        pytest.skip(why)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_kernels, "LIBRARY", library)
        forget()
        found = copy_kernels.level()
        assert found is not None
        yield found
    forget()


def forget() -> None:
    for cached in (copy_kernels.kernel, copy_kernels.level):
        cached.cache_clear()


@given(data=st.data())
@settings(max_examples=300)
def test_every_level_transposes_every_size_of_element(kernel: int, data: st.DataObject) -> None:
    m, n = data.draw(st.tuples(st.integers(0, 150), st.integers(0, 300)))
    itemsize = data.draw(st.sampled_from(copy_kernels.ITEMSIZES))
    shift, gap = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 9)))
    best = data.draw(st.integers(0, kernel))
    stream = data.draw(st.booleans())
    void = np.dtype((np.void, itemsize))
    raw = np.random.default_rng(m * 301 + n).integers(0, 256, (m, n * itemsize), np.uint8)
    source = raw.view(void) if raw.size else np.empty((m, n), void)
    memory = np.full(shift + n * (m * itemsize + gap) + 64, 7, np.uint8)
    lines = [memory[shift + j * (m * itemsize + gap) :][: m * itemsize] for j in range(n)]
    target = np.array([line.ctypes.data for line in lines], np.uintp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_kernels, "level", lambda: best)
        lines_of = copy_kernels.line_addresses(source, 0)
        copy_kernels.transpose(lines_of, target, itemsize, stream=stream)
    for j, line in enumerate(lines):
        assert line.tobytes() == source[:, j].tobytes()
        line[:] = 7
    assert (memory == 7).all()  # nothing else was written


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Distribution, list[int]]:
    size = draw(st.integers(1, 8))
    grid = default_grid(size)
    names = [name for name in LAYOUTS if copies(name, grid) == 1]
    shape = draw(st.tuples(st.integers(1, 120), st.integers(1, 120)))
    here = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return Distribution(draw(st.sampled_from(names)), shape, grid), sorted(here)


@given(
    matrix=matrices(),
    dtype=st.sampled_from(DTYPES),
    way=st.sampled_from(["C", "padded", "backwards", "Fortran", "every second column"]),
    into_parts=st.booleans(),
    stream=st.booleans(),
    data=st.data(),
)
@settings(max_examples=200)
def test_exchange_is_the_same_with_and_without_the_kernel(
    matrix: Any, dtype: str, way: str, into_parts: bool, stream: bool, data: st.DataObject
) -> None:
    distribution, ranks = matrix
    m, n = distribution.shape
    row0, row1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, m)])))
    col0, col1 = sorted(data.draw(st.tuples(*2 * [st.integers(0, n)])))
    array = np.random.default_rng(m * n).integers(0, 100, (m, n)).astype(dtype)
    results = []
    for best in (copy_kernels.level(), None):
        out = arranged(array if into_parts else np.zeros_like(array), way)
        parts = []
        for rank in ranks:
            indices = distribution.local_indices(rank)
            if indices.size:
                local = np.zeros(indices.shape, dtype, order="F")
                if not into_parts:
                    local[...] = array[np.ix_(indices.rows, indices.cols)]
                parts.append(RankPart(rank, indices, local))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copy_kernels, "level", lambda best=best: best)
            patch.setattr(copy_kernels, "UNTILED_BYTES", 0)
            block = ArrayBlock(out[row0:row1, col0:col1], (row0, col0))
            copied = copy_kernels.exchange([block], parts, into_parts=into_parts, stream=stream)
        counts = {rank: elements for rank, (elements, _) in copied.items()}
        results.append((out.tobytes(), [part.local.tobytes() for part in parts], counts))
    assert results[0] == results[1]


def arranged(array: Array, way: str) -> Array:
    """The same elements in memory of another order."""
    match way:
        case "padded":
            return np.pad(array, 3)[3:-3, 3:-3]
        case "backwards":
            return array[::-1].copy()[::-1]
        case "Fortran":
            return np.array(array, order="F")
        case "every second column":
            return np.repeat(array, 2, 1)[:, ::2]
    return array.copy()


def test_the_kernel_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert copy_kernels.description().startswith("compiled, ")
    monkeypatch.setenv(copy_kernels.SWITCH, "0")
    forget()
    assert copy_kernels.level() is None
    assert copy_kernels.description() == "NumPy"
    monkeypatch.undo()
    forget()


def test_a_missing_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert build_native.build(SOURCE, tmp_path / "kernel.so") == "no C compiler was found"
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "/nowhere/cc failed" in str(build_native.build(SOURCE, tmp_path / "kernel.so"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_shrinks_while_it_is_copied_is_an_error(kernel: int, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = np.random.default_rng(0).random((400, 500))
    numbers.tofile(path)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    source = np.frombuffer(pages, np.float64).reshape(400, 500)
    target = np.zeros((200, 500), order="F")
    assert copy_kernels.transposed(target, source[::2], stream=True, mapped=True)
    assert np.array_equal(target, numbers[::2])
    assert not copy_kernels.transposed(
        target.copy(order="C"), source[::2], stream=True, mapped=True
    )
    os.truncate(path, 5000)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be read"):
            copy_kernels.transposed(target, source[1::2], stream=True, mapped=True)
    numbers.tofile(path)  # the same file, as long as before
    assert copy_kernels.transposed(target, source[1::2], stream=False, mapped=True)
    assert np.array_equal(target, numbers[1::2])


_OTHER_BUS_ERROR = """
import faulthandler, mmap, os, sys
import numpy as np
from pathlib import Path
from mpi_workers.matrix import copy_kernels
copy_kernels.LIBRARY = Path(sys.argv[3])
if sys.argv[2] == "traceback":
    faulthandler.enable()
with open(sys.argv[1], "rb") as file:
    pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
source = np.frombuffer(pages, np.float64).reshape(400, 500)
assert copy_kernels.transposed(np.zeros((400, 500), order="F"), source, stream=False, mapped=True)
os.truncate(sys.argv[1], 0)
source.sum()
"""


@pytest.mark.parametrize("report", ["traceback", "none"])
def test_other_bus_errors_end_the_process_as_before(
    kernel: int, tmp_path: Path, report: str
) -> None:
    path = tmp_path / "numbers"
    np.zeros((400, 500)).tofile(path)
    done = commands.python(_OTHER_BUS_ERROR, path, report, str(copy_kernels.LIBRARY))
    assert done.returncode == -signal.SIGBUS
    assert ("Bus error" in done.stderr) == (report == "traceback")
