"""Files: load and save by 2 ranks, compared with the format's library in one process and the disk.

``python -m benchmarks.files``; with ``large`` as an argument, 4 GB through `send_blocks`, into a
file and back, with an object store of 500 MB.

Cold: the file's pages are dropped from the page cache before every run (`posix_fadvise`), so it
comes from the disk. Warm: it is in memory. One process reads into a fresh array, as its user
would; the ranks keep the memory of matrices that were freed. Every save, of both, ends when
the data is on the disk (`fsync`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from benchmarks.harness import Report, Time, in_turns, run_and_save, start_ray, timed
from mpi_workers.matrix import copy_kernels

RANKS = min(2, len(os.sched_getaffinity(0)))
BINARY = (8000, 4000)  # 256 MB
TABLE = (400_000, 50)  # 160 MB
TEXT = (20_000, 50)  # 1 million numbers
ROUNDS = 5
BUFFER = 4 << 20
COPY = ("copy", "the copy alone")

Array = np.ndarray[Any, Any]


# --- the formats' own libraries, in one process ---


def _load_npy(path: Path) -> Array:
    return np.load(path)


def _save_npy(path: Path, array: Array) -> None:
    np.save(path, array)


def _load_h5(path: Path) -> Array:
    import h5py

    with h5py.File(path) as file:
        return np.asarray(file["data"][:])


def _save_h5(path: Path, array: Array) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["data"] = array


def _load_zarr(path: Path) -> Array:
    import zarr

    return np.asarray(zarr.open_array(path, mode="r")[:])


def _save_zarr(path: Path, array: Array) -> None:
    import zarr

    shutil.rmtree(path, ignore_errors=True)
    zarr.create_array(path, data=array, chunks=(262, array.shape[1]), compressors=None)


def _load_parquet(path: Path) -> Array:
    import pyarrow.parquet as pq

    table = pq.read_table(path, use_threads=False)
    return np.column_stack([column.to_numpy() for column in table.columns])


def _save_parquet(path: Path, array: Array) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.is_dir():
        shutil.rmtree(path)
    columns = [pa.array(column) for column in np.asfortranarray(array).T]
    table = pa.table(columns, names=[f"c{j}" for j in range(array.shape[1])])
    pq.write_table(table, path, compression="none", use_dictionary=False)


def _load_csv(path: Path) -> Array:
    from pyarrow import csv

    options = csv.ReadOptions(use_threads=False, autogenerate_column_names=True)
    table = csv.read_csv(path, options)
    return np.column_stack([column.to_numpy() for column in table.columns])


def _save_csv(path: Path, array: Array) -> None:
    import pyarrow as pa
    from pyarrow import csv

    columns = [pa.array(column) for column in np.asfortranarray(array).T]
    table = pa.table(columns, names=[str(j) for j in range(array.shape[1])])
    csv.write_csv(table, path, csv.WriteOptions(include_header=False))


ALONE: dict[str, tuple[str, Callable[[Path], Array], Callable[[Path, Array], None]]] = {
    "npy": ("NumPy", _load_npy, _save_npy),
    "h5": ("h5py", _load_h5, _save_h5),
    "zarr": ("zarr", _load_zarr, _save_zarr),
    "parquet": ("pyarrow", _load_parquet, _save_parquet),
    "csv": ("pyarrow", _load_csv, _save_csv),
}
WARM = {"npy": 1.5, "h5": 1.5, "zarr": 1.5, "parquet": 1.5}  # loads; all else: no slower


def run() -> Report:
    report = Report("files")
    random = np.random.default_rng(0)
    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder,
        AlchemistSession(RANKS, progress=False) as als,
    ):
        for suffix in ALONE:
            shape = {"parquet": TABLE, "csv": TEXT}.get(suffix, BINARY)
            _one(als, report, Path(folder), suffix, random.standard_normal(shape))
    report.notes.append(
        f"{RANKS} ranks on {len(os.sched_getaffinity(0))} cores. The disk's rate is that of one "
        "process that reads or writes the same number of bytes in pieces of 4 MiB, as `dd` does. "
        f'"The copy alone": {RANKS} threads of one process copy the same number of bytes from the '
        "page cache into the order of the ranks' memory, which is warm: no load is faster."
    )
    return report


def _one(als: AlchemistSession, report: Report, folder: Path, suffix: str, array: Array) -> None:
    library, load_alone, save_alone = ALONE[suffix]
    ours, theirs = folder / f"ours.{suffix}", folder / f"theirs.{suffix}"
    plain = folder / "plain"
    handle = als.send_matrix(array)
    handle.save(ours)
    _save(theirs, array, save_alone)
    np.testing.assert_array_equal(load_alone(ours), array)
    nbytes = sum(os.path.getsize(path) for path in _files(theirs))
    plain.write_bytes(os.urandom(1 << 20) * (nbytes >> 20 or 1))

    def load() -> None:
        als.load_matrix(theirs).free()

    for state in ("cold", "warm"):
        works: dict[str, Callable[[], object]] = {
            "gang": load,
            "alone": lambda: load_alone(theirs),
            "disk": lambda: _read(plain),
        }
        if state == "warm" and array.shape == BINARY:
            works["copy"] = _copying(plain)
        dropped = [theirs, plain] if state == "cold" else []
        took = in_turns(works, ROUNDS, before=partial(_drop, dropped))
        target = WARM.get(suffix, 1.0) if state == "warm" else 1.0
        _note(report, f"load .{suffix}, {state}", library, took, nbytes, target)
    took = in_turns(
        {
            "gang": lambda: handle.save(ours),
            "alone": lambda: _save(theirs, array, save_alone),
            "disk": lambda: _write(plain, nbytes),
        },
        ROUNDS,
    )
    _note(report, f"save .{suffix}", library, took, nbytes, 1.0)
    handle.free()
    plain.unlink()


def _note(
    report: Report, what: str, library: str, took: dict[str, Time], nbytes: int, target: float
) -> None:
    report.add(
        what,
        took["alone"] / took["gang"],
        target,
        f"x {library} in one process",
        detail=", ".join(
            f"{name} {nbytes / 1e6 / took[key]:,.0f} MB/s"
            for key, name in (("gang", "gang"), ("alone", library), ("disk", "disk"), COPY)
            if key in took
        ),
    )
    report.compare(what, library, took["alone"])
    for key in ("gang", "disk", *({"copy"} & took.keys())):
        report.compare(what, key, took[key])


def _drop(paths: list[Path]) -> None:
    """Drop the files' pages from the page cache."""
    for path in paths:
        for file in _files(path):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _files(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else iter([path])


def _save(path: Path, array: Array, save_alone: Callable[[Path, Array], None]) -> None:
    save_alone(path, array)
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def _read(path: Path) -> None:
    room = bytearray(BUFFER)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass


def _copying(path: Path) -> Callable[[], None]:
    """The least work of a warm load: every rank's rows from the page cache into its columns."""
    n = BINARY[1]
    rows = np.memmap(path, float, "r", shape=(os.path.getsize(path) // (8 * n), n))
    targets = [np.zeros((len(rows[r::RANKS]), n), order="F") for r in range(RANKS)]

    def copy(rank: int) -> None:
        copy_kernels.copy(targets[rank], rows[rank::RANKS])

    def copy_all() -> None:
        threads = [threading.Thread(target=copy, args=[rank]) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return copy_all


def _write(path: Path, nbytes: int) -> None:
    piece = os.urandom(1 << 20) * (BUFFER >> 20)
    path.unlink()
    with open(path, "wb", buffering=0) as file:
        for _ in range(-(-nbytes // BUFFER)):
            file.write(piece)
        os.fsync(file.fileno())


# --- larger than what is on the way ---


def large() -> None:
    """4 GB in blocks of 8 MB, into a file and back: what everyone had to hold meanwhile."""
    m, n, height = 500_000, 1000, 1000

    def blocks() -> Iterator[Array]:
        for start in range(0, m, height):
            yield np.full((height, n), float(start))

    with (
        tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder,
        AlchemistSession(RANKS, progress=False) as als,
    ):
        path = Path(folder, "large.npy")
        store = ray.cluster_resources()["object_store_memory"]
        print(f"{m * n * 8 / 1e9:.1f} GB; an object store of {store / 1e6:.0f} MB", flush=True)
        held = Held(als)
        for what, work in (
            ("send_blocks", lambda: als.send_blocks(blocks(), shape=(m, n), name="large")),
            ("save", lambda: als.matrix("large").save(path)),
            ("free", lambda: als.matrix("large").free()),
            ("load_matrix", lambda: als.load_matrix(path, name="again")),
        ):
            with held:
                took = timed(work)
            print(f"{what}: {took:.1f} s, {m * n * 8 / 1e9 / took:.2f} GB/s; {held}", flush=True)
        found = als.matrix("again").fetch(rows=slice(0, m, height * 10))[:, -1]
        assert found.tolist() == [float(x) for x in range(0, m, height * 10)]


class Held:
    """Looks twenty times a second at what this process, the ranks and the object store hold."""

    def __init__(self, als: AlchemistSession) -> None:
        self._pids = [os.getpid(), *(worker.pid for worker in als.list_workers())]
        self._over = threading.Event()
        self._most: list[float] = []

    def __enter__(self) -> None:
        first = self._now()
        self._most = [0.0] * len(first)
        self._over.clear()
        self._thread = threading.Thread(target=self._watch, args=(first,))
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self, first: list[float]) -> None:
        while not self._over.wait(0.05):
            more = [now - before for now, before in zip(self._now(), first, strict=True)]
            self._most = list(map(max, self._most, more))

    def _now(self) -> list[float]:
        here = ray.available_resources().get("object_store_memory", 0.0)
        return [*map(_private, self._pids), ray.cluster_resources()["object_store_memory"] - here]

    def __str__(self) -> str:
        here, *ranks, store = (f"{nbytes / 1e6:.0f}" for nbytes in self._most)
        return (
            f"at most {here} MB more in this process, {' and '.join(ranks)} MB of their own in "
            f"the ranks (matrices are shared memory), {store} MB more in the object store"
        )


def _private(pid: int) -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return float(int(found.group(1)) << 10) if found else 0.0


if __name__ == "__main__":
    start_ray(8, store_bytes=500_000_000)
    if "large" in sys.argv[1:]:
        large()
    else:
        run_and_save(run)
