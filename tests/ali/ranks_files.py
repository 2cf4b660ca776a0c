"""Rank side of test_files.py."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ali.files import exchange, npy, routines, text, zarr3
from ali.interface import Context
from mpi_workers.matrix import pairwise
from mpi_workers.matrix.dist_matrix import DistMatrix
from mpi_workers.matrix.dtypes import DTYPES
from mpi_workers.rank.gang_view import GangView
from tests.support.layouts import SOME_LAYOUTS
from tests.support.ranks_shared import failure_of
from tests.support.suite import scaled

Array = np.ndarray[Any, Any]
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1.7976931348623157e308, 0.1)


def values(shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """Any bits at all: payloads of NaNs, subnormal numbers, the smallest integers."""
    rng = np.random.default_rng(seed)
    most = 2 if dtype == "bool" else 256
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    found = rng.integers(0, most, nbytes, np.uint8).view(dtype).reshape(shape)
    if seed % 2 and np.dtype(dtype).kind not in "biu":
        with np.errstate(over="ignore"):
            flat = np.array(SPECIAL).astype(dtype)
        found = flat[rng.integers(0, len(flat), shape)]
    return np.ascontiguousarray(found)


def bits(array: Array) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@contextmanager
def small() -> Iterator[None]:
    """Boxes, chunks and blocks of a few elements, so that there are many."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, number in (
            (exchange, "PIECE", 200), (exchange, "DIRECT_PIECE", 200), (pairwise, "MESSAGE", 64),
            (npy, "STRIP", 100), (npy, "APART", 20), (zarr3, "STORED_NBYTES", 120),
            (zarr3, "PLAIN", 1), (text, "PARSED_NBYTES", 50), (text, "COPY", 30),
        ):  # fmt: skip
            patch.setattr(module, name, number)
        yield


def everything(gang: GangView, folder: str) -> dict[str, Any]:
    """All checks, in one launch."""
    # They use this module.
    from tests.ali.ranks_files_bad import atomic, refused, url_atomic  # noqa: PLC0415
    from tests.ali.ranks_files_strict import (  # noqa: PLC0415
        conversions,
        durable,
        kept,
        large_chunks,
        shuffled,
        tables,
    )

    found = {}
    with small():
        for function in (
            round_trips, parts, atomic, refused, url_atomic, kept, conversions, tables, durable,
            large_chunks, shuffled,
        ):  # fmt: skip
            check = Checks(gang, Path(folder, function.__name__))
            check.folder.mkdir(exist_ok=True)
            gang.comm.Barrier()
            function(check)
            found[function.__name__] = [check.done, check.wrong]
    return found


class Checks:
    """A gang's files: what is wrong, on any rank, as all of them know."""

    def __init__(self, gang: GangView, folder: Path) -> None:
        exchange.EXCHANGE = USUAL  # another check may have changed it
        self.gang = gang
        self.ctx = Context(gang, {})
        self.folder = folder
        self.done = 0
        self.wrong: list[str] = []

    def right(self, good: bool, words: str) -> None:
        """Note what is wrong if it is not good."""
        if not good:
            self.wrong.append(words)

    def whole(self, matrix: DistMatrix) -> Array:
        return self.ctx.to_layout(matrix, "STAR_STAR").local.reshape(matrix.array_shape)

    def load(self, path: str, **options: Any) -> DistMatrix:
        return routines.load(self.ctx, path, **options)[0]

    def agree(self, wrong: str | None) -> None:
        """Fail on all ranks alike, so that Hypothesis goes the same way on all of them."""
        self.done += 1
        found = [words for words in self.gang.comm.allgather(wrong) if words]
        assert not found, found[0]

    def by_rank_0(self, work: Any, *arguments: Any) -> None:
        if self.gang.rank == 0:
            work(*arguments)
        self.gang.comm.Barrier()

    def left(self) -> list[str]:
        """Names in the folder that no save should have left."""
        self.gang.comm.Barrier()
        names = sorted(name for name in os.listdir(self.folder) if name.startswith("."))
        self.gang.comm.Barrier()
        return names

    def said(self, call: Any, *arguments: Any, **options: Any) -> str:
        """The failure of a call, if it is the same on all ranks."""
        words = failure_of(call, *arguments, **options)
        everyone = set(self.gang.comm.allgather(words))
        return words if len(everyone) == 1 else f"ranks differ: {sorted(everyone)}"


def agreed(gang: GangView, examples: int) -> Any:
    """So many examples, the same on all ranks, others on each number of them."""
    some = settings(
        max_examples=examples if gang.size < 4 else examples // 2,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: seed(gang.size)(some(test))


# Ranks exchange what they read, or read their own elements: never, if it pays, always.
USUAL = exchange.EXCHANGE
WAYS = st.sampled_from([0, USUAL, 1000])


# --- whole matrices there and back ---

SUFFIXES = (".npy", ".h5", ".zarr", ".parquet", ".csv")
URL = "url.zarr"  # behind fsspec


def round_trips(check: Checks) -> None:
    """Saved from any layout and loaded into any other: the same bits, also to the format's own
    library; chunks of zeros as well."""
    gang, folder = check.gang, check.folder
    sides = st.sampled_from([0, 1, 2, 3, 5, 7, 23])

    @agreed(gang, scaled(36, 72))
    @given(
        suffix=st.sampled_from([*SUFFIXES, URL]),
        shape=st.tuples(sides, sides) | st.tuples(sides) | st.just(()),
        dtype=st.sampled_from(DTYPES),
        layouts=st.tuples(st.sampled_from(SOME_LAYOUTS), st.sampled_from(SOME_LAYOUTS)),
        salt=st.integers(0, 99),
        way=WAYS,
    )
    def there_and_back(
        suffix: str, shape: tuple[int, ...], dtype: str, layouts: tuple[str, str], salt: int,
        way: int,
    ) -> None:  # fmt: skip
        exchange.EXCHANGE = way
        table = suffix in (".parquet", ".csv")
        if table and dtype.startswith("complex"):
            dtype = dtype.replace("complex", "float").replace("128", "64")
        zeros = suffix == URL and salt % 3 == 0
        array = np.zeros(shape, dtype) if zeros else values(shape, dtype, salt)
        path = folder / f"A{suffix}"
        place = f"file://{path}" if suffix == URL else str(path)
        matrix = check.ctx.new_replicated(array, layouts[0])
        if table and not matrix.shape[1]:
            said = check.said(lambda: routines.save(check.ctx, matrix, place))
            check.agree(None if said.startswith("ShapeError") else said)
            return
        routines.save(check.ctx, matrix, place)
        array = array.reshape(matrix.shape) if table else array  # tables have rows and columns
        asked = dtype if suffix == ".csv" else None
        found = check.load(place, layout=layouts[1], dtype=asked)
        assert found.layout == layouts[1]
        wrong = None
        if not same(array, check.whole(found), suffix):
            wrong = f"{suffix} {shape} {dtype} {layouts} {salt}: not what was saved"
        elif suffix == ".csv" and not array.size:
            pass  # NumPy warns of a file with nothing but names
        elif gang.rank == 0 and not same(array, read_alone(path, dtype), suffix):
            wrong = f"{suffix} {shape} {dtype} {layouts} {salt}: the format's library differs"
        check.agree(wrong)
        check.agree(str(check.left()) if check.left() else None)
        if suffix == URL:  # a URL is not replaced
            check.by_rank_0(lambda: shutil.rmtree(path))

    there_and_back()


def same(wanted: Array, found: Array, suffix: str) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if suffix != ".csv" or wanted.dtype.kind in "bi":
        return bits(wanted) == bits(found)
    nan = np.isnan(wanted)  # of a NaN, text keeps only that it is one
    return bool((nan == np.isnan(found)).all()) and bits(wanted[~nan]) == bits(found[~nan])


def read_alone(path: Path, dtype: str) -> Array:
    """The file through its format's own library."""
    match path.suffix:
        case ".npy":
            found = np.load(path)
        case ".h5":
            with h5py.File(path) as file:
                found = file["data"][()]
        case ".zarr":
            found = zarr.open_array(path, mode="r")[...]
        case ".parquet":
            table = pq.read_table(path)
            found = np.column_stack([column.to_numpy() for column in table.columns])
        case _:
            found = np.loadtxt(path, delimiter=",", dtype=dtype, ndmin=2)
    return np.asarray(found)


# --- parts of files that others have written ---

M, N = 29, 6
BASE = np.arange(M * N, dtype=np.float64).reshape(M, N) - 40
NAMES = [f"x{j}" for j in range(N)]


def written_by_others(folder: Path) -> None:
    """The same matrix in many ways of writing it down."""
    np.save(folder / "fortran.npy", np.asfortranarray(BASE))
    np.save(folder / "big.npy", BASE.astype(">f8"))
    np.save(folder / "half.npy", BASE.astype(np.float16))
    with h5py.File(folder / "many.h5", "w") as file:
        file["deep/plain"] = BASE
        file["big"] = BASE.astype(">i4")
        file.create_dataset("packed", data=BASE, chunks=(5, 4), compression="gzip")
        file.create_dataset("words", data=["a", "b"])
        layout = h5py.VirtualLayout(BASE.shape, BASE.dtype)
        layout[:] = h5py.VirtualSource(".", "deep/plain", BASE.shape)
        file.create_virtual_dataset("virtual", layout)
    with h5py.File(folder / "links.h5", "w") as file:
        file["other"] = np.repeat(BASE, 9)
        file["outside"] = h5py.ExternalLink("many.h5", "deep/plain")
    zarr.create_array(
        str(folder / "sharded.zarr"), data=BASE, chunks=(2, 3), shards=(4, 6), zarr_format=3
    )
    zarr.create_array(str(folder / "plain.zarr"), data=BASE, chunks=(4, 4), compressors=None)
    # A chunk of nothing but the fill value is not written.
    filled = {"chunks": (1, 1), "compressors": None, "fill_value": BASE[5, 5]}
    zarr.create_array(str(folder / "sparse.zarr"), data=BASE, **filled)
    two = zarr.open_group(str(folder / "group.zarr"), mode="w", zarr_format=2)
    two.create_array("inner", data=BASE.astype(np.int16), chunks=(4, 4))
    columns = [pa.array(BASE[:, j].astype("f4" if j % 2 else "i4")) for j in range(N)]
    words = pa.array([f"w{i}" for i in range(M)])
    table = pa.table([*columns, words], names=[*NAMES, "word"])
    pq.write_table(table, folder / "one.parquet", row_group_size=4)
    (folder / "folder.parquet").mkdir()
    for k, (start, stop) in enumerate([(0, 11), (11, 12), (12, M)]):
        part = table.drop_columns("word").slice(start, stop - start)
        pq.write_table(part, folder / "folder.parquet" / f"{k}.parquet", row_group_size=7)
    lines = [", ".join(map(repr, row)) for row in BASE.tolist()]
    (folder / "plain.csv").write_text("\n".join(lines))
    text = "\r\n".join([";".join(NAMES), *(line.replace(", ", ";") for line in lines)])
    (folder / "names.csv").write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n\r\n \r\n")


WRITTEN: tuple[tuple[str, dict[str, Any], bool], ...] = (  # file, options, do columns have names?
    ("fortran.npy", {}, False), ("big.npy", {}, False), ("half.npy", {"dtype": "float32"}, False),
    ("many.h5", {"dataset": "deep/plain"}, False), ("many.h5", {"dataset": "big"}, False),
    ("many.h5", {"dataset": "packed"}, False), ("many.h5", {"dataset": "virtual"}, False),
    ("links.h5", {"dataset": "outside"}, False), ("sharded.zarr", {}, False),
    ("plain.zarr", {}, False), ("sparse.zarr", {}, False),
    ("group.zarr", {"dtype": "int64"}, False), ("one.parquet", {"columns": f":{N}"}, True),
    ("folder.parquet", {}, True), ("plain.csv", {}, False), ("names.csv", {"delimiter": ";"}, True),
)  # fmt: skip


def parts(check: Checks) -> None:
    """Any rows and columns of them, as any dtype, into any layout; also through fsspec."""
    folder = check.folder
    check.by_rank_0(lambda: written_by_others(folder))
    numbers = st.integers(-M, M)
    maybe = st.none() | numbers
    steps = st.sampled_from([None, 1, 2, 9, -1, -3])
    slices = st.tuples(maybe, maybe, steps)
    lists = st.lists(st.integers(-M, M - 1), max_size=8)

    @agreed(check.gang, scaled(36, 60))
    @given(
        file=st.sampled_from(WRITTEN),
        rows=st.none() | slices | lists,
        cols=st.none()
        | st.lists(st.integers(0, N - 1), max_size=7)
        | st.sampled_from([(None, None, 2), (1, 4, None), (2, None, 3), (None, None, -1)]),
        by_name=st.booleans(),
        dtype=st.sampled_from([None, "float32", "complex128"]),
        layout=st.sampled_from(SOME_LAYOUTS),
        remote=st.booleans(),
        way=WAYS,
    )
    def chosen(
        file: Any, rows: Any, cols: Any, by_name: bool, dtype: Any, layout: str, remote: bool,
        way: int,
    ) -> None:  # fmt: skip
        exchange.EXCHANGE = way
        name, options, named = file
        asked = {**options, "layout": layout, **({"dtype": dtype} if dtype else {})}
        wanted = BASE
        if isinstance(rows, tuple):
            asked["rows"] = ":".join("" if x is None else str(x) for x in rows)
            wanted = wanted[slice(*rows)]
        elif rows is not None:
            asked["row_list"] = rows
            wanted = wanted[rows]
        if isinstance(cols, tuple):
            asked["columns"] = ":".join("" if x is None else str(x) for x in cols)
            if options.get("columns"):  # the file has more
                asked["columns"] = f":{N}"
            else:
                wanted = wanted[:, slice(*cols)]
        elif cols is not None:
            asked.pop("columns", None)
            wanted = wanted[:, cols]
            if named and by_name:
                asked["column_names"] = [NAMES[j] for j in cols]
            else:
                asked["column_list"] = cols
        remote = remote and name != "links.h5"  # HDF5 finds no other file from there
        path = f"{'file://' if remote else ''}{folder / name}"
        found = check.whole(check.load(path, **asked))
        good = np.array_equal(found, wanted) and found.dtype == np.dtype(
            asked.get("dtype", found.dtype)
        )
        check.agree(None if good else f"{path} {asked}: {found} is not {wanted}")

    chosen()
    about = routines.inspect(check.ctx, str(folder / "names.csv"), delimiter=";")
    check.agree(None if about == (M, N, "float64", NAMES) else f"inspect: {about}")
