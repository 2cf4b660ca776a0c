"""Rank side of test_files.py: nothing lost, no wrong number, each byte on the disk."""

from __future__ import annotations

import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zarr

from ali.files import exchange, paths, routines, text
from ali.files.paths import hidden
from mpi_workers.matrix import pairwise
from tests.ali.ranks_files import (
    BASE,
    NAMES,
    SUFFIXES,
    USUAL,
    Checks,
    bits,
    values,
    written_by_others,
)
from tests.support.layouts import SOME_LAYOUTS

M, N = BASE.shape


# --- saves that are refused ---


def kept(check: Checks) -> None:
    """A save that is refused leaves every byte that was there."""
    folder = check.folder
    check.by_rank_0(lambda: existing(folder))
    A = check.ctx.new_replicated(BASE, "MC_MR")
    C = check.ctx.new_replicated(BASE.astype(np.complex64), "MC_MR")
    saves: tuple[tuple[Any, str, dict[str, Any], str], ...] = (
        (A, "groups.h5", {"dataset": "deep", "append": True}, "'deep' is a group"),
        (A, "groups.h5", {"dataset": "deep/plain/x", "append": True}, "FileError"),
        (A, "groups.h5", {"columns": ["a"]}, "have no names"),
        (A, "group2.zarr", {}, "other contents"),
        (A, "group3.zarr", {}, "other contents"),
        (A, "array.zarr", {"dataset": "x"}, "no data sets"),
        (A, "damaged.zarr", {}, "other contents"),
        (A, "notes2.zarr", {}, "other contents"),
        (A, "notes3.zarr", {}, "other contents"),
        (A, "tables.parquet", {}, "other contents"),
        (C, "table.parquet", {}, "DtypeError: {}: .parquet has no complex numbers"),
        (A, "table.parquet", {"columns": ["a", "a"]}, "different names"),
        (C, "old.csv", {}, "DtypeError: {}: .csv has no complex numbers"),
        (A, "old.csv", {"delimiter": "."}, "cannot separate"),
        (A, "old.csv", {"delimiter": "1"}, "BadArgumentError: {}: delimiter='1'"),
        (A, "old.csv", {"delimiter": "e"}, "BadArgumentError: {}: delimiter='e'"),  # 1e300
        (A, "old.csv", {"columns": ["a"]}, "BadArgumentError: 6 columns need 6 different names"),
        (A, "old.csv", {"columns": ["a\nb", *NAMES[1:]]}, "Error: {}: a name with a line"),
        (A, "old.npy", {"columns": NAMES}, "BadArgumentError: {}: .npy files have no names"),
        (
            A,
            "old.npy",
            {"append": True},
            "BadArgumentError: {}: .npy files have no other data sets",
        ),
        (A, "groups.h5", {"header": True}, "BadArgumentError: {}: .h5 files have no header"),
        (A, "folder.npy", {}, "FileError: {} is a folder with other contents"),
        (A, "folder.h5", {}, "other contents"),
        (A, "folder.csv", {}, "other contents"),
        (A, "no/such/x.npy", {}, "FileError: {}: the folder"),
        (A, "x.mat", {}, "BadArgumentError: {}: unknown suffix"),
        (A, "file:///x.npy", {}, "BadArgumentError: file:///x.npy: only .zarr can be saved"),
    )
    before = contents(folder)
    for matrix, name, options, words in saves:
        path = name if "://" in name else str(folder / name)
        said = check.said(routines.save, check.ctx, matrix, path, **options)
        same = contents(folder) == before and not check.left()
        check.right(same and words.replace("{}", path) in said, f"{name} {options}: {said}")
    for other in ("app", "notes"):
        said = check.said(routines.begin_folder, check.ctx, str(folder / other), "t")
        same = contents(folder) == before
        check.right(same and "is not a checkpoint" in said, f"{other}: {said}")
    place = str(folder / "checkpoint")
    for number, fails in enumerate((False, True)):
        routines.begin_folder(check.ctx, place, "t")
        routines.save(check.ctx, A, f"{hidden(place, 't')}/{number}.npy")
        before = contents(folder / "checkpoint")
        check.gang.comm.Barrier()
        with pytest.MonkeyPatch.context() as patch:
            if fails:
                patch.setattr(paths, "_swap", full)
            text = f'{{"format": "{routines.CHECKPOINT_FORMAT}", "number": {number}}}'
            said = check.said(routines.end_folder, check.ctx, place, "t", text)
        good = fails == ("No space left" in said) and not check.left()
        check.right(good, f"checkpoint {number}: {said}, left {check.left()}")
    found = contents(folder / "checkpoint")
    check.right(found == before and '"number": 0' in str(before), f"checkpoint: {sorted(found)}")


def full(*_: object) -> None:
    raise OSError(28, os.strerror(28))


def existing(folder: Path) -> None:
    """Files and folders that a save must not replace."""
    with h5py.File(folder / "groups.h5", "w") as file:
        file["deep/plain"] = BASE
    for version in (2, 3):
        group = zarr.open_group(str(folder / f"group{version}.zarr"), mode="w", zarr_format=version)
        group.create_array("inner", data=BASE)
        array = str(folder / f"notes{version}.zarr")
        zarr.create_array(array, data=BASE, zarr_format=version)
        (folder / array / "notes.txt").write_text("how it was measured")
    zarr.create_array(str(folder / "array.zarr"), data=BASE)
    (folder / "damaged.zarr").mkdir()
    (folder / "damaged.zarr" / "zarr.json").write_text("{")
    table = pa.table({"a": BASE[:, 0]})
    (folder / "tables.parquet" / "inner.parquet").mkdir(parents=True)
    pq.write_table(table, folder / "tables.parquet" / "inner.parquet" / "0.parquet")
    (folder / "table.parquet").mkdir()
    pq.write_table(table, folder / "table.parquet" / "0.parquet")
    (folder / "old.csv").write_text("1,2\n")
    np.save(folder / "old.npy", BASE)
    for name in ("folder.npy", "folder.h5", "folder.csv"):
        (folder / name).mkdir()
        np.save(folder / name / "inner.npy", BASE)
    (folder / "notes").mkdir()
    (folder / "notes" / "manifest.json").write_text(
        json.dumps({"format": routines.CHECKPOINT_FORMAT})
    )
    (folder / "notes" / "notes.txt").write_text("how it was computed")
    (folder / "app").mkdir()
    (folder / "app" / "manifest.json").write_text('{"name": "a web application"}')


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# --- numbers that a dtype cannot hold ---

TOO_LARGE: tuple[tuple[Any, str, str], ...] = (  # element, dtype of the file, dtype asked for
    (2**40, "int64", "int32"),
    (-(2**31) - 1, "int64", "int32"),
    (2**63, "uint64", "int64"),
    (2**31, "uint32", "int32"),
    (1e300, "float64", "float32"),
    (-1e39, "float64", "float32"),
    (complex(0, 1e300), "complex128", "complex64"),
    (complex(np.inf, 1e300), "complex128", "complex64"),
)
FITS: tuple[tuple[Any, str, str], ...] = (
    (-(2**31), "int64", "int32"),
    (2**63 - 1, "uint64", "int64"),
    (0.1, "float64", "float32"),
    (1e-300, "float64", "float32"),
    (-np.inf, "float64", "float32"),
    (np.nan, "float64", "float32"),
    (complex(np.nan, np.inf), "complex128", "complex64"),
    (2**53 + 1, "int64", "float64"),
)


def conversions(check: Checks) -> None:
    """Elements out of range are refused by name; others become what NumPy makes of them."""
    folder = check.folder
    for number, (value, have, want) in enumerate((*TOO_LARGE, *FITS)):
        array = np.ones((M, N), have)
        array[M - 2, 3] = value
        for way in (0, USUAL, 1000):
            exchange.EXCHANGE = way
            for suffix in (".npy", ".h5"):
                path = folder / f"{number}{way}{suffix}"

                def make(path: Path = path, array: Any = array) -> None:
                    if path.suffix == ".npy":
                        np.save(path, array)
                        return
                    with h5py.File(path, "w") as file:
                        file.create_dataset("data", data=array, chunks=(5, 4), compression="gzip")

                check.by_rank_0(make)
                found = None

                def load(path: Path = path, want: str = want, number: int = number) -> None:
                    nonlocal found
                    layout = SOME_LAYOUTS[number % len(SOME_LAYOUTS)]
                    found = check.load(str(path), dtype=want, layout=layout)

                said = check.said(load)
                if number < len(TOO_LARGE):
                    worst = max(filter(np.isfinite, (value.real, value.imag)), key=abs)
                    words = f"{path} has the element {worst!r}, which {want} cannot hold"
                    good = said.startswith(f"DtypeError: {words}")
                else:
                    assert found is not None, said
                    good = np.array_equal(check.whole(found), array.astype(want), equal_nan=True)
                check.right(good, f"{value} from {have} to {want}, {suffix} {way}: {said}")


# --- tables and text ---

nan = np.nan
TEXTS: tuple[tuple[str, dict[str, Any], Any], ...] = (  # text, options, what it is
    ("1\t2\n3\t\n", {"delimiter": "\t"}, [[1, 2], [3, nan]]),
    ("\t2\n3\t\n\t\n", {"delimiter": "\t"}, [[nan, 2], [3, nan], [nan, nan]]),
    ("1 2\n3 \n\n", {"delimiter": " "}, [[1, 2], [3, nan]]),
    ("1,2 \n3,4 \t\n \n", {}, [[1, 2], [3, 4]]),
    ("1,NA\n3,4\nNA,null\n", {}, [[1, nan], [3, 4], [nan, nan]]),
    ("NA,N/A\n3,4\n", {}, [[nan, nan], [3, 4]]),
    ("nan,-Inf\n3,4\n", {}, [[nan, -np.inf], [3, 4]]),
    ("NA,x\n3,4\n", {}, [[3, 4]]),
    ("2020_01,2020_02\n3,4\n", {}, [[3, 4]]),
    ("0,1,2\n3,4,5\n", {}, "BadArgumentError: {}: cannot tell whether the first line (0,1,2"),
    (",0,1\n0,4,5\n", {}, "BadArgumentError: {}: cannot tell whether the first line (,0,1"),
    ("0,1,2\n3,4,5\n", {"header": True}, [[3, 4, 5]]),
    ("0,1,2\n3,4,5\n", {"header": False}, [[0, 1, 2], [3, 4, 5]]),
    ("0\n1\n", {}, [[0], [1]]),
    ("1,2\n1e400,4\n", {}, "DtypeError: {}: row 1, column 0: 1e400 is out of range of float64"),
    ("1,2\n3,-1e39\n", {"dtype": "float32"}, "DtypeError: {}: row 1, column 1: -1e39 is out of"),
    ("1,2\n3,4294967296\n", {"dtype": "int32"}, "DtypeError: {}: row 1, column 1: '4294967296'"),
    ("a,b\nTrue,2.5\n,3\nFalse,4\n", {}, [[1, 2.5], [nan, 3], [0, 4]]),  # pandas' bools
    ("True,2\nFalse,4\n", {"dtype": "int8"}, [[1, 2], [0, 4]]),
    ("true\nfalse\n", {"dtype": "bool"}, [[1], [0]]),
    ("True,Trues\n7,4\n", {"header": False, "columns": ":1"}, [[1], [7]]),
    ("True,Trues\n7,4\n", {"header": False}, "DtypeError: {}: row 0, column 1: 'Trues' is not"),
    ("1;2\n3;4\n", {}, "BadArgumentError: {}: '1;2' is not a number: set delimiter=';'"),
    ("a;b\n1;2\n", {}, "DtypeError: {}: row 0, column 'a;b': '1;2' is not a number: set delim"),
    ("# a b\n1.5 2e3\n", {}, "DtypeError: {}: row 0, column 'a b': '1.5 2e3' is not a number: set"),
    ("# a,b\n1,2\n", {"column_names": ["a"]}, [[1]]),  # as numpy.savetxt writes names
    ("1,2\n# c\n", {}, "FileError: {} is ragged: row 1 has 1 fields"),
    ("1\n# c\n", {}, "DtypeError: {}: row 1, column 0: '# c' is not a number of float64: lines of"),
    ("a;b\n1,5;2,5\n", {}, "FileError: {} is ragged: row 0 has 3 fields; the first has 1: set d"),
    ("a;b\n1,5;2,5\n", {"delimiter": ";"}, "DtypeError: {}: row 0, column 'a': '1,5' is not a n"),
    ("1,5;-2,5e1\n;3\n", {"delimiter": ";", "decimal": ","}, [[1.5, -25], [nan, 3]]),
    ("1,2\n", {"decimal": ","}, "BadArgumentError: {}: decimal=',' with delimiter=','"),
    ("1,-\n-999,4\n", {"na_values": ["-", "-999"]}, [[1, nan], [nan, 4]]),
    ("1,?\n3,4\n", {"header": False}, "DtypeError: {}: row 0, column 1: '?' is not a number of f"),
)


def tables(check: Checks) -> None:
    """Texts and Parquet folders as their writers meant them, or an error that says why not."""
    folder = check.folder
    for number, (content, options, wanted) in enumerate(TEXTS):
        path = folder / f"{number}.csv"
        check.by_rank_0(path.write_bytes, content.encode())
        expect(check, path, options, wanted)
    check.by_rank_0(lambda: parquet_files(folder))
    column = np.arange(12.0).reshape(-1, 1)

    def only(name: str) -> dict[str, list[str]]:
        return {"column_names": [name]}

    for name, options, wanted in (
        ("parts.parquet", {}, column),
        ("parts.parquet", {"row_list": [11, 2, 10]}, column[[11, 2, 10]]),
        ("partitioned.parquet", {}, "FileError: {} has subfolders (year=2020)"),
        ("types.parquet", only("x"), [[1.0], [2.0]]),
        ("types.parquet", only("money"), [[1.5], [2.5]]),
        ("types.parquet", only("pair"), "DtypeError: {}: column 'pair' has type struct"),
        ("types.parquet", only("word"), [[0], [1]]),
        ("types.parquet", only("day"), [[1], [2]]),
        ("types.parquet", {"column_names": ["x", "day"]}, "DtypeError: {}: column 'day' (datetime"),
        (
            "types.parquet",
            {**only("day"), "dtype": "int32"},
            "DtypeError: {} has elements of datet",
        ),
        ("int96.parquet", only("spark"), OLD.view(np.int64)[:, None]),
        (
            "int96.parquet",
            only("fine"),
            "DtypeError: {}: column 'fine' has timestamps of INT96 wit",
        ),
    ):
        expect(check, folder / name, options, wanted)
        expect(check, f"file://{folder / name}", options, wanted)


def expect(check: Checks, path: Path | str, options: dict[str, Any], wanted: Any) -> None:
    found = None

    def load() -> None:
        nonlocal found
        found = check.whole(check.load(str(path), **options))

    said = check.said(load)
    if isinstance(wanted, str):
        good = said.startswith(wanted.replace("{}", str(path)))
    else:
        good = found is not None and np.array_equal(found, wanted, equal_nan=True)
    check.right(good, f"{path} {options}: {said} {found}, not {wanted}")


# Beyond the years that int64 holds in nanoseconds.
OLD = np.array(["1000-01-01", "2000-02-29T12:00:00.000001", "9999-12-31"], "M8[us]")


def parquet_files(folder: Path) -> None:
    days = {"spark": pa.array(OLD), "fine": pa.array([0, 1000, 1001], pa.timestamp("ns"))}
    pq.write_table(
        pa.table(days), folder / "int96.parquet", use_deprecated_int96_timestamps=True,
        row_group_size=2,
    )  # fmt: skip
    for name in ("parts.parquet", "partitioned.parquet/year=2020"):
        (folder / name).mkdir(parents=True)
        for k in range(12):
            pq.write_table(pa.table({"x": [float(k)]}), folder / name / f"part.{k}.parquet")
    columns = {
        "x": [1.0, 2.0],
        "money": pa.array([Decimal("1.50"), Decimal("2.50")]),
        "pair": pa.array([{"a": 1}, {"a": 2}]),
        "word": pa.array(["a", "b"]).dictionary_encode(),
        "day": pa.array([1, 2], pa.date32()),
    }
    pq.write_table(pa.table(columns), folder / "types.parquet")


# --- on the disk ---


def durable(check: Checks) -> None:
    """Before the rename each rank has called fsync for the files that it wrote itself."""
    folder = check.folder
    array = values((40, 4), "float64", 4)
    matrix = check.ctx.new_replicated(array, "VC_STAR")
    for suffix in SUFFIXES:
        path = folder / f"A{suffix}"
        flushed: set[str] = set()
        real = os.fsync

        def fsync(fd: int, flushed: set[str] = flushed, real: Any = real) -> None:
            flushed.add(os.readlink(f"/proc/self/fd/{fd}"))
            real(fd)

        def publish(temporary: str, final: str, flushed: set[str] = flushed) -> None:
            flushed.add("published")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            patch.setattr(paths, "_publish", publish)
            routines.save(check.ctx, matrix, str(path), token="t")
        temporary = hidden(str(path), "t")
        everyone = check.gang.comm.allgather(flushed - {"published"})
        files = [str(p) for p in Path(temporary).rglob("*") if p.is_file()] or [temporary]
        data = [name for name in files if not name.endswith("zarr.json")]
        all_of_it = all(any(name in some for some in everyone) for name in data)
        check.right(all_of_it, f"{suffix}: not all of {data} are in {everyone}")
        by_all = all(any(name in some for name in data) for some in everyone)
        apart = suffix not in (".zarr", ".parquet") or not overlaps(data, everyone)
        check.right(by_all and apart, f"{suffix}: flushed by the wrong ranks: {everyone}")
        check.gang.comm.Barrier()
        check.by_rank_0(paths.remove, temporary)


def overlaps(names: list[str], flushed: list[set[str]]) -> bool:
    """Whether a file was flushed by more than one rank."""
    return any(sum(name in some for some in flushed) > 1 for name in names)


# --- chunks ---


def large_chunks(check: Checks) -> None:
    """A chunk that does not fit into the node's memory is refused before it is read."""
    folder = check.folder
    check.by_rank_0(lambda: written_by_others(folder))
    for name, options in (
        ("many.h5", {"dataset": "packed"}),
        ("sharded.zarr", {}),
        ("sharded.zarr", {"rows": "3:4"}),
        ("one.parquet", {"columns": ":3"}),
    ):
        path = str(folder / name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routines, "available_bytes", lambda: 64 * 8 * 2 * check.gang.size)
            said = check.said(check.load, path, **options)
            check.right(said == "nothing", f"{name} {options} fits: {said}")
            patch.setattr(routines, "available_bytes", lambda: 12 * 8 * 2 - 1)
            said = check.said(check.load, path, **options)
            words = f"ResourceError: {path}: a chunk of this file has"
            check.right(said.startswith(words), f"{name} {options} does not fit: {said}")


def shuffled(check: Checks) -> None:
    """Rows in any order; no stretch of a text is parsed more often than in order."""
    folder = check.folder
    check.by_rank_0(lambda: written_by_others(folder))
    rows = [int(i) for i in np.random.default_rng(check.gang.size).permutation(M)] + [3, 3, 0]
    parsed = [0]
    parse = text.CsvSource._parsed

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        parsed[0] += 1
        return parse(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text.CsvSource, "_parsed", counted)
        patch.setattr(pairwise, "MESSAGE", 64)
        for name, options in (
            ("plain.csv", {}),
            ("folder.parquet", {}),
            ("many.h5", {"dataset": "packed"}),
            ("sharded.zarr", {}),
            ("fortran.npy", {}),
        ):
            for layout in SOME_LAYOUTS:
                picked = {**options, "row_list": rows, "column_list": [4, 1, 2], "layout": layout}
                found = check.whole(check.load(str(folder / name), **picked))
                wanted = BASE[rows][:, [4, 1, 2]]
                check.right(bits(found) == bits(wanted), f"{name} {layout}: {found}")
        parsed[0] = 0
        check.load(str(folder / "plain.csv"))
        in_order = check.gang.comm.allreduce(parsed[0])
        parsed[0] = 0
        check.load(str(folder / "plain.csv"), row_list=rows[:M])
        now = check.gang.comm.allreduce(parsed[0])
        check.right(now <= 2 * in_order, f"{now} stretches parsed instead of {in_order}")
