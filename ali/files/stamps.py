"""Stamps, which differ if a file has changed."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ali.files.paths import together
from ali.interface import Context, routine


@routine("stamp", pure=True)
def stamp(ctx: Context, path: str) -> str:
    """Size and time of modification of a file, or of all files in a folder, as rank 0 sees them.

    Parameters
    ----------
    path : str
        A URL has no stamp.

    Returns
    -------
    stamp : str
        Empty for a URL.

    Raises
    ------
    FileError
        If it cannot be read.
    """
    found: list[str] = []
    together(ctx, path, lambda: found.append(_state(path)) if ctx.rank == 0 else None)
    told: str = ctx.comm.bcast(found[0] if found else "")
    return told


def _state(path: str) -> str:
    if "://" in path:
        return ""
    nbytes, newest, count = 0, 0, 0
    for name in _files(path):
        about = os.stat(name)
        nbytes, newest, count = nbytes + about.st_size, max(newest, about.st_mtime_ns), count + 1
    return f"{count} files, {nbytes} bytes, {newest}"


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
