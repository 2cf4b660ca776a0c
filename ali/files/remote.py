"""Arrays at URLs, which become visible when they are complete."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from ali.files.exchange import Array
from ali.files.formats import Box
from ali.files.paths import Place, extra, together
from ali.interface import Context
from mpi_workers.failures import Failure

METADATA = "zarr.json"
CHUNKS = "c"  # the prefix of all chunks
LOCAL = ("file:", "local:")  # only there do folders have to be created


@contextlib.contextmanager
def appearing(ctx: Context, place: Place) -> Iterator[None]:
    """Write an array to a URL inside this block, which must end on all ranks alike. Collective.

    Raises
    ------
    Failure
        FileError if something exists there, or it cannot be written; then nothing is left.
    """

    def look() -> None:
        names = _names(place)
        if names - {CHUNKS}:
            raise Failure(
                "FileError",
                f"{place.path} exists, and a URL cannot be replaced in one step: choose another "
                "name or remove it first",
            )
        if names:
            _remove(place)  # only chunks: left by a save whose gang was killed

    together(ctx, place.path, look if ctx.rank == 0 else lambda: None)
    try:
        yield
    except BaseException:
        _remove(place)  # on every rank: the last one removes all of it
        raise


def _names(place: Place) -> set[str]:
    fs, inside = place.filesystem()
    fs.invalidate_cache()
    try:
        return {PurePosixPath(name).name for name in fs.ls(inside, detail=False)}
    except FileNotFoundError:
        return set()


def _remove(place: Place) -> None:
    with contextlib.suppress(Exception):  # it does not exist, or other ranks are removing it
        fs, inside = place.filesystem()
        fs.invalidate_cache()
        fs.rm(inside, recursive=True)


class RemoteArray:
    """The sink of a rank: writes chunks, but no metadata.

    Parameters
    ----------
    options : dict
        Options of `zarr.create_array`, the same on all ranks.
    """

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        zarr = extra(path, "zarr")
        # Chunks of zeros must be written too: they may contain -0.0.
        with zarr.config.set({"array.write_empty_chunks": True}):
            metadata = _model(path, options).metadata
            folders = {"auto_mkdir": True} if path.startswith(LOCAL) else None
            store = zarr.storage.FsspecStore.from_url(path, folders)
            where = zarr.storage.StorePath(store)
            self._array = zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=where))

    def write(self, box: Box, values: Array) -> None:
        write_box(self._array, box, values)

    def close(self) -> None:
        """Nothing is open between writes."""


def write_box(array: Any, box: Box, values: Array) -> None:
    """Write a box of rows and columns into a Zarr array; of three axes and more, whole rows."""
    where = (slice(box.rows.start, box.rows.stop), slice(box.cols.start, box.cols.stop))
    if array.ndim > 2:
        array[where[0]] = values.reshape(len(box.rows), *array.shape[1:])
        return
    length = tuple(map(len, box))[: array.ndim]
    array[where[: array.ndim]] = values.reshape(length)


def publish(path: str, options: dict[str, Any]) -> None:
    """Write the metadata: the array becomes visible."""
    made: dict[str, Any] = {}
    _model(path, options, made)
    fs, inside = Place(path).filesystem()
    if path.startswith(LOCAL):
        fs.makedirs(inside, exist_ok=True)  # an array without elements has no chunks
    fs.pipe_file(f"{inside.rstrip('/')}/{METADATA}", made[METADATA].to_bytes())


def _model(path: str, options: dict[str, Any], objects: dict[str, Any] | None = None) -> Any:
    """The array without its elements, in memory; its objects are stored in `objects`."""
    zarr = extra(path, "zarr")
    store = zarr.storage.MemoryStore(objects)
    return zarr.create_array(store, **options)
