"""A folder of matrices with a manifest that appears in one step: the form of checkpoints."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from ali.files.paths import Place, agree_on, hidden, on_rank_0, remove, replacing, together
from ali.interface import Context, routine
from mpi_workers.failures import Failure
from mpi_workers.wire.names import CHECKPOINT_FORMAT, MANIFEST

MATRIX = re.compile(r"\d+\.npy")  # the file of a matrix in a checkpoint


@routine("folder")
def begin_folder(ctx: Context, path: str, token: str) -> str:
    """Begin a folder under a hidden name, for `end_folder`.

    Parameters
    ----------
    path : str
        The final path.
    token : str
        Part of the hidden name.

    Returns
    -------
    folder : str
        The hidden name.

    Raises
    ------
    FileError
        If it cannot be created, or the path exists and is not a checkpoint.
    """

    final = ctx.comm.bcast(os.path.realpath(path))

    def make() -> None:
        if os.path.exists(final) and not _is_checkpoint(Path(final)):
            words = f"{path} exists and is not a checkpoint: choose another name"
            raise Failure("FileError", words)
        os.makedirs(hidden(final, token), exist_ok=True)

    on_rank_0(ctx, path, make)
    return hidden(final, token)


@routine()
def check_folder(ctx: Context, path: str, token: str) -> None:
    """Whether all ranks see the folder in which a checkpoint will be.

    Parameters
    ----------
    path : str
        The final path of the checkpoint.
    token : str
        Part of the name of a file that is there for a moment.

    Raises
    ------
    FileError
        If it cannot be written on rank 0, or a rank does not see what rank 0 writes.
    """
    parent = os.path.dirname(os.path.realpath(path))
    mark = os.path.join(parent, f".alchemist-{token}.part")

    def look() -> None:
        if not os.path.exists(mark):
            words = f"{path} cannot be a checkpoint folder: {os.uname().nodename} does not see it"
            raise Failure("FileError", f"{words}. Choose a folder that all nodes of the gang share")

    on_rank_0(ctx, path, Path(mark).touch)
    try:
        together(ctx, path, look)
    finally:
        if ctx.rank == 0:
            Path(mark).unlink(missing_ok=True)


@routine()
def end_folder(ctx: Context, path: str, token: str, manifest: str | None = None) -> None:
    """Rename a folder of `begin_folder` to its final path in one step, or remove it.

    Parameters
    ----------
    path, token : str
        As given to `begin_folder`.
    manifest : str, optional
        The text of its manifest.json. Without it the folder is removed.

    Raises
    ------
    FileError
        If it cannot be written; the old folder is unchanged.
    """
    temporary = hidden(os.path.realpath(path), token)
    if manifest is None:
        on_rank_0(ctx, path, lambda: remove(temporary))
        return
    text = manifest

    def write() -> None:
        Path(temporary, MANIFEST).write_text(text, encoding="utf-8")

    with replacing(ctx, path, token, _is_checkpoint):
        on_rank_0(ctx, path, write)


@routine("manifest")
def manifest(ctx: Context, path: str) -> str:
    """The text of the manifest.json of a checkpoint.

    Parameters
    ----------
    path : str
        The checkpoint's folder.

    Raises
    ------
    FileError
        If the folder is not a checkpoint, or is incomplete.
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
    """Whether a folder is empty, or holds a checkpoint and nothing else."""
    if not folder.is_dir():
        return False
    names = os.listdir(folder)
    if not names:
        return True
    if not all(name == MANIFEST or MATRIX.fullmatch(name) for name in names):
        return False
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("format") == CHECKPOINT_FORMAT
