"""Matrices that arrive in blocks: from an iterator, from arrays on a disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import DtypeError, FileError, IncompleteMatrixError, ShapeError
from alchemist_ray.transfer import sources
from tests.alchemist_ray.conftest import refused
from tests.support.traces import memory

h5py = pytest.importorskip("h5py", reason="needs the extra 'files'")

WORKERS = 2
A = np.random.default_rng(3).standard_normal((100, 7))


def blocks(*heights: int) -> Iterator[np.ndarray[Any, Any]]:
    row = 0
    for height in heights:
        yield A[row : row + height]
        row += height


@pytest.mark.parametrize("layout", ["VC_STAR", "MC_MR", "STAR_STAR"])
@pytest.mark.parametrize("heights", [(100,), (1,) * 100, (60, 0, 1, 39)])
def test_blocks_of_any_height_make_the_matrix(
    als: AlchemistSession, layout: str, heights: tuple[int, ...]
) -> None:
    B = als.send_blocks(blocks(*heights), shape=A.shape, layout=layout, name="B")
    assert (B.name, B.layout) == ("B", layout)
    assert np.array_equal(B.fetch(), A)


def test_blocks_are_lists_rows_other_dtypes_and_made_of_other_matrices(
    als: AlchemistSession, capsys: pytest.CaptureFixture[str]
) -> None:
    B = als.send_matrix(A)
    made = (B.fetch(rows=slice(i, i + 10)).astype("float32") for i in range(0, 100, 10))
    C = als.send_blocks(made, shape=A.shape, dtype="complex128", print_times=True)
    assert np.array_equal(C.fetch(), A.astype("float32"))
    assert "Data transfer times" in capsys.readouterr().out
    D = als.send_blocks([[1, 2], [[3, 4], [5, 6]]], shape=(3, 2), dtype="int64")
    assert D.fetch().tolist() == [[1, 2], [3, 4], [5, 6]]
    E = als.send_blocks([[1.0, 2.0], [3.0]], shape=(3, 1))
    assert E.fetch().ravel().tolist() == [1, 2, 3]
    F = als.send_blocks([[1.0, 2.0], [3.0]], shape=(3,))
    assert (F.shape, F.fetch().tolist()) == ((3,), [1, 2, 3])
    G = als.send_blocks([[[True, False]], [[False, True]]], shape=(2, 2), dtype="bool")
    assert G.fetch().tolist() == [[True, False], [False, True]]
    cube = np.arange(24.0).reshape(4, 3, 2)
    H = als.send_blocks([cube[:1], cube[1], cube[2:]], shape=cube.shape)
    np.testing.assert_array_equal(H.fetch(), cube)
    with pytest.raises(ShapeError, match=r"block 1 \(row 3\).*rows must have shape \(3, 2\)"):
        als.send_blocks([cube[:3], cube[3:].reshape(1, 6)], shape=cube.shape)
    for shape in ((0, 2), (2, 0), (0,), (0, 3, 2)):
        assert als.send_blocks([], shape=shape).fetch().shape == shape


def broken() -> Iterator[np.ndarray[Any, Any]]:
    yield A[:3]
    raise OSError("the tape is torn")


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        (lambda: blocks(60, 39), IncompleteMatrixError, "have 99 rows in total; shape= has 100"),
        (lambda: blocks(), IncompleteMatrixError, "have 0 rows"),
        (lambda: [A, A[:1]], ShapeError, "block 1 ends at row 101; shape= has 100 rows"),
        (lambda: [A[:5], A[:5, :6]], ShapeError, r"block 1 \(row 5\) has shape \(5, 6\)"),
        (lambda: [[[1, 2], [3]]], ShapeError, r"block 0 \(row 0\): not a matrix"),
        (lambda: [A[:5] + 1j], DtypeError, "block 0.*without loss"),
        (lambda: [A[:5].astype(str)], DtypeError, "block 0"),
        (lambda: [A[:5], np.ma.masked_less(A[:5], 0)], DtypeError, r"block 1 \(row 5\).*masked"),
        (lambda: A, ShapeError, "an iterable of arrays, not a ndarray"),
        (lambda: 3, ShapeError, "an iterable of arrays, not a int"),
        (broken, OSError, "the tape is torn"),
    ],
)
def test_blocks_that_do_not_fit_leave_nothing(
    als: AlchemistSession, source: Callable[[], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        als.send_blocks(source(), shape=A.shape)
    assert als.list_matrices() == []
    assert np.array_equal(als.send_matrix(A).fetch(), A)


def test_shape_and_dtype_are_checked_first(als: AlchemistSession) -> None:
    refused(als, blocks(100), DtypeError, "send_blocks takes an iterator")
    for shape in (3, (), (-1, 2), (2,) * 9, (2.5, 1), None):
        with pytest.raises(ShapeError, match="shape="):
            als.send_blocks([], shape=shape)
    for dtype in ("longdouble", "number", object):
        with pytest.raises(DtypeError):
            als.send_blocks([], shape=(3, 3), dtype=dtype)


def test_arrays_of_h5py_and_zarr_and_memmaps_are_sent_in_pieces(
    als: AlchemistSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zarr = pytest.importorskip("zarr")
    monkeypatch.setattr("alchemist_ray.transfer.sources.READ_NBYTES", 500)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        packed = file.create_dataset("packed", data=A, chunks=(13, 4), compression="gzip")
        C = als.send_matrix(packed, layout="MR_MC")
        assert np.array_equal(C.fetch(), A)
        line = file.create_dataset("line", data=A[:, 0].astype("f2"))
        B = als.send_matrix(line, dtype="float32", name="B")
        assert B.shape == (100,)
        assert np.array_equal(B.fetch(), A[:, 0].astype("f2"))
        empty = als.send_matrix(file.create_dataset("empty", data=np.zeros((0, 3), bool)))
        assert (empty.shape, empty.dtype) == ((0, 3), np.bool_)
        cube = np.arange(5 * 4 * 3.0).reshape(5, 4, 3)
        field = file.create_dataset("field", data=cube, chunks=(2, 2, 3))
        assert np.array_equal(als.send_matrix(field).fetch(), cube)
        for bad, kind in ((np.zeros((1,) * 9), ShapeError), (["a"], DtypeError)):
            refused(als, file.create_dataset(kind.__name__, data=bad), kind)
        refused(als, file, DtypeError, "is a group, not an array")
    stored = zarr.create_array(str(tmp_path / "a.zarr"), data=A, chunks=(30, 3), shards=(30, 6))
    Z = als.send_matrix(stored)
    assert np.array_equal(Z.fetch(), A)
    for chunk in (tmp_path / "a.zarr" / "c").rglob("*"):
        if chunk.is_file():
            chunk.write_bytes(b"")
    refused(als, stored, FileError, "cannot be read")
    np.save(tmp_path / "a.npy", A)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    M = als.send_matrix(mapped)
    assert np.array_equal(M.fetch(), A)
    connection = als.connection
    ids = [handle.id for handle in (C, B, Z, M)]
    sources = connection.request({"op": "sources", "matrices": ids})["sources"]
    assert [source["from"] for source in sources] == ["h5py", "h5py", "zarr", "array"]


@given(*(st.integers(0, 60) for _ in range(2)), *(st.integers(1, 70) for _ in range(2)))
def test_pieces_of_arrays_on_disk_are_whole_chunks_and_cover_all(
    m: int, n: int, height: int, width: int
) -> None:
    stored = SimpleNamespace(chunks=(height, width), dtype=np.dtype("int8"))
    seen = np.zeros((m, n), int)
    for rows, cols in sources.pieces(stored, (m, n), 100):
        seen[rows, cols] += 1
        assert rows.start % height == cols.start % width == 0
        chunks = -(-seen[rows].shape[0] // height) * -(-seen[:, cols].shape[1] // width)
        assert seen[rows, cols].size <= 800 or chunks == 1
    assert (seen == 1).all()


def test_tall_chunks_are_read_some_columns_at_a_time(
    als: AlchemistSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "READ_NBYTES", 600)
    with h5py.File(tmp_path / "tall.h5", "w") as file:
        tall = file.create_dataset("tall", data=A, chunks=(len(A), 1))
        assert max(A[piece].nbytes for piece in sources.pieces(tall, A.shape, 600)) == 800
        assert np.array_equal(als.send_matrix(tall, dtype="float32").fetch(), A.astype("f4"))


def test_a_large_matrix_needs_little_memory_here(als: AlchemistSession) -> None:
    """200 MB in blocks of 4 MB."""
    m, n, height = 50_000, 500, 1000
    used: list[int] = []
    store: list[float] = []

    def made() -> Iterator[np.ndarray[Any, Any]]:
        for start in range(0, m, height):
            used.append(memory(os.getpid(), "RssAnon"))  # memory shared with ranks is theirs
            store.append(ray.available_resources().get("object_store_memory", 0.0))
            yield np.full((height, n), float(start))

    B = als.send_blocks(made(), shape=(m, n))
    assert B.nbytes == 200_000_000
    assert max(used) - used[0] < 48 << 20
    assert store[0] - min(store) < 20 << 20  # more, if objects of an earlier test went
    assert B.fetch(rows=slice(0, m, height))[:, 0].tolist() == list(range(0, m, height))
