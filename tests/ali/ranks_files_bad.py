"""Rank side of test_files.py: files that are no matrices, and writes that fail."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from ali.files import npy, parquet, paths, routines, text, zarr3
from mpi_workers.rank.gang_view import GangView
from tests.ali.ranks_files import BASE, SUFFIXES, Checks, bits, values, written_by_others

NOBODY = 65534  # a user without any rights


# --- a save that fails ---


def atomic(check: Checks) -> None:
    """However it fails, the old file is as it was, nothing else is there, the gang goes on."""
    folder = check.folder
    old = check.ctx.new_replicated(values((9, 4), "float64", 2), "MC_MR")
    new = check.ctx.new_replicated(values((40, 4), "float64", 4), "VC_STAR")
    added = {"dataset": "second", "append": True}
    for suffix, options in (*((suffix, {}) for suffix in SUFFIXES), (".h5", added)):
        path = folder / f"kept{len(options)}{suffix}"
        routines.save(check.ctx, old, str(path))
        before = check.whole(check.load(str(path)))
        for fails in ("writing", "ending", "publishing"):
            with pytest.MonkeyPatch.context() as patch:
                break_it(patch, check.gang, suffix, fails)
                said = check.said(routines.save, check.ctx, new, str(path), **options)
            rank = 0 if fails == "publishing" else check.gang.size - 1
            words = "No space left on device", f"(rank {rank})", f"FileError: {path}"
            check.right(all(word in said for word in words), f"{suffix} {fails}: {said}")
            after = check.whole(check.load(str(path)))
            same = bits(after) == bits(before)
            check.right(same and not check.left(), f"{suffix} {fails}: left {check.left()}")
        routines.save(check.ctx, new, str(path), **options)
        whole = check.whole(check.load(str(path), dataset=options.get("dataset")))
        replaced = whole.shape == new.shape and not check.left()
        check.right(replaced, f"{suffix}: not replaced, or left {check.left()}")


def break_it(patch: pytest.MonkeyPatch, gang: GangView, suffix: str, fails: str) -> None:
    """The last rank's second box, its sink's end, or rank 0's rename find the disk full."""

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    if fails == "publishing":
        patch.setattr(paths.os, "replace", full)
        patch.setattr(paths, "_swap", full)
        patch.setattr(zarr3, "_publish", full)
        return
    kind: Any = {
        ".npy": npy.RawSink,
        ".h5": npy.RawSink,
        ".zarr": zarr3.ZarrSink,
        "url": zarr3.ZarrSink,
        ".parquet": parquet.ParquetSink,
        ".csv": text.CsvSink,
    }[suffix]
    if gang.rank == gang.size - 1:
        count = [0]
        write = kind.write

        def second(self: Any, box: Any, array: Any) -> None:
            count[0] += 1
            if count[0] == 2:
                full()
            write(self, box, array)

        patch.setattr(*((kind, "write", second) if fails == "writing" else (kind, "close", full)))


def url_atomic(check: Checks) -> None:
    """A save that fails leaves nothing there; one over something is refused."""
    folder = check.folder
    path = folder / "A.zarr"
    url = f"file://{path}"
    matrix = check.ctx.new_replicated(values((40, 4), "float64", 4), "VC_STAR")
    for fails in ("writing", "ending", "publishing"):
        with pytest.MonkeyPatch.context() as patch:
            break_it(patch, check.gang, "url", fails)
            said = check.said(lambda: routines.save(check.ctx, matrix, url))
        words = "No space left on device", f"FileError: {url}"
        check.right(all(word in said for word in words), f"{fails}: {said}")
        check.gang.comm.Barrier()
        check.right(not path.exists(), f"{fails}: left {[*path.glob('*')]}")
        check.gang.comm.Barrier()
    check.by_rank_0(lambda: (path / "c" / "7").mkdir(parents=True))  # as a killed gang leaves it
    routines.save(check.ctx, matrix, url)
    before = bits(check.whole(check.load(url)))
    said = check.said(lambda: routines.save(check.ctx, matrix, url))
    words = f"FileError: {url} exists, and a URL cannot"
    check.right(said.startswith(words), f"over another: {said}")
    check.right(bits(check.whole(check.load(url))) == before, "the other one was changed")


# --- what is no matrix ---


def spoil(folder: Path) -> None:
    """Files with something wrong."""
    written_by_others(folder)
    (folder / "empty.npy").write_bytes(b"")
    np.save(folder / "cut.npy", BASE)
    os.truncate(folder / "cut.npy", 1000)
    (folder / "text.npy").write_text("1,2\n")
    np.save(folder / "objects.npy", np.array([["a"]], object), allow_pickle=True)
    np.save(folder / "words.npy", np.array([["a"]]))
    np.save(folder / "cube.npy", np.zeros((2, 2, 2), order="F"))
    np.save(folder / "line.npy", np.zeros(5))
    np.save(folder / "long.npy", np.zeros((2, 3), np.longdouble))
    np.save(folder / "complex.npy", np.zeros((2, 3), np.complex64))
    whole = (folder / "many.h5").read_bytes()
    (folder / "a.csv.gz").touch()
    (folder / "cut.h5").write_bytes(whole[: len(whole) // 2])
    with h5py.File(folder / "null.h5", "w") as file:
        file["x"] = h5py.Empty("f8")
        file["link"] = h5py.SoftLink("/nothing")
    (folder / "cut.zarr").mkdir()
    (folder / "cut.zarr" / "zarr.json").write_text("{")
    whole = (folder / "one.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "none.parquet").mkdir()
    (folder / "ragged.csv").write_text("1,2\n3,4\n5\n6,7\n" + "8,9\n" * 50)
    (folder / "late.csv").write_text("1,2\n" * 60 + "x,2\n")
    (folder / "gap.csv").write_text("1,2\n,4\n")
    (folder / "blank.csv").write_text("1,2\n\n3,4\n")
    (folder / "empty.csv").write_text("\n\n")
    (folder / "binary.csv").write_bytes(b"\xff\xfe\x00\n")
    (folder / "m.mat").write_text("")
    os.mkfifo(folder / "pipe.npy")
    np.save(folder / "secret.npy", BASE)
    (folder / "secret.npy").chmod(0)
    (folder / "group.npy").mkdir()


REFUSED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("absent.npy", {}, "FileError: {}: No such file or directory (rank 0)"),
    ("empty.npy", {}, "FileError: {} is not a .npy file"),
    ("cut.npy", {}, "FileError: {} is truncated"),
    ("text.npy", {}, "FileError: {} is not a .npy file"),
    ("objects.npy", {}, "DtypeError: {}: elements of dtype object are not numbers"),
    ("words.npy", {}, "DtypeError: {}: elements of dtype <U1 are not numbers"),
    ("cube.npy", {}, "ShapeError: {}: an array of shape (2, 2, 2) in Fortran's order"),
    ("line.npy", {"columns": ":1"}, "BadArgumentError: {}: a 1-D array has no columns"),
    ("long.npy", {}, "DtypeError: {}: a matrix cannot have dtype float128: choose one to convert"),
    ("complex.npy", {"dtype": "float64"}, "DtypeError: {}: elements of dtype complex64 cannot"),
    ("big.npy", {"dtype": "float128"}, "DtypeError: {}"),
    ("big.npy", {"layout": "ROWS"}, "LayoutError"),
    ("big.npy", {"rows": "1"}, "BadArgumentError: {}: rows: '1' is not a slice"),
    ("big.npy", {"rows": "::0"}, "BadArgumentError"),
    ("big.npy", {"row_list": [3, 29]}, "BadArgumentError: {}: rows: index 29 is out of range"),
    ("big.npy", {"column_names": ["x0"]}, "BadArgumentError: {}: its columns have no names"),
    ("big.npy", {"dataset": "a"}, "BadArgumentError: {}: .npy files have no data sets"),
    ("a.csv.gz", {}, "BadArgumentError: {}: ranks cannot read or write parts of a compressed file"),
    ("big.npy", {"decimal": ","}, "BadArgumentError: {}: .npy files have no decimal points"),
    ("m.mat", {}, "BadArgumentError: {}: unknown suffix '.mat'"),
    ("pipe.npy", {}, "FileError: {} is neither a file nor a folder"),
    ("group.npy", {}, "FileError: {}"),
    ("cut.h5", {}, "FileError: {} is not a complete HDF5 file"),
    ("many.h5", {}, "BadArgumentError: {} has 4 data sets: choose one"),
    ("many.h5", {"dataset": "no"}, "FileError: {} has no data set 'no'; it has "),
    ("many.h5", {"dataset": "words"}, "DtypeError: {}: /words: elements of dtype"),
    ("null.h5", {}, "DtypeError: {} has no data set of numbers"),
    ("null.h5", {"dataset": "x"}, "ShapeError: {}: data set 'x' is empty"),
    ("null.h5", {"dataset": "link"}, "FileError: {} has no data set 'link'; it has "),
    ("cut.zarr", {}, "FileError: {}"),
    ("group.zarr", {"dataset": "no", "dtype": "int32"}, "FileError: {} has no array 'no'"),
    ("cut.parquet", {}, "FileError: {} is not a complete Parquet file"),
    ("none.parquet", {}, "FileError: {} is a folder without Parquet files"),
    ("one.parquet", {}, "DtypeError: {}: column 'word' has type string"),
    ("one.parquet", {"column_names": ["x1", "y"]}, "BadArgumentError: {} has no column 'y'"),
    ("ragged.csv", {}, "FileError: {} is ragged: row 2 has 1 fields"),
    ("late.csv", {}, "DtypeError: {}: row 60, column 0: 'x' is not a number"),
    ("late.csv", {"dtype": "int32"}, "DtypeError: {}: row 60, column 0: 'x' is not a number"),
    ("gap.csv", {"dtype": "int64"}, "DtypeError: {}: column 0 has missing values"),
    ("blank.csv", {}, "FileError: {} is ragged: row 1 is blank"),
    ("empty.csv", {}, "FileError: {} has no rows"),
    ("binary.csv", {}, "FileError: {} is not text in UTF-8"),
    ("file:///absent/x.npy", {}, "FileError: file:///absent/x.npy"),
)


def refused(check: Checks) -> None:
    """Every file with something wrong is told of by all ranks alike, and the gang goes on."""
    folder = check.folder
    check.by_rank_0(lambda: spoil(folder))
    for name, options, words in REFUSED:
        path = name if "://" in name else str(folder / name)
        said = check.said(check.load, path, **options)
        check.right(said.startswith(words.replace("{}", path)), f"{name} {options}: {said}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "h5py", None)
        path = str(folder / "many.h5")
        said = check.said(lambda: check.load(path))
        words = "this format needs h5py, which is not installed: pip install 'alchemist-on-r"
        check.right(words in said, f"no h5py: {said}")
    user = os.geteuid()
    if user == 0:  # who may read everything: not for this one call
        os.seteuid(NOBODY)
    said = check.said(lambda: check.load(str(folder / "secret.npy")))
    os.seteuid(user)
    words = f"FileError: {folder / 'secret.npy'}: Permission denied (rank 0)"
    check.right(said == words, f"unreadable: {said}")
    if check.gang.size > 1:
        elsewhere(check)


def elsewhere(check: Checks) -> None:
    """A path that is another file on the last rank's node, or is not there."""
    folder, last = check.folder, check.gang.rank == check.gang.size - 1
    check.by_rank_0(lambda: (folder / "own").mkdir())
    mine = folder / "own" if last else folder
    if last:
        np.save(folder / "own" / "big.npy", BASE[:3])
    check.gang.comm.Barrier()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(mine)
        for name, words in (
            ("big.npy", "FileError: big.npy is not the same file on"),
            ("half.npy", "FileError: half.npy: No such file or directory, but other nodes have it"),
        ):
            said = check.said(check.load, name)
            check.right(said.startswith(words), f"elsewhere: {said}")
        A = check.ctx.new_replicated(BASE, "MC_MR")
        said = check.said(lambda: routines.save(check.ctx, A, "mine.npy"))
        words = "does not see the file that rank 0 created: give a path"
        check.right(words in said and not check.left(), f"save elsewhere: {said}")


# --- a disk that is full ---


def full_disk(gang: GangView, folder: str) -> list[str]:
    """On a disk of 2 MB: what is too large is refused, the old file stays, and the room is free
    again."""
    check = Checks(gang, Path(folder))
    old = check.ctx.new_replicated(values((20, 4), "float64", 2), "MC_MR")
    new = check.ctx.new_replicated(values((300, 1000), "float64", 4), "VC_STAR")
    for suffix in SUFFIXES:
        path = Path(folder, f"kept{suffix}")
        routines.save(check.ctx, old, str(path))
        before = check.whole(check.load(str(path)))
        said = check.said(routines.save, check.ctx, new, str(path))
        words = f"FileError: {path}"
        check.right(said.startswith(words) and "No space left on device" in said, said)
        same = bits(before) == bits(check.whole(check.load(str(path))))
        check.right(same and not check.left(), f"{suffix}: left {check.left()}")
        routines.save(check.ctx, old, str(path))
    return check.wrong


def out_of_descriptors(gang: GangView, folder: str) -> list[Any]:
    """What saves say if the last rank can open no file, and files that are open afterwards."""
    check = Checks(gang, Path(folder))
    A = check.ctx.new_replicated(BASE, "VC_STAR")
    path = str(Path(folder, "A.npy"))
    routines.save(check.ctx, A, path)
    before, most = len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    said = []
    for _ in range(2):
        if gang.rank == gang.size - 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
        try:
            said.append(check.said(routines.save, check.ctx, A, path))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
    return [said, len(os.listdir("/proc/self/fd")) - before]
