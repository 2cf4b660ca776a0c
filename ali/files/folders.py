"""A folder of matrices that appears whole, with a manifest: what checkpoints are kept in."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ali.files.paths import Place, agree_on, hidden, remove, replacing, together
from ali.interface import Context, routine
from mpi_workers.failures import Failure

MANIFEST = "manifest.json"


@routine("folder")
def begin_folder(ctx: Context, path: str, token: str) -> str:
    """Begin a folder under a hidden name, for `end_folder`.

    Parameters
    ----------
    path : str
        Where it is to be in the end.
    token : str
        Part of the hidden name.

    Returns
    -------
    folder : str
        The hidden name.

    Raises
    ------
    FileError
        If it cannot be made, or there is a folder that is no checkpoint.
    """

    final = ctx.comm.bcast(os.path.realpath(path))

    def make() -> None:
        if os.path.exists(final) and not _is_checkpoint(Path(final)):
            raise Failure("FileError", f"{path} is there and no checkpoint: choose another name")
        os.makedirs(hidden(final, token), exist_ok=True)

    together(ctx, path, make if ctx.rank == 0 else lambda: None)
    return hidden(final, token)


@routine()
def end_folder(ctx: Context, path: str, token: str, manifest: str | None = None) -> None:
    """Put a folder that `begin_folder` began in its place in one step, or give it up.

    Parameters
    ----------
    path, token : str
        As given to `begin_folder`.
    manifest : str, optional
        What its manifest.json is to say. Without it the folder is removed.

    Raises
    ------
    FileError
        If it cannot be written; the old folder is as it was.
    """
    temporary = hidden(os.path.realpath(path), token)
    if manifest is None:
        together(ctx, path, (lambda: remove(temporary)) if ctx.rank == 0 else lambda: None)
        return
    text = manifest

    def write() -> None:
        Path(temporary, MANIFEST).write_text(text, encoding="utf-8")

    with replacing(ctx, path, token, _is_checkpoint):
        together(ctx, path, write if ctx.rank == 0 else lambda: None)


@routine("manifest")
def manifest(ctx: Context, path: str) -> str:
    """What the manifest.json of a checkpoint says.

    Parameters
    ----------
    path : str
        The checkpoint's folder.

    Raises
    ------
    FileError
        If it is none, or not whole.
    """
    place = Place(str(Path(path, MANIFEST)))
    agree_on(ctx, place)

    def read() -> str:
        text = Path(place.path).read_text(encoding="utf-8")
        try:
            json.loads(text)
        except ValueError as error:
            raise Failure("FileError", f"{place.path} is damaged: {error}") from None
        return text

    return together(ctx, place.path, read)


def _is_checkpoint(folder: Path) -> bool:
    return folder.is_dir() and (not os.listdir(folder) or (folder / MANIFEST).is_file())
