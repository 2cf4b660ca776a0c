"""Zarr through zarr-python: version 3 is written, 2 and 3 are read.

Boxes are whole chunks, so that no two ranks write the same one. Chunks are not compressed. A
missing chunk reads as the array's fill value, as the format specifies.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ali.files.exchange import Array, ArraySource
from ali.files.formats import Box, Format, Grain, Options, Sink, Source, Spec, checked, refuse
from ali.files.npy import Lines, RawSource
from ali.files.paths import Place, begin_flush, extra, flush, on_rank_0
from ali.interface import Context
from mpi_workers.failures import Failure
from mpi_workers.matrix.layout import as_slice, stored_shape

STORED_NBYTES = 8 << 20  # 8 MiB: a chunk
METADATA = "zarr.json"
CHUNKS = "c"  # the prefix of all chunks
LOCAL = ("file:", "local:")  # only at these URLs do folders have to be created
# In the folder of an array: metadata, and chunks or folders of them (zarr.json: "c/0/0", "c.0.0").
MEMBER = re.compile(r"zarr\.json|\.zarray|\.zattrs|(c|\d+)(\.\d+)*")
PLAIN = 1 << 15  # elements of a chunk from which on every rank opens its file directly


def _chunks(spec: Spec) -> tuple[int, int]:
    """Whole rows, unless a matrix has one that is longer than a chunk."""
    (m, n), itemsize = spec.shape, spec.dtype.itemsize
    cols = max(1, min(n, STORED_NBYTES // itemsize) if len(spec.array_shape) < 3 else n)
    return max(1, min(m, STORED_NBYTES // (cols * itemsize))), cols


def _created(spec: Spec) -> dict[str, Any]:
    """Options of zarr.create_array."""
    inner = tuple(max(1, n) for n in spec.array_shape[1:])
    chunks = _chunks(spec) if len(inner) < 2 else (_chunks(spec)[0], *inner)
    return {
        "shape": spec.array_shape, "dtype": spec.dtype, "chunks": chunks[: len(spec.array_shape)],
        "compressors": None, "fill_value": 0, "zarr_format": 3,
    }  # fmt: skip


class Zarr(Format):
    urls = True
    takes = ("dataset",)
    any_axes = True

    def look(self, place: Place, options: Options) -> Source:
        zarr = extra(place.path, "zarr")
        try:
            opened = zarr.open(place.path, mode="r")
        except (FileNotFoundError, ValueError, KeyError) as error:
            raise Failure("FileError", f"{place.path} is not a Zarr array: {error}") from None
        array = _array(zarr, opened, options.dataset, place.path)
        checked(array.shape, array.dtype, place.path)
        return PlainChunks(array) if _is_plain(array) else ArraySource(array)

    def create(self, path: str, spec: Spec, old: str) -> None:
        place = Place(old)
        refuse(place, spec.options, takes=())  # a group is read, and not written
        zarr = extra(old, "zarr")
        if not place.is_url:
            zarr.create_array(path, **_created(spec))

    def grain(self, spec: Spec) -> Grain:
        return Grain(*_chunks(spec))

    def replacing(
        self, ctx: Context, place: Place, token: str | None
    ) -> contextlib.AbstractContextManager[str]:
        return _appearing(ctx, place) if place.is_url else super().replacing(ctx, place, token)

    def sink(self, path: str, spec: Spec, created: Any, rank: int) -> Sink:
        return ZarrSink(path, spec)

    def finish(self, ctx: Context, path: str, spec: Spec, old: str) -> None:
        if Place(path).is_url:
            on_rank_0(ctx, path, lambda: _publish(path, spec))

    def owns(self, folder: Path) -> bool:
        names = os.listdir(folder)
        if not all(map(MEMBER.fullmatch, names)):
            return False
        if not names or ".zarray" in names:
            return True
        try:
            node = json.loads((folder / "zarr.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(node, dict) and node.get("node_type") == "array"  # not a group


class PlainChunks(ArraySource):
    """Uncompressed chunks in files, with elements as in memory: read without zarr-python."""

    def take(self, rows: range, cols: range, target: Array) -> None:
        """See `exchange.Direct`."""
        for i, here_rows, these_rows in _cells(rows, self._array.chunks[0]):
            for j, here_cols, these_cols in _cells(cols, self._array.chunks[1]):
                part = target[here_rows, here_cols]
                chunk = self._chunk(i, j)
                if chunk is None:
                    part[...] = self._array.fill_value
                    continue
                try:
                    chunk.take(these_rows, these_cols, part)
                finally:
                    chunk.close()

    def toll(self, rows: range, cols: range) -> int:
        """See `exchange.Direct`."""
        width = self._array.chunks[1]
        lines = Lines(width, self._array.dtype.itemsize)
        return sum(lines.toll(rows, these) for _, _, these in _cells(cols, width))

    def _chunk(self, i: int, j: int) -> RawSource | None:
        array = self._array
        name = os.path.join(array.store.root, array.path, array.metadata.encode_chunk_key((i, j)))
        try:
            file = Place(name).open()
        except FileNotFoundError:
            return None
        return RawSource(file, 0, array.chunks, array.dtype, by_columns=False)


def _cells(indices: range, width: int) -> Iterator[tuple[int, slice, range]]:
    """For each chunk: its number, the slice of `indices` in it, and their positions in it."""
    at = 0
    while at < len(indices):
        number = indices[at] // width
        stop = len(range(indices.start, min(indices.stop, (number + 1) * width), indices.step))
        mine = indices[at:stop]
        first = mine.start - number * width
        yield number, slice(at, stop), range(first, mine[-1] + 1 - number * width, mine.step)
        at = stop


def _is_plain(array: Any) -> bool:
    """Whether `PlainChunks` can read it, and chunks are large enough to open their files."""
    if array.metadata.zarr_format != 3 or len(array.shape) != 2 or array.shards is not None:
        return False
    if array.compressors or array.filters or array.chunks[0] * array.chunks[1] < PLAIN:
        return False
    endian = getattr(array.serializer, "endian", None)
    return getattr(endian, "value", None) == sys.byteorder and hasattr(array.store, "root")


class ZarrSink:
    """Writes the chunks of a rank. The metadata of an array at a URL is written at the end."""

    def __init__(self, path: str, spec: Spec) -> None:
        zarr = extra(path, "zarr")
        self._path, self._is_url = path, Place(path).is_url
        self._written: list[str] = []
        # Chunks of zeros must be written too: they may contain -0.0.
        with zarr.config.set({"array.write_empty_chunks": True}):
            if self._is_url:
                folders = {"auto_mkdir": True} if path.startswith(LOCAL) else None
                store = zarr.storage.FsspecStore.from_url(path, folders)
                where = zarr.storage.StorePath(store)
                metadata = _model(path, spec).metadata
                self._array = zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=where))
            else:
                self._array = zarr.open_array(path, mode="r+")

    def write(self, box: Box, values: Array) -> None:
        """Write a box of rows and columns; of three axes and more, whole rows."""
        array, ndim = self._array, self._array.ndim
        if ndim == 2:
            array[as_slice(box.rows), as_slice(box.cols)] = values
        else:
            shape = (len(box.rows), *array.shape[1:])[:ndim]
            array[(as_slice(box.rows),)[:ndim]] = values.reshape(shape)
        if self._is_url:
            return
        down, across = stored_shape(array.chunks)
        for i in range(box.rows.start, box.rows.stop, down):
            for j in range(box.cols.start, box.cols.stop, across):
                chunk = (i // down, j // across, *(0,) * (ndim - 2))[:ndim]
                name = f"{self._path}/{array.metadata.encode_chunk_key(chunk)}"
                with open(name, "rb") as file:
                    begin_flush(file.fileno())
                self._written.append(name)

    def close(self) -> None:
        """Flush the chunks of this rank, and their folders."""
        written, self._written = self._written, []
        for name in written:
            flush(name)
        for folder in {os.path.dirname(name) for name in written}:
            flush(folder)
        if written:
            flush(f"{self._path}/c")


def _array(zarr: Any, opened: Any, name: str | None, path: str) -> Any:
    if isinstance(opened, zarr.Array):
        if name is not None:
            raise Failure("BadArgumentError", f"{path} is one array, and contains no {name!r}")
        return opened
    names = sorted(opened.array_keys())
    if name is None and len(names) == 1:
        name = names[0]
    if name is None:
        kind = "BadArgumentError" if names else "FileError"
        raise Failure(kind, f"{path} is a group: choose dataset=... (it has {', '.join(names)})")
    try:
        found = opened[name]
    except KeyError:
        found = None
    if not isinstance(found, zarr.Array):
        raise Failure("FileError", f"{path} has no array {name!r}; it has {', '.join(names)}")
    return found


@contextlib.contextmanager
def _appearing(ctx: Context, place: Place) -> Iterator[str]:
    """Write an array to a URL inside this block, which must end on all ranks alike. Collective.

    Raises
    ------
    Failure
        FileError if something exists there, or it cannot be written; then nothing is left.
    """

    def look() -> None:
        fs, inside = place.filesystem()
        fs.invalidate_cache()
        names = set()
        with contextlib.suppress(FileNotFoundError):
            names = {PurePosixPath(name).name for name in fs.ls(inside, detail=False)}
        if names - {CHUNKS}:
            raise Failure(
                "FileError",
                f"{place.path} exists, and a URL cannot be replaced in one step: choose another "
                "name or remove it first",
            )
        if names:
            _remove(place)  # only chunks: left by a save whose gang was killed

    on_rank_0(ctx, place.path, look)
    try:
        yield place.path
    except BaseException:
        _remove(place)  # on every rank: the last one removes all of it
        raise


def _remove(place: Place) -> None:
    with contextlib.suppress(Exception):  # it does not exist, or other ranks are removing it
        fs, inside = place.filesystem()
        fs.invalidate_cache()
        fs.rm(inside, recursive=True)


def _publish(path: str, spec: Spec) -> None:
    """Write the metadata of an array at a URL: it becomes visible."""
    made: dict[str, Any] = {}
    _model(path, spec, made)
    fs, inside = Place(path).filesystem()
    if path.startswith(LOCAL):
        fs.makedirs(inside, exist_ok=True)  # an array without elements has no chunks
    fs.pipe_file(f"{inside.rstrip('/')}/{METADATA}", made[METADATA].to_bytes())


def _model(path: str, spec: Spec, objects: dict[str, Any] | None = None) -> Any:
    """The array without its elements, in memory; its objects are stored in `objects`."""
    zarr = extra(path, "zarr")
    store = zarr.storage.MemoryStore(objects)
    return zarr.create_array(store, **_created(spec))


FORMAT = Zarr()
