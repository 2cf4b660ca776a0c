"""Matrices in files: what ranks do, on any number of them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from ali.files import exchange
from ali.files.formats import Box, Grain
from ali.testing import Case, LibraryTests
from mpi_workers.local import local_gang
from tests.support import commands, launches
from tests.support.suite import scaled

pytest.importorskip("h5py", reason="needs the extra 'files'")

RANK_COUNTS = scaled([3], [1, 2, 3, 6])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """The results of ranks_files*.py on this many ranks."""
    folder = tmp_path_factory.mktemp("files")

    def found(ranks: int) -> dict[str, Any]:
        own = folder / str(ranks)
        own.mkdir(exist_ok=True)
        return launches.results("tests.ali.ranks_files:everything", ranks, str(own))

    return found


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(("function", "least"), [("round_trips", 24), ("parts", 18)])
def test_what_is_saved_is_loaded_in_parts_and_in_any_layout(
    results: Callable[[int], dict[str, Any]], ranks: int, function: str, least: int
) -> None:
    launches.check_right(results(ranks)[function], least)


@pytest.mark.parametrize("ranks", RANK_COUNTS)
@pytest.mark.parametrize(
    "function",
    [
        "atomic",  # a save that fails leaves the old file and nothing else
        "url_atomic",
        "refused",  # by all ranks alike
        "kept",  # a refused save changes nothing
        "conversions",  # numbers out of range are refused
        "tables",  # and text, as their writers meant them
        "durable",  # each rank flushes what it has written
        "large_chunks",
        "shuffled",  # rows: each chunk is read once
    ],
)
def test_nothing_is_wrong_with_files(
    results: Callable[[int], dict[str, Any]], ranks: int, function: str
) -> None:
    assert results(ranks)[function][1] == []


def test_a_save_that_one_rank_cannot_begin_leaves_no_open_file(tmp_path: Path) -> None:
    said, left = local_gang.run("tests.ali.ranks_files_bad:out_of_descriptors", 2, str(tmp_path))
    assert ["Too many open files (rank 1)" in words for words in said] == [True] * 2
    assert left == 0


IN_A_SMALL_DISK = """
import json, subprocess, sys
from mpi_workers.local import local_gang
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", sys.argv[1]], check=True)
print(json.dumps(local_gang.run("tests.ali.ranks_files_bad:full_disk", 2, sys.argv[1])))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux")
def test_a_full_disk_is_reported_and_the_old_file_stays(tmp_path: Path) -> None:
    command = ["unshare", "--mount", sys.executable, "-c", IN_A_SMALL_DISK, tmp_path]
    done = commands.run(*command, cwd=Path(__file__).parents[2])
    if "permission denied" in done.stderr.lower():
        pytest.skip("this machine lets nobody mount")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


# --- boxes ---


@pytest.mark.parametrize(
    "grain",
    [
        Grain(),
        Grain(7, 3),
        Grain(by_columns=True),
        Grain(1, 50),
        Grain(bands=range(100), columns_apart=True),
    ],
)
@pytest.mark.parametrize("shape", [(1, 1), (2, 90), (100, 3), (41, 23)])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_boxes_tile_the_matrix_and_part_no_chunk(
    grain: Grain, shape: tuple[int, int], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PIECE", 160)
    seen = np.zeros(shape, int)
    for box in exchange.cut(shape, 8, size, grain):
        seen[box.rows.start : box.rows.stop, box.cols.start : box.cols.stop] += 1
        assert box.rows.start % grain.rows == 0
        assert box.cols.start % grain.cols == 0
        assert box.rows.stop % grain.rows == 0 or box.rows.stop == shape[0]
        assert box.cols.stop % grain.cols == 0 or box.cols.stop == shape[1]
        chunk = grain.rows * grain.cols * 8
        line = shape[0] if grain.by_columns else shape[1]
        assert box.shape[0] * box.shape[1] * 8 <= max(2 * 160, chunk, line * 8)
    assert (seen == 1).all()


def test_boxes_of_irregular_bands_begin_where_bands_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PIECE", 10 * 8)
    monkeypatch.setattr(exchange, "SEVERAL", 1)
    found = exchange.cut((30, 1), 8, 2, Grain(bands=[0, 4, 9, 11, 29]))
    assert found == [Box(range(a, b), range(1)) for a, b in [(0, 9), (9, 11), (11, 29), (29, 30)]]


def test_ranks_have_equally_many_columns_of_few_bands() -> None:
    for n, bands, size in ((50, 1, 2), (64, 1, 8), (7, 2, 2), (24, 3, 4), (3, 1, 8)):
        grain = Grain(bands=range(bands), columns_apart=True)
        found = exchange.cut((bands, n), 8, size, grain)
        shares = [exchange.share(len(found), rank, size) for rank in range(size)]
        held = [sum(len(found[i].cols) for i in mine) for mine in shares]
        assert sum(held) == bands * n
        assert max(held) <= -(-bands * n // size) + max(len(box.cols) for box in found)
        assert len(found) >= min(size, bands * n)
    (wide,) = exchange.cut((1, 50), 8, 2, Grain(bands=[0]))
    assert wide.shape == (1, 50)  # others read whole rows


# --- what every library must do ---

FOLDER = Path(tempfile.mkdtemp())
A = np.arange(20.0).reshape(5, 4)
np.save(FOLDER / "A.npy", A)
for name, integer, element, cut, last in (
    ("A", ">i4", ">f8", None, A.shape[1] - 1), ("wide", ">i8", ">c16", None, A.shape[1] - 1),
    ("cut", ">i4", ">f8", 90, 0), ("outside", ">i4", ">f8", None, A.shape[1]),
):  # fmt: skip
    columns = np.tile(np.arange(A.shape[1]), len(A))
    columns[-1] = last
    head = [1211216, *A.shape, A.size, *[A.shape[1]] * len(A), *columns]
    elements = (A + (2j if element == ">c16" else 0)).astype(element)
    (FOLDER / f"{name}.petsc").write_bytes(
        (np.array(head, integer).tobytes() + elements.tobytes())[:cut]
    )
(FOLDER / "other.petsc").write_bytes(bytes(64))
scipy.io.mmwrite(FOLDER / "A.mtx", scipy.sparse.csr_array(A), precision=17)
(FOLDER / "kept").mkdir()
(FOLDER / "kept" / "manifest.json").write_text("{}")


class TestFiles(LibraryTests):
    library = "files"
    sizes = scaled((2,), (2, 3))
    cases = (
        Case("load", {"path": f"{FOLDER}/A.npy"}, [A, [], "{}"]),
        Case("load", {"path": f"{FOLDER}/A.npy", "rows": "::2", "column_list": [3, 0]},
             [A[::2][:, [3, 0]], [], "{}"]),
        Case("load", {"path": f"{FOLDER}/B.npy"}, raises="FileError"),
        Case("save", {"A": A, "path": f"{FOLDER}/saved.npy"}, []),
        Case("save", {"A": A, "path": f"{FOLDER}/saved.zarr"}, []),
        Case("save", {"A": A, "path": f"{FOLDER}/no/saved.npy"}, raises="does not exist"),
        Case("save_sparse", {"A": scipy.sparse.csr_array(A), "path": f"{FOLDER}/saved.mtx"}, []),
        Case("save_sparse", {"A": scipy.sparse.csr_array(A), "path": f"{FOLDER}/saved.npy"},
             raises="a sparse matrix is in a file of SciPy"),
        Case("load_sparse", {"path": f"{FOLDER}/A.mtx"}, [scipy.sparse.csr_array(A)]),
        Case("load_sparse", {"path": f"{FOLDER}/A.npz"}, raises="FileError"),
        Case("load_sparse", {"path": f"{FOLDER}/A.petsc"}, [scipy.sparse.csr_array(A)]),
        Case("load_sparse", {"path": f"{FOLDER}/wide.petsc"}, [scipy.sparse.csr_array(A + 2j)]),
        Case("load_sparse", {"path": f"{FOLDER}/cut.petsc"}, raises="cut off"),
        Case("load_sparse", {"path": f"{FOLDER}/outside.petsc"}, raises="FileError"),
        Case("load_sparse", {"path": f"{FOLDER}/other.petsc"}, raises="PETSc's binary format"),
        Case("inspect", {"path": f"{FOLDER}/A.npy"}, [5, 4, "float64", []]),
        Case("stamp", {"path": f"{FOLDER}/A.npy"},
             [f"1 files, {(FOLDER / 'A.npy').stat().st_size} bytes, "
              f"{(FOLDER / 'A.npy').stat().st_mtime_ns}"]),
        Case("stamp", {"path": f"{FOLDER}/B.npy"}, raises="FileError"),
        Case("check_folder", {"path": f"{FOLDER}/new", "token": "t"}, []),
        Case("check_folder", {"path": f"{FOLDER}/no/new", "token": "t"}, raises="FileError"),
        Case("begin_folder", {"path": f"{FOLDER}/new", "token": "t"},
             [f"{FOLDER}/.new.t.part"]),
        Case("end_folder", {"path": f"{FOLDER}/new", "token": "t"}, []),
        Case("end_folder", {"path": f"{FOLDER}/new", "token": "x", "manifest": "{}"},
             raises="FileError"),
        Case("manifest", {"path": f"{FOLDER}/kept"}, ["{}"]),
        Case("manifest", {"path": f"{FOLDER}"}, raises="FileError"),
    )  # fmt: skip
